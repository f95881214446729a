//! A device that nobody has here: wgpu's `noop` back end poses as one whose matrices are 8 x 8, and what is dispatched on it is repeated on
//! CPU threads with the MSL of its shaders (`portability/msl`), so that tests compare it with the oracle like any other.
//!
//! It needs `WGMOE_REPLAY`, the folder that `tests/translate` has left its shaders in; what is compiled goes to a folder beside it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use serde_json::{Value, json};
use wgmoe::kernels::Recording;
use wgmoe::plan::capabilities::Capabilities;
use wgmoe::plan::matrix;
use wgmoe::plan::tuning::Tuning;
use wgmoe::{Gpu, GpuInfo, Tier};
use wgpu::{DeviceType, DownlevelFlags, Features, Limits};

use super::posing;
use super::traced::Buffers;

/// Lanes of a subgroup and rows of a matrix, as Apple's GPUs have them.
const LANES: u32 = 32;
const EDGE: u32 = 8;

fn shaders() -> Option<PathBuf> {
    std::env::var_os("WGMOE_REPLAY").map(PathBuf::from)
}

/// The device, with other thresholds: `tuning` is given those of its tier.
pub fn device(tuning: impl FnOnce(Tuning) -> Tuning) -> Gpu {
    shaders().expect("WGMOE_REPLAY: the folder with translated shaders; portability/steps/msl-run.sh sets it");
    let limits = Limits {
        max_storage_buffer_binding_size: 1 << 30,
        max_buffer_size: 1 << 30,
        max_compute_workgroup_storage_size: matrix::workgroup_bytes(EDGE),
        ..Limits::defaults()
    };
    let features = Features::SUBGROUP | matrix::FEATURES;
    let gpu = posing::open(&posing::adapter(DeviceType::IntegratedGpu, features, limits, Some((LANES, LANES))), true);
    let info = GpuInfo { matrix_edge: Some(EDGE), software: false, ..gpu.info().clone() };
    let caps = Capabilities::new(&info, &gpu.device().limits(), DownlevelFlags::compliant(), Tier::Matrix).unwrap();
    assert!(caps.matrix && caps.edge == EDGE);
    gpu.with_capabilities(Capabilities { tuning: tuning(caps.tuning), ..caps })
}

/// Whether what is recorded on `gpu` has to be repeated.
pub fn repeats(gpu: &Gpu) -> bool {
    shaders().is_some() && gpu.info().backend == "noop" && gpu.capabilities().edge == EDGE
}

/// What was recorded, to be repeated once the device has done the copies.
pub struct Case {
    buffers: Buffers,
    json: Value,
}

impl Case {
    /// Before the commands are submitted; `None` where the device computes by itself.
    pub fn recorded(rec: &mut Recording) -> Option<Self> {
        let gpu = rec.gpu().clone();
        if !repeats(&gpu) {
            return None;
        }
        let mut buffers = Buffers::default();
        let dispatches: Vec<Value> = rec.trace().iter().map(|traced| buffers.dispatch(traced)).collect();
        let json = json!({ "tier": gpu.tier(), "buffers": buffers.contents(&gpu), "dispatches": dispatches });
        Some(Self { buffers, json })
    }

    /// Runs it, and leaves in the buffers what it computed.
    pub fn run(self, gpu: &Gpu) {
        // Tests of a process would compile the same shader twice.
        static TURN: Mutex<()> = Mutex::new(());
        let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let shaders = shaders().unwrap();
        let work = shaders.with_file_name("replayed");
        std::fs::create_dir_all(&work).unwrap();
        let case = work.join(format!("{}.json", std::process::id()));
        std::fs::write(&case, serde_json::to_vec(&self.json).unwrap()).unwrap();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("portability/msl/replay.py");
        let mut replay = Command::new("python3");
        replay.arg(script).arg("--repeat").args([&case, &shaders, &work]).args(["--simdgroup", &LANES.to_string()]);
        assert!(replay.status().unwrap().success(), "{}", case.display());
        self.buffers.write(gpu, &std::fs::read(case.with_extension("after")).unwrap());
    }
}
