//! Pairs of a parameter that holds all experts, as PEFT wraps it (`target_parameters`), and of parts of such a parameter.

use super::Site;
use super::config::ExpertColumns;
use super::decode::{Decoded, Decoder, Sources, Whole};
use super::layout::{self, Flat, Orientation};
use super::names::{Packed, Pair};
use super::window::Windows;
use crate::checkpoint::Window;
use crate::error::{ErrorKind, Result};
use crate::family::Role;
use crate::family::table::Fused;

impl<'f> Decoder<'f> {
    /// The factors of all experts of a fused parameter. The file does not say which parameter it is: `depth` wrappers are
    /// around this one, and the layer has wrappers at `depths`.
    pub(super) fn fused(
        &self,
        pair: &Pair,
        layer: usize,
        depth: usize,
        depths: &[usize],
        to: &mut Decoded,
    ) -> Result<()> {
        let (name, parameter) = self.parameter(pair, depth, depths)?;
        self.need_experts(pair, layer)?;
        let n_experts = self.model.moe.experts;
        let [out, inn] = self.shape(parameter);
        let (rank, scale) = self.rank_and_scale(&format!("{}.{name}", pair.module))?;
        // With three dimensions, [E, R, X] and [Y, R, E], the order of the elements is the same.
        let (a_shape, b_shape) = (self.file.tensor(&pair.a)?.shape, self.file.tensor(&pair.b)?.shape);
        let (Some(&x), Some(&y)) = (a_shape.last(), b_shape.first()) else {
            let message = format!("expected two dimensions, got {a_shape:?} and {b_shape:?}");
            return Err(self.at(ErrorKind::Adapter, &pair.a, message));
        };
        let stored = self.model.family.table().stored;
        let orientation = layout::orientation([y, x], [out, inn], stored, self.config.peft_version())
            .map_err(|reason| self.at(ErrorKind::Adapter, &pair.a, reason.to_owned()))?
            // Fits neither way: the check of the canonical shape below says so.
            .unwrap_or(Orientation::Canonical);
        let [y, x] = match orientation {
            Orientation::Canonical => [out, inn],
            Orientation::Transposed => [inn, out],
        };
        let stacked = a_shape.len() == 3 && b_shape.len() == 3;
        let (a, b) = if stacked {
            (self.float(&pair.a, &[n_experts, rank, x])?, self.float(&pair.b, &[y, rank, n_experts])?)
        } else {
            (self.float(&pair.a, &[rank * n_experts, x])?, self.float(&pair.b, &[y, rank * n_experts])?)
        };
        let columns = if stacked { ExpertColumns::RankMajor } else { self.columns(pair)? };
        let mut from = match orientation {
            Orientation::Canonical => Sources { a: Windows::new(a), b: Windows::new(b), bias: None },
            // (B·A)ᵀ = Aᵀ·Bᵀ
            Orientation::Transposed => Sources { a: Windows::new(b), b: Windows::new(a), bias: None },
        };
        let flat = Flat { n_experts, rank, x, y, orientation, columns };
        for expert in 0..n_experts {
            let (a, b) = flat.windows(expert);
            self.split(layer, expert, parameter, &Whole { rank, scale, a, b }, &mut from, to)?;
        }
        Ok(())
    }

    /// The factors of one expert of a fused parameter, from a linear module of its own: A `[R, in]`, B `[out, R]`.
    pub(super) fn listed(
        &self,
        pair: &Pair,
        layer: usize,
        expert: usize,
        part: Packed,
        to: &mut Decoded,
    ) -> Result<()> {
        let parameter = if part == Packed::Down { Fused::Down } else { Fused::GateUp };
        self.need_experts(pair, layer)?;
        let gated = self.model.family.table().gated();
        if expert >= self.model.moe.experts || (parameter == Fused::GateUp && !gated) {
            let message = "the model has no such layer, expert or projection".to_owned();
            return Err(self.does_not_fit(&pair.a, message));
        }
        let [out, inn] = self.shape(parameter);
        let (rank, scale) = self.rank_and_scale(&pair.module)?;
        let (a, b) = (self.float(&pair.a, &[rank, inn])?, self.float(&pair.b, &[out, rank])?);
        let whole = Whole { rank, scale, a: Window::dense([rank, inn], 0), b: Window::dense([out, rank], 0) };
        let mut from = Sources { a: Windows::new(a), b: Windows::new(b), bias: None };
        self.split(layer, expert, parameter, &whole, &mut from, to)
    }

    /// One expert's factor of a fused parameter, as the factors of its projections.
    fn split(
        &self,
        layer: usize,
        expert: usize,
        parameter: Fused,
        whole: &Whole,
        from: &mut Sources<'f>,
        to: &mut Decoded,
    ) -> Result<()> {
        let f = self.model.moe.expert_width;
        let (up, every) = if self.model.family.table().interleaved { (1, 2) } else { (f, 1) };
        let mut push = |site, b| self.push((layer, site, expert), &Whole { b, ..*whole }, from, to);
        match parameter {
            Fused::GateUp => {
                push(Site::ExpertGate, whole.b.rows(0, f, every))?;
                push(Site::ExpertUp, whole.b.rows(up, f, every))
            }
            Fused::Up => push(Site::ExpertUp, whole.b),
            Fused::Down => push(Site::ExpertDown, whole.b),
        }
    }

    /// Which parameter of the experts' module a pair belongs to, and its name. PEFT wraps the parameters in the order in which
    /// the module registers them: where all are wrapped that settles it, otherwise it needs the configuration.
    fn parameter(&self, pair: &Pair, depth: usize, depths: &[usize]) -> Result<(&'static str, Fused)> {
        let fail = |message: String| Err(self.at(ErrorKind::Adapter, &pair.a, message));
        let n_wrappers = depths.len();
        if let Some(deepest) = depths.iter().find(|d| **d >= n_wrappers) {
            return fail(format!("expected a pair for each of {} nested wrappers, got {n_wrappers}", deepest + 1));
        }
        let known = self.model.family.table().fused;
        let targets = |name: &str| self.config.targets_parameter(&format!("{}.{name}", pair.module));
        if let Some((name, _)) = known.iter().find(|(name, _)| targets(&format!("{name}_bias"))) {
            let message = format!("LoRA on `{name}_bias` is not supported");
            return Err(self.at(ErrorKind::Unsupported, &pair.a, message));
        }
        let targeted: Vec<_> = known.iter().filter(|(name, _)| targets(name)).collect();
        let all: Vec<_> = known.iter().collect();
        let wrapped = match n_wrappers {
            n if n == all.len() => all,
            n if n == targeted.len() => targeted,
            n if n > all.len() => return fail(format!("expected at most {} fused parameters, got {n}", all.len())),
            n => {
                let names: Vec<_> = known.iter().map(|(name, _)| format!("`{name}`")).collect();
                let got = targeted.len();
                return fail(format!(
                    "expected `target_parameters` to name {n} of {} of this module, got {got}",
                    names.join(" and ")
                ));
            }
        };
        // The innermost is the first; `depth` is below the number of wrappers.
        Ok(*wrapped[n_wrappers - 1 - depth])
    }

    /// `[out, in]` of one expert in a fused parameter.
    fn shape(&self, parameter: Fused) -> [usize; 2] {
        let (d, f) = (self.model.moe.hidden, self.model.moe.expert_width);
        match parameter {
            Fused::GateUp => [2 * f, d],
            Fused::Up => [f, d],
            Fused::Down => [d, f],
        }
    }

    /// Errors: `Adapter` when the layer has no experts.
    pub(super) fn need_experts(&self, pair: &Pair, layer: usize) -> Result<()> {
        match self.model.family.shape(Role::FusedDown { layer }, self.model) {
            Some(_) => Ok(()),
            None => Err(self.does_not_fit(&pair.a, "the model has no experts in this layer".to_owned())),
        }
    }

    fn columns(&self, pair: &Pair) -> Result<ExpertColumns> {
        self.config.expert_columns().ok_or_else(|| {
            let message = "saved by a tool that has used two layouts of `lora_B`; set `lora_B_layout` in \
                           `adapter_config.json` to `rank_major` or `grouped_by_expert`";
            self.at(ErrorKind::Unsupported, &pair.b, message.to_owned())
        })
    }
}
