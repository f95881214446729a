//! What the ranks read, put to work on the oracle: partial layer outputs add up to the output of one rank.

mod common;
mod files;

use common::{Rng, TOL_F32, rel_err};
use files::layouts::{D, E, F, Layout, R, layouts, rules, share};
use files::{TINY, biased, data, encode, folder};
use wgmoe::activation::Activation;
use wgmoe::adapter::{Matrix, Site};
use wgmoe::checkpoint::ExpertPart;
use wgmoe::family::{Family, Role};
use wgmoe::placement::{ExpertShare, Heads, PlacementRule, RankShare, Topology};
use wgmoe::plan::read::{ReadPlan, ScalePolicy, StoredLayout};
use wgmoe::reference::{AttentionShape, Factors, MoeLayer, attention, lora, moe_layer};
use wgmoe::router::RouteOptions;
use wgmoe::shape::MoeShape;
use wgmoe::{Adapter, Checkpoint};

const TOKENS: usize = 6;
/// A layer of the tiny model that has experts.
const LAYER: usize = 0;

/// The bytes that a plan reads of one tensor, in order, as f32.
fn read(checkpoint: &Checkpoint, plan: &ReadPlan, role: Role) -> Vec<f32> {
    let name = checkpoint.config().family.tensor_name(role);
    let tensor = plan.tensors.iter().find(|t| t.name == name).unwrap();
    let view = checkpoint.tensor(&name).unwrap();
    let ranges = tensor.spans.iter().flat_map(|s| s.ranges());
    ranges.flat_map(|r| view.dtype.decode(view.bytes(r.start as usize..r.end as usize).unwrap())).collect()
}

/// The output of the layer on one rank, from what its plan reads and nothing else.
fn partial(checkpoint: &Checkpoint, rule: &PlacementRule, topology: Topology, x: &[f32]) -> Vec<f32> {
    let config = checkpoint.config();
    let layout = StoredLayout::of(config);
    let plan = ReadPlan::new(checkpoint.headers(), &layout, rule, topology, ScalePolicy::Owned).unwrap();
    let placement = rule.place(config.moe.experts, topology).unwrap();
    let before = checkpoint.bytes_read();
    let router = read(checkpoint, &plan, Role::Router { layer: LAYER });
    let (mut gate_up, mut down) = (Vec::new(), Vec::new());
    for expert in placement.owned() {
        gate_up.extend(read(checkpoint, &plan, ExpertPart::Gate.role(LAYER, expert)));
        gate_up.extend(read(checkpoint, &plan, ExpertPart::Up.role(LAYER, expert)));
        down.extend(read(checkpoint, &plan, ExpertPart::Down.role(LAYER, expert)));
    }
    let width = topology.width_range(config.moe.expert_width).len();
    // The counter saw the share of this rank (stored as bf16), no byte more.
    let elements = router.len() + placement.owned().len() * 3 * width * config.hidden;
    assert_eq!(checkpoint.bytes_read() - before, 2 * elements as u64);
    let layer = MoeLayer {
        shape: MoeShape { expert_width: width, ..config.moe },
        options: RouteOptions { renormalise: config.norm_topk_prob, ..RouteOptions::default() },
        activation: Activation::Silu,
        placement: &placement,
        router: &router,
        router_bias: None,
        gate_up: &gate_up,
        gate_up_bias: None,
        down: &down,
        down_bias: None,
    };
    moe_layer(&layer, x, &[-1; TOKENS], 1, &|_, _| None).out
}

#[test]
fn partial_outputs_add_up_to_the_output_of_one_rank() {
    let checkpoint = Checkpoint::open(&data(TINY)).unwrap();
    let x = Rng::new(3).floats(TOKENS * checkpoint.config().hidden);
    let whole = partial(&checkpoint, &PlacementRule::Linear, Topology::default(), &x);
    assert!(whole.iter().any(|v| *v != 0.0));
    let mut failures = Vec::new();
    for tp in [1, 2, 3, 4, 6, 8] {
        for ep in (1..=tp).filter(|ep| tp % ep == 0) {
            for rule in [PlacementRule::Linear, PlacementRule::RoundRobin] {
                let mut sum = vec![0.0; whole.len()];
                for rank in 0..tp {
                    let topology = Topology::new(Some(tp), Some(ep), rank).unwrap();
                    for (total, part) in sum.iter_mut().zip(partial(&checkpoint, &rule, topology, &x)) {
                        *total += part;
                    }
                }
                let error = rel_err(&sum, &whole);
                if error > TOL_F32 {
                    failures.push((tp, ep, rule, error));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{failures:?}");
}

/// Base weights of one layer in their whole width.
struct Base {
    /// `[E, D]`
    router: Vec<f32>,
    /// `[E, F, D]` each.
    gate: Vec<f32>,
    up: Vec<f32>,
    /// `[E, D, F]`
    down: Vec<f32>,
    x: Vec<f32>,
}

impl Base {
    fn new() -> Self {
        let mut rng = Rng::new(29);
        let mut floats = |n| rng.floats(n);
        Self {
            router: floats(E * D),
            gate: floats(E * F * D),
            up: floats(E * F * D),
            down: floats(E * D * F),
            x: floats(TOKENS * D),
        }
    }

    /// What the rank with `share` adds to the output, with what it read of the adapter: `[T, D]`. Every third token has
    /// no adapter.
    fn partial(&self, gated: bool, share: &ExpertShare, adapter: &Adapter) -> Vec<f32> {
        let (owned, width) = (share.placement().owned(), share.width());
        if owned.is_empty() {
            return vec![0.0; TOKENS * D];
        }
        let (mut gate_up, mut down) = (Vec::new(), Vec::new());
        for e in &owned {
            let rows = (e * F + width.start) * D..(e * F + width.end) * D;
            if gated {
                gate_up.extend_from_slice(&self.gate[rows.clone()]);
            }
            gate_up.extend_from_slice(&self.up[rows]);
            down.extend((0..D).flat_map(|d| &self.down[(e * D + d) * F..][width.clone()]));
        }
        let factors: Vec<_> = adapter
            .factors
            .iter()
            .map(|f| {
                let values = |m: &Matrix| m.dtype.decode(&m.bytes);
                (f.site, f.expert, f.scale, values(&f.a), values(&f.b), f.bias.as_deref().map(values))
            })
            .collect();
        let loaded = |site: Site, v: usize| {
            let (_, _, scale, a, b, bias) = factors.iter().find(|f| (f.0, f.1) == (site, owned[v]))?;
            Some(Factors { rank: R, scale: *scale, a, b, bias: bias.as_deref() })
        };
        let layer = MoeLayer {
            shape: MoeShape { experts: E, top_k: 3, hidden: D, expert_width: width.len() },
            options: RouteOptions::default(),
            activation: if gated { Activation::Silu } else { Activation::ReluSquared },
            placement: share.placement(),
            router: &self.router,
            router_bias: None,
            gate_up: &gate_up,
            gate_up_bias: None,
            down: &down,
            down_bias: None,
        };
        let mapping: Vec<i32> = (0..TOKENS).map(|t| if t % 3 == 2 { -1 } else { 0 }).collect();
        moe_layer(&layer, &self.x, &mapping, 1, &loaded).out
    }
}

/// The layer with the adapter on one rank that read everything.
fn whole_output(base: &Base, gated: bool, layout: &Layout, dir: &std::path::Path) -> Vec<f32> {
    let whole = ExpertShare::whole(E, F).unwrap();
    let mut adapter = Adapter::open(dir, &layout.model).unwrap();
    let with = base.partial(gated, &whole, &adapter);
    adapter.factors.clear();
    let without = base.partial(gated, &whole, &adapter);
    assert!(rel_err(&with, &without) > 100.0 * TOL_F32, "{}: the adapter changes nothing", layout.name);
    with
}

#[test]
fn partial_outputs_with_an_adapter_of_every_layout_add_up() {
    let base = Base::new();
    let mut failures = Vec::new();
    for layout in layouts() {
        let gated = layout.model.family != Family::NemotronH;
        let dir = folder(&[
            ("adapter_config.json", layout.config.to_string().into()),
            ("adapter_model.safetensors", encode(&layout.tensors)),
        ]);
        let whole = whole_output(&base, gated, &layout, dir.path());
        for (tp, ep) in [1, 2, 3, 4, 8].into_iter().flat_map(|tp| (1..=tp).map(move |ep| (tp, ep))) {
            if tp % ep != 0 {
                continue;
            }
            for rule in rules(ep) {
                let mut sum = vec![0.0; whole.len()];
                for rank in 0..tp {
                    let share = share(&layout.model, &rule, [tp, ep], rank);
                    let part = Adapter::open_for(dir.path(), &layout.model, &share).unwrap();
                    for (total, part) in sum.iter_mut().zip(base.partial(gated, &share.experts, &part)) {
                        *total += part;
                    }
                }
                let error = rel_err(&sum, &whole);
                if error > TOL_F32 {
                    failures.push((layout.name, tp, ep, rule, error));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{failures:?}");
}

/// What the plan reads of attention and what an adapter adds to it, on one rank: `[T, D]`. Norms and positions, which concern
/// each head alone, are left out.
fn attention_part(checkpoint: &Checkpoint, topology: Topology, dir: &std::path::Path, x: &[f32]) -> Vec<f32> {
    let config = checkpoint.config();
    let (rule, layer) = (PlacementRule::Linear, LAYER);
    let plan =
        ReadPlan::new(checkpoint.headers(), &StoredLayout::of(config), &rule, topology, ScalePolicy::Owned).unwrap();
    let share = RankShare::new(config, &rule, topology).unwrap();
    let adapter = Adapter::open_for(dir, config, &share).unwrap();
    // W·x, and what the adapter changes of it.
    let project = |role: Role, site: Site, out: usize, inn: usize, x: &[f32]| {
        let weights = read(checkpoint, &plan, role);
        assert_eq!(weights.len(), out * inn, "{role:?}");
        let values = |m: &Matrix| m.dtype.decode(&m.bytes);
        let f = adapter.factors.iter().find(|f| f.place() == (layer, site, 0)).unwrap();
        let (a, b, bias) = (values(&f.a), values(&f.b), f.bias.as_deref().map(values));
        let loaded = Factors { rank: f.rank, scale: f.scale, a: &a, b: &b, bias: bias.as_deref() };
        let mut y = vec![0.0; TOKENS * out];
        for (x, y) in x.chunks(inn).zip(y.chunks_mut(out)) {
            for (w, y) in weights.chunks(inn).zip(y) {
                *y = w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>() as f32;
            }
        }
        lora(x, 1, &[0; TOKENS], &|_| Some(loaded), out, inn, &mut y, out, 0);
        y
    };
    let d = config.hidden;
    let (q_width, kv_width) = (share.heads.q_range().len(), share.heads.kv_range().len());
    let q = project(Role::Q { layer }, Site::Q, q_width, d, x);
    let k = project(Role::K { layer }, Site::K, kv_width, d, x);
    let v = project(Role::V { layer }, Site::V, kv_width, d, x);
    let (heads, kv_heads) = (share.heads.heads().len(), share.heads.kv_heads().len());
    let shape = AttentionShape { heads, kv_heads, head_dim: config.head_dim, scale: 0.2 };
    let mut attended = vec![0.0; q.len()];
    attention(&q, &k, &v, 0, &shape, &mut attended);
    project(Role::O { layer }, Site::O, d, q_width, &attended)
}

#[test]
fn attention_of_the_heads_of_all_ranks_adds_up_to_that_of_one() {
    let checkpoint = Checkpoint::open(&data(TINY)).unwrap();
    let config = checkpoint.config();
    assert_eq!((Heads::of(config).heads, Heads::of(config).kv_heads), (4, 2));
    let adapter = biased(&data(TINY).join("adapters/attn_only"));
    let x = Rng::new(7).floats(TOKENS * config.hidden);
    let whole = attention_part(&checkpoint, Topology::default(), adapter.path(), &x);
    let mut failures = Vec::new();
    for tp in 1..=8 {
        // Two ranks have one key head each, four share two; other numbers leave all of it to each rank.
        let splits = [2, 4].contains(&tp);
        let mut sum = vec![0.0; whole.len()];
        for rank in 0..tp {
            let topology = Topology::new(Some(tp), None, rank).unwrap();
            let part = attention_part(&checkpoint, topology, adapter.path(), &x);
            if !splits && part != whole {
                failures.push(format!("tp {tp}, rank {rank}: not the whole"));
            }
            sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        }
        let error = rel_err(&sum, &whole);
        if splits && error > TOL_F32 {
            failures.push(format!("tp {tp}: off by {error}"));
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}
