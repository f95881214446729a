//! An adapter read by ranks: each reads the elements that it holds and no byte more, and together they have all.

mod files;

use std::collections::HashMap;
use std::path::Path;

use files::layouts::{D, E, F, Layout, R, SCALE, Values, layouts, model, pair, rules, share, values};
use files::zip::torch_save;
use files::{Table, Tensor, encode, folder};
use serde_json::json;
use tempfile::TempDir;
use wgmoe::adapter::{Adapter, Factor, Matrix, Site};
use wgmoe::dtype::DType;
use wgmoe::family::Family;
use wgmoe::placement::{HeadShare, Heads, PlacementRule, RankShare, Topology};
use wgmoe::{ErrorKind, ModelConfig};

fn decoded(m: &Matrix) -> Values {
    (m.rows, m.cols, m.dtype.decode(&m.bytes))
}

fn is_routed(f: &Factor) -> bool {
    matches!(f.site, Site::ExpertGate | Site::ExpertUp | Site::ExpertDown)
}

/// The adapter as a folder, in either format.
fn written(layout: &Layout, torch: bool) -> TempDir {
    let weights = if torch {
        ("adapter_model.bin", torch_save(&layout.tensors))
    } else {
        ("adapter_model.safetensors", encode(&layout.tensors))
    };
    folder(&[("adapter_config.json", layout.config.to_string().into()), weights])
}

/// Worlds of ranks: `tp` and `ep`. In the last one, some ranks have no column.
const WORLDS: [[usize; 2]; 11] =
    [[1, 1], [2, 1], [2, 2], [3, 1], [4, 2], [6, 3], [8, 1], [8, 8], [8, 2], [12, 6], [15, 1]];

/// Canonical A and B by layer, site and expert.
type Factors = HashMap<(usize, Site, usize), (Values, Values)>;

/// The factors of a whole group of ranks but for those of attention, put together from their parts; `None` when the parts do not go together.
fn joined(parts: &[Adapter]) -> Option<Factors> {
    let mut all = HashMap::new();
    for f in parts.iter().flat_map(|part| &part.factors).filter(|f| f.site != Site::O) {
        let (a, b) = (decoded(&f.a), decoded(&f.b));
        let Some((old_a, old_b)) = all.get_mut(&f.place()) else {
            all.insert(f.place(), (a, b));
            continue;
        };
        if f.site == Site::ExpertDown {
            let row = |m: &Values, r: usize| m.2[r * m.1..(r + 1) * m.1].to_vec();
            let rows = (0..R).flat_map(|r| [row(old_a, r), row(&a, r)].concat()).collect();
            *old_a = (R, old_a.1 + a.1, rows);
            if *old_b != b {
                return None;
            }
        } else if is_routed(f) {
            *old_b = (old_b.0 + b.0, R, [old_b.2.clone(), b.2].concat());
            if *old_a != a {
                return None;
            }
        } else if (&*old_a, &*old_b) != (&a, &b) {
            return None;
        }
    }
    Some(all)
}

#[test]
fn every_layout_decodes_to_its_canonical_factors() {
    let mut table = Table::default();
    for layout in layouts() {
        for torch in [false, true] {
            let case = format!("{}, torch {torch}", layout.name);
            let adapter = match Adapter::open(written(&layout, torch).path(), &layout.model) {
                Ok(adapter) => adapter,
                Err(e) => {
                    table.holds(&case, false, e);
                    continue;
                }
            };
            let got: Vec<_> = adapter
                .factors
                .iter()
                .filter(|f| is_routed(f))
                .map(|f| (f.site, f.expert, decoded(&f.a), decoded(&f.b)))
                .collect();
            table.holds(&case, got == layout.factors, got.len());
            table.holds(&case, adapter.factors.len() == got.len() + 3, adapter.factors.len());
            let scaled = adapter.factors.iter().all(|f| f.scale == SCALE && f.rank == R && f.bias.is_none());
            table.holds(&case, scaled, "scale or rank");
            let n_bytes: usize = layout.tensors.iter().map(|t| t.bytes.len()).sum();
            table.holds(&case, adapter.bytes_read == n_bytes as u64, (adapter.bytes_read, n_bytes));
            table.holds(&case, layout.bytes(&(0..E).collect::<Vec<_>>(), F, 2) == n_bytes as u64, "bytes of the case");
        }
    }
    table.finish();
}

#[test]
fn a_rank_reads_its_own_elements_and_nothing_else() {
    let mut table = Table::default();
    for layout in layouts() {
        for torch in [false, true] {
            let dir = written(&layout, torch);
            for (world, rule) in WORLDS.into_iter().flat_map(|w| rules(w[1]).map(|rule| (w, rule))) {
                for rank in 0..world[0] {
                    let share = share(&layout.model, &rule, world, rank);
                    let got = Adapter::open_for(dir.path(), &layout.model, &share).unwrap();
                    let want = {
                        let (experts, heads) = (&share.experts, if world[0] == 2 { 1 } else { 2 });
                        layout.bytes(&experts.placement().owned(), experts.width().len(), heads)
                    };
                    let case = format!("{}, torch {torch}, {world:?}, {rule:?}, rank {rank}", layout.name);
                    table.holds(&case, got.bytes_read == want, (got.bytes_read, want));
                    let held: u64 = held_bytes(&got);
                    table.holds(&case, held == want, ("held", held, want));
                    let owned = |f: &&Factor| is_routed(f) && share.experts.placement().local(f.expert).is_none();
                    table.holds(&case, !got.factors.iter().any(|f| owned(&f)), "another's expert");
                    table.holds(&case, got.share.as_ref() == Some(&share), "the share");
                }
            }
        }
    }
    table.finish();
}

/// Bytes of the matrices of an adapter, what is shared once.
fn held_bytes(adapter: &Adapter) -> u64 {
    let mut seen = HashMap::new();
    for m in adapter.factors.iter().flat_map(|f| [Some(&f.a), Some(&f.b), f.bias.as_ref()]).flatten() {
        seen.insert(std::sync::Arc::as_ptr(m), m.bytes.len() as u64);
    }
    seen.values().sum()
}

#[test]
fn the_ranks_of_a_group_have_together_what_the_file_holds() {
    let mut table = Table::default();
    for layout in layouts() {
        let dir = written(&layout, false);
        let whole = Adapter::open(dir.path(), &layout.model).unwrap();
        for (world, rule) in WORLDS.into_iter().flat_map(|w| rules(w[1]).map(|rule| (w, rule))) {
            let [tp, ep] = world;
            let mut found = Vec::new();
            for group in 0..ep {
                let ranks = group * (tp / ep)..(group + 1) * (tp / ep);
                let parts = ranks.map(|r| {
                    Adapter::open_for(dir.path(), &layout.model, &share(&layout.model, &rule, world, r)).unwrap()
                });
                let parts: Vec<_> = parts.collect();
                let case = format!("{}, {world:?}, {rule:?}, group {group}", layout.name);
                let Some(joined) = joined(&parts) else {
                    table.holds(&case, false, "parts of one side differ");
                    continue;
                };
                let placement = rule.place(E, Topology::new(Some(tp), Some(ep), group * (tp / ep)).unwrap()).unwrap();
                let ours = |f: &&Factor| !is_routed(f) || placement.local(f.expert).is_some();
                let ours = |f: &&Factor| f.site != Site::O && ours(f);
                let want: Factors =
                    whole.factors.iter().filter(ours).map(|f| (f.place(), (decoded(&f.a), decoded(&f.b)))).collect();
                table.holds(&case, joined == want, (joined.len(), want.len()));
                found.extend(joined.into_keys());
            }
            let all = whole.factors.iter().all(|f| f.site == Site::O || found.contains(&f.place()));
            table.holds(&format!("{}, {world:?}, {rule:?}", layout.name), all, "no group has it");
        }
        let all =
            Adapter::open_for(dir.path(), &layout.model, &share(&layout.model, &PlacementRule::Linear, [1, 1], 0))
                .unwrap();
        let same = |a: &Factor, b: &Factor| {
            (a.place(), a.rank, a.scale.to_bits()) == (b.place(), b.rank, b.scale.to_bits()) && a.a == b.a && a.b == b.b
        };
        let equal = all.factors.len() == whole.factors.len()
            && all.factors.iter().zip(&whole.factors).all(|(a, b)| same(a, b))
            && all.bytes_read == whole.bytes_read;
        table.holds(layout.name, equal, "the whole share differs from no share");
    }
    table.finish();
}

/// Pairs with a bias on an expert's projections, the router and the LM head.
fn biased() -> (serde_json::Value, Vec<Tensor>) {
    let experts = "model.layers.0.mlp.experts";
    let mut tensors = Vec::new();
    let mut add = |module: &str, out: usize, inn: usize, tag: usize| {
        tensors.extend(pair(module, &values(R, inn, tag), &values(out, R, tag + 1)));
        let name = format!("base_model.model.{module}.lora_B.bias");
        let bytes = DType::F32.encode(&values(out, 1, tag + 2).2);
        tensors.push(Tensor { name, dtype: "F32".to_owned(), shape: vec![out], bytes });
    };
    for e in 0..E {
        add(&format!("{experts}.{e}.up_proj"), F, D, 10 * e);
        add(&format!("{experts}.{e}.down_proj"), D, F, 10 * e + 5);
    }
    add("model.layers.0.mlp.gate", E, D, 200);
    add("lm_head", 10, D, 210);
    (json!({"peft_type": "LORA", "r": R, "lora_alpha": 6, "lora_bias": true}), tensors)
}

#[test]
fn a_bias_follows_its_outputs_and_that_of_down_is_added_once() {
    let (config, tensors) = biased();
    let dir =
        folder(&[("adapter_config.json", config.to_string().into()), ("adapter_model.safetensors", encode(&tensors))]);
    let model = model(Family::Qwen3Moe);
    let whole = Adapter::open(dir.path(), &model).unwrap();
    let bias = |f: &Factor| f.bias.as_ref().map(|m| decoded(m));
    let mut table = Table::default();
    for f in &whole.factors {
        let tag = match f.site {
            Site::ExpertUp => 10 * f.expert + 2,
            Site::ExpertDown => 10 * f.expert + 7,
            Site::Router => 202,
            _ => 212,
        };
        table.holds("whole", bias(f) == Some(values(f.b.rows, 1, tag)), f.place());
    }
    table.holds("whole", whole.factors.len() == 2 * E + 2, whole.factors.len());
    for (world, rule) in [[2, 1], [4, 2], [3, 3], [15, 1]].into_iter().flat_map(|w| rules(w[1]).map(|rule| (w, rule))) {
        let [tp, ep] = world;
        for group in 0..ep {
            let mut ups: HashMap<usize, Vec<f32>> = HashMap::new();
            let mut downs: HashMap<usize, usize> = HashMap::new();
            for rank in group * (tp / ep)..(group + 1) * (tp / ep) {
                let share = share(&model, &rule, world, rank);
                let part = Adapter::open_for(dir.path(), &model, &share).unwrap();
                let held = held_bytes(&part);
                table.holds(&format!("{world:?} {rank}"), part.bytes_read == held, (part.bytes_read, held));
                for f in &part.factors {
                    match (f.site, bias(f)) {
                        (Site::ExpertUp, Some(b)) => ups.entry(f.expert).or_default().extend(b.2),
                        (Site::ExpertDown, Some(b)) => {
                            *downs.entry(f.expert).or_default() += 1;
                            table.holds("down", b == values(D, 1, 10 * f.expert + 7), f.place());
                        }
                        (Site::ExpertDown, None) => _ = downs.entry(f.expert).or_default(),
                        (_, b) => table.holds("others", b.is_some(), f.place()),
                    }
                }
            }
            let right = ups.iter().all(|(e, b)| *b == values(F, 1, 10 * e + 2).2) && downs.values().all(|n| *n == 1);
            table.holds(&format!("{world:?}, {rule:?}, group {group}"), right && ups.len() == downs.len(), &downs);
        }
    }
    table.finish();
}

#[test]
fn ranks_agree_on_what_they_refuse() {
    let mut table = Table::default();
    let spoiled = |layout: &Layout, spoil: &dyn Fn(&mut Vec<Tensor>)| {
        let mut tensors = layout.tensors.clone();
        spoil(&mut tensors);
        folder(&[
            ("adapter_config.json", layout.config.to_string().into()),
            ("adapter_model.safetensors", encode(&tensors)),
        ])
    };
    let layout = layouts().remove(0);
    let share = share(&layout.model, &PlacementRule::Linear, [4, 4], 0);
    // Expert 6 belongs to the last rank.
    let name = "base_model.model.model.layers.0.mlp.experts.6.up_proj.lora_A.weight";
    let wrong = spoiled(&layout, &|tensors| {
        let t = tensors.iter_mut().find(|t| t.name == name).unwrap();
        t.shape = vec![D, R];
    });
    let twice = spoiled(&layout, &|tensors| {
        let part = |side: &str, shape: [usize; 3]| {
            Tensor::zeros(
                &format!("base_model.model.model.layers.0.mlp.experts.up_proj.lora_{side}.weight"),
                "F32",
                &shape,
                4,
            )
        };
        tensors.extend([part("A", [E, R, D]), part("B", [E, F, R])]);
    });
    let open = |dir: &Path, model: &ModelConfig, share: &RankShare| Adapter::open_for(dir, model, share);
    let parts = ["adapter_model.safetensors", "experts.6.up_proj", "[3, 24]"];
    table.fails("another's tensor", open(wrong.path(), &layout.model, &share), ErrorKind::Adapter, &parts);
    let parts = ["adapter_model.safetensors", "ExpertUp", "both fused"];
    table.fails("twice", open(twice.path(), &layout.model, &share), ErrorKind::Adapter, &parts);
    let mut wider = layout.model.clone();
    wider.moe.expert_width = F + 1;
    let other = RankShare::new(&wider, &PlacementRule::Linear, Topology::default()).unwrap();
    let parts = ["expected a share of 7 experts of width 13", "width 14"];
    table.fails("another model", open(wrong.path(), &layout.model, &other), ErrorKind::Config, &parts);
    let heads = HeadShare::whole(Heads { heads: 4, ..Heads::of(&layout.model) });
    let other = RankShare { heads, ..share };
    let parts = ["expected a share of 2 heads of 8, 1 for keys and values", "got one of 4 heads"];
    table.fails("other heads", open(wrong.path(), &layout.model, &other), ErrorKind::Config, &parts);
    table.finish();
}

/// Pairs with a bias on every projection of attention in layer 0.
fn biased_attention(model: &ModelConfig) -> (serde_json::Value, Vec<Tensor>) {
    let (q, kv) = (model.heads * model.head_dim, model.kv_heads * model.head_dim);
    let mut tensors = Vec::new();
    for (i, (name, out, inn)) in [("q", q, D), ("k", kv, D), ("v", kv, D), ("o", D, q)].into_iter().enumerate() {
        let module = format!("model.layers.0.self_attn.{name}_proj");
        tensors.extend(pair(&module, &values(R, inn, 10 * i), &values(out, R, 10 * i + 1)));
        let name = format!("base_model.model.{module}.lora_B.bias");
        let bytes = DType::F32.encode(&values(out, 1, 10 * i + 2).2);
        tensors.push(Tensor { name, dtype: "F32".to_owned(), shape: vec![out], bytes });
    }
    (json!({"peft_type": "LORA", "r": R, "lora_alpha": 6, "lora_bias": true}), tensors)
}

/// Rows `range` of a matrix.
fn rows_of(m: &Values, range: &std::ops::Range<usize>) -> Values {
    (range.len(), m.1, m.2[range.start * m.1..range.end * m.1].to_vec())
}

/// Columns `range` of a matrix.
fn columns_of(m: &Values, range: &std::ops::Range<usize>) -> Values {
    (m.0, range.len(), (0..m.0).flat_map(|r| m.2[r * m.1..][range.clone()].to_vec()).collect())
}

#[test]
fn attention_is_cut_by_heads_and_the_bias_of_its_output_is_added_once() {
    let mut table = Table::default();
    for (heads, kv_heads, tp) in
        [(8, 2, 2), (8, 2, 4), (8, 2, 8), (4, 4, 2), (4, 4, 3), (12, 6, 4), (12, 4, 12), (2, 1, 16)]
    {
        let mut model = model(Family::Qwen3Moe);
        (model.heads, model.kv_heads) = (heads, kv_heads);
        let (config, tensors) = biased_attention(&model);
        for torch in [false, true] {
            let weights = if torch { torch_save(&tensors) } else { encode(&tensors) };
            let file = if torch { "adapter_model.bin" } else { "adapter_model.safetensors" };
            let dir = folder(&[("adapter_config.json", config.to_string().into()), (file, weights)]);
            let whole = Adapter::open(dir.path(), &model).unwrap();
            let splits = [(8, 2), (4, 4), (12, 4)].contains(&(heads, kv_heads)) && tp != 3;
            let mut biased = 0;
            for rank in 0..tp {
                let case = format!("{heads} heads, {kv_heads} kv, tp {tp}, rank {rank}, torch {torch}");
                let n = if splits { tp } else { 1 };
                let (place, each) = (if splits { rank } else { 0 }, heads / n);
                let q = place * each * 8..(place + 1) * each * 8;
                // The first and last key head that the queries need.
                let of = |head: usize| head * kv_heads / heads;
                let kv = of(place * each) * 8..(of((place + 1) * each - 1) + 1) * 8;
                let part = Adapter::open_for(dir.path(), &model, &share(&model, &PlacementRule::Linear, [tp, 1], rank));
                let part = part.unwrap();
                let held = held_bytes(&part);
                table.holds(&case, part.bytes_read == held, (part.bytes_read, held));
                table.holds(&case, part.factors.len() == 4, part.factors.len());
                for (f, all) in part.factors.iter().zip(&whole.factors) {
                    let (a, b, bias) = (decoded(&f.a), decoded(&f.b), f.bias.as_ref().map(|m| decoded(m)));
                    let (all_a, all_b) = (decoded(&all.a), decoded(&all.b));
                    let all_bias = decoded(all.bias.as_ref().unwrap());
                    let right = if f.site == Site::O {
                        biased += usize::from(bias.is_some());
                        let first = bias == (q.start == 0).then_some(all_bias);
                        first && (a, b) == (columns_of(&all_a, &q), all_b)
                    } else {
                        let rows = if f.site == Site::Q { &q } else { &kv };
                        bias == Some(rows_of(&all_bias, rows)) && (a, b) == (all_a, rows_of(&all_b, rows))
                    };
                    table.holds(&case, right, f.site);
                }
            }
            let want = if splits { 1 } else { tp };
            table.holds(&format!("{heads} heads, {kv_heads} kv, tp {tp}"), biased == want, biased);
        }
    }
    table.finish();
}
