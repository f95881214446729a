//! The shader of products of many rows on cooperative matrices, of which x goes straight from memory into matrices; recorded by
//! [`ExpertGemmMatrix`](crate::kernels::expert_gemm_matrix::ExpertGemmMatrix).

use crate::dtype::DType;
use crate::kernels::expert_gemm_matrix::{Flags, Sizes};
use crate::kernels::linker::{Kernel, Vars};
use crate::plan::capabilities::Capabilities;
use crate::plan::matrix::{self, MatrixTile};

/// The shader.
pub static EXPERT_GEMM_DIRECT: Kernel = Kernel { stem: "expert_gemm_direct", reads: 3, writes: 1 };
/// The same shader, which adds adapters, too.
pub static EXPERT_GEMM_DIRECT_FOLDED: Kernel = Kernel { stem: "expert_gemm_direct", reads: 7, writes: 1 };

/// The variables of one variant of a direct cut.
pub fn vars(
    caps: &Capabilities,
    dtype: DType,
    rows: &'static str,
    tile: MatrixTile,
    Flags { scaled, ragged, lora, across, .. }: Flags,
    sizes: &Sizes,
) -> Vars {
    let mut vars: Vars = vec![
        ("edge", caps.edge.into()),
        ("dtype", dtype.name().into()),
        ("rows", rows.into()),
        ("height", tile.height.into()),
        ("columns", tile.columns.into()),
        ("depth", tile.depth.into()),
        ("x_ahead", tile.x_ahead.into()),
        ("sub_rows", tile.sub_rows.into()),
        ("sub_columns", tile.sub_columns.into()),
        ("width", caps.row_lanes.into()),
        ("scaled", scaled.into()),
        ("ragged", ragged.into()),
        ("lora", lora.into()),
    ];
    if lora {
        vars.extend([("across", across.into()), ("lift", matrix::LIFT.into())]);
    }
    vars.extend(sizes.vars(caps));
    vars
}
