//! Adapter folders: what PEFT saved decodes to what PEFT computed.

mod files;

use files::{TINY, Table, data, json_file, load_adapter, open_adapter, patched, read, tiny};
use serde_json::json;
use wgmoe::ErrorKind;
use wgmoe::adapter::{Adapter, Factor, Site};
use wgmoe::checkpoint::{ModelConfig, SafetensorsFile};
use wgmoe::family::Family;

/// Largest difference between a decoded weight change and PEFT's own, relative to its largest element.
const DELTA_TOLERANCE: f64 = 1e-6;

/// `scale · B · A`, `[out, in]`.
fn delta(factor: &Factor) -> Vec<f64> {
    let (a, b) = (factor.a.dtype.decode(&factor.a.bytes), factor.b.dtype.decode(&factor.b.bytes));
    let (out, inn, rank) = (factor.b.rows, factor.a.cols, factor.rank);
    assert_eq!((factor.a.rows, factor.b.cols), (rank, rank));
    let mut delta = vec![0.0; out * inn];
    for o in 0..out {
        for i in 0..inn {
            for r in 0..rank {
                delta[o * inn + i] += f64::from(factor.scale) * f64::from(b[o * rank + r]) * f64::from(a[r * inn + i]);
            }
        }
    }
    delta
}

/// The change of a fused parameter, `[E, out, in]`, put together from the factors of its experts.
fn fused_delta(adapter: &Adapter, layer: usize, sites: &[Site], experts: usize) -> Vec<f64> {
    let mut all = Vec::new();
    for expert in 0..experts {
        for site in sites {
            let factor = adapter.factors.iter().find(|f| f.place() == (layer, *site, expert));
            all.extend(delta(factor.unwrap_or_else(|| panic!("no factor for {layer} {site:?} {expert}"))));
        }
    }
    all
}

/// `[E, 2F, D]` with the rows of gate and up one by one, as GPT-OSS keeps them.
fn in_turns(delta: &[f64], f: usize, d: usize) -> Vec<f64> {
    let row = |expert: usize, row: usize| &delta[(expert * 2 * f + row) * d..][..d];
    let experts = delta.len() / (2 * f * d);
    let rows = (0..experts).flat_map(|e| (0..2 * f).map(move |r| (e, r / 2 + r % 2 * f)));
    rows.flat_map(|(e, r)| row(e, r)).copied().collect()
}

/// Compares every `delta_out_in` of a case with the decoded adapter; returns how many there were.
fn check_deltas(table: &mut Table, case: &str, model: &ModelConfig) -> usize {
    let dir = data("peft").join(case);
    let adapter = Adapter::open(&dir.join("adapter"), model).unwrap_or_else(|e| panic!("{case}: {e}"));
    let expected = SafetensorsFile::open(&dir.join("expected.safetensors")).unwrap();
    let mut n_checked = 0;
    for name in expected.names().filter(|n| n.starts_with("delta_out_in.")) {
        let layer = name.split('.').nth(3).unwrap().parse().unwrap();
        let sites: &[Site] =
            if name.ends_with("gate_up_proj") { &[Site::ExpertGate, Site::ExpertUp] } else { &[Site::ExpertDown] };
        let want = expected.tensor(name).unwrap().to_f32();
        let mut got = fused_delta(&adapter, layer, sites, model.moe.experts);
        if model.family == Family::GptOss && sites.len() == 2 {
            got = in_turns(&got, model.moe.expert_width, model.hidden);
        }
        let worst = got.iter().zip(&want).map(|(g, w)| (g - f64::from(*w)).abs()).fold(0.0, f64::max);
        let size = want.iter().fold(0.0f32, |m, w| m.max(w.abs()));
        let ok = got.len() == want.len() && worst <= DELTA_TOLERANCE * f64::from(size) && size > 0.01;
        table.holds(&format!("{case} {name}"), ok, (worst, size));
        n_checked += 1;
    }
    n_checked
}

/// The model that `meta.json` of a case names.
fn base(case: &str) -> ModelConfig {
    let meta = json_file(&data("peft").join(case).join("meta.json"));
    ModelConfig::open(&data("peft").join(meta["base"].as_str().unwrap())).unwrap()
}

#[test]
fn fused_experts_of_every_peft_version_decode_to_what_it_computed() {
    let mut table = Table::default();
    let cases = [
        ("qwen3_moe__params__peft0181_tf524", 4),
        ("qwen3_moe__params__peft0190_tf524", 4),
        ("qwen3_moe__params__peft0212_tf524", 4),
        ("qwen3_moe__only_down__peft0212_tf524", 2),
        ("qwen3_moe__only_gateup__peft0191_tf524", 2),
        ("qwen3_moe__rankpat_rslora__peft0191_tf524", 4),
        ("qwen3_moe__v4style__peft0191_tf524", 4),
        ("mixtral__params__peft0181_tf524", 4),
        ("mixtral__params__peft0212_tf524", 4),
        ("olmoe_square__params__peft0181_tf524", 4),
        ("olmoe_square__params__peft0212_tf524", 4),
        ("gpt_oss__params__peft0181_tf524", 4),
        ("gpt_oss__params__peft0212_tf524", 4),
    ];
    for (case, n_deltas) in cases {
        let n = check_deltas(&mut table, case, &base(case));
        table.holds(case, n == n_deltas, n);
    }
    table.finish();
}

#[test]
fn square_parameters_need_a_version() {
    let mut table = Table::default();
    for case in [
        "olmoe_square__params__peft0181_tf524",
        "olmoe_square__params__peft0212_tf524",
        "gpt_oss__params__peft0181_tf524",
    ] {
        let dir = data("peft").join(case).join("adapter");
        for version in ["<absent>", "main", "0.19.1.dev0"] {
            let config = patched(json_file(&dir.join("adapter_config.json")), &json!({"peft_version": version}));
            let got = open_adapter(&config, &read(&dir.join("adapter_model.safetensors")), &base(case));
            let parts = ["adapter_model.safetensors", "mlp.experts", "square", "peft_version"];
            table.fails(&format!("{case} {version}"), got, ErrorKind::Adapter, &parts);
        }
    }
    table.finish();
}

#[test]
fn gate_and_up_of_a_fused_parameter_share_a() {
    let model = ModelConfig::open(&data("peft/bases/qwen3_moe-f9628232")).unwrap();
    let adapter = Adapter::open(&data("peft/qwen3_moe__only_gateup__peft0191_tf524/adapter"), &model).unwrap();
    let of = |site| adapter.factors.iter().filter(move |f| f.site == site);
    assert_eq!(adapter.factors.len(), 2 * 6 * 2);
    assert!(of(Site::ExpertGate).zip(of(Site::ExpertUp)).all(|(g, u)| std::sync::Arc::ptr_eq(&g.a, &u.a)));
}

#[test]
fn every_saved_adapter_of_the_tiny_model_opens() {
    // Factors: (layer, expert) pairs times projections; two layers have 8 experts, one is dense.
    let cases = [
        ("all_linear", 2 * 8 * 3 + 2 + 3 + 3 * 4),
        ("attn_only", 3 * 4),
        ("down_only", 2 * 8 + 3),
        ("experts2d", 2 * 8 * 3 + 3 + 3 * 4),
        ("experts2d_down_only", 2 * 8 + 1),
        ("experts2d_rslora", 2 * 8 * 3 + 3),
        ("experts2d_some", 4 * 3),
        ("experts3d", 2 * 8 * 3 + 3),
        ("gate_up_only", 2 * 8 * 2 + 3),
        ("layer_subset", 8 * 3 + 1),
    ];
    let mut table = Table::default();
    for (case, n_factors) in cases {
        let dir = data(TINY).join("adapters").join(case);
        let adapter = Adapter::open(&dir, &tiny()).unwrap_or_else(|e| panic!("{case}: {e}"));
        table.holds(case, adapter.factors.len() == n_factors, adapter.factors.len());
        table.holds(case, adapter.factors.is_sorted_by_key(Factor::place), "not sorted");
        let n_bytes: usize = read(&dir.join("adapter_model.safetensors")).iter().map(|t| t.bytes.len()).sum();
        table.holds(case, adapter.bytes_read == n_bytes as u64, (adapter.bytes_read, n_bytes));
    }
    table.finish();
}

#[test]
fn patterns_set_rank_and_scale() {
    let rslora = Adapter::open(&data(TINY).join("adapters/experts2d_rslora"), &tiny()).unwrap();
    let model = ModelConfig::open(&data("peft/bases/qwen3_moe-0f21722b")).unwrap();
    let partial = Adapter::open(&data("peft/qwen3_moe__partial_experts__peft0181_tf457/adapter"), &model).unwrap();
    let mut table = Table::default();
    for f in &rslora.factors {
        let down = matches!(f.site, Site::Down | Site::ExpertDown);
        let (rank, scale) = if down { (2, 5.0 / 2.0f64.sqrt()) } else { (8, 8.0 / 8.0f64.sqrt()) };
        table.holds("rslora", f.rank == rank && f.scale == scale as f32, (f.place(), f.rank, f.scale));
    }
    for f in &partial.factors {
        let (expert, rank) = if f.site == Site::ExpertDown { (4, 5) } else { (1, 3) };
        let scale = (9.0 / (rank as f64).sqrt()) as f32;
        table.holds("partial", (f.expert, f.rank, f.scale) == (expert, rank, scale), (f.place(), f.rank, f.scale));
    }
    table.finish();
    assert_eq!(partial.factors.len(), 2 * 3);
}

#[test]
fn modules_of_their_own_keep_their_bytes() {
    let model = ModelConfig::open(&data("peft/bases/qwen3_moe-0f21722b")).unwrap();
    let dir = data("peft/qwen3_moe__perexpert__peft0181_tf457/adapter");
    let adapter = Adapter::open(&dir, &model).unwrap();
    let tensors = read(&dir.join("adapter_model.safetensors"));
    let name = "base_model.model.model.layers.1.mlp.experts.4.up_proj.lora_B.weight";
    let b = &tensors.iter().find(|t| t.name == name).unwrap().bytes;
    let factor = adapter.factors.iter().find(|f| f.place() == (1, Site::ExpertUp, 4)).unwrap();
    assert_eq!((&factor.b.bytes, factor.scale), (b, 3.0));

    let router = Adapter::open(
        &data("peft/qwen3_moe__router__peft0212_tf524/adapter"),
        &base("qwen3_moe__router__peft0212_tf524"),
    )
    .unwrap();
    let places: Vec<_> = router.factors.iter().map(Factor::place).collect();
    assert_eq!(places, [(0, Site::Router, 0), (1, Site::Router, 0)]);
}

#[test]
fn marked_layouts_of_b_give_the_same_factors() {
    let (config, tensors) = load_adapter("experts3d");
    let want = open_adapter(&config, &tensors, &tiny()).unwrap();
    let mut grouped = tensors;
    for t in grouped.iter_mut().filter(|t| t.name.contains("experts") && t.name.contains("lora_B")) {
        // Column j·E + e becomes e·R + j.
        let (n, size) = (t.shape[1], t.bytes.len() / (t.shape[0] * t.shape[1]));
        let (experts, rank) = (8, n / 8);
        let old = t.bytes.clone();
        for (row, e, j) in
            (0..t.shape[0]).flat_map(|r| (0..experts).flat_map(move |e| (0..rank).map(move |j| (r, e, j))))
        {
            let (from, to) = ((row * n + j * experts + e) * size, (row * n + e * rank + j) * size);
            t.bytes[to..to + size].copy_from_slice(&old[from..from + size]);
        }
    }
    for changes in [
        json!({"lora_B_layout": "grouped_by_expert"}),
        json!({"auto_mapping": {"unsloth_fixed": true, "lora_B_layout": "grouped_by_expert"}}),
    ] {
        let got = open_adapter(&patched(config.clone(), &changes), &grouped, &tiny()).unwrap();
        assert!(got.factors.iter().zip(&want.factors).all(|(g, w)| g.b == w.b && g.a == w.a));
    }
}
