//! Router logits to expert ids and weights.

use crate::error::{Error, ErrorKind, Result};
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View};
use crate::plan::capabilities::Capabilities;
use crate::router::{GroupScore, RouteOptions, Score};

/// The shader.
pub static ROUTE: Kernel = Kernel { stem: "route", reads: 2, writes: 3 };

/// Groups that the shader has room for.
const MAX_GROUPS: usize = 32;

params! {
    /// Sizes and rule of one routing.
    RouteParams {
        /// T.
        tokens: u32,
        /// E.
        experts: u32,
        /// A.
        top_k: u32,
        /// 1: the weights of a token are divided by their sum.
        renormalise: u32,
        /// Factor on every weight, after that.
        scale: f32,
        /// Groups of experts, 1 for none; at most 32.
        groups: u32,
        /// Groups whose experts are candidates.
        top_groups: u32,
        /// Padding.
        pad0: u32,
    }
}

/// Semantics: `ids[t] = top-A of key(logits[t])`, `weights[t,k] = score(logits[t, ids[t,k]])`, renormalised and scaled.
pub struct Route<'a> {
    /// T.
    pub tokens: usize,
    /// E.
    pub experts: usize,
    /// A.
    pub top_k: usize,
    /// Score, groups, scaling.
    pub options: &'a RouteOptions,
    /// f32 `[parts, T, E]`.
    pub logits: &'a View,
    /// Parts of a logit, whose sum it is.
    pub parts: usize,
    /// f32 `[E]`, added to the score for selection only.
    pub bias: Option<&'a View>,
    /// i32 `[T, A]`, written.
    pub topk_ids: &'a View,
    /// f32 `[T, A]`, written.
    pub topk_weights: &'a View,
    /// u32 `[1]`: bit 0 is set where a place found no finite logit.
    pub status: &'a View,
}

/// The variables for one rule and `experts` experts, whose logits have so many `parts`, on one device.
pub fn vars(caps: &Capabilities, options: &RouteOptions, biased: bool, experts: usize, parts: usize) -> Vars {
    let values = experts.div_ceil(caps.row_lanes as usize).next_power_of_two() as u32;
    let groups = options.groups > 1;
    vec![
        ("score", if options.score == Score::Sigmoid { "sigmoid" } else { "softmax" }.into()),
        // Softmax and sigmoid grow with the logit: without bias and groups the raw logits decide, so ids are exact.
        ("by_score", (biased || groups).into()),
        ("biased", biased.into()),
        ("groups", groups.into()),
        ("group_score", if options.group_score == GroupScore::TopTwo { "two" } else { "max" }.into()),
        ("values", values.into()),
        ("parts", (parts as u32).into()),
        ("lanes", caps.row_lanes.into()),
        ("one_subgroup", caps.one_subgroup.into()),
    ]
}

impl Route<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for more than 32 groups, groups that do not divide E, or A above E; when the device
    /// refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let groups = self.options.groups as usize;
        if self.top_k > self.experts || groups == 0 || groups > MAX_GROUPS || !self.experts.is_multiple_of(groups) {
            let message = format!("route: {} of {} experts in {groups} groups", self.top_k, self.experts);
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        let vars = vars(rec.gpu().capabilities(), self.options, self.bias.is_some(), self.experts, self.parts);
        let pipeline = pipeline(rec.gpu(), &ROUTE, vars)?;
        let params = RouteParams {
            tokens: self.tokens as u32,
            experts: self.experts as u32,
            top_k: self.top_k as u32,
            renormalise: u32::from(self.options.renormalise),
            scale: self.options.scale,
            groups: self.options.groups,
            top_groups: self.options.top_groups,
            pad0: 0,
        };
        let bias = self.bias.unwrap_or(self.logits);
        let buffers = [self.logits, bias, self.topk_ids, self.topk_weights, self.status];
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &Grid::folded(1, self.tokens as u32));
        Ok(())
    }
}
