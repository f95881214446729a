//! Ranks as processes of an MPI job: the program answers as it does alone, and a rank that fails or dies ends the job.
//!
//! Needs `mpirun` and the feature `mpi`.

use std::io::Write;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/demo");

/// `mpirun -n ranks wgmoe ARGS --mpi`, or `wgmoe ARGS` for 0 ranks.
fn wgmoe(ranks: usize, args: &[&str]) -> Command {
    let program = env!("CARGO_BIN_EXE_wgmoe");
    if ranks == 0 {
        let mut command = Command::new(program);
        command.args(args);
        return command;
    }
    let mut command = Command::new("mpirun");
    // CI runs as root, on fewer cores than ranks; ranks that wait should not take the others' time.
    command
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .args(["--oversubscribe", "--mca", "mpi_yield_when_idle", "1", "-n", &ranks.to_string(), program])
        .args(args)
        .arg("--mpi");
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn output(command: &mut Command) -> Output {
    command.output().expect("mpirun of Open MPI")
}

/// A file of requests, one a line.
fn file(lines: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(lines.as_bytes()).unwrap();
    file
}

fn with_adapters<'a>(command: &'a str, rest: &[&'a str], loras: &'a [String]) -> Vec<&'a str> {
    let mut args = vec![command, "--model"];
    args.push(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/demo/base"));
    // Ranks are held to f32 sums.
    let tiers = wgmoe::Gpu::list().into_iter().next().map(|info| info.tiers).unwrap_or_default();
    args.extend(["--tier", if tiers.contains(&wgmoe::Tier::Subgroup) { "subgroup" } else { "baseline" }]);
    for lora in loras {
        args.extend(["--lora", lora]);
    }
    args.extend(rest);
    args
}

fn loras() -> Vec<String> {
    ["shout", "mirror"].map(|name| format!("{name}={DEMO}/adapters/{name}")).into()
}

#[test]
fn two_and_four_processes_answer_as_one() {
    let prompts = file(
        "{\"prompt\": \"mixture of experts\\n\", \"max_tokens\": 20}\n\
         {\"prompt\": \"hello world\\n\", \"adapter\": \"shout\", \"max_tokens\": 20}\n\
         {\"prompt\": \"one two three\\n\", \"adapter\": \"mirror\", \"max_tokens\": 20}\n",
    );
    let requests = file(
        "{\"text\": \"hello world\\nHELLO WORLD\", \"adapter\": \"shout\", \"top_logprobs\": 3}\n\
         {\"text\": \"a quick brown fox\"}\n",
    );
    let (prompts, requests) = (prompts.path().to_str().unwrap(), requests.path().to_str().unwrap());
    let loras = loras();
    let run = with_adapters("run", &["--prompts", prompts, "--format", "json"], &loras);
    let score = with_adapters("score", &["--requests", requests], &loras);
    let (alone, scored) = (output(&mut wgmoe(0, &run)), output(&mut wgmoe(0, &score)));
    assert!(alone.status.success() && !alone.stdout.is_empty(), "{}", text(&alone.stderr));
    let worlds = [
        (2, &["--ep", "2"][..]),
        (4, &["--tp", "4", "--ep", "2", "--placement", "round-robin"]),
        (4, &["--exchange", "dispatch"]),
    ];
    for (ranks, more) in worlds {
        let got = output(&mut wgmoe(ranks, &[&run[..], more].concat()));
        assert!(got.status.success(), "{ranks}: {}", text(&got.stderr));
        assert_eq!(text(&got.stdout), text(&alone.stdout), "{ranks}");
        let got = output(&mut wgmoe(ranks, &[&score[..], more].concat()));
        assert!(got.status.success(), "{ranks}: {}", text(&got.stderr));
        let lines = |out: &Output| text(&out.stdout).lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        let (got, want): (Vec<Value>, Vec<Value>) = (lines(&got), lines(&scored));
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(&want) {
            let logs = |v: &Value| v["logprobs"].as_array().unwrap().iter().map(Value::as_f64).collect::<Vec<_>>();
            let pairs = logs(got).into_iter().zip(logs(want));
            let off = pairs.map(|(g, w)| (g.unwrap_or(0.0) - w.unwrap_or(0.0)).abs()).fold(0.0, f64::max);
            assert!(off <= 1e-4, "{ranks}: {got} {want}");
        }
    }
}

#[test]
fn a_rank_that_cannot_load_ends_the_job_with_its_message_on_every_rank() {
    let loras = ["broken=/nonexistent".to_owned()];
    let args = with_adapters("run", &["--prompt", "hello"], &loras);
    let start = Instant::now();
    let got = output(&mut wgmoe(3, &args));
    assert!(!got.status.success() && start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    assert!(text(&got.stderr).contains("/nonexistent"), "{}", text(&got.stderr));
    assert!(got.stdout.is_empty());
    // A mistake of rank 0 alone, found before the others are needed.
    let args = with_adapters("run", &["--prompt", "hello", "--adapter", "unknown"], &[]);
    let got = output(&mut wgmoe(2, &args));
    assert!(!got.status.success() && text(&got.stderr).contains("`unknown`"), "{}", text(&got.stderr));
}

#[test]
#[cfg(target_os = "linux")]
fn a_rank_that_is_killed_ends_the_job() {
    let args = with_adapters("run", &["--prompt", "mixture of experts", "--ignore-eos", "--max-tokens", "400"], &[]);
    let mut command = wgmoe(2, &args);
    let job = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("mpirun");
    // Its ranks are its children.
    let children = || {
        let path = format!("/proc/{0}/task/{0}/children", job.id());
        let list = std::fs::read_to_string(path).unwrap_or_default();
        list.split_whitespace().filter_map(|n| n.parse::<u32>().ok()).collect::<Vec<_>>()
    };
    let start = Instant::now();
    while children().len() < 2 {
        assert!(start.elapsed() < Duration::from_secs(30), "the ranks did not start");
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_millis(1500));
    let killed = Instant::now();
    let kill = Command::new("kill").args(["-9", &children()[1].to_string()]).status().unwrap();
    assert!(kill.success());
    let got = job.wait_with_output().unwrap();
    assert!(killed.elapsed() < Duration::from_secs(10), "{:?}", killed.elapsed());
    assert!(!got.status.success());
    assert!(text(&got.stderr).contains("signal 9"), "{}", text(&got.stderr));
}
