//! What the ranks read, put to work on the oracle: partial layer outputs add up to the output of one rank.

mod common;
mod files;

use common::{Rng, TOL_F32, rel_err};
use files::{TINY, data};
use wgmoe::Checkpoint;
use wgmoe::activation::Activation;
use wgmoe::checkpoint::ExpertPart;
use wgmoe::family::Role;
use wgmoe::placement::{PlacementRule, Topology};
use wgmoe::plan::read::{ExpertLayout, ReadPlan, ScalePolicy};
use wgmoe::reference::{MoeLayer, moe_layer};
use wgmoe::router::RouteOptions;
use wgmoe::shape::MoeShape;

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
    let layout = ExpertLayout::of(config);
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
        owners: placement.owners(),
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
