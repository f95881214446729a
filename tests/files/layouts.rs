//! Adapters of one change in every layout that tools write, for small models of several families. The canonical factors are
//! known beforehand, and so are the bytes that a rank has to read.

use serde_json::{Value, json};
use wgmoe::adapter::Site;
use wgmoe::checkpoint::{Mixer, MlpKind, ModelConfig};
use wgmoe::family::Family;
use wgmoe::placement::{PlacementRule, RankShare, Topology};

use super::{Tensor, tiny};

/// Experts, rank, hidden width and expert width. The width is odd, so that no split of it is even.
pub const E: usize = 7;
pub const R: usize = 3;
pub const D: usize = 24;
pub const F: usize = 13;
/// alpha / R.
pub const SCALE: f32 = 2.0;

/// Rows, columns, values.
pub type Values = (usize, usize, Vec<f32>);

/// One adapter.
pub struct Layout {
    pub name: &'static str,
    pub model: ModelConfig,
    pub config: Value,
    pub tensors: Vec<Tensor>,
    /// Place (layer 0) and canonical A and B of every factor of a routed expert.
    pub factors: Vec<(Site, usize, Values, Values)>,
    /// Elements of each expert: those of its whole width, and those of one column of it.
    pub each: [usize; 2],
    /// The same of what all experts share.
    pub shared: [usize; 2],
    /// Elements outside the experts, but for A of the output projection.
    pub other: usize,
}

impl Layout {
    /// Bytes that a rank must read that holds `width` columns of `owned`, and `heads` heads.
    pub fn bytes(&self, owned: &[usize], width: usize, heads: usize) -> u64 {
        let elements = |[whole, column]: [usize; 2]| whole + column * width;
        let held = owned.iter().filter(|e| self.factors.iter().any(|f| f.1 == **e)).count();
        let shared = if held > 0 { elements(self.shared) } else { 0 };
        let output = R * heads * self.model.head_dim;
        4 * (self.other + output + shared + held * elements(self.each)) as u64
    }
}

/// Linear, round-robin, and a table with some experts in one of `ep` groups, some in two, one in all.
pub fn rules(ep: usize) -> [PlacementRule; 3] {
    let owners = |e: usize| match e {
        3 => (0..ep).collect(),
        _ if e.is_multiple_of(2) && ep > 1 => vec![e % ep, (e + 1) % ep],
        _ => vec![e % ep],
    };
    [PlacementRule::Linear, PlacementRule::RoundRobin, PlacementRule::Table((0..E).map(owners).collect())]
}

/// What `rank` of `tp` ranks in `ep` groups holds of `model`.
pub fn share(model: &ModelConfig, rule: &PlacementRule, [tp, ep]: [usize; 2], rank: usize) -> RankShare {
    RankShare::new(model, rule, Topology::new(Some(tp), Some(ep), rank).unwrap()).unwrap()
}

/// A model of `family` with two layers, in letters of this file.
pub fn model(family: Family) -> ModelConfig {
    let mut model = tiny();
    model.family = family;
    (model.hidden, model.moe.hidden, model.moe.experts, model.moe.expert_width) = (D, D, E, F);
    (model.heads, model.kv_heads, model.head_dim, model.vocab) = (2, 1, 8, 10);
    model.layers = vec![MlpKind::Experts; 2];
    model.shared_width = 5;
    if family == Family::NemotronH {
        model.mixers = vec![Mixer::Mlp, Mixer::Attention];
    }
    model
}

/// Values between -0.5 and 0.5, others for each `tag`.
pub fn values(rows: usize, cols: usize, tag: usize) -> Values {
    let hash = |i: usize| (i as u32).wrapping_mul(2_654_435_761).wrapping_add((tag as u32).wrapping_mul(40_503));
    let value = |i: usize| f64::from((hash(i) ^ (hash(i) >> 15)).wrapping_mul(0x2c1b_3c6d) >> 8) / f64::from(1 << 24);
    (rows, cols, (0..rows * cols).map(|i| (value(i) - 0.5) as f32).collect())
}

/// Canonical A `[R, in]`; with `shared`, of all experts, and of gate and up.
fn a(site: Site, expert: usize, one: bool) -> Values {
    let (inn, tag) = if site == Site::ExpertDown { (F, 2) } else { (D, usize::from(site == Site::ExpertUp)) };
    values(R, inn, 10 * if one { 0 } else { expert } + tag)
}

/// Canonical B `[out, R]`.
fn b(site: Site, expert: usize) -> Values {
    let (out, tag) = if site == Site::ExpertDown { (D, 5) } else { (F, 3 + usize::from(site == Site::ExpertUp)) };
    values(out, R, 10 * expert + tag)
}

fn transposed((rows, cols, values): &Values) -> Values {
    (*cols, *rows, (0..rows * cols).map(|i| values[i % rows * cols + i / rows]).collect())
}

/// Rows of the first above rows of the second, or in turns.
fn stacked(first: &Values, second: &Values, in_turns: bool) -> Values {
    let (rows, cols) = (first.0, first.1);
    let row = |m: &Values, r: usize| m.2[r * cols..(r + 1) * cols].to_vec();
    let values = if in_turns {
        (0..rows).flat_map(|r| [row(first, r), row(second, r)].concat()).collect()
    } else {
        [first.2.clone(), second.2.clone()].concat()
    };
    (2 * rows, cols, values)
}

fn tensor(name: String, shape: &[usize], values: &[f32]) -> Tensor {
    assert_eq!(shape.iter().product::<usize>(), values.len(), "{name}");
    let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    Tensor { name, dtype: "F32".to_owned(), shape: shape.to_vec(), bytes }
}

/// A pair of two-dimensional tensors under `module`.
pub fn pair(module: &str, a: &Values, b: &Values) -> Vec<Tensor> {
    let one =
        |side: &str, m: &Values| tensor(format!("base_model.model.{module}.lora_{side}.weight"), &[m.0, m.1], &m.2);
    vec![one("A", a), one("B", b)]
}

/// How B of a fused parameter is ordered, and what the pair is.
#[derive(Clone, Copy, PartialEq)]
enum Flat {
    RankMajor,
    Grouped,
    Transposed,
    /// With three dimensions.
    Stacked,
}

/// The pair of a fused parameter.
fn fused(module: &str, experts: &[(Values, Values)], flat: Flat) -> Vec<Tensor> {
    let turned: Vec<(Values, Values)> = match flat {
        Flat::Transposed => experts.iter().map(|(a, b)| (transposed(b), transposed(a))).collect(),
        _ => experts.to_vec(),
    };
    let (x, y) = (turned[0].0.1, turned[0].1.0);
    let a: Vec<f32> = turned.iter().flat_map(|(a, _)| a.2.clone()).collect();
    let mut b = vec![0.0; y * R * E];
    for (e, (_, one)) in turned.iter().enumerate() {
        for (row, j) in (0..y).flat_map(|row| (0..R).map(move |j| (row, j))) {
            let column = if flat == Flat::Grouped { e * R + j } else { j * E + e };
            b[row * R * E + column] = one.2[row * R + j];
        }
    }
    let mut tensors = pair(module, &(R * E, x, a), &(y, R * E, b));
    if flat == Flat::Stacked {
        (tensors[0].shape, tensors[1].shape) = (vec![E, R, x], vec![y, R, E]);
    }
    tensors
}

/// A pair with a dimension for the experts; a side given once has 1 there.
fn packed(module: &str, a: &[Values], b: &[Values]) -> Vec<Tensor> {
    let one = |side: &str, m: &[Values]| {
        let all: Vec<f32> = m.iter().flat_map(|m| m.2.clone()).collect();
        tensor(format!("base_model.model.{module}.lora_{side}.weight"), &[m.len(), m[0].0, m[0].1], &all)
    };
    vec![one("A", a), one("B", b)]
}

const GATE: Site = Site::ExpertGate;
const UP: Site = Site::ExpertUp;
const DOWN: Site = Site::ExpertDown;

fn config(changes: Value) -> Value {
    let base = json!({"peft_type": "LORA", "r": R, "lora_alpha": R as f32 * SCALE, "peft_version": "0.21.2"});
    super::patched(base, &changes)
}

/// Router and LM head, which every rank reads whole, and an output projection, which two ranks share out.
fn others(family: Family) -> Vec<Tensor> {
    let router = match family {
        Family::GptOss => "model.layers.0.mlp.router",
        Family::NemotronH => "model.layers.0.mixer.gate",
        _ => "model.layers.0.mlp.gate",
    };
    let attention = if family == Family::NemotronH { "layers.1.mixer" } else { "layers.1.self_attn" };
    let mut tensors = pair(router, &values(R, D, 101), &values(E, R, 102));
    tensors.extend(pair(&format!("model.{attention}.o_proj"), &values(R, 16, 103), &values(D, R, 104)));
    tensors.extend(pair("lm_head", &values(R, D, 105), &values(10, R, 106)));
    tensors
}

fn layout(
    name: &'static str,
    family: Family,
    changes: Value,
    mut tensors: Vec<Tensor>,
    factors: Vec<(Site, usize, Values, Values)>,
    (each, shared): ([usize; 2], [usize; 2]),
) -> Layout {
    let others = others(family);
    let all: usize = others.iter().map(|t| t.bytes.len() / 4).sum();
    let other = all - R * 16;
    tensors.extend(others);
    Layout { name, model: model(family), config: config(changes), tensors, factors, each, shared, other }
}

/// The canonical factors of `sites` of `experts`; gate and up have one A where `one_a` says so.
fn canonical(sites: &[Site], experts: &[usize], one_a: bool) -> Vec<(Site, usize, Values, Values)> {
    let of = |site: Site| if one_a && site == UP { GATE } else { site };
    let mut all = Vec::new();
    for site in sites {
        all.extend(experts.iter().map(|e| (*site, *e, a(of(*site), *e, false), b(*site, *e))));
    }
    all
}

/// Elements of an expert with its own tensors: whole, and of one column.
const GATE_OR_UP: [usize; 2] = [R * D, R];
const DOWN_ONLY: [usize; 2] = [D * R, R];
const NOTHING: [usize; 2] = [0, 0];
const ALL_THREE: [usize; 2] = [2 * R * D + D * R, 3 * R];
const ONE_A: [usize; 2] = [R * D, 2 * R];
const FUSED: [usize; 2] = [R * D + D * R, 3 * R];

/// Pairs of one module an expert.
fn apart(factors: &[(Site, usize, Values, Values)], experts: &str, [gate, up, down]: [&str; 3]) -> Vec<Tensor> {
    let module = |site, e| {
        format!("{experts}.{e}.{}", [gate, up, down][[GATE, UP, DOWN].iter().position(|s| *s == site).unwrap()])
    };
    factors.iter().flat_map(|(site, e, a, b)| pair(&module(*site, *e), a, b)).collect()
}

const NAMES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
const EXPERTS: &str = "model.layers.0.mlp.experts";

/// Gate, up and down as two fused parameters.
fn both(flat: Flat, in_turns: bool) -> Vec<Tensor> {
    [gate_up(flat, in_turns, ".base_layer"), down(flat)].concat()
}

fn gate_up(flat: Flat, in_turns: bool, wrapper: &str) -> Vec<Tensor> {
    let of = |e| (a(GATE, e, false), stacked(&b(GATE, e), &b(UP, e), in_turns));
    fused(&format!("{EXPERTS}{wrapper}"), &(0..E).map(of).collect::<Vec<_>>(), flat)
}

fn down(flat: Flat) -> Vec<Tensor> {
    fused(EXPERTS, &(0..E).map(|e| (a(DOWN, e, false), b(DOWN, e))).collect::<Vec<_>>(), flat)
}

/// Every layout.
pub fn layouts() -> Vec<Layout> {
    let all: Vec<usize> = (0..E).collect();
    let three = [GATE, UP, DOWN];
    let parameters = json!({"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]});
    let with = |more: Value| super::patched(parameters.clone(), &more);
    let fused_of = |name, family, changes, tensors| {
        layout(name, family, changes, tensors, canonical(&three, &all, true), (FUSED, NOTHING))
    };
    let separate = canonical(&three, &all, false);
    let some = canonical(&three, &[1, 4, 5], false);
    let sides = |site| -> (Vec<Values>, Vec<Values>) {
        (all.iter().map(|e| a(site, *e, false)).collect(), all.iter().map(|e| b(site, *e)).collect())
    };
    let packed_gate_up: Vec<Values> = all.iter().map(|e| stacked(&b(GATE, *e), &b(UP, *e), false)).collect();
    let module = |name: &str| format!("{EXPERTS}.{name}");
    let one_side = {
        let mut factors = Vec::new();
        for e in &all {
            factors.push((GATE, *e, a(GATE, 0, true), b(GATE, *e)));
            factors.push((UP, *e, a(GATE, 0, true), b(UP, *e)));
            factors.push((DOWN, *e, a(DOWN, *e, false), b(DOWN, 0)));
        }
        factors.sort_by_key(|f| (f.0, f.1));
        factors
    };
    let nemotron = |changes, tensors| {
        let each = [R * D + D * R, 2 * R];
        layout(
            "without a gate",
            Family::NemotronH,
            changes,
            tensors,
            canonical(&[UP, DOWN], &all, false),
            (each, NOTHING),
        )
    };
    let backbone = "model.layers.0.mixer.experts";
    let up_and_down = [UP, DOWN].map(|site| all.iter().map(|e| (a(site, *e, false), b(site, *e))).collect::<Vec<_>>());
    let listed = canonical(&three, &all, true);
    let in_lists = all.iter().flat_map(|e| {
        let gate_up = (a(GATE, *e, false), stacked(&b(GATE, *e), &b(UP, *e), true));
        let mut tensors = pair(&module(&format!("gate_up_projs.{e}")), &gate_up.0, &gate_up.1);
        tensors.extend(pair(&module(&format!("down_projs.{e}")), &a(DOWN, *e, false), &b(DOWN, *e)));
        tensors
    });
    use Family::{GptOss, Mixtral, NemotronH, Qwen3Moe};
    vec![
        layout(
            "per expert",
            Qwen3Moe,
            json!({}),
            apart(&separate, EXPERTS, NAMES),
            separate.clone(),
            (ALL_THREE, NOTHING),
        ),
        layout(
            "w1, w3, w2",
            Mixtral,
            json!({}),
            apart(&separate, "model.layers.0.block_sparse_moe.experts", ["w1", "w3", "w2"]),
            separate.clone(),
            (ALL_THREE, NOTHING),
        ),
        layout("some experts", Qwen3Moe, json!({}), apart(&some, EXPERTS, NAMES), some.clone(), (ALL_THREE, NOTHING)),
        fused_of("fused", Qwen3Moe, with(json!({})), both(Flat::RankMajor, false)),
        fused_of("fused of another name", Mixtral, with(json!({})), both(Flat::RankMajor, false)),
        fused_of("grouped", Qwen3Moe, with(json!({"lora_B_layout": "grouped_by_expert"})), both(Flat::Grouped, false)),
        fused_of("transposed", Qwen3Moe, with(json!({"peft_version": "0.18.1"})), both(Flat::Transposed, false)),
        fused_of("stacked", Qwen3Moe, with(json!({})), both(Flat::Stacked, false)),
        fused_of("gate and up in turns", GptOss, with(json!({})), both(Flat::RankMajor, true)),
        fused_of(
            "gate and up in turns, transposed",
            GptOss,
            with(json!({"peft_version": "0.19.0"})),
            both(Flat::Transposed, true),
        ),
        layout("lists", GptOss, json!({}), in_lists.collect(), listed, (FUSED, NOTHING)),
        layout(
            "gate and up alone",
            Qwen3Moe,
            json!({"target_parameters": ["experts.gate_up_proj"]}),
            gate_up(Flat::RankMajor, false, ""),
            canonical(&[GATE, UP], &all, true),
            (ONE_A, NOTHING),
        ),
        layout(
            "down alone, transposed",
            Qwen3Moe,
            json!({"target_parameters": ["down_proj"]}),
            down(Flat::Transposed),
            canonical(&[DOWN], &all, false),
            (DOWN_ONLY, NOTHING),
        ),
        layout(
            "packed",
            Qwen3Moe,
            json!({}),
            [
                packed(&module("gate_up_proj"), &sides(GATE).0, &packed_gate_up),
                packed(&module("down_proj"), &sides(DOWN).0, &sides(DOWN).1),
            ]
            .concat(),
            canonical(&three, &all, true),
            (FUSED, NOTHING),
        ),
        layout(
            "packed up alone",
            Qwen3Moe,
            json!({}),
            packed(&module("w3"), &sides(UP).0, &sides(UP).1),
            canonical(&[UP], &all, false),
            (GATE_OR_UP, NOTHING),
        ),
        layout(
            "packed, one side for all",
            Qwen3Moe,
            json!({}),
            [
                packed(&module("gate_up_proj"), &sides(GATE).0[..1], &packed_gate_up),
                packed(&module("down_proj"), &sides(DOWN).0, &sides(DOWN).1[..1]),
            ]
            .concat(),
            one_side,
            ([0, 3 * R], [R * D + D * R, 0]),
        ),
        nemotron(
            json!({"target_parameters": ["experts.up_proj", "experts.down_proj"]}),
            [
                fused(&format!("{backbone}.base_layer"), &up_and_down[0], Flat::RankMajor),
                fused(backbone, &up_and_down[1], Flat::RankMajor),
            ]
            .concat(),
        ),
        layout(
            "without a gate, per expert",
            NemotronH,
            json!({}),
            apart(&canonical(&[UP, DOWN], &all, false), backbone, NAMES),
            canonical(&[UP, DOWN], &all, false),
            ([R * D + D * R, 2 * R], NOTHING),
        ),
    ]
}
