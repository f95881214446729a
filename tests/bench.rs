//! `wgmoe bench` from outside, at small sizes: its numbers hang together, and what cannot be measured is refused.
#![cfg(feature = "cli")]

use std::process::{Command, Stdio};

use serde_json::Value;
use wgmoe::Tier;
use wgmoe::plan::tuning::{FIELDS, TuningTable};

/// Exit code, stdout and stderr.
fn bench(args: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_wgmoe"));
    let output = command.arg("bench").args(args).stdin(Stdio::null()).output().expect("the program starts");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn json(args: &[&str]) -> Value {
    let (code, stdout, stderr) = bench(args);
    assert_eq!(code, Some(0), "{stderr}");
    serde_json::from_str(&stdout).expect(&stdout)
}

fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or_else(|| panic!("{key} in {row}"))
}

#[test]
fn a_layer_is_measured_against_limits_of_the_same_device() {
    let dir = tempfile::tempdir().expect("a folder");
    let svg = dir.path().join("roof.svg");
    let report = json(&[
        "layer",
        "--shape",
        "tiny",
        "--tokens",
        "1,12",
        "--adapters",
        "0,3",
        "--rank",
        "8,16",
        "--loaded",
        "5",
        "--format",
        "json",
        "--svg",
        svg.to_str().expect("a path"),
    ]);
    let rows = report["rows"].as_array().expect("rows");
    let places: Vec<_> = rows.iter().map(|r| (number(r, "tokens"), number(r, "adapters"))).collect();
    assert_eq!(places, [(1.0, 0.0), (1.0, 3.0), (12.0, 0.0), (12.0, 3.0)]);
    for row in rows {
        assert!(number(row, "us") > 0.0 && number(row, "least_us") > 0.0, "{row}");
        // 4 of 16 experts a token, at least; gate, up and down of 128 x 64 in two bytes each.
        let experts = number(row, "experts");
        assert!((4.0..=16.0).contains(&experts) && number(row, "bytes") > experts * 3.0 * 128.0 * 64.0 * 2.0, "{row}");
        assert!(number(row, "tile_rows_a_pair") >= 1.0 && number(row, "off_cpu") < 2e-3, "{row}");
    }
    assert!(number(&rows[1], "macs") > number(&rows[0], "macs"), "adapters multiply, too");
    assert_eq!(rows[3]["ranks"], serde_json::json!([8, 16]));
    let limits = &report["limits"];
    assert!(number(limits, "copy_gb_s") > 0.0 && number(limits, "tflops") > 0.0);
    let drawn = std::fs::read_to_string(&svg).expect("a picture");
    assert!(drawn.starts_with("<svg") && drawn.trim_end().ends_with("</svg>"));
    assert_eq!(drawn.matches("<circle").count(), rows.len() + 2, "a point for each row and two in the legend");
}

#[test]
fn one_expert_and_popular_experts_are_what_tokens_meet() {
    let most = |routing: &str| {
        let args = ["layer", "--shape", "tiny", "--tokens", "64", "--adapters", "0", "--routing", routing];
        let report = json(&[&args[..], &["--format", "json"]].concat());
        number(&report["rows"][0], "most_pairs")
    };
    let [uniform, zipf, one] = ["uniform", "zipf:1.5", "one-expert"].map(most);
    assert_eq!(one, 64.0);
    assert!(uniform < zipf && zipf < one, "{uniform} {zipf}");
}

#[test]
fn a_model_is_measured_on_one_rank_and_on_two() {
    let small = ["--sequences", "2", "--prompt", "3", "--decode", "2", "--prefill", "9", "--runs", "1"];
    for ranks in [&["--ep", "1"][..], &["--ep", "2"], &["--ep", "2", "--exchange", "dispatch"]] {
        let words = ["model", "--shape", "tiny", "--adapters", "0,2", "--format", "json"];
        let report = json(&[&words[..], &small[..], ranks].concat());
        let rows = report["rows"].as_array().expect("rows");
        let whats: Vec<_> = rows.iter().map(|r| (r["what"].as_str(), number(r, "tokens"))).collect();
        let expected = [(Some("decode"), 4.0), (Some("prefill"), 9.0)];
        assert_eq!(whats, [expected, expected].concat());
        let several = number(&report, "ranks") > 1.0;
        for row in rows {
            assert!(number(row, "tokens_s") > 0.0, "{row}");
            assert_eq!(number(row, "exchanges") > 0.0, several, "{row}");
            assert!(number(row, "exchange_ms") <= number(row, "ms"), "{row}");
        }
    }
}

#[test]
fn thresholds_are_measured_and_written_for_the_tier_alone() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("tuning.json");
    let file = path.to_str().expect("a path");
    let report = json(&["tune", "--shape", "tiny", "--adapters", "1", "--write", file, "--format", "json"]);
    let fields = report["fields"].as_array().expect("fields");
    let names: Vec<&str> = fields.iter().filter_map(|row| row["field"].as_str()).collect();
    assert!(names.contains(&"tiles_from") && names.contains(&"tiles_of_8_from"), "{names:?}");
    assert_eq!(names.len() + report["not_measured"].as_array().expect("names").len(), FIELDS.len());
    for row in fields {
        let (present, proposed) = (number(row, "present"), number(row, "proposed"));
        let (us_present, us_proposed) = (number(row, "us_present"), number(row, "us_proposed"));
        assert!(us_present > 0.0 && us_proposed > 0.0, "{row}");
        assert!(if present == proposed { us_proposed == us_present } else { us_proposed < 0.98 * us_present }, "{row}");
        for batch in row["batches"].as_array().expect("batches") {
            let of = |key: &str| batch[key].as_array().expect("a list").clone();
            let (values, ways) = (of("values"), of("ways"));
            assert!(values.iter().any(|value| value.as_f64() == Some(present)), "{batch}");
            assert!(ways.first() != ways.last() && of("us").len() == values.len(), "{batch}");
        }
    }
    let tier: Tier = report["tier"].as_str().expect("a tier").parse().expect("a tier");
    let written = TuningTable::read(&path).expect("a table");
    let built_in = TuningTable::built_in().expect("a table");
    assert_eq!(serde_json::to_value(written.of(tier)).expect("an entry"), report["tuning"]);
    assert_eq!(written.with(tier, built_in.of(tier)), built_in, "all else stays");
    assert_eq!(std::fs::read_dir(dir.path()).expect("a folder").count(), 1, "nothing else is left");

    // The table of a file decides, and a bad one is refused with the names of file and field.
    let decided = |name: &str, value: Value| {
        let mut table = serde_json::to_value(&built_in).expect("a table");
        table[tier.to_string()][name] = value;
        std::fs::write(&path, table.to_string()).expect("a file");
        bench(&["layer", "--shape", "tiny", "--tokens", "8", "--adapters", "0", "--format", "json", "--tuning", file])
    };
    let rows_a_pair = |(code, stdout, stderr): (Option<i32>, String, String)| {
        assert_eq!(code, Some(0), "{stderr}");
        let report: Value = serde_json::from_str(&stdout).expect(&stdout);
        number(&report["rows"][0], "tile_rows_a_pair")
    };
    assert_eq!(rows_a_pair(decided("tiles_from", 12.into())), 1.0, "one by one");
    assert!(rows_a_pair(decided("tiles_from", 0.5.into())) > 1.0, "in tiles");
    let (code, stdout, stderr) = decided("tiles_from", 0.into());
    assert!(code == Some(1) && stdout.is_empty(), "{stderr}");
    for word in ["--tuning", file, "tiles_from", "expected a number from 0.1 to 65535, got 0"] {
        assert!(stderr.contains(word), "no `{word}` in {stderr}");
    }
}

#[test]
fn cuts_are_searched_where_there_are_matrices() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("tuning.json");
    let file = path.to_str().expect("a path");
    let (code, stdout, stderr) = bench(&["tune", "--shape", "tiny", "--cuts", "--tier", "subgroup", "--write", file]);
    assert!(code == Some(1) && stdout.is_empty(), "{stdout} {stderr}");
    assert!(stderr.contains("--cuts: expected a device with cooperative matrices, got the subgroup tier"), "{stderr}");
    assert!(!path.exists(), "nothing is written");
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let cases: [(&[&str], &str); 10] = [
        (&["layer", "--shape", "nonsense"], "expected qwen3-30b-a3b"),
        (&["layer", "--shape", "Cargo.toml"], "--shape `Cargo.toml`: expected qwen3-30b-a3b"),
        (&["layer", "--routing", "zipf:x"], "zipf:S"),
        (&["model", "--shape", "tiny", "--layers", "3"], "--layers 3: expected 1 to 2"),
        (
            &["model", "--shape", "tiny", "--prefill", "32768"],
            "--prefill 32768: expected less than the model's context",
        ),
        (&["model", "--shape", "tiny", "--prompt", "32704"], "--prompt 32704 --decode 64: expected less"),
        (&["model", "--shape", "tiny", "--tp", "2", "--adapters", "1"], "--tp"),
        (&["tune", "--shape", "tiny", "--write", "."], "--write `.`: expected a regular file"),
        (&["tune", "--shape", "tiny", "--tokens", "64"], "--cuts"),
        (&["tune", "--cuts", "--tokens", "64,0"], "expected a whole number from 1 to 32768, or several"),
    ];
    let failures: Vec<_> = cases
        .iter()
        .filter_map(|(args, words)| {
            let (code, stdout, stderr) = bench(args);
            (code != Some(2) || !stdout.is_empty() || !stderr.contains(words)).then(|| format!("{args:?}: {stderr}"))
        })
        .collect();
    assert!(failures.is_empty(), "{failures:#?}");
}
