//! The program from outside: how tests start it, and the files they give it.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

pub const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/demo");

pub struct Output {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Output {
    pub fn json_lines(&self) -> Vec<Value> {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        self.stdout.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
    }
}

pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_wgmoe"));
    command.args(args).stdin(Stdio::null()).env_remove("WGMOE_LOG");
    command
}

pub fn output(mut command: Command) -> Output {
    let output = command.output().expect("the program starts");
    Output {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).expect("stdout is UTF-8"),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

pub fn wgmoe(args: &[&str]) -> Output {
    output(command(args))
}

/// Runs with `args` and expects `code`, nothing on stdout, and an `error:` that names all of `words`.
#[track_caller]
pub fn refused(args: &[&str], code: i32, words: &[&str]) {
    let output = wgmoe(args);
    assert_eq!(output.code, Some(code), "{args:?}: {}", output.stderr);
    assert_eq!(output.stdout, "", "{args:?}");
    assert!(output.stderr.contains("error: "), "{args:?}: {}", output.stderr);
    for word in words {
        assert!(output.stderr.contains(word), "{args:?}: expected `{word}` in: {}", output.stderr);
    }
}

pub fn base() -> String {
    format!("{DEMO}/base")
}

pub fn lora(name: &str) -> String {
    format!("{name}={DEMO}/adapters/{name}")
}

/// A copy of the base model without its weights, for tests to spoil; `weights` is what model.safetensors holds.
pub fn spoiled(config: impl Fn(&mut Value), weights: &[u8]) -> tempfile::TempDir {
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

pub fn weights() -> Vec<u8> {
    std::fs::read(format!("{}/model.safetensors", base())).unwrap()
}

pub fn file(text: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    file
}

pub fn name(path: &Path) -> &str {
    path.to_str().unwrap()
}
