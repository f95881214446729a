//! The program from outside: what it refuses, in which words, and with which exit code.
#![cfg(feature = "cli")]

#[path = "common/program.rs"]
mod program;

use std::path::{Path, PathBuf};

use program::{DEMO, base, command, file, lora, name, output, refused, spoiled, weights, wgmoe};
use serde_json::{Value, json};

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
        (run(&["--prompt", ""]), "no tokens"),
        (run(&["--prompt", "a", "--lora", "x=a", "--lora", "x=b"]), "given twice"),
        (run(&["--prompt", "a", "--adapter-memory", "1 GB"]), "--adapter-memory"),
        (run(&["--prompt", "a", "--tp", "2", "--exchange", "dispatch"]), "give --ep 2 without --tp"),
        (vec!["demo", "--tp", "4", "--ep", "2", "--exchange", "dispatch"], "--exchange dispatch with --tp 4"),
        (vec!["score", "--model", &base, "--requests", "x", "--format", "table"], "--format"),
        (vec!["perplexity", "--model", &base], "--text"),
        (vec!["devices", "--tier", "huge"], "--tier"),
        (vec!["devices", "--tuning", "x.json"], "--tuning"),
        (vec!["inspect", &base, "--tuning", "x.json"], "--tuning"),
        (vec!["inspect", &base, "--rank", "2", "--ep", "2"], "--rank 2: expected a rank below 2"),
        (vec!["inspect", &base, "--tp", "3", "--ep", "2"], "--tp 3 --ep 2: "),
        (run(&["--prompt", "a", "--placement", ""]), "--placement"),
        (run(&["--prompt", "a", "--device", ""]), "--device"),
    ];
    for (args, word) in &cases {
        refused(args, 2, &[word]);
    }
}

#[test]
fn a_wrong_value_is_answered_with_what_the_option_takes() {
    let base = base();
    let run = ["run", "--model", &base, "--prompt", "a"];
    let inspect = ["inspect", &base];
    let placement = ["placement", "--from-trace", "x", "--ep", "2"];
    let ranks = "from 1 to 4096";
    let cases: [(&[&str], &str, &[&str], &str); 28] = [
        (&run, "--max-tokens", &["", "x", "0", "-1", "1.5", "99999999999999999999"], "from 1 to 4294967295"),
        (&run, "--temperature", &["", "x", "-1", "nan", "inf", "1e39"], "a number from 0 on"),
        (&run, "--top-p", &["", "x", "-1", "0", "1.5", "nan"], "a number above 0 and up to 1"),
        (&run, "--top-k", &["", "x", "-1", "4294967296"], "from 0 to 4294967295"),
        (&run, "--seed", &["", "x", "-1"], "from 0 to 18446744073709551615"),
        (&run, "--adapter-memory", &["", "-1", "1.5GiB"], "a whole number, such as 128MiB"),
        (&run, "--adapter-memory", &["0", "99999999999TiB"], "1 byte or more"),
        (&run, "--tp", &["", "x", "0", "-1", "5000"], ranks),
        (&run, "--ep", &["", "x", "0", "-1", "5000"], ranks),
        (&inspect, "--rank", &["", "x", "-1"], "from 0 to 4095"),
        (&inspect, "--binding-limit", &["x", "128MB"], "KiB, MiB, GiB or TiB"),
        (&placement[..3], "--ep", &["", "x", "0", "-1", "70000"], ranks),
        (&placement, "--copies", &["", "x", "-1"], "a whole number from 0"),
        (
            &["bench", "layer"],
            "--tokens",
            &["", "x", "0", "-1", "1,,2", "1,x", "65537"],
            "from 1 to 65536, or several, as in 1,16",
        ),
        (&["bench", "layer"], "--adapters", &["", "x", "-1", "65537"], "from 0 to 65536, or several"),
        (&["bench", "layer"], "--rank", &["", "x", "0", "-1", "513"], "from 1 to 512, or several"),
        (&["bench", "layer"], "--loaded", &["", "x", "-1", "9999999999", "18446744073709551615"], "from 0 to 65536"),
        (&["bench", "layer"], "--routing", &["", "x"], "uniform, zipf:S or one-expert"),
        (&["bench", "model"], "--layers", &["", "x", "0", "-1"], "a whole number from 1"),
        (&["bench", "model"], "--sequences", &["", "x", "0", "-1", "4097"], "from 1 to 4096, or several"),
        (&["bench", "model"], "--prompt", &["", "x", "0", "-1", "18446744073709551615"], "a whole number from 1"),
        (&["bench", "model"], "--decode", &["", "x", "0", "-1", "18446744073709551615"], "a whole number from 1"),
        (&["bench", "model"], "--prefill", &["", "x", "-1", "18446744073709551615"], "a whole number from 0"),
        (&["bench", "model"], "--step-tokens", &["", "x", "0", "-1"], "a whole number from 1"),
        (&["bench", "model"], "--adapters", &["", "x", "-1", "999999999999"], "from 0 to 65536, or several"),
        (&["bench", "model"], "--rank", &["", "x", "0", "-1", "513"], "from 1 to 512"),
        (&["bench", "model"], "--runs", &["", "x", "0", "-1", "18446744073709551615"], "a whole number from 1"),
        (&["bench", "tune"], "--adapters", &["", "x", "-1", "65537"], "from 0 to 65536"),
    ];
    for (command, option, values, expected) in cases {
        for value in values {
            let args = [command, &[option, value]].concat();
            refused(&args, 2, &[&format!("for '{option} "), "expected ", expected]);
        }
    }
}

#[test]
fn a_path_that_is_not_what_an_option_takes_is_named_with_what_it_should_be() {
    let (base, text, empty, dir) = (base(), file("{}"), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let nothing = dir.path().join("nothing");
    let [text, empty, nothing] = [text.path(), empty.path(), nothing.as_path()].map(name);
    let run = ["run", "--model", &base, "--prompt", "a"];
    // What stands in front of the path, and what the message says of it.
    let folders: [(&[&str], &str, &str, i32); 9] = [
        (&["run", "--prompt", "a", "--model="], "--model", "a folder with config.json", 1),
        (&["score", "--requests", text, "--model="], "--model", "a folder with config.json", 1),
        (&["perplexity", "--text", text, "--model="], "--model", "a folder with config.json", 1),
        (&[&run[..], &["--lora", "x="]].concat(), "--lora x", "a folder with adapter_config.json", 1),
        (&["perplexity", "--model", &base, "--text", text, "--lora", "x="], "--lora x", "adapter_config.json", 1),
        (&["inspect", ""], "DIR", "a folder with config.json", 1),
        (&["demo", "--dir="], "--dir", "a folder with reference.json", 1),
        (&["bench", "layer", "--shape="], "--shape", "tiny or a folder with config.json", 2),
        (&["bench", "model", "--shape="], "--shape", "tiny or a folder with config.json", 2),
    ];
    let files: [(&[&str], &str, &str, i32); 10] = [
        (&["run", "--model", &base, "--prompts="], "--prompts", "a file of JSON lines", 1),
        (&["score", "--model", &base, "--requests="], "--requests", "a file of JSON lines", 1),
        (&["perplexity", "--model", &base, "--text="], "--text", "a text file", 1),
        (&["perplexity", "--model", &base, "--tokens="], "--tokens", "a safetensors file", 1),
        (&[&run[..], &["--tuning="]].concat(), "--tuning", "a file as `wgmoe bench tune` writes it", 1),
        (&["bench", "layer", "--tuning="], "--tuning", "a file as `wgmoe bench tune` writes it", 1),
        (&[&run[..], &["--placement="]].concat(), "--placement", "linear, round-robin or a JSON file", 1),
        (&["inspect", &base, "--placement="], "--placement", "linear, round-robin or a JSON file", 1),
        (&["bench", "model", "--placement="], "--placement", "linear, round-robin or a JSON file", 1),
        (&["placement", "--ep", "2", "--from-trace="], "--from-trace", "a file as --trace-routing writes it", 1),
    ];
    let refuse = |(command, option, expected, code): (&[&str], &str, &str, i32), path: &str, got: &str| {
        let (last, front) = command.split_last().unwrap();
        let last = format!("{last}{path}");
        refused(&[front, &[&last]].concat(), code, &[&format!("error: {option} `{path}`: expected "), expected, got]);
    };
    for case in folders {
        let got = |what| if case.1 == "--shape" { "" } else { what };
        refuse(case, nothing, got(", but there is nothing"));
        refuse(case, text, got(", got a file"));
        refuse(case, empty, got(", got one without it"));
    }
    for case in files {
        refuse(case, nothing, ", but there is nothing");
        refuse(case, empty, ", got a folder");
    }
    // The report is there all the same.
    let output = wgmoe(&["inspect", &base, "--lora", nothing]);
    let said = format!("error: --lora `{nothing}`: expected a folder with adapter_config.json, but there is nothing");
    assert!(output.code == Some(1) && output.stderr.contains(&said), "{}", output.stderr);
    // A file of something else.
    refused(
        &["perplexity", "--model", &base, "--tokens", text],
        1,
        &["--tokens: ", text, "expected a safetensors file"],
    );
}

#[test]
fn a_word_that_nobody_expects_is_answered_with_what_it_may_have_been_meant_to_be() {
    let base = base();
    refused(&["run", "--model", &base, "--prompt", "hello", "world"], 2, &["'world'", "behind --message or --prompt"]);
    refused(&["bench", "layer", "--tokens", "1,", "16"], 2, &["'16'", "as in 1,16,256"]);
    refused(&["bench", "layer", "--tokens", "1", "16"], 2, &["'16'", "no spaces between them"]);
    refused(&["--device", "0", "run"], 2, &["'--device'", "options stand behind the command"]);
    if !cfg!(feature = "mpi") {
        refused(&["run", "--model", &base, "--prompt", "a", "--mpi"], 2, &["'--mpi'", "--features mpi"]);
    }
}

#[test]
fn files_are_whole_or_as_they_were() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, "what was there before").unwrap();
    let (base, file) = (base(), name(&path));
    let cases: [&[&str]; 5] = [
        &["bench", "layer", "--svg", file],
        &["bench", "tune", "--write", file],
        &["inspect", &base, "--svg", file],
        &["run", "--model", &base, "--prompt", "a", "--trace-routing", file],
        &["score", "--model", &base, "--requests", file, "--trace-routing", file],
    ];
    for args in cases {
        let output = wgmoe(&[args, &["--device", "no such gpu"]].concat());
        assert_eq!((output.code, output.stdout.as_str()), (Some(2), ""), "{args:?}: {}", output.stderr);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "what was there before", "{args:?}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "{args:?}");
    }
    for folder in [name(dir.path()), "/nonexistent/x.svg"] {
        refused(&["bench", "layer", "--svg", folder], 2, &["--svg", folder]);
        refused(&["inspect", &base, "--svg", folder], 2, &["--svg", folder]);
    }
}

#[test]
fn a_placement_of_other_experts_names_its_file() {
    let base = base();
    let table = file("[[0], [1]]");
    let placement = ["--ep", "2", "--placement", name(table.path())];
    let words = ["--placement", name(table.path()), "expected owners of 16 experts, got 2"];
    for command in
        [&["inspect", &base][..], &["run", "--model", &base, "--prompt", "a"], &["bench", "model", "--shape", "tiny"]]
    {
        refused(&[command, &placement].concat(), 1, &words);
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
    let base = base();
    let devices: Vec<Value> = serde_json::from_str(&wgmoe(&["devices", "--format", "json"]).stdout).unwrap();
    let listed: Vec<String> =
        devices.iter().map(|d| format!("index {} is `{}`", d["index"], d["name"].as_str().unwrap())).collect();
    let commands: [&[&str]; 6] = [
        &["devices"],
        &["inspect", &base],
        &["inspect", &base, "--binding-limit", "1MiB"],
        &["run", "--model", &base, "--prompt", "a"],
        &["run", "--model", &base, "--prompt", "a", "--ep", "2"],
        &["bench", "layer"],
    ];
    for command in commands {
        for wanted in ["no such gpu", "4096", "-4096"] {
            let asked = format!("--device `{wanted}`: expected the index of a device or a part of its name");
            let words: Vec<&str> = std::iter::once(&asked).chain(&listed).map(String::as_str).collect();
            refused(&[command, &["--device", wanted]].concat(), 2, &words);
        }
    }
}

#[test]
fn a_tier_that_a_device_lacks_is_answered_with_those_it_has() {
    let devices: Vec<Value> = serde_json::from_str(&wgmoe(&["devices", "--format", "json"]).stdout).unwrap();
    let tiers: Vec<&str> = devices[0]["tiers"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    if tiers.contains(&"matrix") {
        return;
    }
    let (base, tiers) = (base(), tiers.join(", "));
    for command in [&["devices"][..], &["inspect", &base], &["run", "--model", &base, "--prompt", "a"]] {
        refused(&[command, &["--device", "0", "--tier", "matrix"]].concat(), 1, &["matrix", "offers", &tiers]);
    }
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
