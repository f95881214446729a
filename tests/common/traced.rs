//! Recorded dispatches as JSON, with the buffers that they work on, so that another program can repeat them.
//!
//! With `WGMOE_TRACE_STAGES=FOLDER` every test that runs stages leaves some of its runs there, each with what its buffers
//! held before and after: what a kernel test covers is thereby repeated elsewhere, a new stage too
//! (`portability/msl`, `portability/browser`).

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex};

use serde_json::{Value, json};
use wgmoe::kernels::linker::label;
use wgmoe::kernels::recording::Traced;
use wgmoe::kernels::variants::variants;
use wgmoe::kernels::{Grid, Recording, View};
use wgmoe::plan::classes::classes;
use wgmoe::{Gpu, Tier};

/// The first, the third and the ninth run of a variant are kept: tests begin with the smallest shapes.
const KEPT: [usize; 3] = [1, 3, 9];
/// Larger runs take too long on CPU threads.
const MAX_BYTES: u64 = 1 << 18;
const MAX_GROUPS: u32 = 48;

/// The distinct buffers of a trace, in order of their first use.
#[derive(Default)]
pub struct Buffers {
    all: Vec<(wgpu::Buffer, u64)>,
}

impl Buffers {
    /// The number of `buffer`, of which the first `end` bytes are used.
    pub fn number(&mut self, buffer: &wgpu::Buffer, end: u64) -> usize {
        let at = self.all.iter().position(|(b, _)| b == buffer).unwrap_or_else(|| {
            self.all.push((buffer.clone(), 0));
            self.all.len() - 1
        });
        self.all[at].1 = end.max(self.all[at].1);
        at
    }

    fn view(&mut self, view: &View) -> Value {
        let buffer = self.number(&view.buffer, view.offset + view.size);
        json!({ "buffer": buffer, "offset": view.offset, "size": view.size })
    }

    /// One dispatch.
    pub fn dispatch(&mut self, traced: &Traced) -> Value {
        let buffers: Vec<Value> = traced.buffers.iter().map(|v| self.view(v)).collect();
        let grid = match &traced.grid {
            Grid::Direct(n) => json!(n),
            Grid::Indirect(buffer, offset) => {
                let number = self.number(buffer, offset + 12);
                json!({ "buffer": number, "offset": offset })
            }
        };
        json!({ "shader": traced.label, "params": hex(&traced.params), "buffers": buffers, "grid": grid })
    }

    /// Replaces what they hold: their contents one behind the other.
    pub fn write(&self, gpu: &Gpu, mut contents: &[u8]) {
        for (buffer, size) in &self.all {
            let (own, rest) = contents.split_at(*size as usize);
            gpu.queue().write_buffer(buffer, 0, own);
            contents = rest;
        }
        assert!(contents.is_empty());
    }

    /// What each holds now: one word over and over, or bytes.
    pub fn contents(&self, gpu: &Gpu) -> Vec<Value> {
        let content = |(buffer, size): &(wgpu::Buffer, u64)| {
            let bytes = gpu.read(buffer, 0, *size).unwrap();
            let word = &bytes[..4];
            if bytes.chunks(4).all(|w| w == word) {
                json!({ "size": size, "fill": hex(word) })
            } else {
                json!({ "size": size, "bytes": hex(&bytes) })
            }
        };
        self.all.iter().map(content).collect()
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// A run that will be left in the folder, once the device has done it.
pub struct Stages {
    buffers: Buffers,
    shaders: BTreeMap<String, String>,
    case: Value,
}

static FOLDER: LazyLock<Option<PathBuf>> = LazyLock::new(|| std::env::var_os("WGMOE_TRACE_STAGES").map(PathBuf::from));

/// How often a variant has run on a tier.
type Runs = HashMap<(Tier, String), usize>;

static RUNS: LazyLock<Mutex<Runs>> = LazyLock::new(Mutex::default);

/// Variants of devices that do not say how large their subgroups are, which Metal and browsers do not: the others are those
/// of the device at hand.
static ANYWHERE: LazyLock<HashSet<String>> = LazyLock::new(|| {
    let classes = classes();
    let anywhere = classes.iter().filter(|class| !class.one_subgroup && !class.matrix);
    anywhere.flat_map(|class| variants(class).iter().map(|(k, vars)| label(k, vars)).collect::<Vec<_>>()).collect()
});

/// Keeps what is recorded from now on, where runs are wanted.
pub fn begin(rec: &mut Recording) {
    if FOLDER.is_some() || super::replayed::repeats(rec.gpu()) {
        rec.trace();
    }
}

impl Stages {
    /// What was recorded, before it is submitted; `None` where it is not kept.
    pub fn recorded(rec: &mut Recording) -> Option<Self> {
        FOLDER.as_ref()?;
        let (gpu, trace) = (rec.gpu().clone(), rec.trace());
        let groups = |traced: &Traced| match traced.grid {
            Grid::Direct([x, y, z]) => x * y * z,
            Grid::Indirect(..) => 0,
        };
        let repeatable = |traced: &Traced| ANYWHERE.contains(&traced.label) && groups(traced) <= MAX_GROUPS;
        let mut buffers = Buffers::default();
        let dispatches: Vec<Value> = trace.iter().map(|traced| buffers.dispatch(traced)).collect();
        let bytes: u64 = buffers.all.iter().map(|(_, size)| size).sum();
        if bytes > MAX_BYTES || !trace.iter().all(repeatable) {
            return None;
        }
        let labels: HashSet<&String> = trace.iter().map(|traced| &traced.label).collect();
        let mut runs = RUNS.lock().unwrap();
        let mut kept = false;
        for label in labels {
            let run = runs.entry((gpu.tier(), label.clone())).or_default();
            *run += 1;
            kept |= KEPT.contains(run);
        }
        if !kept {
            return None;
        }
        drop(runs);
        let case = json!({ "tier": gpu.tier(), "buffers": buffers.contents(&gpu), "dispatches": dispatches });
        let shaders = trace.into_iter().map(|t| (t.label, t.wgsl)).collect();
        Some(Self { buffers, shaders, case })
    }

    /// Leaves the run and its results in the folder. The test goes on to compare them with the oracle.
    pub fn write(mut self, gpu: &Gpu) {
        static NUMBER: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        let Some(folder) = FOLDER.as_ref() else { return };
        self.case["after"] = json!(self.buffers.contents(gpu));
        self.case["shaders"] = json!(self.shaders);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = format!("{}-{number}.json", std::process::id());
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(folder.join(name), serde_json::to_vec(&self.case).unwrap()).unwrap();
    }
}
