//! How a product on matrices is cut.

use serde::{Deserialize, Serialize};

use super::{EDGE, WIDTHS, WORKGROUP_BYTES, workgroup_bytes};

/// How a workgroup of a matrix product works: its tile of `height` pairs and `columns` columns, walked along the depth in
/// steps; and the part of the tile that one subgroup holds in registers. [`check`](Self::check) tells which there can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatrixTile {
    /// Pairs.
    pub height: u32,
    /// Columns of y.
    pub columns: u32,
    /// Values of a row in one step.
    pub depth: u32,
    /// Steps that weights are loaded ahead.
    pub ahead: u32,
    /// Steps that x is loaded ahead: a divisor of `ahead`; fewer where registers are short, since x is nearer. Of a direct cut blocks
    /// of 16 values, a divisor of those in a step.
    pub x_ahead: u32,
    /// Rows of a subgroup.
    pub sub_rows: u32,
    /// Columns of a subgroup.
    pub sub_columns: u32,
    /// Subgroups whose rows are all padding do not multiply. A branch keeps loads and products apart, for better or worse.
    pub rests: bool,
    /// What is still held behind the last step is stored, unread, so that a compiler leaves loads ahead of their use. Not of high tiles:
    /// they lack the registers, and compilers do not unroll their loops.
    pub kept: bool,
    /// Rows of x come in blocks that go straight from memory into matrices; only weights pass through workgroup memory, one step
    /// ahead.
    pub direct: bool,
}

/// Invocations of a workgroup that every device allows.
const MOST_LANES: u32 = 256;
/// Rows, columns and values of a step that a cut has at most, and steps that it loads ahead: more than registers hold.
const MOST: [u32; 4] = [256, 512, 256, 8];

impl MatrixTile {
    /// Whether the shaders can be made of it for matrices of `edge`, for products of `dense` rows or of tiles: what they assume of
    /// their sizes, and the workgroup memory that a device with such matrices has.
    ///
    /// # Errors
    /// The field, what was expected and what stands there.
    pub fn check(&self, edge: u32, dense: bool) -> Result<(), String> {
        let Self { height, columns, depth, ahead, x_ahead, sub_rows, sub_columns, rests, kept, direct } = *self;
        let expected =
            |field: &str, expected: &str, got: u32| Err(format!("`{field}`: expected {expected}, got {got}"));
        let [most_rows, most_columns, most_depth, most_ahead] = MOST;
        for (field, got, most) in [
            ("height", height, most_rows),
            ("columns", columns, most_columns),
            ("depth", depth, most_depth),
            ("sub_rows", sub_rows, most_rows),
            ("sub_columns", sub_columns, most_columns),
        ] {
            if got == 0 || got > most || !got.is_multiple_of(EDGE) {
                return expected(field, &format!("a multiple of {EDGE} up to {most}"), got);
            }
        }
        if !height.is_multiple_of(sub_rows) {
            return expected("sub_rows", &format!("a divisor of the {height} rows"), sub_rows);
        }
        if !columns.is_multiple_of(sub_columns) {
            return expected("sub_columns", &format!("a divisor of the {columns} columns"), sub_columns);
        }
        for width in WIDTHS {
            let lanes = self.subgroups() * width;
            if lanes > MOST_LANES {
                let most = format!("at most {} parts of {sub_rows} x {sub_columns} in a tile", MOST_LANES / width);
                return expected("sub_rows", &most, self.subgroups());
            }
            // A lane loads eight values of a row.
            if !lanes.is_multiple_of(depth / 8) {
                return expected("depth", &format!("a depth whose eighth divides {lanes} invocations"), depth);
            }
            if direct && !columns.is_multiple_of(lanes / (depth / 8)) {
                return expected("columns", &format!("a multiple of {} in a direct cut", lanes / (depth / 8)), columns);
            }
        }
        if direct {
            if ahead != 1 {
                return expected("ahead", "1 in a direct cut", ahead);
            }
            // Subgroups share out the columns of a tile of few rows.
            if !columns.is_multiple_of(EDGE * self.subgroups()) {
                let parts = format!("a multiple of {} in a direct cut", EDGE * self.subgroups());
                return expected("columns", &parts, columns);
            }
            // What brings its adapters into blocks has a lane for each row.
            if WIDTHS.into_iter().any(|width| !height.is_multiple_of(width)) {
                return expected("height", &format!("a multiple of {} in a direct cut", WIDTHS[0]), height);
            }
            // Who adds adapters knows of every so many rows which they have.
            if sub_rows != EDGE && WIDTHS.into_iter().any(|width| !sub_rows.is_multiple_of(width)) {
                return expected(
                    "sub_rows",
                    &format!("{EDGE} or a multiple of {} in a direct cut", WIDTHS[0]),
                    sub_rows,
                );
            }
            // A tile of few rows is told by its second row of subgroups.
            if sub_rows == height {
                return expected("sub_rows", &format!("less than the {height} rows in a direct cut"), sub_rows);
            }
            if rests || kept {
                return Err(format!("`{}`: expected false in a direct cut", if rests { "rests" } else { "kept" }));
            }
        }
        if ahead == 0 || ahead > most_ahead {
            return expected("ahead", &format!("1 to {most_ahead}"), ahead);
        }
        // Registers go round.
        let round = if direct { depth / EDGE } else { ahead };
        if x_ahead == 0 || !round.is_multiple_of(x_ahead) {
            return expected("x_ahead", &format!("a divisor of {round}"), x_ahead);
        }
        // A direct product in tiles may leave more than sums.
        let strips = if direct { self.subgroups() * 16 * 16 * 4 } else { 0 };
        let bytes = if dense { self.dense_workgroup_bytes() } else { self.workgroup_bytes() + strips };
        let (bytes, room) = (bytes + self.folded_workgroup_bytes(), workgroup_bytes(edge));
        if bytes > room {
            return Err(format!(
                "takes {bytes} bytes of workgroup memory, expected {room} at most for matrices of {edge}"
            ));
        }
        Ok(())
    }

    /// Subgroups of a workgroup.
    pub fn subgroups(&self) -> u32 {
        (self.height / self.sub_rows) * (self.columns / self.sub_columns)
    }

    /// Workgroups of a dense product.
    pub(super) fn workgroups(&self, rows: usize, columns: usize) -> usize {
        rows.div_ceil(self.height as usize) * columns.div_ceil(self.columns as usize)
    }

    /// Columns of the strip of 16 rows through which a subgroup of a dense product writes its sums: 32, or 16 where memory
    /// is short.
    pub fn strip(&self) -> u32 {
        if self.direct {
            return EDGE;
        }
        let fits = self.workgroup_bytes() + self.subgroups() * 16 * 32 * 4 <= WORKGROUP_BYTES;
        if fits && self.sub_columns.is_multiple_of(32) { 32 } else { 16 }
    }

    /// Workgroup memory of a step of both operands in bytes, rows longer by eight halves.
    pub fn workgroup_bytes(&self) -> u32 {
        let rows = if self.direct { self.columns } else { self.height + self.columns };
        rows * (self.depth + 8) * 2
    }

    /// The same and the strips of a dense product.
    pub fn dense_workgroup_bytes(&self) -> u32 {
        self.workgroup_bytes() + self.subgroups() * 16 * self.strip() * 4
    }

    /// What adding adapters takes beside: a word a row, and 16 bytes a subgroup; of a direct cut nothing.
    pub fn folded_workgroup_bytes(&self) -> u32 {
        if self.direct { 0 } else { self.height * 4 + self.subgroups() * 16 }
    }

    /// Whether a direct product of gate and up with this cut can leave the activation for one of the same cut: each subgroup has blocks of
    /// both, also where subgroups share out the columns, and all tiles together have whole steps of the next product.
    pub fn gates(&self) -> bool {
        let pair = 2 * EDGE;
        self.direct
            && self.sub_columns.is_multiple_of(pair)
            && self.columns.is_multiple_of(pair * self.subgroups())
            && (self.columns / 2).is_multiple_of(self.depth)
    }

    /// Blocks of 16 values in a row of x of a direct cut, padded to whole steps.
    pub fn blocks(&self, width: usize) -> usize {
        width.next_multiple_of(self.depth as usize) / EDGE as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAGED: MatrixTile = MatrixTile {
        height: 64,
        columns: 128,
        depth: 64,
        ahead: 2,
        x_ahead: 2,
        sub_rows: 32,
        sub_columns: 32,
        rests: true,
        kept: false,
        direct: false,
    };
    const DIRECT: MatrixTile =
        MatrixTile { height: 128, ahead: 1, x_ahead: 4, sub_columns: 128, rests: false, direct: true, ..STAGED };

    #[test]
    fn a_cut_that_no_shader_can_be_made_of_is_refused_by_its_field() {
        assert_eq!([STAGED, DIRECT].map(|cut| cut.check(16, true)), [Ok(()), Ok(())]);
        for (cut, words) in [
            (MatrixTile { height: 0, ..STAGED }, "`height`: expected a multiple of 16 up to 256, got 0"),
            (MatrixTile { height: u32::MAX - 15, ..STAGED }, "`height`: expected a multiple of 16 up to 256"),
            (MatrixTile { columns: 40, ..STAGED }, "`columns`: expected a multiple of 16 up to 512, got 40"),
            (MatrixTile { sub_rows: 48, ..STAGED }, "`sub_rows`: expected a divisor of the 64 rows, got 48"),
            (MatrixTile { sub_columns: 48, ..STAGED }, "`sub_columns`: expected a divisor of the 128 columns, got 48"),
            (
                MatrixTile { sub_rows: 16, ..STAGED },
                "`sub_rows`: expected at most 8 parts of 16 x 32 in a tile, got 16",
            ),
            (
                MatrixTile { depth: 48, ..STAGED },
                "`depth`: expected a depth whose eighth divides 256 invocations, got 48",
            ),
            (MatrixTile { ahead: 0, ..STAGED }, "`ahead`: expected 1 to 8, got 0"),
            (MatrixTile { x_ahead: 3, ..STAGED }, "`x_ahead`: expected a divisor of 2, got 3"),
            (MatrixTile { x_ahead: 0, ..DIRECT }, "`x_ahead`: expected a divisor of 4, got 0"),
            (MatrixTile { ahead: 2, ..DIRECT }, "`ahead`: expected 1 in a direct cut, got 2"),
            (MatrixTile { height: 48, sub_rows: 48, ..DIRECT }, "`height`: expected a multiple of 32 in a direct cut"),
            (
                MatrixTile { columns: 48, sub_columns: 48, ..DIRECT },
                "`columns`: expected a multiple of 64 in a direct cut",
            ),
            (
                MatrixTile { height: 96, sub_rows: 48, sub_columns: 64, ..DIRECT },
                "`sub_rows`: expected 16 or a multiple of 32 in a direct cut, got 48",
            ),
            (MatrixTile { height: 32, ..DIRECT }, "`sub_rows`: expected less than the 32 rows in a direct cut"),
            (MatrixTile { rests: true, ..DIRECT }, "`rests`: expected false"),
            (MatrixTile { kept: true, ..DIRECT }, "`kept`: expected false"),
            (MatrixTile { depth: 256, ..STAGED }, "bytes of workgroup memory, expected 49152 at most"),
        ] {
            let error = cut.check(16, false).unwrap_err();
            assert!(error.contains(words), "no `{words}` in {error}");
        }
        let sums = MatrixTile { columns: 256, sub_columns: 64, ..STAGED };
        assert_eq!(sums.check(16, false), Ok(()));
        assert!(sums.check(16, true).unwrap_err().contains("workgroup memory"), "sums take some, too");
        assert!(sums.check(8, false).unwrap_err().contains("expected 32768 at most for matrices of 8"));
    }
}
