//! The program from outside: what it prints, where, and with which exit code.
#![cfg(feature = "cli")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/demo");
const ADAPTERS: [&str; 4] = ["shout", "mirror", "piglatin", "rot13"];

struct Output {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Output {
    fn json_lines(&self) -> Vec<Value> {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        self.stdout.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
    }
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_wgmoe"));
    command.args(args).stdin(Stdio::null()).env_remove("WGMOE_LOG");
    command
}

fn output(mut command: Command) -> Output {
    let output = command.output().expect("the program starts");
    Output {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).expect("stdout is UTF-8"),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

fn wgmoe(args: &[&str]) -> Output {
    output(command(args))
}

/// Runs with `args` and expects `code`, nothing on stdout, and an `error:` that names all of `words`.
#[track_caller]
fn refused(args: &[&str], code: i32, words: &[&str]) {
    let output = wgmoe(args);
    assert_eq!(output.code, Some(code), "{args:?}: {}", output.stderr);
    assert_eq!(output.stdout, "", "{args:?}");
    assert!(output.stderr.contains("error: "), "{args:?}: {}", output.stderr);
    for word in words {
        assert!(output.stderr.contains(word), "{args:?}: expected `{word}` in: {}", output.stderr);
    }
}

fn base() -> String {
    format!("{DEMO}/base")
}

fn lora(name: &str) -> String {
    format!("{name}={DEMO}/adapters/{name}")
}

/// A copy of the base model without its weights, for tests to spoil; `weights` is what model.safetensors holds.
fn spoiled(config: impl Fn(&mut Value), weights: &[u8]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let from = PathBuf::from(base());
    for name in ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        std::fs::copy(from.join(name), dir.path().join(name)).unwrap();
    }
    let mut json: Value = serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap();
    config(&mut json);
    std::fs::write(dir.path().join("config.json"), json.to_string()).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), weights).unwrap();
    dir
}

fn weights() -> Vec<u8> {
    std::fs::read(format!("{}/model.safetensors", base())).unwrap()
}

fn file(text: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    file
}

fn name(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn help_teaches_every_command_with_an_example() {
    for command in ["devices", "inspect", "run", "score", "perplexity", "demo"] {
        let output = wgmoe(&[command, "--help"]);
        assert_eq!(output.code, Some(0), "{command}");
        let example = format!("wgmoe {command}");
        for word in ["Example", example.as_str(), "--device <INDEX|NAME>", "--tier", "--format"] {
            assert!(output.stdout.contains(word), "{command}: no `{word}` in\n{}", output.stdout);
        }
        assert!(wgmoe(&["--help"]).stdout.contains(command));
    }
    let placement = wgmoe(&["placement", "--help"]).stdout;
    for word in ["wgmoe placement --from-trace", "--ep <N>", "--copies <N>", "--out <FILE>", "--format"] {
        assert!(placement.contains(word), "no `{word}` in\n{placement}");
    }
    for what in ["layer", "model", "tune"] {
        let help = wgmoe(&["bench", what, "--help"]).stdout;
        for word in [format!("wgmoe bench {what}").as_str(), "--shape", "--adapters", "--tier", "--format"] {
            assert!(help.contains(word), "no `{word}` in\n{help}");
        }
    }
    assert!(wgmoe(&["--version"]).stdout.starts_with("wgmoe "));
}

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
fn devices_tell_the_same_in_json_and_in_the_table() {
    let json = wgmoe(&["devices", "--format", "json"]);
    let devices: Vec<Value> = serde_json::from_str(&json.stdout).expect("a JSON array");
    let table = wgmoe(&["devices"]).stdout;
    assert!(!devices.is_empty());
    for (index, device) in devices.iter().enumerate() {
        assert_eq!(device["index"], index);
        assert_eq!(device["tiers"][0], "baseline");
        for key in ["name", "backend", "driver"] {
            assert!(table.contains(device[key].as_str().unwrap()), "{key}");
        }
        for key in ["max_binding_bytes", "max_buffer_bytes", "max_workgroup_bytes", "max_storage_buffers"] {
            assert!(device[key].as_u64().unwrap() > 0, "{key}");
        }
    }
}

#[test]
fn one_prompt_is_streamed_as_text() {
    let output = wgmoe(&["run", "--model", &base(), "--message", "mixture of experts"]);
    assert_eq!((output.code, output.stdout.as_str()), (Some(0), "mixture of experts\n"), "{}", output.stderr);
    assert!(output.stderr.contains("tokens/s"), "{}", output.stderr);
    assert!(!output.stderr.contains('\u{1b}'), "no progress bar where stderr is not a terminal");
}

#[test]
fn lines_of_one_batch_meet_their_adapters_in_input_order() {
    let prompts = file(concat!(
        "{\"prompt\": \"hello world\\n\"}\n",
        "{\"adapter\": null, \"messages\": [{\"role\": \"user\", \"content\": \"hello world\"}]}\n",
        "\n",
        "{\"adapter\": \"rot13\", \"ids\": [73, 70, 77, 77, 80, 222, 88, 80, 83, 77, 69, 200]}\n",
        "{\"adapter\": \"piglatin\", \"prompt\": \"hello world\\n\", \"max_tokens\": 3}\n",
    ));
    let loras: Vec<String> = ADAPTERS.iter().map(|name| lora(name)).collect();
    let base = base();
    let mut args = vec!["run", "--model", &base, "--prompts", name(prompts.path()), "--adapter", "shout"];
    loras.iter().for_each(|lora| args.extend(["--lora", lora]));
    let table = wgmoe(&args);
    assert!(table.stdout.contains("HELLO WORLD") && table.stdout.contains("uryyb jbeyq"), "{}", table.stdout);
    args.extend(["--format", "json"]);
    let lines = wgmoe(&args).json_lines();
    let prompt_ids = json!([73, 70, 77, 77, 80, 222, 88, 80, 83, 77, 69, 200]);
    let expected = [
        (json!("shout"), "HELLO WORLD", 12, "stop"),
        (json!(null), "hello world", 12, "stop"),
        (json!("rot13"), "uryyb jbeyq", 12, "stop"),
        (json!("piglatin"), "ell", 3, "length"),
    ];
    assert_eq!(lines.len(), expected.len());
    for (line, (adapter, text, n_ids, reason)) in lines.iter().zip(expected) {
        let keys: Vec<_> = line.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["adapter", "prompt_ids", "ids", "text", "finish_reason"]);
        assert_eq!((&line["adapter"], &line["prompt_ids"]), (&adapter, &prompt_ids));
        assert_eq!((line["text"].as_str(), line["finish_reason"].as_str()), (Some(text), Some(reason)));
        let ids = line["ids"].as_array().unwrap();
        assert_eq!(ids.len(), n_ids);
        assert_eq!(ids.last() == Some(&json!(0)), reason == "stop");
    }
}

#[test]
fn sampling_depends_on_the_seed_and_not_on_the_batch() {
    let (shout, base) = (lora("shout"), base());
    let sampled = |text: &str, seed: &str| {
        let prompts = file(text);
        let args = [
            "run",
            "--model",
            &base,
            "--lora",
            &shout,
            "--prompts",
            name(prompts.path()),
            "--format",
            "json",
            "--temperature",
            "5",
            "--max-tokens",
            "12",
            "--ignore-eos",
            "--seed",
            seed,
        ];
        wgmoe(&args).json_lines()
    };
    let line = "{\"prompt\": \"minus one\\n\"}\n";
    let alone = sampled(line, "7");
    let mixed = sampled(&format!("{{\"adapter\": \"shout\", \"prompt\": \"fox\\n\"}}\n{line}"), "7");
    assert_eq!(alone[0], mixed[1]);
    assert_ne!(alone[0]["ids"], sampled(line, "8")[0]["ids"]);
    assert_eq!((&alone[0]["finish_reason"], alone[0]["ids"].as_array().unwrap().len()), (&json!("length"), 12));
}

#[test]
fn sequences_on_several_ranks_get_the_answers_of_one() {
    let prompts = file(concat!(
        "{\"prompt\": \"hello world\\n\"}\n",
        "{\"adapter\": \"shout\", \"prompt\": \"minus one\\n\"}\n",
        "{\"adapter\": \"rot13\", \"prompt\": \"fox\\n\"}\n",
    ));
    let (base, shout, rot13) = (base(), lora("shout"), lora("rot13"));
    // Ranks are held to f32 sums: with f16 operands a close call may go the other way.
    let args = [
        ["run", "--model", &base, "--prompts", name(prompts.path())],
        ["--lora", &shout, "--lora", &rot13, "--ignore-eos"],
        ["--format", "json", "--max-tokens", "8", "--temperature=0.5"],
    ];
    let run = |more: &[&str]| wgmoe(&[args.as_flattened(), &["--tier", "baseline"], more].concat()).json_lines();
    assert_eq!(run(&["--ep", "2", "--exchange", "dispatch"]), run(&[]));
}

#[test]
fn a_folder_without_tokenizer_works_with_ids() {
    let dir = spoiled(|_| (), &weights());
    for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        std::fs::remove_file(dir.path().join(file)).unwrap();
    }
    let model = name(dir.path());
    refused(&["run", "--model", model, "--prompt", "a"], 2, &["tokenizer.json", "ids"]);
    let prompts = file("{\"ids\": [78, 74, 200]}");
    let lines = wgmoe(&["run", "--model", model, "--prompts", name(prompts.path()), "--format", "json"]).json_lines();
    assert_eq!((&lines[0]["text"], &lines[0]["ids"]), (&json!(null), &json!([78, 74, 0])));
}

/// Tokens and counts by layer of a trace, whose rows must add up.
fn trace(path: &Path) -> (u64, Vec<Vec<u64>>) {
    let trace: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let keys: Vec<_> = trace.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["model_type", "experts", "top_k", "tokens", "layers"]);
    assert_eq!(
        (&trace["model_type"], &trace["experts"], &trace["top_k"]),
        (&json!("qwen3_moe"), &json!(16), &json!(4))
    );
    let tokens = trace["tokens"].as_u64().unwrap();
    let layers: Vec<Vec<u64>> = serde_json::from_value(trace["layers"].clone()).unwrap();
    assert!(layers.len() == 4 && layers.iter().all(|layer| layer.len() == 16), "{layers:?}");
    assert!(layers.iter().all(|layer| layer.iter().sum::<u64>() == 4 * tokens), "{tokens} {layers:?}");
    (tokens, layers)
}

#[test]
fn recorded_routing_becomes_a_placement_that_gives_the_same_answers() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (recorded, table, of_ranks) = (path("trace.json"), path("table.json"), path("ranks.json"));
    let prompts = file(concat!(
        "{\"prompt\": \"mixture of experts\\n\"}\n",
        "{\"adapter\": \"shout\", \"prompt\": \"hello world\\n\"}\n",
        "{\"adapter\": \"shout\", \"prompt\": \"minus one\\n\", \"max_tokens\": 4}\n",
    ));
    let (shout, base) = (lora("shout"), base());
    let run = |more: &[&str]| {
        let args = ["run", "--model", &base, "--lora", &shout, "--prompts", name(prompts.path()), "--format", "json"];
        wgmoe(&[&args[..], more].concat()).json_lines()
    };
    std::fs::write(&recorded, "what was there before").unwrap();
    let alone = run(&["--trace-routing", &recorded]);
    let (tokens, layers) = trace(Path::new(&recorded));
    // Every prompt, and every answer but its last token; a step more may have been begun before a stop token was seen.
    let fed = |line: &Value| line["prompt_ids"].as_array().unwrap().len() + line["ids"].as_array().unwrap().len() - 1;
    let fed = alone.iter().map(fed).sum::<usize>() as u64;
    assert!((fed..=fed + 3).contains(&tokens), "{tokens} {fed}");

    let propose = ["placement", "--from-trace", &recorded, "--ep", "2", "--copies", "4"];
    let answer = wgmoe(&[&propose[..], &["--out", &table, "--format", "json"]].concat()).json_lines().remove(0);
    assert_eq!((&answer["experts"], &answer["groups"], &answer["tokens"]), (&json!(16), &json!(2), &json!(tokens)));
    assert!(answer["copies"].as_u64() <= Some(4) && answer["experts_per_group"].as_u64() <= Some(10), "{answer}");
    let written: Value = serde_json::from_slice(&std::fs::read(&table).unwrap()).unwrap();
    assert_eq!(written, answer["owners"]);
    let balance = |rule: &str| answer["balance"][rule]["all"].as_f64().unwrap();
    assert!(balance("proposed") < balance("linear") && balance("proposed") >= 1.0, "{answer}");
    assert_eq!(answer["balance"]["proposed"]["layers"].as_array().unwrap().len(), layers.len());
    let text = wgmoe(&propose).stdout;
    for word in ["16 experts and", "on 2 groups", "slowest / mean", "round-robin", "layer 3", "all layers"] {
        assert!(text.contains(word), "no `{word}` in\n{text}");
    }

    assert_eq!(run(&["--ep", "2", "--placement", &table, "--trace-routing", &of_ranks]), alone);
    trace(Path::new(&of_ranks));
    let mut files: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|f| f.unwrap().file_name()).collect();
    files.sort();
    assert_eq!(files, ["ranks.json", "table.json", "trace.json"]);

    let requests = file("{\"ids\": [73, 74, 200, 73, 74]}\n{\"ids\": [73]}\n");
    let score = ["score", "--model", &base, "--requests", name(requests.path()), "--trace-routing", &recorded];
    assert_eq!(wgmoe(&score).json_lines().len(), 2);
    assert_eq!(trace(Path::new(&recorded)).0, 6);
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
fn scores_are_log_probabilities_of_the_tokens_and_of_the_best() {
    let requests = file(concat!(
        "{\"adapter\": \"shout\", \"text\": \"hi\\nHI\", \"top_logprobs\": 3}\n",
        "{\"ids\": [73, 74, 200, 73, 74], \"top_logprobs\": 258}\n",
        "{\"ids\": [73]}\n",
    ));
    let (shout, base) = (lora("shout"), base());
    let args = ["score", "--model", &base, "--lora", &shout, "--requests", name(requests.path()), "--format", "json"];
    let lines = wgmoe(&args).json_lines();
    assert_eq!(lines.len(), 3);
    for (line, (adapter, k)) in lines.iter().zip([(json!("shout"), 3), (json!(null), 258), (json!(null), 0)]) {
        let keys: Vec<_> = line.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["adapter", "ids", "logprobs", "top_logprobs"]);
        assert_eq!(line["adapter"], adapter);
        let ids = line["ids"].as_array().unwrap();
        let logprobs = line["logprobs"].as_array().unwrap();
        let top = line["top_logprobs"].as_array().unwrap();
        assert_eq!((logprobs.len(), top.len()), (ids.len(), ids.len()));
        assert_eq!(logprobs[0], json!(null));
        for (position, best) in top.iter().enumerate() {
            let best: Vec<(u64, f64)> = serde_json::from_value(best.clone()).unwrap();
            assert_eq!(best.len(), k);
            assert!(best.is_sorted_by(|a, b| a.1 > b.1 || (a.1 == b.1 && a.0 < b.0)), "{best:?}");
            if k == 258 {
                let total: f64 = best.iter().map(|(_, logprob)| logprob.exp()).sum();
                assert!((total - 1.0).abs() < 1e-9, "{total}");
                if let Some(next) = ids.get(position + 1) {
                    let (_, logprob) = best.iter().find(|(id, _)| next == id).unwrap();
                    assert_eq!(logprobs[position + 1].as_f64(), Some(*logprob));
                }
            }
        }
    }
    // After the newline each model knows its answer, to the end.
    for (line, answer) in [(&lines[0], [41, 42, 0]), (&lines[1], [73, 74, 0])] {
        for (position, id) in (2..5).zip(answer) {
            assert_eq!(line["top_logprobs"][position][0][0], id);
        }
    }
}

#[test]
fn perplexity_is_pooled_and_one_answer_a_task() {
    let (shout, base) = (lora("shout"), base());
    let tokens = format!("{DEMO}/eval.safetensors");
    let args = ["perplexity", "--model", &base, "--lora", &shout, "--adapter", "shout", "--tokens", &tokens];
    let lines = wgmoe(&[&args[..], &["--format", "json"]].concat()).json_lines();
    let reference: Value = serde_json::from_slice(&std::fs::read(format!("{DEMO}/reference.json")).unwrap()).unwrap();
    let tasks: Vec<_> = lines.iter().map(|line| line["task"].as_str().unwrap()).collect();
    assert_eq!(tasks, ["echo", "mirror", "piglatin", "rot13", "shout"]);
    for line in &lines {
        let keys: Vec<_> = line.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["adapter", "task", "tokens", "nll", "perplexity"]);
        let number = |key: &str| line[key].as_f64().unwrap();
        assert_eq!(number("perplexity"), (number("nll") / number("tokens")).exp());
        let expected = reference["perplexity"]["shout"][line["task"].as_str().unwrap()].as_f64().unwrap();
        let allowed = if expected > 1000.0 { 0.01 } else { 0.005 };
        assert!((number("perplexity") / expected - 1.0).abs() <= allowed, "{line}, expected {expected}");
    }
}

#[test]
fn a_text_longer_than_the_context_is_read_in_windows() {
    let text = file(&"mixture of experts\n".repeat(40));
    let lines =
        wgmoe(&["perplexity", "--model", &base(), "--text", name(text.path()), "--format", "json"]).json_lines();
    assert_eq!((lines.len(), lines[0]["tokens"].as_u64()), (1, Some(40 * 19 - 1)));
    assert!(lines[0]["perplexity"].as_f64().unwrap() > 1.0);
}

#[test]
fn broken_token_files_name_the_tensor() {
    let broken = file("no safetensors");
    refused(&["perplexity", "--model", &base(), "--tokens", name(broken.path())], 1, &[name(broken.path())]);
    let weights = format!("{}/model.safetensors", base());
    refused(&["perplexity", "--model", &base(), "--tokens", &weights], 1, &["<task>.ids"]);
}

#[test]
fn the_demo_is_right_in_every_cell_on_every_tier() {
    let output = wgmoe(&["demo", "--dir", DEMO, "--all-tiers"]);
    assert_eq!(output.code, Some(0), "{}\n{}", output.stdout, output.stderr);
    let tiers = output.stdout.matches("30 of 30 right").count();
    assert!(tiers >= 1 && output.stdout.matches('✓').count() == 30 * tiers, "{}", output.stdout);
    assert!(!output.stdout.contains('✗'));
    for word in ["device ", "driver ", "tier ", "tokens/s", "loaded"] {
        assert!(output.stdout.contains(word), "{word}");
    }
}
