//! `wgmoe inspect` from outside: figures of each rank, adapters, problems, the picture.
#![cfg(feature = "cli")]

mod files;

use std::path::Path;
use std::process::Command;

use files::layouts::{pair, values};
use files::{encode, folder};
use serde_json::Value;
use wgmoe::adapter::Adapter;
use wgmoe::placement::{PlacementRule, RankShare, Topology};
use wgmoe::{ErrorKind, ModelConfig};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

fn inspect(args: &[&str]) -> (Option<i32>, String, String) {
    let limit = ["--binding-limit", "128MiB"];
    let limit: &[&str] = if args.contains(&"--binding-limit") { &[] } else { &limit };
    let output =
        Command::new(env!("CARGO_BIN_EXE_wgmoe")).arg("inspect").args(args).args(limit).output().expect("it starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[track_caller]
fn json(args: &[&str]) -> Value {
    let (code, out, err) = inspect(&[args, &["--format", "json"]].concat());
    assert_eq!(code, Some(0), "{err}");
    serde_json::from_str(&out).expect(&out)
}

fn tiny() -> String {
    format!("{ROOT}/tests/data/tiny/qwen3_moe")
}

fn demo() -> String {
    format!("{ROOT}/examples/demo/base")
}

fn sum(report: &Value, role: &str, key: &str) -> u64 {
    report["ranks"].as_array().unwrap().iter().map(|rank| rank["roles"][role][key].as_u64().unwrap()).sum()
}

#[test]
fn one_rank_reads_and_keeps_the_whole_file() {
    for dir in [tiny(), demo()] {
        let report = json(&[&dir]);
        let rank = &report["ranks"][0];
        assert_eq!(rank["read_bytes"], report["model"]["bytes"]);
        assert_eq!(rank["skipped_bytes"], 0);
        assert_eq!(report["model"]["family"], "qwen3_moe");
    }
    let report = json(&[&tiny()]);
    let experts = 8 * 3 * 40 * 64 * 2 * 2u64;
    assert_eq!(report["ranks"][0]["roles"]["expert_payload"]["read_bytes"], experts);
    assert_eq!(report["ranks"][0]["roles"]["expert_payload"]["resident_bytes"], experts);
    assert_eq!((&report["model"]["layers"], &report["model"]["moe_layers"]), (&3.into(), &2.into()));
}

#[test]
fn ranks_share_the_experts_out_and_read_the_rest_each() {
    for (dir, placement) in [(tiny(), "linear"), (demo(), "round-robin")] {
        let whole = json(&[&dir]);
        for (tp, ep) in [("2", "2"), ("3", "1"), ("4", "2"), ("6", "3"), ("5", "5")] {
            let report = json(&[&dir, "--tp", tp, "--ep", ep, "--placement", placement, "--all-ranks"]);
            let ranks: u64 = tp.parse().unwrap();
            assert_eq!(report["ranks"].as_array().unwrap().len() as u64, ranks);
            let experts = whole["ranks"][0]["roles"]["expert_payload"]["read_bytes"].as_u64().unwrap();
            assert_eq!(sum(&report, "expert_payload", "read_bytes"), experts, "tp {tp} ep {ep}");
            let attention = whole["ranks"][0]["roles"]["attention"]["read_bytes"].as_u64().unwrap();
            // Four heads, two of keys and values: two ranks share out all, four have each key head twice, others have all.
            let times = match tp {
                "2" => attention,
                "4" => attention / 3 * 4,
                _ => ranks * attention,
            };
            assert_eq!(sum(&report, "attention", "read_bytes"), times, "tp {tp} ep {ep}");
            assert_eq!(sum(&report, "router", "read_bytes"), ranks * sum(&whole, "router", "read_bytes"));
            for rank in report["ranks"].as_array().unwrap() {
                let all = rank["read_bytes"].as_u64().unwrap() + rank["skipped_bytes"].as_u64().unwrap();
                assert_eq!(all, report["model"]["bytes"].as_u64().unwrap());
            }
        }
    }
}

#[test]
fn a_placement_file_may_give_copies() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "[[0],[0],[0],[0,1],[1],[1],[1],[1]]").unwrap();
    let report = json(&[&tiny(), "--ep", "2", "--placement", file.path().to_str().unwrap(), "--all-ranks"]);
    assert_eq!(report["ranks"][0]["experts"], serde_json::json!([0, 1, 2, 3]));
    assert_eq!(report["ranks"][1]["experts"], serde_json::json!([3, 4, 5, 6, 7]));
}

#[test]
fn adapters_are_listed_with_their_sites_and_a_wrong_one_is_a_problem() {
    let good = format!("{}/adapters/experts3d", tiny());
    let report = json(&[&tiny(), "--lora", &good, "--ep", "2", "--all-ranks"]);
    let adapter = &report["adapters"][0];
    assert_eq!(adapter["sites"]["expert gate"], 16);
    assert!(adapter["bytes"].as_u64().unwrap() > 0 && adapter["error"].is_null());
    assert!(adapter["bytes_by_rank"][0].as_u64().unwrap() < adapter["bytes"].as_u64().unwrap());
    let (code, out, err) = inspect(&[&demo(), "--lora", &good]);
    assert_eq!(code, Some(1));
    assert!(out.contains("experts3d") && err.contains("experts3d"), "{out}\n{err}");
}

#[test]
fn heads_are_shared_out_under_tp_alone() {
    let attention = |args: &[&str]| {
        let report = json(&[&[tiny().as_str(), "--all-ranks"], args].concat());
        let ranks = report["ranks"].as_array().unwrap().iter();
        let heads =
            |rank: &serde_json::Value| [&rank["heads"], &rank["kv_heads"]].map(|r| r["start"].as_u64().unwrap());
        let held = ranks.map(|rank| (heads(rank), rank["roles"]["attention"].clone()));
        (report["attention_tp"].as_u64().unwrap(), held.collect::<Vec<_>>())
    };
    let whole = 3 * 2 * 64 * 24 * 2 * 6;
    let (degree, ranks) = attention(&["--tp", "4", "--ep", "2"]);
    assert_eq!((degree, ranks.len()), (4, 4));
    for (rank, (first, role)) in ranks.iter().enumerate() {
        // One query head of four, beside one key head of two.
        assert_eq!(*first, [rank as u64, rank as u64 / 2]);
        assert_eq!([&role["read_bytes"], &role["resident_bytes"]], [whole / 3; 2], "rank {rank}");
        assert_eq!(role["skipped_bytes"], whole - whole / 3);
    }
    for args in [&["--ep", "4"][..], &["--tp", "3"]] {
        for (first, role) in attention(args).1 {
            assert_eq!((first, &role["read_bytes"]), ([0, 0], &serde_json::json!(whole)), "{args:?}");
        }
    }
}

#[test]
fn a_rank_holds_of_an_adapter_what_it_reads_of_it() {
    let dir = format!("{}/adapters/experts3d", tiny());
    let config = ModelConfig::open(Path::new(&tiny())).unwrap();
    for (tp, ep) in [(2, 1), (4, 2), (3, 3)] {
        let (tp_text, ep_text) = (tp.to_string(), ep.to_string());
        let report = json(&[&tiny(), "--lora", &dir, "--tp", &tp_text, "--ep", &ep_text, "--all-ranks"]);
        for rank in 0..tp {
            let topology = Topology::new(Some(tp), Some(ep), rank).unwrap();
            let share = RankShare::new(&config, &PlacementRule::Linear, topology).unwrap();
            let want = Adapter::open_for(Path::new(&dir), &config, &share).unwrap().bytes_read;
            assert_eq!(report["adapters"][0]["bytes_by_rank"][rank], want, "tp {tp} ep {ep} rank {rank}");
        }
    }
}

#[test]
fn families_without_a_decoder_are_shown_with_their_adapters() {
    let tensors = [
        pair("lm_head", &values(2, 64, 1), &values(256, 2, 2)),
        pair("model.layers.0.mlp.shared_expert.up_proj", &values(2, 64, 3), &values(56, 2, 4)),
        pair("model.layers.0.mlp.shared_expert_gate", &values(2, 64, 5), &values(1, 2, 6)),
    ];
    let config = r#"{"peft_type": "LORA", "r": 2}"#;
    let adapter =
        folder(&[("adapter_config.json", config.into()), ("adapter_model.safetensors", encode(&tensors.concat()))]);
    let adapter = adapter.path().to_str().unwrap();
    let report = json(&[&format!("{ROOT}/tests/data/tiny/qwen2_moe"), "--lora", adapter]);
    assert_eq!(report["adapters"][0]["sites"], serde_json::json!({"lm head": 1, "shared up": 1, "shared router": 1}));
    for family in ["mixtral", "olmoe", "qwen2_moe"] {
        let report = json(&[&format!("{ROOT}/tests/data/tiny/{family}"), "--tp", "4", "--ep", "2", "--all-ranks"]);
        assert_eq!(report["model"]["family"], family);
        assert_eq!(report["ranks"][0]["skipped_bytes"].as_u64().map(|n| n > 0), Some(true));
        // Nothing is padded at these sizes but the columns of an expert that a rank shares, and vectors become f32.
        let whole = json(&[&format!("{ROOT}/tests/data/tiny/{family}")]);
        for role in ["expert_payload", "router", "embedding", "shared_expert"] {
            let role = &whole["ranks"][0]["roles"][role];
            assert_eq!(role["resident_bytes"], role["read_bytes"], "{family}");
        }
    }
    let error = wgmoe::Checkpoint::open(Path::new(&format!("{ROOT}/tests/data/tiny/gpt_oss"))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

#[test]
fn buffers_split_under_the_limit_and_what_does_not_fit_is_a_problem() {
    let report = json(&[&tiny(), "--binding-limit", "16KiB"]);
    let rank = &report["ranks"][0];
    assert!(rank["bindings"].as_u64() > rank["buffers"].as_u64());
    assert_eq!(rank["split"][0]["buffer"], "embedding");
    let (code, _, err) = inspect(&[&tiny(), "--binding-limit", "100"]);
    assert!(code == Some(1) && err.contains("binding limit of 100"), "{err}");
    let (code, out, err) = inspect(&[&tiny(), "--memory", "100KiB"]);
    assert!(code == Some(1) && out.contains("NO") && err.contains("100.00 KiB"), "{out}{err}");
    assert_eq!(json(&[&tiny(), "--memory", "1GiB"])["ranks"][0]["fits"], true);
}

#[test]
fn mistakes_exit_with_2_and_name_the_option() {
    let dir = tiny();
    let cases: [(&[&str], &str); 6] = [
        (&["--tp", "4", "--ep", "3"], "`ep` to divide the 4 ranks"),
        (&["--ep", "2", "--rank", "2"], "a rank below 2"),
        (&["--ep", "0"], "--ep"),
        (&["--rank", "0", "--all-ranks"], "--all-ranks"),
        (&["--scales", "some"], "--scales"),
        (&["--binding-limit", "5XB"], "KiB"),
    ];
    for (args, word) in cases {
        let (code, out, err) = inspect(&[&[dir.as_str()], args].concat());
        assert!(code == Some(2) && out.is_empty() && err.contains(word), "{args:?}: {code:?} {err}");
    }
    let (code, _, err) = inspect(&[&dir, "--placement", "/nonexistent.json"]);
    assert!(code == Some(1) && err.contains("--placement") && err.contains("/nonexistent.json"), "{err}");
}

#[test]
fn the_table_and_the_picture_show_every_rank() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    let (code, out, err) = inspect(&[&demo(), "--tp", "4", "--ep", "2", "--all-ranks", "--svg", path]);
    assert_eq!(code, Some(0), "{err}");
    let svg = std::fs::read_to_string(path).unwrap();
    for rank in 0..4 {
        let bars = out.lines().filter(|l| l.starts_with(&format!("rank   {rank} █"))).count();
        assert_eq!(bars, 1, "{out}");
        assert!(svg.contains(&format!(">rank {rank}</text>")));
    }
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
    assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
    for word in ["expert weights", "attention", "skipped"] {
        assert!(svg.contains(word) && out.contains(word), "{word}\n{out}");
    }
}
