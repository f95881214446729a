//! The program from outside: what it refuses, in which words, and with which exit code.
#![cfg(feature = "cli")]

#[path = "common/program.rs"]
mod program;

use std::path::{Path, PathBuf};

use program::{DEMO, base, command, file, lora, name, output, refused, spoiled, weights, wgmoe};
use serde_json::json;

#[test]
fn mistakes_in_the_command_line_exit_with_2() {
    let base = base();
    let run = |more: &[&'static str]| [&["run", "--model", base.as_str()], more].concat();
    let cases: Vec<(Vec<&str>, &str)> = vec![
        (vec!["frobnicate"], "frobnicate"),
        (vec!["run", "--prompt", "a"], "--model"),
        (run(&[]), "--message"),
        (run(&["--prompt", "a", "--message", "b"]), "--message"),
        (run(&["--prompt", "a", "--lora", "shout"]), "NAME=DIR"),
        (run(&["--prompt", "a", "--adapter", "shout"]), "adapter `shout` is not loaded"),
        (run(&["--prompt", "a", "--tier", "huge"]), "--tier"),
        (run(&["--prompt", "a", "--max-tokens", "0"]), "max_tokens"),
        (run(&["--prompt", "a", "--temperature", "nan"]), "--temperature"),
        (run(&["--prompt", "a", "--top-p", "1.5"]), "--top-p"),
        (run(&["--prompt", ""]), "no tokens"),
        (run(&["--prompt", "a", "--lora", "x=a", "--lora", "x=b"]), "given twice"),
        (run(&["--prompt", "a", "--adapter-memory", "1 GB"]), "--adapter-memory"),
        (run(&["--prompt", "a", "--tp", "2", "--exchange", "dispatch"]), "give --ep 2 without --tp"),
        (vec!["demo", "--tp", "4", "--ep", "2", "--exchange", "dispatch"], "--exchange dispatch with --tp 4"),
        (vec!["score", "--model", &base, "--requests", "x", "--format", "table"], "--format"),
        (vec!["perplexity", "--model", &base], "--text"),
        (vec!["devices", "--tier", "huge"], "--tier"),
        (vec!["devices", "--tuning", "x.json"], "--tuning"),
    ];
    for (args, word) in &cases {
        refused(args, 2, &[word]);
    }
}

#[test]
fn every_line_is_checked_before_work_starts() {
    let long = format!(r#"{{"ids": [{}]}}"#, vec!["5"; 513].join(","));
    let cases = [
        ("{\"prompt\": ", "line 2"),
        (r#"{"promt": "a"}"#, "promt"),
        (r#"{"max_tokens": 4}"#, "exactly one of `prompt`, `messages` and `ids`"),
        (r#"{"prompt": "a", "ids": [5]}"#, "exactly one"),
        (r#"{"ids": []}"#, "no tokens"),
        (r#"{"ids": [258]}"#, "token id 258"),
        (r#"{"ids": [-1]}"#, "line 2"),
        (r#"{"ids": [5], "adapter": "rot13"}"#, "adapter `rot13` is not loaded"),
        (r#"{"ids": [5], "max_tokens": 0}"#, "max_tokens"),
        (long.as_str(), "context of 512"),
    ];
    for (line, word) in cases {
        let prompts = file(&format!("{{\"prompt\": \"fine\\n\"}}\n{line}\n"));
        let shout = lora("shout");
        let args = ["run", "--model", &base(), "--lora", &shout, "--prompts", name(prompts.path()), "--format", "json"];
        refused(&args, 2, &[name(prompts.path()), "line 2", word]);
    }
    for line in
        [r#"{"text": "a", "top_logprobs": 259}"#, r#"{"adapter": null}"#, r#"{"text": "a", "top_logprobs": -1}"#]
    {
        let requests = file(line);
        refused(&["score", "--model", &base(), "--requests", name(requests.path())], 2, &["line 1"]);
    }
}

#[test]
fn a_prompt_longer_than_the_context_is_a_usage_error() {
    refused(&["run", "--model", &base(), "--prompt", &"a".repeat(600)], 2, &["--prompt", "600", "512"]);
    refused(&["run", "--model", &base(), "--message", &"a".repeat(512)], 2, &["--message", "513"]);
    refused(&["run", "--model", &base(), "--prompt", &"a".repeat(512)], 2, &["no room"]);
}

#[test]
fn broken_model_folders_fail_and_name_what_is_wrong() {
    let run = |dir: &Path, words: &[&str]| refused(&["run", "--model", name(dir), "--prompt", "a"], 1, words);
    run(Path::new("/nonexistent/model"), &["config.json"]);

    let all = weights();
    let missing = spoiled(|_| (), &all);
    std::fs::remove_file(missing.path().join("model.safetensors")).unwrap();
    run(missing.path(), &["safetensors"]);
    run(spoiled(|_| (), &all[..all.len() / 2]).path(), &["model.safetensors"]);
    run(spoiled(|_| (), b"").path(), &["model.safetensors"]);
    run(spoiled(|config| config["moe_intermediate_size"] = json!(96), &all).path(), &["expected", "experts"]);
    run(spoiled(|config| config["num_hidden_layers"] = json!(5), &all).path(), &["layers.4"]);
    run(spoiled(|config| config["model_type"] = json!("quasar"), &all).path(), &["config.json", "quasar"]);
    let broken = spoiled(|_| (), &all);
    std::fs::write(broken.path().join("config.json"), "{").unwrap();
    run(broken.path(), &["config.json"]);
    let broken = spoiled(|_| (), &all);
    std::fs::write(broken.path().join("tokenizer.json"), "[]").unwrap();
    run(broken.path(), &["tokenizer.json"]);
}

#[test]
fn broken_adapters_fail_and_are_named() {
    let run = |dir: &Path, words: &[&str]| {
        let lora = format!("other={}", name(dir));
        refused(&["run", "--model", &base(), "--lora", &lora, "--prompt", "a"], 1, words);
    };
    run(Path::new("/nonexistent/adapter"), &["other", "adapter_config.json"]);

    let from = PathBuf::from(format!("{DEMO}/adapters/shout"));
    let config = std::fs::read(from.join("adapter_config.json")).unwrap();
    let factors = std::fs::read(from.join("adapter_model.safetensors")).unwrap();
    let adapter = |config: &[u8], factors: &[u8]| {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("adapter_config.json"), config).unwrap();
        std::fs::write(dir.path().join("adapter_model.safetensors"), factors).unwrap();
        dir
    };
    run(adapter(&config, &factors[..factors.len() - 1]).path(), &["other", "adapter_model.safetensors"]);
    run(adapter(b"{}", &factors).path(), &["other", "adapter_config.json"]);
}

#[test]
fn an_adapter_for_another_model_is_refused() {
    let other = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tiny/qwen3_moe/adapters/experts3d");
    let lora = format!("other={other}");
    refused(&["run", "--model", &base(), "--lora", &lora, "--prompt", "a"], 1, &["adapter `other`", "expected"]);
}

#[test]
fn an_adapter_larger_than_the_adapter_memory_is_refused_with_both_sizes() {
    let (shout, base) = (lora("shout"), base());
    let args = ["run", "--model", &base, "--lora", &shout, "--prompt", "a", "--adapter-memory", "1KiB"];
    refused(&args, 1, &["adapter `shout`", "bytes needed", "the budget is 1024"]);
}

#[test]
fn an_unknown_device_is_a_usage_error_that_lists_the_devices() {
    refused(&["run", "--model", &base(), "--prompt", "a", "--device", "no such gpu"], 2, &["--device", "there are 0"]);
    refused(&["run", "--model", &base(), "--prompt", "a", "--device", "4096"], 2, &["--device `4096`"]);
    let output = wgmoe(&["devices", "--device", "no such gpu"]);
    assert_eq!(output.code, Some(2), "{}", output.stderr);
}

#[test]
#[cfg(target_os = "linux")]
fn no_device_at_all_says_what_to_install() {
    let base = base();
    for args in [vec!["run", "--model", &base, "--prompt", "a"], vec!["devices"]] {
        let mut command = command(&args);
        command.env("VK_DRIVER_FILES", "/nonexistent").env("VK_ICD_FILENAMES", "/nonexistent");
        let output = output(command);
        assert_eq!((output.code, output.stdout.as_str()), (Some(1), ""), "{}", output.stderr);
        assert!(output.stderr.contains("mesa-vulkan-drivers"), "{}", output.stderr);
    }
}

#[test]
fn traces_and_tables_are_refused_before_work_starts() {
    let dir = tempfile::tempdir().unwrap();
    // The model is not there either, but that is not what is said.
    for path in ["/nonexistent/trace.json", name(dir.path()), ".."] {
        let args = ["run", "--model", "/nonexistent/model", "--prompt", "a", "--trace-routing", path];
        refused(&args, 2, &["--trace-routing", path]);
    }
    let good = file(r#"{"model_type": "x", "experts": 2, "top_k": 1, "tokens": 9, "layers": [[4, 5]]}"#);
    let propose = |trace: &str, more: &[&str], code: i32, words: &[&str]| {
        refused(&[&["placement", "--from-trace", trace], more].concat(), code, words);
    };
    let good = name(good.path());
    propose(good, &["--ep", "0"], 2, &["--ep"]);
    propose(good, &["--ep", "2", "--copies", "3"], 2, &["--copies", "at most 2"]);
    propose(good, &["--ep", "2", "--out", "/nonexistent/table.json"], 2, &["--out", "/nonexistent"]);
    propose(good, &[], 2, &["--ep"]);
    propose("/nonexistent/trace.json", &["--ep", "2"], 1, &["/nonexistent/trace.json"]);
    let broken = file(r#"{"model_type": "x", "experts": 2, "top_k": 1, "tokens": 9, "layers": [[4, 5, 6]]}"#);
    propose(name(broken.path()), &["--ep", "2"], 1, &[name(broken.path()), "layers[0]"]);
}

#[test]
fn broken_token_files_name_the_tensor() {
    let broken = file("no safetensors");
    refused(&["perplexity", "--model", &base(), "--tokens", name(broken.path())], 1, &[name(broken.path())]);
    let weights = format!("{}/model.safetensors", base());
    refused(&["perplexity", "--model", &base(), "--tokens", &weights], 1, &["<task>.ids"]);
}
