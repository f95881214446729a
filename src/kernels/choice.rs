//! The choice of experts inside the first product of few pairs, in the place of [`Route`](crate::kernels::route::Route).

use crate::error::Result;
use crate::kernels::linker::Vars;
use crate::kernels::operands::Rows;
use crate::kernels::route;
use crate::kernels::{Recording, View};
use crate::plan::capabilities::Capabilities;
use crate::router::RouteOptions;

/// What shaders call rows that are single pairs whose id is chosen there.
pub const ROWS: &str = "chosen";

/// Most logits of a row that a lane keeps.
const MOST_VALUES: u32 = 8;

/// What a product needs to choose the experts of its pairs, A of each row of x, and where it leaves them.
pub struct Choice<'a> {
    /// Score and scaling; a rule that [`possible`] takes.
    pub options: &'a RouteOptions,
    /// E.
    pub experts: usize,
    /// f32 `[P / A, E]`.
    pub logits: &'a View,
    /// Written.
    pub topk: &'a Topk,
    /// u32 `[1]`: bit 0 is set where a place found no finite logit.
    pub status: &'a View,
}

/// What the parameters of a product say of its choice; zeros where it has none.
#[derive(Default)]
pub(crate) struct Numbers {
    pub experts: u32,
    pub renormalise: u32,
    pub scale: f32,
    pub weights_base: u32,
}

impl Numbers {
    pub fn of(choice: Option<&Choice<'_>>) -> Self {
        choice.map_or_else(Self::default, |c| Self {
            experts: c.experts as u32,
            renormalise: u32::from(c.options.renormalise),
            scale: c.options.scale,
            weights_base: c.topk.weights_base() as u32,
        })
    }
}

/// What shaders call the rows of a product.
pub(crate) fn rows(select: &Rows<'_>, choice: Option<&Choice<'_>>) -> &'static str {
    if choice.is_some() { ROWS } else { select.name() }
}

/// Ids and weights of some pairs in one buffer.
pub struct Topk {
    view: View,
    pairs: usize,
}

impl Topk {
    /// Room for `pairs` pairs.
    ///
    /// # Errors
    /// Those of [`Recording::scratch`].
    pub fn scratch(rec: &mut Recording, pairs: usize) -> Result<Self> {
        let bytes = pairs as u64 * 4;
        Ok(Self { view: rec.scratch("topk", bytes.next_multiple_of(View::ALIGN) + bytes)?, pairs })
    }

    /// Both.
    pub(crate) fn view(&self) -> &View {
        &self.view
    }

    /// Word of the weights.
    pub(crate) fn weights_base(&self) -> u64 {
        self.bytes().next_multiple_of(View::ALIGN) / 4
    }

    /// Bytes of the ids, and of the weights.
    fn bytes(&self) -> u64 {
        self.pairs as u64 * 4
    }

    /// i32 `[P]`, -1 where no expert was found.
    pub fn ids(&self) -> View {
        self.view.part(0, self.bytes())
    }

    /// f32 `[P]`.
    pub fn weights(&self) -> View {
        self.view.part(self.weights_base() * 4, self.bytes())
    }
}

/// Whether a product can choose by this rule among `experts` experts: without groups, and where registers hold a row of logits.
pub fn possible(caps: &Capabilities, options: &RouteOptions, experts: usize, top_k: usize) -> bool {
    options.groups == 1 && top_k <= experts && experts <= (MOST_VALUES * caps.row_lanes) as usize
}

/// The variables that a product has beside its own.
pub fn vars(caps: &Capabilities, options: &RouteOptions, experts: usize) -> Vars {
    let of_route = route::vars(caps, options, false, experts, 1);
    of_route.into_iter().filter(|(name, _)| ["score", "values"].contains(name)).collect()
}
