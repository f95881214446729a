//! How the lanes of products in f32 lie: along the rows of the weights or beside each other, and which of them carry x.

use crate::kernels::operands::DENSE;
use crate::plan::capabilities::Capabilities;
use crate::plan::rows::SUBGROUPS;

/// Output columns of an invocation (of a subgroup, when its lanes lie along the depth): several share the loads of x. A
/// dense product of few rows has few columns beside them, and gives each a subgroup.
pub(crate) fn per_lane(caps: &Capabilities, rows: &str, tile: usize) -> u32 {
    match (along_depth(caps, tile), tile) {
        (true, 0..4) if rows == DENSE => 1,
        (true, _) if rows == DENSE => 2,
        (true, _) => 4,
        (false, 0..4) => 1,
        (false, _) => 2,
    }
}

/// High tiles are bound by arithmetic, and there columns of their own need no sums over lanes.
pub(crate) fn along_depth(caps: &Capabilities, tile: usize) -> bool {
    caps.along_depth && tile < 8
}

/// Invocations of a workgroup, and of those the ones along the depth (0: none).
pub(crate) fn lanes(caps: &Capabilities, tile: usize) -> [u32; 2] {
    if along_depth(caps, tile) { [caps.row_lanes * SUBGROUPS, caps.row_lanes] } else { [caps.gemm_lanes, 0] }
}

/// Lanes that carry x: every device with subgroups has at least four, and eight need fewer loads.
pub(crate) fn carriers(caps: &Capabilities) -> u32 {
    if !caps.subgroup {
        0
    } else if caps.one_subgroup && caps.row_lanes >= 8 {
        8
    } else {
        4
    }
}
