//! How pairs meet matrices: one by one, or sorted into tiles.

use crate::plan::capabilities::Capabilities;

/// Tile height for `pairs` spread over `matrices`, or `None` for one pair at a time.
///
/// A tile reads a matrix once for all its pairs, but a bucket with fewer pairs than the tile wastes the rest: tiles of 4
/// from two pairs a matrix on, of 8 from twelve. The same on every device.
pub fn tile(pairs: usize, matrices: usize) -> Option<usize> {
    let matrices = matrices.max(1);
    if pairs < 2 * matrices {
        None
    } else if pairs < 12 * matrices {
        Some(4)
    } else {
        Some(8)
    }
}

/// The same for adapters. Where the lanes of a product lie along the depth, tiles of 8 do not: a rank has too few columns
/// for lanes that own one each.
pub fn adapter_tile(caps: &Capabilities, pairs: usize, matrices: usize) -> Option<usize> {
    tile(pairs, matrices).map(|tile| if caps.along_depth { tile.min(4) } else { tile })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_grow_with_the_pairs_of_a_matrix() {
        assert_eq!(tile(0, 16), None);
        assert_eq!(tile(31, 16), None);
        assert_eq!(tile(32, 16), Some(4));
        assert_eq!(tile(192, 16), Some(8));
        assert_eq!(tile(5, 0), Some(4));
    }
}
