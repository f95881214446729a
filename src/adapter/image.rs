//! What one adapter becomes in the pool, site by site: the words of its factors, and the index entries that point at them.

use std::collections::HashMap;
use std::ops::Range;

use crate::adapter::cut::Cut;
use crate::adapter::sites::PoolSites;
use crate::adapter::{Adapter, Factor, Matrix, Site};
use crate::dtype::DType;
use crate::plan::matrix::{factor_exponent, factor_reach, larger, largest_magnitude};

/// Bytes of a pool word: what an index entry counts in.
pub(crate) const WORD: u64 = 16;

/// One entry of a layer's index. A and B are words of the site's pool, counted from where the image begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Its place, for slot 0.
    pub at: usize,
    /// First word of A and of B within the image, rank and storage type, scale: `Factor` of `shared/factors.wgsl`.
    pub words: [u32; 4],
}

/// The factors that one site of a layer takes of an adapter, laid out but not yet copied.
#[derive(Default)]
pub(crate) struct Image<'a> {
    blocks: Vec<Block<'a>>,
    /// Size of all blocks.
    pub words: u64,
    /// Every factor and its entry but for the exponent of A, which is measured when the entry is written.
    entries: Vec<(Entry, &'a Factor)>,
    /// First words of the blocks that may be asked for again: gate and up of a fused adapter share A, which is stored once.
    stored: HashMap<Key, u32>,
}

/// A part of a matrix as the pool stores it: rows padded to eight columns, and zero rows after the last.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Part {
    rows: Range<usize>,
    cols: Range<usize>,
    padded_rows: usize,
    /// One more column.
    biased: bool,
    /// Rows and columns are those of the transposed matrix.
    transposed: bool,
    dtype: DType,
}

struct Block<'a> {
    matrix: &'a Matrix,
    bias: Option<&'a Matrix>,
    part: Part,
}

impl<'a> Image<'a> {
    /// The images of `adapter` in the layer `layer`, whose places are `sites`: one for each site, by ordinal. Takes the
    /// experts, columns and heads that this rank holds, from a whole adapter or from one that was cut while it was read. The
    /// adapter must have passed the pool's check.
    pub fn of_layer(sites: &PoolSites, layer: usize, adapter: &'a Adapter) -> Vec<Self> {
        let mut images: Vec<Self> = sites.runs().iter().map(|_| Self::default()).collect();
        for factor in adapter.of_layer(layer) {
            let expert = match sites.experts().filter(|_| factor.site.of_expert()) {
                None => 0,
                Some(share) => match share.placement().local(factor.expert) {
                    Some(local) => local,
                    // Another rank holds this expert.
                    None => continue,
                },
            };
            let Some((ordinal, at)) = sites.entry(factor.site, expert) else { continue };
            let image = &mut images[ordinal];
            let cut = sites.cut(factor.site);
            let bias = factor.bias.as_deref().filter(|_| cut.as_ref().is_none_or(Cut::adds_bias));
            // An entry has one type for all.
            let same = [Some(&*factor.b), bias].into_iter().flatten().all(|m| m.dtype == factor.a.dtype);
            let dtype = if same { factor.a.dtype } else { DType::F32 };
            let [a, b] = parts(factor, cut, adapter.share.is_some(), dtype);
            let a = image.place(Block { matrix: &factor.a, bias: None, part: a });
            let b = Part { biased: bias.is_some(), ..b };
            let b = image.place(Block { matrix: &factor.b, bias, part: b });
            let storage = match dtype {
                DType::F16 => 1,
                DType::Bf16 => 2,
                _ => 0,
            };
            let biased = u32::from(bias.is_some());
            let rank_type = (factor.rank as u32 + biased) | storage << 16 | biased << 18;
            image.entries.push((Entry { at, words: [a, b, rank_type, factor.scale.to_bits()] }, factor));
        }
        images
    }

    /// Every factor's entry, whether products on cooperative matrices can add all of them, and how far those of experts
    /// [reach](factor_reach).
    pub fn measured(&self) -> (Vec<Entry>, bool, f32) {
        let (mut folds, mut reach) = (true, 0f32);
        let finished = |(entry, factor): &(Entry, &Factor)| {
            let mut entry = *entry;
            let largest = largest_magnitude(factor.a.dtype, &factor.a.bytes);
            entry.words[2] |= u32::from(factor_exponent(largest).cast_unsigned()) << 24;
            folds = folds && factor.folds(largest);
            if factor.site.of_expert() {
                let Factor { a, b, rank, scale, .. } = *factor;
                let own = factor_reach([a.dtype, b.dtype], [&a.bytes, &b.bytes], *rank, *scale);
                reach = larger(reach, own);
            }
            entry
        };
        let entries = self.entries.iter().map(finished).collect();
        (entries, folds, reach)
    }

    /// Adds a block unless it is there already; its first word.
    fn place(&mut self, block: Block<'a>) -> u32 {
        *self.stored.entry(block.key()).or_insert_with(|| {
            let at = self.words as u32;
            self.words += block.part.words();
            self.blocks.push(block);
            at
        })
    }

    /// The words, `16 · words` bytes.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity((self.words * WORD) as usize);
        for block in &self.blocks {
            block.append(&mut bytes);
        }
        bytes
    }
}

/// The parts of A and B that this rank stores, of factors that are whole or, with `done`, were cut when they were read.
fn parts(factor: &Factor, cut: Option<Cut>, done: bool, dtype: DType) -> [Part; 2] {
    let whole = |m: &Matrix| Part {
        rows: 0..m.rows,
        cols: 0..m.cols,
        padded_rows: m.rows,
        biased: false,
        transposed: false,
        dtype,
    };
    let (mut a, mut b) = (whole(&factor.a), whole(&factor.b));
    if factor.site == Site::Embedding {
        // A token's values become a row.
        a = Part { rows: a.cols, cols: a.rows, padded_rows: factor.a.cols, transposed: true, ..a };
    } else if let Some(Cut { inputs, range, padded, .. }) = cut {
        let held = if done { 0..range.len() } else { range };
        if inputs {
            a.cols = held;
        } else {
            (b.rows, b.padded_rows) = (held, padded);
        }
    }
    [a, b]
}

impl Part {
    fn row_bytes(&self) -> usize {
        (self.cols.len() + usize::from(self.biased)).next_multiple_of(8) * self.dtype.size()
    }

    fn words(&self) -> u64 {
        (self.padded_rows * self.row_bytes()) as u64 / WORD
    }
}

/// What tells blocks apart: the allocations of matrix and bias, and the part.
type Key = (*const Matrix, Option<*const Matrix>, Part);

impl Block<'_> {
    fn key(&self) -> Key {
        (std::ptr::from_ref(self.matrix), self.bias.map(std::ptr::from_ref), self.part.clone())
    }

    fn append(&self, bytes: &mut Vec<u8>) {
        let Self { matrix, bias, part } = self;
        let push = |bytes: &mut Vec<u8>, from: &Matrix, first: usize, n: usize| {
            let size = from.dtype.size();
            let values = &from.bytes[first * size..(first + n) * size];
            if part.dtype == from.dtype {
                bytes.extend_from_slice(values);
            } else {
                bytes.extend_from_slice(&part.dtype.encode(&from.dtype.decode(values)));
            }
        };
        let begin = bytes.len();
        for row in part.rows.clone() {
            let at = bytes.len();
            if part.transposed {
                part.cols.clone().for_each(|col| push(bytes, matrix, col * matrix.cols + row, 1));
            } else {
                push(bytes, matrix, row * matrix.cols + part.cols.start, part.cols.len());
            }
            if let Some(bias) = bias {
                push(bytes, bias, row, 1);
            }
            bytes.resize(at + part.row_bytes(), 0);
        }
        bytes.resize(begin + part.padded_rows * part.row_bytes(), 0);
    }
}
