//! The shaders of products on cooperative matrices, and what tells their variants apart.

use crate::activation::Activation;
use crate::dtype::DType;
use crate::kernels::activation;
use crate::kernels::linker::{Kernel, Vars};
use crate::plan::capabilities::Capabilities;
use crate::plan::matrix::{self, EDGE, MatrixTile};

/// Both operands pass through workgroup memory.
pub static EXPERT_GEMM_MATRIX: Kernel = Kernel { stem: "expert_gemm_matrix", reads: 3, writes: 1 };
/// The same, and adapters are added.
pub static EXPERT_GEMM_FOLDED: Kernel = Kernel { stem: "expert_gemm_matrix", reads: 7, writes: 1 };
/// Of a direct cut: x goes straight from memory into matrices.
pub static EXPERT_GEMM_DIRECT: Kernel = Kernel { stem: "expert_gemm_direct", reads: 3, writes: 1 };
/// The same, and adapters are added.
pub static EXPERT_GEMM_DIRECT_FOLDED: Kernel = Kernel { stem: "expert_gemm_direct", reads: 6, writes: 1 };
/// Gate and up of a direct cut, and the activation.
pub static EXPERT_GEMM_GATED: Kernel = Kernel { stem: "expert_gemm_direct", reads: 3, writes: 2 };
/// The same, and adapters are added.
pub static EXPERT_GEMM_GATED_FOLDED: Kernel = Kernel { stem: "expert_gemm_direct", reads: 6, writes: 2 };

/// What else tells variants apart.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Flags {
    /// Weights are scaled on the way.
    pub scaled: bool,
    /// Rows end within a step.
    pub ragged: bool,
    /// Each value of x has its rest behind all.
    pub twice: bool,
    /// Adapters are added.
    pub lora: bool,
    /// Workgroups share out the depth, too.
    pub parted: bool,
    /// Some tile of columns lies across the border of two projections of the adapters, or they alternate.
    pub across: bool,
    /// The activation behind gate and up, and whether its rows are written as well; only of a direct cut in tiles.
    pub gated: Option<(Activation, bool)>,
    /// The sums are left as f16; only of a direct cut in tiles.
    pub halves: bool,
}

/// Sizes of a product that its shader has as numbers, as [`ExpertGemmMatrixParams`](crate::kernels::expert_gemm_matrix::ExpertGemmMatrixParams) has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sizes {
    /// Groups of eight in a row of W.
    pub groups: u32,
    /// Of a row of x that are multiplied, or blocks.
    pub x_groups: u32,
    /// From a row of x to the next.
    pub x_stride: u32,
    /// Rows of W in this piece.
    pub out_rows: u32,
    /// Row of y in elements.
    pub y_stride: u32,
}

impl Sizes {
    /// The variables that say so. Pipelines are made for each shape where matrices are of 16 x 16; those of 8 x 8 have never run on
    /// a device, and what shows them right takes one text for all shapes.
    fn vars(&self, caps: &Capabilities) -> Vars {
        let fixed = caps.edge == EDGE;
        let mut vars: Vars = vec![("fixed", fixed.into())];
        if fixed {
            vars.extend([
                ("fixed_groups", self.groups.into()),
                ("fixed_x_groups", self.x_groups.into()),
                ("fixed_x_stride", self.x_stride.into()),
                ("fixed_out_rows", self.out_rows.into()),
                ("fixed_y_stride", self.y_stride.into()),
            ]);
        }
        vars
    }
}

/// The shader of a product and its variables, for `rows` of this [name](crate::kernels::operands::Rows) in a cut.
pub fn variant(
    caps: &Capabilities,
    dtype: DType,
    rows: &'static str,
    tile: MatrixTile,
    flags: Flags,
    sizes: &Sizes,
) -> (&'static Kernel, Vars) {
    let kernel = match (tile.direct, flags.gated, flags.lora) {
        (false, _, false) => &EXPERT_GEMM_MATRIX,
        (false, _, true) => &EXPERT_GEMM_FOLDED,
        (true, None, false) => &EXPERT_GEMM_DIRECT,
        (true, None, true) => &EXPERT_GEMM_DIRECT_FOLDED,
        (true, Some(_), false) => &EXPERT_GEMM_GATED,
        (true, Some(_), true) => &EXPERT_GEMM_GATED_FOLDED,
    };
    let staged = !tile.direct;
    let mut vars: Vars = vec![
        ("edge", caps.edge.into()),
        ("dtype", dtype.name().into()),
        ("rows", rows.into()),
        ("height", tile.height.into()),
        ("columns", tile.columns.into()),
        ("depth", tile.depth.into()),
    ];
    if staged {
        vars.push(("ahead", tile.ahead.into()));
    }
    vars.extend([
        ("x_ahead", tile.x_ahead.into()),
        ("sub_rows", tile.sub_rows.into()),
        ("sub_columns", tile.sub_columns.into()),
    ]);
    if staged {
        vars.extend([("rests", tile.rests.into()), ("kept", tile.kept.into()), ("strip", tile.strip().into())]);
    }
    let Flags { scaled, ragged, twice, lora, parted, across, gated, halves } = flags;
    vars.extend([("width", caps.row_lanes.into()), ("scaled", scaled.into()), ("ragged", ragged.into())]);
    if staged {
        vars.push(("twice", twice.into()));
    }
    vars.push(("lora", lora.into()));
    if staged {
        vars.push(("parted", parted.into()));
    }
    if tile.direct {
        vars.extend([("gated", gated.is_some().into()), ("halves", halves.into())]);
    }
    if let Some((kind, by_row)) = gated {
        vars.extend([("kind", activation::name(kind).into()), ("by_row", by_row.into())]);
    }
    if lora {
        vars.extend([("across", across.into()), ("lift", matrix::LIFT.into())]);
    }
    vars.extend(sizes.vars(caps));
    (kernel, vars)
}
