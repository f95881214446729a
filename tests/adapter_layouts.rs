//! Adapters of other tools: the same change in another layout decodes to the same factors.

mod files;

use files::{Table, Tensor, load_adapter, open_adapter, patched, tiny};
use serde_json::{Value, json};
use wgmoe::ErrorKind;
use wgmoe::adapter::{Adapter, Factor, Site};

const P: &str = "base_model.model.model.layers";
/// Experts, rank, hidden width and expert width of the adapter `experts3d`.
const E: usize = 8;
const R: usize = 4;
const D: usize = 64;
const F: usize = 40;

/// A copy of `t` under another name, with element (i, j, k) of `shape` taken from `source(i, j, k)`.
fn moved(t: &Tensor, name: String, shape: [usize; 3], source: impl Fn(usize, usize, usize) -> usize) -> Tensor {
    let size = t.bytes.len() / t.shape.iter().product::<usize>();
    let mut bytes = Vec::new();
    for i in 0..shape[0] {
        for j in 0..shape[1] {
            for k in 0..shape[2] {
                let at = source(i, j, k) * size;
                bytes.extend_from_slice(&t.bytes[at..at + size]);
            }
        }
    }
    Tensor { name, dtype: t.dtype.clone(), shape: shape.to_vec(), bytes }
}

/// A `[R·E, X]` as `[E, R, X]`, or B `[Y, R·E]`, rank-major, rows `first..first + n`, as `[E, n, R]`.
fn pack(t: &Tensor, name: String, rows: Option<(usize, usize)>) -> Tensor {
    match rows {
        None => {
            let x = t.shape[1];
            moved(t, name, [E, R, x], |e, r, c| (e * R + r) * x + c)
        }
        Some((first, n)) => moved(t, name, [E, n, R], |e, y, r| (first + y) * R * E + r * E + e),
    }
}

/// The fused tensors of `experts3d`, each replaced by what `replace(module, is gate_up, is A, tensor)` gives.
fn replaced(replace: impl Fn(&str, bool, bool, &Tensor) -> Vec<Tensor>) -> (Value, Vec<Tensor>) {
    let (config, tensors) = load_adapter("experts3d");
    let replaced = tensors.iter().flat_map(|t| match t.name.split_once(".mlp.experts.") {
        Some((layer, rest)) => {
            replace(&format!("{layer}.mlp.experts"), rest.starts_with("base_layer"), rest.contains("lora_A"), t)
        }
        None => vec![t.clone()],
    });
    (config, replaced.collect())
}

fn want() -> Adapter {
    let (config, tensors) = load_adapter("experts3d");
    open_adapter(&config, &tensors, &tiny()).unwrap()
}

fn same(got: &Adapter, want: &Adapter) -> bool {
    let key = |f: &Factor| (f.place(), f.rank, f.scale.to_bits());
    got.factors.len() == want.factors.len()
        && got.factors.iter().zip(&want.factors).all(|(g, w)| key(g) == key(w) && g.a == w.a && g.b == w.b)
}

#[test]
fn packed_and_stacked_experts_are_those_of_fused_parameters() {
    let side = |a: bool| if a { "lora_A" } else { "lora_B" };
    let whole = |gate_up: bool| if gate_up { 2 * F } else { D };
    let together = replaced(|module, gate_up, a, t| {
        let name = if gate_up { "gate_up_proj" } else { "down_proj" };
        let rows = (!a).then_some((0, whole(gate_up)));
        vec![pack(t, format!("{module}.{name}.{}.weight", side(a)), rows)]
    });
    let apart = |names: [&'static str; 3]| {
        replaced(move |module, gate_up, a, t| {
            let parts: Vec<_> = if gate_up { vec![(names[0], 0, F), (names[1], F, F)] } else { vec![(names[2], 0, D)] };
            let part =
                |(n, first, rows)| pack(t, format!("{module}.{n}.{}.weight", side(a)), (!a).then_some((first, rows)));
            parts.into_iter().map(part).collect()
        })
    };
    // A [E, R, X] and B [Y, R, E]: the elements stay where they are.
    let stacked = replaced(|_, _, a, t| {
        let mut t = t.clone();
        t.shape = if a { vec![E, R, t.shape[1]] } else { vec![t.shape[0], R, E] };
        vec![t]
    });
    let mut table = Table::default();
    let want = want();
    for (case, (config, tensors)) in [
        ("gate_up", together),
        ("gate, up, down", apart(["gate_proj", "up_proj", "down_proj"])),
        ("w1, w3, w2", apart(["w1", "w3", "w2"])),
        ("stacked", stacked),
    ] {
        match open_adapter(&config, &tensors, &tiny()) {
            Ok(got) => table.holds(case, same(&got, &want), "differs"),
            Err(e) => table.holds(case, false, e),
        }
    }
    table.finish();
}

/// Zeros for one packed projection of layer 0.
fn packed(name: &str, a: &[usize], b: &[usize]) -> Vec<Tensor> {
    let tensor = |side, shape| Tensor::zeros(&format!("{P}.0.mlp.experts.{name}.{side}.weight"), "BF16", shape, 2);
    vec![tensor("lora_A", a), tensor("lora_B", b)]
}

#[test]
fn what_all_experts_share_is_kept_once() {
    let (config, _) = load_adapter("experts3d");
    let mut tensors = packed("gate_up_proj", &[1, R, D], &[E, 2 * F, R]);
    tensors.extend(packed("down_proj", &[E, R, F], &[1, D, R]));
    let adapter = open_adapter(&config, &tensors, &tiny()).unwrap();
    let of = |site| adapter.factors.iter().filter(move |f| f.site == site).collect::<Vec<_>>();
    let (gate, up, down) = (of(Site::ExpertGate), of(Site::ExpertUp), of(Site::ExpertDown));
    assert_eq!([gate.len(), up.len(), down.len()], [E; 3]);
    let one = |f: &&Factor, g: &Factor| std::sync::Arc::ptr_eq(&f.a, &g.a);
    assert!(gate.iter().chain(&up).all(|f| one(f, gate[0])));
    assert!(down.iter().all(|f| std::sync::Arc::ptr_eq(&f.b, &down[0].b)) && !one(&down[1], down[0]));
    let n_bytes: usize = tensors.iter().map(|t| t.bytes.len()).sum();
    assert_eq!(adapter.bytes_read, n_bytes as u64);
}

#[test]
fn packed_experts_that_do_not_fit_are_refused() {
    let (config, _) = load_adapter("experts3d");
    let mut table = Table::default();
    let cases = [
        ("experts", packed("down_proj", &[E, R, F], &[E - 1, D, R]), "[8, 64, 4]"),
        ("rank", packed("down_proj", &[E, R + 1, F], &[E, D, R + 1]), "[8, 4, 40]"),
        ("width", packed("w1", &[E, R, F], &[E, F, R]), "[8, 4, 64]"),
        ("flat", packed("down_proj", &[R * E, F], &[D, R * E]), "[8, 4, 40]"),
        ("nothing", packed("down_proj", &[], &[]), "[8, 4, 40]"),
        ("other module", packed("w4", &[E, R, F], &[E, D, R]), "no module"),
        ("nested", packed("down_proj.base_layer", &[E, R, F], &[E, D, R]), "no module"),
    ];
    for (case, tensors, part) in cases {
        table.fails(case, open_adapter(&config, &tensors, &tiny()), ErrorKind::Adapter, &["layers.0.mlp", part]);
    }
    let twice = [packed("gate_up_proj", &[1, R, D], &[1, 2 * F, R]), packed("w1", &[1, R, D], &[1, F, R])].concat();
    table.fails("twice", open_adapter(&config, &twice, &tiny()), ErrorKind::Adapter, &["ExpertGate"]);
    let names = [packed("w1", &[1, R, D], &[1, F, R]), packed("gate_proj", &[1, R, D], &[1, F, R])].concat();
    table.fails("two names", open_adapter(&config, &names, &tiny()), ErrorKind::Adapter, &["means the same"]);
    let mut dense = packed("down_proj", &[E, R, F], &[E, D, R]);
    dense.iter_mut().for_each(|t| t.name = t.name.replace("layers.0", "layers.1"));
    table.fails("dense layer", open_adapter(&config, &dense, &tiny()), ErrorKind::Adapter, &["no experts"]);
    table.finish();
}

#[test]
fn a_text_model_within_another_and_unmatched_settings() {
    let (config, tensors) = load_adapter("experts3d");
    let want = want();
    let mut table = Table::default();
    for prefix in ["base_model.model.model.language_model.", "base_model.model.language_model.model.", "model."] {
        let mut renamed = tensors.clone();
        renamed.iter_mut().for_each(|t| t.name = t.name.replacen("base_model.model.model.", prefix, 1));
        match open_adapter(&config, &renamed, &tiny()) {
            Ok(got) => table.holds(prefix, same(&got, &want), "differs"),
            Err(e) => table.holds(prefix, false, e),
        }
    }
    let changes = [
        json!({"layers_to_transform": [0, 2], "layers_pattern": "layers"}),
        json!({"layers_to_transform": 1, "exclude_modules": ["x"]}),
        json!({"target_modules": ["q_proj", "nothing"], "rank_pattern": {"nothing": 3}}),
    ];
    for changes in changes {
        match open_adapter(&patched(config.clone(), &changes), &tensors, &tiny()) {
            Ok(got) => table.holds(&changes.to_string(), same(&got, &want), "differs"),
            Err(e) => table.holds(&changes.to_string(), false, e),
        }
    }
    table.finish();
}
