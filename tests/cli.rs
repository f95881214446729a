//! The program from outside: what it answers, and where.
#![cfg(feature = "cli")]

#[path = "common/program.rs"]
mod program;

use std::path::Path;

use program::{DEMO, base, file, lora, name, refused, spoiled, weights, wgmoe};
use serde_json::{Value, json};

const ADAPTERS: [&str; 4] = ["shout", "mirror", "piglatin", "rot13"];

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
