//! Every shader variant that the crate can choose on a device: what the tests validate.

use std::collections::HashMap;

use crate::activation::Activation;
use crate::dtype::DType;
use crate::gpu::Tier;
use crate::kernels::dense_gemm::{Adapters, Cut};
use crate::kernels::expert_gemm_variant::{self, Flags, Sizes};
use crate::kernels::linker::{Kernel, Vars};
use crate::kernels::lora_matrix::InBlocks;
use crate::kernels::{
    activation, activation_blocks, align, attention, attention_matrix, attention_split, choice, combine, count,
    dense_gemm, down_combine, embed, expand_norm, expert_gemm, fold_blocks, localise, lora, lora_gather, lora_matrix,
    matrix_probe, norm, norm_pack, pack, pair_expand_shrink, pair_gemm, pair_gemm_shrink, pair_shrink, random, rate,
    remap, rope, route, runs, sample, stream, tile_rows,
};
use crate::plan::attention::{self as attention_plan, MATRIX_WIDTHS};
use crate::plan::capabilities::Capabilities;
use crate::plan::classes::classes;
use crate::plan::matrix::{DEPTH_PARTS, EDGE, MatrixTile};
use crate::plan::rows::FEW_TILE;
use crate::router::{GroupScore, RouteOptions, Score};

/// Storage types of weights.
const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];
/// Kinds of rows with their tile heights.
const DENSE: [(&str, usize); 3] = [("dense", 1), ("dense", 4), ("dense", 8)];
const PAIRS: [(&str, usize); 4] = [("pairs", 1), ("tiles", 1), ("tiles", 4), ("tiles", 8)];
const FEW: [(&str, usize); 2] = [("pairs", 1), ("tiles", FEW_TILE)];
/// Widths of a head that give different attention variants.
const HEAD_DIMS: [usize; 5] = [24, 32, 64, 128, 256];

/// Widths of rows that give every number of loads, and rows that are too long for that.
const WIDTHS: [usize; 5] = [1024, 2048, 4096, 8192, 16384];

/// Numbers of experts that give different routings: from one a lane to more than any known model has.
const EXPERTS: [usize; 6] = [16, 32, 64, 128, 256, 512];
/// Query heads of a workgroup that splits a context; the numbers of known models stand for all from 1 to 8.
const SPLIT_HEADS: [usize; 5] = [1, 2, 4, 7, 8];

/// Columns of narrow experts.
const NARROW: [usize; 3] = [64, 768, 1024];

const ACTIVATIONS: [Activation; 4] = [
    Activation::Silu,
    Activation::Gelu,
    Activation::SwigluClamped { alpha: 1.702, limit: 7.0 },
    Activation::ReluSquared,
];

/// One shader with one set of variables.
#[derive(Debug, Clone)]
pub struct Variant {
    /// The shader.
    pub kernel: &'static Kernel,
    /// Its variables.
    pub vars: Vars,
    /// Tiers on which it is chosen, lowest first.
    pub tiers: Vec<Tier>,
}

/// Every variant that is chosen on any class of device, each once.
pub fn all() -> Vec<Variant> {
    let mut all: Vec<Variant> = Vec::new();
    let mut places = HashMap::new();
    for class in classes() {
        for (kernel, vars) in variants(&class) {
            let at = *places.entry((kernel.stem, vars.clone())).or_insert(all.len());
            if at == all.len() {
                all.push(Variant { kernel, vars, tiers: Vec::new() });
            }
            if all[at].tiers.last() != Some(&class.tier) {
                all[at].tiers.push(class.tier);
            }
        }
    }
    all
}

/// Every kernel with every set of variables that a device with `caps` can meet, each once. Attention has a variant for
/// each width of a head; the widths of known models stand for all.
pub fn variants(caps: &Capabilities) -> Vec<(&'static Kernel, Vars)> {
    let mut all = routes(caps);
    all.push((&count::COUNT, Vars::new()));
    all.push((&localise::LOCALISE, Vars::new()));
    all.push((&localise::LOCALISE_QUOTAS, localise::quota_vars()));
    all.push((&localise::LOCALISE_COPIES, localise::copy_vars()));
    all.push((&remap::REMAP, Vars::new()));
    for chunk in align::CHUNKS {
        all.push((&align::ALIGN_COUNT, align::vars(chunk)));
        all.push((&align::ALIGN_SCATTER, align::vars(chunk)));
        all.push((&runs::RUNS_COUNT, align::vars(chunk)));
    }
    all.extend([true, false].map(runs::placing));
    for most in align::FEW_SIZES {
        all.push((&align::ALIGN_FEW, align::few_vars(most)));
    }
    for dtype in DTYPES {
        for (rows, tile) in DENSE.into_iter().chain(PAIRS) {
            all.push((&expert_gemm::EXPERT_GEMM, expert_gemm::vars(caps, dtype, rows, tile)));
        }
        all.push((&embed::EMBED, embed::vars(dtype)));
        all.push((&random::RANDOM, random::vars(dtype)));
    }
    if caps.along_depth {
        few_variants(caps, &mut all);
    }
    if caps.matrix {
        matrix_variants(caps, &mut all);
    }
    for (rows, tile) in PAIRS {
        all.push((&lora::LORA_SHRINK, lora::shrink_vars(caps, rows, tile)));
        all.push((&lora::LORA_EXPAND, lora::expand_vars(caps, rows, tile)));
    }
    all.push((&lora_gather::LORA_GATHER, Vars::new()));
    for kind in ACTIVATIONS {
        for dense in [false, true] {
            all.push((&activation::ACTIVATION, activation::vars(kind, dense)));
        }
    }
    all.push((&combine::COMBINE, Vars::new()));
    norms(caps, &mut all);
    for head_dim in HEAD_DIMS {
        let rope = |rows: usize, parts: usize| {
            (&rope::ROPE, rope::vars(caps, head_dim, rope::heads_at_once(caps, rows), parts, false))
        };
        let expands = (&rope::ROPE, rope::vars(caps, head_dim, 1, 1, true));
        let attention = (&attention::ATTENTION, attention::vars(caps, head_dim));
        let expands = Some(expands).filter(|_| rope::adds(caps, head_dim));
        let ropes = [1, 1 << 12].into_iter().flat_map(|rows| [rope(rows, 1), rope(rows, DEPTH_PARTS)]);
        for variant in ropes.chain([attention]).chain(expands) {
            if !all.contains(&variant) {
                all.push(variant);
            }
        }
    }
    if caps.split_attention {
        split_variants(&mut all);
    }
    all.push((&sample::SAMPLE, sample::vars(caps)));
    all.push((&rate::RATE, rate::vars(caps)));
    all.push((&stream::STREAM, Vars::new()));
    all
}

fn routes(caps: &Capabilities) -> Vec<(&'static Kernel, Vars)> {
    let mut all: Vec<(&'static Kernel, Vars)> = Vec::new();
    for score in [Score::Softmax, Score::Sigmoid] {
        for (groups, group_score) in [(1, GroupScore::Max), (4, GroupScore::Max), (4, GroupScore::TopTwo)] {
            for biased in [false, true] {
                let options = RouteOptions { score, groups, group_score, ..RouteOptions::default() };
                let parts = [1, DEPTH_PARTS / 2, DEPTH_PARTS].into_iter();
                for (experts, parts) in parts.flat_map(|parts| EXPERTS.map(|experts| (experts, parts))) {
                    let variant = (&route::ROUTE, route::vars(caps, &options, biased, experts, parts));
                    if !all.contains(&variant) {
                        all.push(variant);
                    }
                }
            }
        }
    }
    all
}

/// Norms of rows of every number of loads, and of rows that are too long for that.
fn norms(caps: &Capabilities, all: &mut Vec<(&'static Kernel, Vars)>) {
    for gathered in [false, true] {
        for width in WIDTHS {
            let variant = (&norm::NORM, norm::vars(caps, gathered, width));
            if !all.contains(&variant) {
                all.push(variant);
            }
        }
    }
    for width in (0..18).map(|n| 1 << n).filter(|_| caps.along_depth) {
        let variant = (&expand_norm::EXPAND_NORM, expand_norm::vars(caps, width));
        if !all.contains(&variant) {
            all.push(variant);
        }
    }
}

/// Those of few pairs.
fn few_variants(caps: &Capabilities, all: &mut Vec<(&'static Kernel, Vars)>) {
    between(caps, all);
    choosing(caps, all);
    let lanes = caps.row_lanes as usize;
    for in_dim in [3 * 8 * lanes, 4 * 8 * lanes] {
        for dense in [false, true] {
            all.push((&pair_shrink::PAIR_SHRINK, pair_shrink::vars(caps, dense, in_dim)));
        }
        for cut in cuts(caps, in_dim) {
            for dtype in DTYPES {
                for adapters in [Adapters::None, Adapters::Adds, Adapters::Shrinks] {
                    let shrinks = adapters == Adapters::Shrinks;
                    let kernel = if shrinks { &dense_gemm::DENSE_GEMM_SHRINK } else { &dense_gemm::DENSE_GEMM };
                    all.push((kernel, dense_gemm::vars(caps, dtype, cut, adapters)));
                }
            }
        }
        for (dtype, (rows, tile)) in DTYPES.into_iter().flat_map(|dtype| FEW.map(|rows| (dtype, rows))) {
            let vars = pair_gemm_shrink::vars(caps, dtype, rows, tile, in_dim);
            all.push((&pair_gemm_shrink::PAIR_GEMM_SHRINK, vars));
        }
        for (dtype, lora) in DTYPES.into_iter().flat_map(|dtype| [(dtype, false), (dtype, true)]) {
            all.push((&down_combine::DOWN_COMBINE, down_combine::vars(caps, dtype, lora, in_dim)));
            let kinds = ACTIVATIONS.into_iter().filter(|kind| kind.gated()).map(Some).chain([None]);
            for kind in kinds {
                for (rows, tile) in FEW {
                    let vars = pair_gemm::vars(caps, dtype, rows, tile, kind, lora, in_dim);
                    all.push((&pair_gemm::PAIR_GEMM, vars));
                }
            }
        }
    }
}

/// Products of few pairs that choose their experts, by every number of logits of a lane and both scores.
fn choosing(caps: &Capabilities, all: &mut Vec<(&'static Kernel, Vars)>) {
    let lanes = caps.row_lanes as usize;
    for (score, values) in [Score::Softmax, Score::Sigmoid].into_iter().flat_map(|s| [1, 2, 4, 8].map(|n| (s, n))) {
        let options = RouteOptions { score, ..RouteOptions::default() };
        let chosen = |of_product: Vars| [of_product, choice::vars(caps, &options, values * lanes)].concat();
        for (dtype, in_dim) in DTYPES.into_iter().flat_map(|dtype| [3, 4].map(|n| (dtype, n * 8 * lanes))) {
            let vars = pair_gemm_shrink::vars(caps, dtype, choice::ROWS, 1, in_dim);
            all.push((&pair_gemm_shrink::PAIR_GEMM_SHRINK_CHOOSING, chosen(vars)));
            for kind in ACTIVATIONS.into_iter().filter(|kind| kind.gated()) {
                let vars = pair_gemm::vars(caps, dtype, choice::ROWS, 1, Some(kind), false, in_dim);
                all.push((&pair_gemm::PAIR_GEMM_CHOOSING, chosen(vars)));
            }
        }
    }
}

/// What stands between the products of few pairs, for experts of every width.
fn between(caps: &Capabilities, all: &mut Vec<(&'static Kernel, Vars)>) {
    for kind in ACTIVATIONS.into_iter().filter(|kind| kind.gated()) {
        for n in 0..18 {
            let variant = (&pair_expand_shrink::PAIR_EXPAND_SHRINK, pair_expand_shrink::vars(caps, kind, 1 << n));
            if !all.contains(&variant) {
                all.push(variant);
            }
        }
    }
}

/// Every cut of a product of few rows of `in_dim` columns.
fn cuts(caps: &Capabilities, in_dim: usize) -> Vec<Cut> {
    let rows = 1..=dense_gemm::MOST_ROWS;
    let all: Vec<Cut> =
        rows.flat_map(|rows| (0..18).filter_map(move |n| Cut::of(caps, rows, 1 << n, in_dim))).collect();
    let first = |i: &usize| !all[..*i].contains(&all[*i]);
    (0..all.len()).filter(first).map(|i| all[i]).collect()
}

fn split_variants(all: &mut Vec<(&'static Kernel, Vars)>) {
    for head_dim in HEAD_DIMS {
        for heads in SPLIT_HEADS.into_iter().filter(|n| head_dim <= 128 || *n <= 4) {
            for (aligned, whole) in [(false, false), (false, true), (true, false), (true, true)] {
                let vars = attention_split::vars(head_dim, heads, aligned, whole);
                all.push((&attention_split::ATTENTION_SPLIT, vars));
            }
        }
        all.push((&attention_split::ATTENTION_COMBINE, attention_split::combine_vars(head_dim)));
    }
}

/// Norms that pack, for the lengths of row and the forms that they are read in.
fn packing_norms(caps: &Capabilities, all: &mut Vec<(&'static Kernel, Vars)>) {
    let forms = pack::FORMS.map(|forms| (false, forms)).into_iter().chain([(true, [true, false])]);
    for (twice, forms) in forms {
        for (width, plain) in WIDTHS.into_iter().flat_map(|width| [(width, false), (width, true)]) {
            for parted in [false, true].into_iter().take(1 + usize::from(norm_pack::holds(caps, width))) {
                let variant = norm_pack::variant(caps, width, twice, forms, [plain, parted]);
                if !all.contains(&variant) {
                    all.push(variant);
                }
            }
        }
    }
}

/// Sizes of products that stand for all: of whole tiles of columns, and not.
fn shapes(caps: &Capabilities, ragged: bool) -> Vec<Sizes> {
    let groups = if ragged { 261 } else { 256 };
    let of = |out_rows: u32| Sizes {
        groups,
        x_groups: groups,
        x_stride: groups,
        out_rows,
        y_stride: out_rows.next_multiple_of(EDGE),
    };
    let all = [1536, 1000].map(of);
    // Elsewhere they are no part of the text.
    all[..if caps.edge == EDGE { 2 } else { 1 }].to_vec()
}

fn matrix_variants(caps: &Capabilities, all: &mut Vec<(&'static Kernel, Vars)>) {
    all.push((&pack::PACK, pack::vars(true, [true, false])));
    for forms in pack::FORMS {
        let kernel = if forms[1] { &pack::PACK_BLOCKS } else { &pack::PACK };
        all.push((kernel, pack::vars(false, forms)));
    }
    packing_norms(caps, all);
    for tile in caps.cuts.experts.iter().filter(|t| t.direct) {
        all.push((&tile_rows::TILE_ROWS, tile_rows::vars(tile)));
        all.push((&fold_blocks::FOLD_BLOCKS, fold_blocks::vars(caps, "tiles", tile)));
    }
    for tile in caps.cuts.dense.iter().filter(|t| t.direct) {
        all.push((&fold_blocks::FOLD_BLOCKS, fold_blocks::vars(caps, "dense", tile)));
    }
    for folded in [false, true] {
        for per in 1..=lora_matrix::MOST_AT_ONCE {
            for run in [lora_matrix::RUN, lora_matrix::LONG_RUN].into_iter().take(1 + usize::from(folded)) {
                let of = |x| lora_matrix::vars(caps, folded, run, per, x);
                let ways = if run > lora_matrix::RUN { &InBlocks::ALL[..] } else { &InBlocks::ALL[..1] };
                for x in ways.iter().copied() {
                    let leaves = x.0 == InBlocks::Leave;
                    let kernel =
                        if leaves { &lora_matrix::LORA_SHRINK_LEAVING } else { &lora_matrix::LORA_SHRINK_MATRIX };
                    all.push((kernel, of(x)));
                }
            }
        }
    }
    all.push((&lora_matrix::LORA_EXPAND_TILES, lora_matrix::expand_vars()));
    for head_dim in MATRIX_WIDTHS {
        let cut = attention_plan::cut(caps);
        all.push((&attention_matrix::ATTENTION_PACK, attention_matrix::pack_vars(cut, head_dim)));
        all.push((&attention_matrix::ATTENTION_MATRIX, attention_matrix::vars(caps, cut, head_dim)));
    }
    for (dtype, scaled) in [(DType::F16, false), (DType::Bf16, false), (DType::Bf16, true)] {
        for ragged in [false, true] {
            let plain = Flags { scaled, ragged, ..Flags::default() };
            let of = |rows: &'static str, cuts: &[MatrixTile]| cuts.iter().map(move |t| (rows, *t)).collect::<Vec<_>>();
            let all_tiles = of("tiles", &caps.cuts.experts).into_iter().chain(of("dense", &caps.cuts.dense));
            let of_sizes = shapes(caps, ragged);
            let all_tiles = all_tiles.flat_map(|(rows, tile)| of_sizes.iter().map(move |s| (rows, tile, s)));
            let (direct, staged): (Vec<_>, Vec<_>) = all_tiles.partition(|(_, t, _)| t.direct);
            for (rows, tile, sizes) in direct {
                let x_groups = tile.blocks(sizes.groups as usize * 8) as u32;
                let sizes = Sizes { x_groups, x_stride: 0, ..*sizes };
                let variant = |flags| expert_gemm_variant::variant(caps, dtype, rows, tile, flags, &sizes);
                all.push(variant(plain));
                for across in [false, true].into_iter().filter(|_| !scaled) {
                    let flags = Flags { lora: true, across, ..plain };
                    all.push(variant(flags));
                }
                if rows == "tiles" {
                    all.push(variant(Flags { halves: true, ..plain }));
                    for across in [false, true].into_iter().filter(|_| !scaled) {
                        all.push(variant(Flags { halves: true, lora: true, across, ..plain }));
                    }
                }
                let kinds = ACTIVATIONS.into_iter().filter(|kind| rows == "tiles" && tile.gates() && kind.gated());
                for gated in kinds.flat_map(|kind| [Some((kind, false)), Some((kind, true))]) {
                    all.push(variant(Flags { gated, ..plain }));
                    if !scaled {
                        all.push(variant(Flags { gated, lora: true, ..plain }));
                    }
                }
            }
            for (rows, tile, sizes) in staged {
                let variant = |flags| expert_gemm_variant::variant(caps, dtype, rows, tile, flags, sizes);
                all.push(variant(plain));
                let parted = |flags| (rows == "dense").then_some(Flags { parted: true, ..flags });
                if rows == "dense" {
                    all.push(variant(Flags { parted: true, ..plain }));
                    let sizes = Sizes { x_groups: 2 * sizes.groups, x_stride: 2 * sizes.groups, ..*sizes };
                    let flags = Flags { twice: true, parted: true, ..plain };
                    all.push(expert_gemm_variant::variant(caps, dtype, rows, tile, flags, &sizes));
                }
                for across in [false, true] {
                    if !scaled {
                        let flags = Flags { lora: true, across, ..plain };
                        for flags in [Some(flags), parted(flags)].into_iter().flatten() {
                            all.push(variant(flags));
                        }
                    }
                }
            }
        }
    }
    if caps.along_depth {
        let lanes = caps.row_lanes as usize;
        for (dense, in_dim) in [false, true].into_iter().flat_map(|d| [(d, 3 * 8 * lanes), (d, 4 * 8 * lanes)]) {
            all.push((&pair_shrink::PAIR_SHRINK_PACKED, pair_shrink::packed_vars(caps, dense, in_dim)));
        }
    }
    for kind in ACTIVATIONS {
        for forms in pack::FORMS {
            let kernel = if forms[1] { &activation::ACTIVATION_PACK_BLOCKS } else { &activation::ACTIVATION_PACK };
            all.push((kernel, activation::pack_vars(kind, forms)));
        }
        for (tile, by_row) in caps.cuts.experts.iter().filter(|t| t.direct).flat_map(|t| [(t, false), (t, true)]) {
            for width in NARROW {
                let vars = activation_blocks::vars(caps, kind, tile.height, width, by_row);
                all.push((&activation_blocks::ACTIVATION_BLOCKS, vars));
            }
        }
    }
    all.extend([false, true].map(|halves| (&combine::COMBINE_TILES, combine::tiles_vars(halves))));
    all.push((&matrix_probe::MATRIX_PROBE, matrix_probe::vars(caps.edge)));
}
