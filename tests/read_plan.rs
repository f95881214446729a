//! Which bytes each rank reads, from headers alone: the reference filter's boundaries, and partitions of the file.

mod files;

use files::Table;
use wgmoe::ErrorKind;
use wgmoe::checkpoint::TensorHeader;
use wgmoe::family::class::Group;
use wgmoe::placement::{Heads, PlacementRule, Topology};
use wgmoe::plan::read::{ReadPlan, ScalePolicy, StoredLayout};

/// Name, shape, bytes of an element.
type Stored = (String, Vec<usize>, u64);

fn headers(tensors: &[Stored]) -> impl Iterator<Item = TensorHeader<'_>> {
    tensors.iter().map(|(name, shape, size)| {
        let n_bytes = shape.iter().map(|&n| n as u64).product::<u64>() * size;
        TensorHeader { name, dtype: "U8", shape, n_bytes }
    })
}

fn stored(name: impl Into<String>, shape: &[usize], size: u64) -> Stored {
    (name.into(), shape.to_vec(), size)
}

/// Two ranks share out all of them, four the queries; three, or more than four, have everything.
const HEADS: Heads = Heads { heads: 4, kv_heads: 2, head_dim: 8, normed_together: false };

fn layout(experts: usize, width: usize) -> StoredLayout {
    StoredLayout { experts, width, layers: 2, interleaved: false, transposed: false, heads: HEADS }
}

fn ep(n: usize, rank: usize) -> Topology {
    Topology::new(None, Some(n), rank).unwrap()
}

/// The names of the tensors of which a rank reads something.
fn kept(
    tensors: &[Stored],
    experts: usize,
    rule: &PlacementRule,
    topology: Topology,
    scales: ScalePolicy,
) -> Vec<bool> {
    let plan = ReadPlan::new(headers(tensors), &layout(experts, 16), rule, topology, scales).unwrap();
    plan.tensors.iter().map(|t| t.read > 0).collect()
}

#[test]
fn the_boundary_of_384_experts_on_8_ranks_lies_between_47_and_48() {
    let names: Vec<Stored> = [47, 48]
        .into_iter()
        .flat_map(|e| {
            ["weight", "weight_packed", "weight_scale"]
                .map(|s| stored(format!("model.layers.1.mlp.experts.{e}.gate_proj.{s}"), &[16, 8], 1))
        })
        .collect();
    let keep = |rank, scales| kept(&names, 384, &PlacementRule::Linear, ep(8, rank), scales);
    assert_eq!(keep(0, ScalePolicy::All), [true, true, true, false, false, true]);
    assert_eq!(keep(1, ScalePolicy::All), [false, false, true, true, true, true]);
    assert_eq!(keep(0, ScalePolicy::Owned), [true, true, true, false, false, false]);
    assert_eq!(keep(7, ScalePolicy::Owned), [false; 6]);
}

/// Suffix, whether a remote rank reads it under `All`, and under `Owned`, and what differs from the reference filter.
const SUFFIXES: [(&str, bool, bool, &str); 14] = [
    ("weight", false, false, ""),
    ("weight_packed", false, false, ""),
    ("qweight", false, false, "the reference reads all"),
    ("weight_scale", true, false, "follows its expert"),
    ("weight_scale_inv", true, false, "follows its expert"),
    ("weight_zero_point", true, false, "follows its expert"),
    ("weight_g_idx", true, false, "follows its expert"),
    ("scales", true, false, "follows its expert"),
    ("qzeros", true, false, "follows its expert"),
    ("bias", true, false, "follows its expert"),
    ("weight_scale_2", true, true, ""),
    ("weight_global_scale", true, true, ""),
    ("input_scale", true, true, ""),
    ("weight_shape", true, true, ""),
];

#[test]
fn each_suffix_is_kept_or_skipped_as_the_contract_says() {
    let mut table = Table::default();
    for (suffix, all, owned, why) in SUFFIXES {
        let tensors = [stored(format!("model.layers.0.mlp.experts.9.up_proj.{suffix}"), &[16, 2], 1)];
        for (scales, want) in [(ScalePolicy::All, all), (ScalePolicy::Owned, owned)] {
            let remote = kept(&tensors, 10, &PlacementRule::Linear, ep(2, 0), scales);
            let local = kept(&tensors, 10, &PlacementRule::Linear, ep(2, 1), scales);
            let one = kept(&tensors, 10, &PlacementRule::Linear, ep(1, 0), scales);
            let got = (remote[0], local[0], one[0]);
            table.holds(&format!("{suffix} {scales:?} ({why})"), got == (want, true, true), got);
        }
    }
    table.finish();
}

#[test]
fn tensors_that_are_no_routed_experts_are_read_by_all() {
    let tensors: Vec<Stored> = [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.shared_experts.gate_proj.weight",
        "model.layers.0.mlp.shared_experts.7.gate_proj.weight",
    ]
    .map(|name| stored(name, &[4, 4], 2))
    .to_vec();
    for rank in 0..4 {
        assert_eq!(kept(&tensors, 8, &PlacementRule::RoundRobin, ep(4, rank), ScalePolicy::Owned), [true; 6]);
    }
}

/// A file with experts of their own in one layer and fused ones in the other, beside attention and replicated tensors.
fn mixed(experts: usize, width: usize, hidden: usize) -> Vec<Stored> {
    let mut tensors = vec![stored("model.embed_tokens.weight", &[5, hidden], 2)];
    for (name, rows) in [("q_proj", 32), ("k_proj", 16), ("v_proj", 16)] {
        tensors.push(stored(format!("model.layers.0.self_attn.{name}.weight"), &[rows, hidden], 2));
        tensors.push(stored(format!("model.layers.0.self_attn.{name}.bias"), &[rows], 2));
    }
    tensors.push(stored("model.layers.0.self_attn.o_proj.weight", &[hidden, 32], 2));
    tensors.push(stored("model.layers.0.self_attn.o_proj.bias", &[hidden], 2));
    // Packed words.
    tensors.push(stored("model.layers.0.self_attn.q_proj.weight_packed", &[32, hidden], 4));
    tensors.push(stored("model.layers.1.self_attn.q_proj.weight", &[8, hidden], 4));
    for layer in 0..2 {
        tensors.push(stored(format!("model.layers.{layer}.mlp.gate.weight"), &[experts, hidden], 2));
    }
    for e in 0..experts {
        let name = |rest: &str| format!("model.layers.0.mlp.experts.{e}.{rest}");
        tensors.push(stored(name("gate_proj.weight"), &[width, hidden], 2));
        tensors.push(stored(name("up_proj.weight"), &[width, hidden], 2));
        tensors.push(stored(name("down_proj.weight"), &[hidden, width], 2));
        tensors.push(stored(name("down_proj.weight_scale"), &[hidden, 1], 2));
        tensors.push(stored(name("down_proj.input_scale"), &[], 4));
    }
    let fused = |rest: &str| format!("model.layers.1.mlp.experts.{rest}");
    tensors.push(stored(fused("gate_up_proj"), &[experts, 2 * width, hidden], 2));
    tensors.push(stored(fused("gate_up_proj_bias"), &[experts, 2 * width], 2));
    tensors.push(stored(fused("down_proj"), &[experts, hidden, width], 2));
    tensors.push(stored(fused("down_proj_bias"), &[experts, hidden], 2));
    tensors
}

/// How often each byte is read over all ranks, tensor by tensor: expert payloads and biases exactly once, replicated
/// roles once a rank, and scales that a split width does not cut once a rank of a group; heads once, or by those that have it.
fn check_partition(
    table: &mut Table,
    case: &str,
    tensors: &[Stored],
    layout: &StoredLayout,
    rule: &PlacementRule,
    world: Topology,
) {
    let plans: Vec<ReadPlan> = (0..world.world())
        .map(|r| ReadPlan::new(headers(tensors), layout, rule, world.at(r).unwrap(), ScalePolicy::Owned).unwrap())
        .collect();
    for (i, header) in headers(tensors).enumerate() {
        let mut times = vec![0usize; header.n_bytes as usize];
        for plan in &plans {
            let t = &plan.tensors[i];
            for range in t.spans.iter().flat_map(|s| s.ranges()) {
                for byte in &mut times[range.start as usize..range.end as usize] {
                    *byte += 1;
                }
            }
            if t.read != t.spans.iter().flat_map(|s| s.ranges()).map(|r| r.end - r.start).sum::<u64>() {
                table.holds(&format!("{case} {}", t.name), false, "bytes miscounted");
            }
        }
        let want = match plans[0].tensors[i].group {
            Group::ExpertPayload | Group::ExpertBias => 1,
            Group::ExpertScale => world.moe_tp(),
            Group::Attention if header.name.contains("layers.0") && !header.name.contains("packed") => {
                let tp = if [2, 4].contains(&world.attention_tp()) { world.attention_tp() } else { 1 };
                let copies = if header.name.contains("k_proj") || header.name.contains("v_proj") { tp / 2 } else { 1 };
                if tp == 1 { world.world() } else { copies.max(1) }
            }
            _ => world.world(),
        };
        let ok = times.iter().all(|&n| n == want);
        table.holds(&format!("{case} {}", header.name), ok, (want, &times[..times.len().min(8)]));
    }
    let (total, sum) =
        (headers(tensors).map(|h| h.n_bytes).sum::<u64>(), plans[0].read_bytes() + plans[0].skipped_bytes());
    table.holds(&format!("{case} sum"), sum == total, (sum, total));
}

#[test]
fn ranks_share_a_file_out_exactly_once() {
    let mut table = Table::default();
    for experts in [1, 7, 60, 128, 384] {
        let tensors = mixed(experts, 4, 3);
        for n in [1, 2, 3, 5, 8, 16, 24] {
            for rule in [PlacementRule::Linear, PlacementRule::RoundRobin] {
                let case = format!("E {experts}, ep {n}, {rule:?}");
                check_partition(&mut table, &case, &tensors, &layout(experts, 4), &rule, ep(n, 0));
            }
        }
    }
    table.finish();
}

#[test]
fn ranks_of_a_group_share_the_width_out_exactly_once() {
    let mut table = Table::default();
    for (tp, ep) in (1..=8).flat_map(|tp| (1..=tp).filter(move |ep| tp % ep == 0).map(move |ep| (tp, ep))) {
        for (width, interleaved) in [(12, false), (13, true), (3, false)] {
            let layout = StoredLayout { interleaved, ..layout(5, width) };
            let world = Topology::new(Some(tp), Some(ep), 0).unwrap();
            let case = format!("tp {tp}, ep {ep}, F {width}");
            check_partition(&mut table, &case, &mixed(5, width, 3), &layout, &PlacementRule::Linear, world);
        }
    }
    table.finish();
}

/// The ranges that the second of two ranks reads of one tensor of a layer of 2 experts with F = 64, D = 6.
fn second_half(
    name: &str,
    shape: &[usize],
    size: u64,
    layout: StoredLayout,
) -> wgmoe::Result<Vec<std::ops::Range<u64>>> {
    let tensors = [stored(format!("model.layers.0.mlp.experts.{name}"), shape, size)];
    let topology = Topology::new(Some(2), None, 1)?;
    let plan = ReadPlan::new(headers(&tensors), &layout, &PlacementRule::Linear, topology, ScalePolicy::Owned)?;
    Ok(plan.tensors[0].spans.iter().flat_map(|s| s.ranges()).collect())
}

#[test]
fn quantised_layouts_are_cut_along_the_width_or_refused() {
    let plain = layout(2, 64);
    let other = StoredLayout { interleaved: true, transposed: true, ..plain };
    let mut table = Table::default();
    let mut holds = |name: &str, shape: &[usize], size, layout, first: std::ops::Range<u64>, n: usize| {
        let got = second_half(name, shape, size, layout).unwrap();
        table.holds(name, got.first() == Some(&first) && got.len() == n, (got.first(), got.len()));
    };
    // compressed-tensors: [out, in / 8] words, [out, in / group] scales
    holds("0.gate_proj.weight_packed", &[64, 2], 4, plain, 256..512, 1);
    holds("0.down_proj.weight_packed", &[6, 8], 4, plain, 16..32, 6);
    holds("0.down_proj.weight_scale", &[6, 2], 2, plain, 2..4, 6);
    holds("0.down_proj.weight_scale", &[6, 1], 2, plain, 0..12, 1);
    // GPTQ and AWQ: [in / 8, out] and [in, out / 8]
    holds("0.gate_proj.qweight", &[2, 64], 4, plain, 128..256, 2);
    holds("0.down_proj.qweight", &[8, 6], 4, plain, 96..192, 1);
    holds("0.gate_proj.qzeros", &[1, 8], 4, plain, 16..32, 1);
    holds("0.down_proj.g_idx", &[64], 4, plain, 128..256, 1);
    holds("0.gate_proj.g_idx", &[6], 4, plain, 0..24, 1);
    // gpt-oss: MXFP4 blocks, interleaved rows, and the transposed bf16 variant
    holds("down_proj_blocks", &[2, 6, 2, 16], 1, other, 16..32, 12);
    holds("down_proj_scales", &[2, 6, 2], 1, other, 1..2, 12);
    holds("gate_up_proj_blocks", &[2, 128, 1, 16], 1, other, 1024..2048, 2);
    holds("gate_up_proj", &[2, 6, 128], 2, other, 128..256, 12);
    holds("down_proj", &[2, 64, 6], 2, other, 384..768, 2);
    // scalars belong to everyone
    holds("1.down_proj.input_scale", &[], 4, plain, 0..4, 1);

    let odd = layout(2, 96);
    for (name, shape, layout) in [
        ("0.down_proj.weight_packed", vec![6, 1], plain),
        ("0.down_proj.weight_scale", vec![6, 3], layout(2, 200)),
        ("0.down_proj.weight_scale", vec![6, 3], odd),
        ("0.down_proj.weight_scale_inv", vec![6, 2], layout(2, 200)),
        ("0.mystery.weight", vec![6, 2], plain),
    ] {
        table.fails(name, second_half(name, &shape, 1, layout), ErrorKind::Unsupported, &["tensor `model", name]);
    }
    table.finish();
}

#[test]
fn draft_layers_have_their_own_number_of_experts() {
    let name = |module: &str, e: usize| stored(format!("{module}.mlp.experts.{e}.w1.weight"), &[4, 4], 2);
    let mut tensors: Vec<Stored> = (0..12).map(|e| name("model.layers.0", e)).collect();
    tensors.extend((0..4).map(|e| name("mtp.layers.0", e)));
    tensors.extend((0..8).map(|e| name("model.layers.2", e)));
    let owned = kept(&tensors, 12, &PlacementRule::Linear, ep(4, 1), ScalePolicy::Owned);
    let ids: Vec<usize> = (0..tensors.len()).filter(|&i| owned[i]).collect();
    assert_eq!(ids, [3, 4, 5, 12 + 1, 16 + 2, 16 + 3]);
}

#[test]
fn tensors_that_the_model_does_not_have_are_refused() {
    let plan = |tensor: Stored, rule: &PlacementRule| {
        ReadPlan::new(headers(&[tensor]), &layout(4, 16), rule, ep(2, 0), ScalePolicy::Owned)
    };
    let mut table = Table::default();
    let extra = stored("model.layers.0.mlp.experts.4.w1.weight", &[16, 2], 2);
    table.fails("id", plan(extra, &PlacementRule::Linear), ErrorKind::Tensor, &["experts.4", "the layer has 4"]);
    let fused = stored("model.layers.0.mlp.experts.gate_up_proj", &[5, 32, 2], 2);
    table.fails("fused", plan(fused.clone(), &PlacementRule::Linear), ErrorKind::Tensor, &["expected 4 experts"]);
    let rule = PlacementRule::Table(vec![vec![0]; 3]);
    table.fails("table", plan(fused, &rule), ErrorKind::Config, &["expected owners of 4 experts, got 3"]);
    table.finish();
}

#[test]
fn a_table_gives_copies_to_every_owner() {
    let tensors = mixed(3, 4, 3);
    let rule = PlacementRule::Table(vec![vec![0], vec![0, 1], vec![1]]);
    let bytes = |rank| {
        let plan = ReadPlan::new(headers(&tensors), &layout(3, 4), &rule, ep(2, rank), ScalePolicy::Owned).unwrap();
        plan.bills[&Group::ExpertPayload]
    };
    let one = 2 * 3 * 3 * 4 * 2;
    assert_eq!([bytes(0).read_bytes, bytes(1).read_bytes], [2 * one, 2 * one]);
    assert_eq!(bytes(0).skipped_bytes, one);
}

#[test]
fn heads_are_ranges_of_rows_and_of_columns() {
    let tensors = mixed(1, 4, 3);
    let of = |name: &str, rank: usize| {
        let topology = Topology::new(Some(4), Some(2), rank).unwrap();
        let rule = PlacementRule::Linear;
        let plan = ReadPlan::new(headers(&tensors), &layout(1, 4), &rule, topology, ScalePolicy::Owned).unwrap();
        let name = format!("model.layers.0.self_attn.{name}");
        let tensor = plan.tensors.into_iter().find(|t| t.name == name).unwrap();
        tensor.spans.iter().flat_map(|s| s.ranges()).map(|r| (r.start, r.end)).collect::<Vec<_>>()
    };
    // Rank 3 has query head 3 and key head 1, of 8 values each; a row of q is 6 bytes, one of o 64.
    assert_eq!(of("q_proj.weight", 3), [(144, 192)]);
    assert_eq!(of("k_proj.weight", 3), [(48, 96)]);
    assert_eq!(of("v_proj.bias", 3), [(16, 32)]);
    assert_eq!(of("o_proj.weight", 3), [(48, 64), (112, 128), (176, 192)]);
    assert_eq!((of("o_proj.bias", 0), of("o_proj.bias", 3)), (vec![(0, 6)], vec![]));
    assert_eq!(of("q_proj.weight_packed", 3), [(0, 384)]);
}
