//! What is decided for devices that are not at hand: their limits, features and subgroup sizes are written down here, and
//! wgpu's `noop` back end poses as each of them. It checks commands against the limits and computes nothing.

mod common;
#[path = "common/gpu_run.rs"]
mod gpu_run;
#[path = "common/moe.rs"]
mod moe;

use std::path::Path;
use std::sync::Arc;

use common::Rng;
use gpu_run::posing;
use moe::{Batch, OnDevice, SHAPE, Twin, adapter, pin, poisoned};
use wgmoe::adapter::Site;
use wgmoe::checkpoint::MlpKind;
use wgmoe::dtype::DType;
use wgmoe::kernels::expert_gemm::{self, EXPERT_GEMM};
use wgmoe::kernels::expert_gemm_variant::{Flags, Sizes, variant};
use wgmoe::kernels::linker::label;
use wgmoe::placement::{ExpertShare, Placement};
use wgmoe::plan::capabilities::Capabilities;
use wgmoe::plan::matrix::{self, Cuts, MatrixTile};
use wgmoe::plan::pieces::cut;
use wgmoe::plan::tuning::{Tuning, TuningTable};
use wgmoe::shape::MoeShape;
use wgmoe::{Adapter, Checkpoint, Engine, EngineOptions, Gpu, GpuInfo, LoadOptions, Model, Request, Tier};
use wgpu::{AdapterInfo, Backend, CooperativeMatrixProperties, CooperativeScalarType, DeviceType, Features, Limits};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// The most that wgpu offers for a storage binding on Vulkan, and for a buffer on Mesa's drivers and DX12.
const VULKAN_BINDING: u64 = (1 << 31) - 4;
const I32_MAX: u64 = (1 << 31) - 1;

/// A device, as wgpu 30 describes it under a driver of 2026. Shapes of matrices are those that WGSL can name: squares.
struct Known {
    name: &'static str,
    kind: DeviceType,
    subgroups: Option<(u32, u32)>,
    f16: bool,
    matrices: &'static str,
    max_binding: u64,
    max_buffer: u64,
    workgroup_bytes: u32,
}

#[rustfmt::skip]
const DEVICES: [Known; 13] = {
    use DeviceType::{Cpu, DiscreteGpu, IntegratedGpu};
    const fn known(
        name: &'static str,
        kind: DeviceType,
        subgroups: Option<(u32, u32)>,
        f16: bool,
        matrices: &'static str,
        [max_binding, max_buffer]: [u64; 2],
        workgroup_kib: u32,
    ) -> Known {
        Known { name, kind, subgroups, f16, matrices, max_binding, max_buffer, workgroup_bytes: workgroup_kib << 10 }
    }
    [
        known("Apple M2, Metal", IntegratedGpu, Some((4, 64)), true, "8x8x8", [9 * GIB, 9 * GIB], 32),
        known("Apple A13, Metal", IntegratedGpu, Some((4, 64)), true, "none", [GIB, GIB], 32),
        // Its matrices are 8 x 16 x 16, which WGSL cannot name.
        known("Arc A770, Vulkan", DiscreteGpu, Some((8, 32)), true, "none", [VULKAN_BINDING, I32_MAX], 32),
        known("GTX 1060, Vulkan", DiscreteGpu, Some((32, 32)), false, "none", [VULKAN_BINDING, 1 << 52], 48),
        known("GTX 1060, DX12, DXC", DiscreteGpu, Some((32, 32)), false, "none", [I32_MAX, I32_MAX], 32),
        // Without DXC there are no wave operations.
        known("GTX 1060, DX12, FXC", DiscreteGpu, None, false, "none", [I32_MAX, I32_MAX], 32),
        known("RX 7900 XTX, Vulkan", DiscreteGpu, Some((32, 64)), true, "16x16x16", [VULKAN_BINDING, I32_MAX], 64),
        known("RX 7900 XTX, DX12", DiscreteGpu, Some((32, 64)), true, "none", [I32_MAX, I32_MAX], 32),
        known("H200, Vulkan", DiscreteGpu, Some((32, 32)), true, "16x16x16", [VULKAN_BINDING, 1 << 52], 48),
        known("llvmpipe, Vulkan", Cpu, Some((8, 8)), true, "none", [128 * MIB, I32_MAX], 32),
        known("SwiftShader, Vulkan", Cpu, Some((4, 4)), false, "none", [GIB, GIB], 32),
        known("WARP, DX12", Cpu, Some((4, 128)), true, "none", [I32_MAX, I32_MAX], 32),
        known("WebGPU's defaults", DiscreteGpu, None, false, "none", [128 * MIB, 256 * MIB], 16),
    ]
};

/// Device, matrices that it lists, tier, lanes of a row and whether they are one subgroup, bindings of a stack of eight
/// matrices of 224 MiB (gate and up of Mixtral in bf16), and the products of one pair, of tiles of four and of tiles of
/// eight: rows, tile, columns a lane, lanes, lanes along the depth, lanes that carry x. On the matrix tier also its tiles:
/// rows, pairs, columns, depth, steps ahead of weights and of x, rows and columns of a subgroup, whether padding rests and
/// loads are kept ahead, columns of its strip, lanes of a subgroup.
const DECIDED: &str = "\
Apple M2, Metal      8x8x8     matrix    32 one   1  pairs 1 4 128 32 8 | tiles 4 4 128 32 8 | tiles 8 2 64 0 8 \
 | tiles 16 64 64 2 2 16 16 rests kept 16 32 | tiles 32 64 64 2 2 16 32 rests kept 32 32 | tiles 48 64 64 2 2 48 16 rests kept 16 32 | tiles 80 128 64 2 1 80 32 no-rests no-kept 32 32 | tiles 144 64 64 2 1 48 32 no-rests no-kept 32 32 | direct tiles 128 128 64 4 32 128 32
Apple A13, Metal     none      subgroup  64       2  pairs 1 1 64 0 4 | tiles 4 2 64 0 4 | tiles 8 2 64 0 4
Arc A770, Vulkan     none      subgroup  64       1  pairs 1 1 64 0 4 | tiles 4 2 64 0 4 | tiles 8 2 64 0 4
GTX 1060, Vulkan     none      subgroup  32 one   1  pairs 1 4 128 32 8 | tiles 4 4 128 32 8 | tiles 8 2 64 0 8
GTX 1060, DX12, DXC  none      subgroup  32 one   1  pairs 1 4 128 32 8 | tiles 4 4 128 32 8 | tiles 8 2 64 0 8
GTX 1060, DX12, FXC  none      baseline  64       1  pairs 1 1 64 0 0 | tiles 4 2 64 0 0 | tiles 8 2 64 0 0
RX 7900 XTX, Vulkan  16x16x16  subgroup  64       1  pairs 1 1 64 0 4 | tiles 4 2 64 0 4 | tiles 8 2 64 0 4
RX 7900 XTX, DX12    none      subgroup  64       1  pairs 1 1 64 0 4 | tiles 4 2 64 0 4 | tiles 8 2 64 0 4
H200, Vulkan         16x16x16  matrix    32 one   1  pairs 1 4 128 32 8 | tiles 4 4 128 32 8 | tiles 8 2 64 0 8 \
 | tiles 16 64 64 2 2 16 16 rests kept 16 32 | tiles 32 64 64 2 2 16 32 rests kept 32 32 | tiles 48 64 64 2 2 48 16 rests kept 16 32 | tiles 80 256 64 2 1 80 32 no-rests no-kept 16 32 | tiles 144 128 64 2 1 48 64 no-rests no-kept 16 32 | direct tiles 128 128 64 4 32 128 32
llvmpipe, Vulkan     none      subgroup  8 one   16  pairs 1 1 16 0 8 | tiles 4 2 16 0 8 | tiles 8 2 16 0 8
SwiftShader, Vulkan  none      subgroup  4 one    2  pairs 1 1 16 0 4 | tiles 4 2 16 0 4 | tiles 8 2 16 0 4
WARP, DX12           none      subgroup  64       1  pairs 1 1 16 0 4 | tiles 4 2 16 0 4 | tiles 8 2 16 0 4
WebGPU's defaults    none      baseline  64      16  pairs 1 1 64 0 0 | tiles 4 2 64 0 0 | tiles 8 2 64 0 0
";

/// The matrices of a device, f16 with sums of f32, as wgpu lists them.
fn listed(known: &Known) -> Vec<CooperativeMatrixProperties> {
    let size = match known.matrices {
        "none" => return Vec::new(),
        "8x8x8" => 8,
        "16x16x16" => 16,
        other => panic!("{other}"),
    };
    let (ab_type, cr_type) = (CooperativeScalarType::F16, CooperativeScalarType::F32);
    let one = CooperativeMatrixProperties {
        m_size: size,
        n_size: size,
        k_size: size,
        ab_type,
        cr_type,
        saturating_accumulation: false,
    };
    vec![one]
}

fn open(known: &Known) -> Gpu {
    let mut features = Features::empty();
    features.set(Features::SUBGROUP, known.subgroups.is_some());
    features.set(Features::SHADER_F16, known.f16);
    features.set(Features::EXPERIMENTAL_COOPERATIVE_MATRIX, known.matrices != "none");
    features.set(Features::SUBGROUP_BARRIER, known.matrices != "none");
    let limits = Limits {
        max_storage_buffer_binding_size: known.max_binding,
        max_buffer_size: known.max_buffer,
        max_compute_workgroup_storage_size: known.workgroup_bytes,
        ..Limits::defaults()
    };
    let adapter = posing::adapter(known.kind, features, limits, known.subgroups);
    // `noop` lists no matrices, so the plan is asked with those written down.
    let (listed, offered) = (listed(known), adapter.limits());
    let backend = if known.name.ends_with("Metal") { Backend::Metal } else { Backend::Vulkan };
    let info = AdapterInfo { backend, ..adapter.get_info() };
    let matrix_edge = matrix::offered(&info, &adapter.features(), &offered, &listed);
    let matrix = matrix_edge.is_some();
    let gpu = posing::open(&adapter, matrix);
    // wgpu 30 calls every `noop` device software, whatever `device_type` says.
    let (name, software) = (known.name.to_owned(), known.kind == DeviceType::Cpu);
    let mut info = GpuInfo { name, software, matrix_edge, ..gpu.info().clone() };
    // What Apple's GPUs say when they are asked.
    if matrix && matrix::asks_subgroups(backend) {
        info.subgroup_sizes = (32, 32);
    }
    let tier = if matrix { Tier::Matrix } else { gpu.tier() };
    let caps = Capabilities::new(&info, &gpu.device().limits(), wgpu::DownlevelFlags::compliant(), tier).unwrap();
    assert_eq!(caps.matrix, matrix, "{}", known.name);
    gpu.with_capabilities(caps)
}

fn decided(known: &Known) -> String {
    let gpu = open(known);
    let caps = gpu.capabilities();
    // Whatever a device would bind: indices and byte offsets stay within 32 bits, and signed ones too.
    assert!(caps.max_binding_bytes < 1 << 31, "{}", known.name);
    let rows = format!("{}{}", caps.row_lanes, if caps.one_subgroup { " one" } else { "" });
    // Mixtral 8x7B: [8, 2 · 14336, 4096] in bf16.
    let pieces = cut(8, 28_672, 8192, caps.max_binding_bytes).unwrap().len();
    let products = [("pairs", 1), ("tiles", 4), ("tiles", 8)].map(|(select, tile)| {
        let label = label(&EXPERT_GEMM, &expert_gemm::vars(caps, DType::Bf16, select, tile));
        label.trim_start_matches("expert_gemm[bf16 ").trim_end_matches(']').to_owned()
    });
    let tier = caps.tier.to_string();
    let mut products = products.to_vec();
    for tile in caps.cuts.experts.iter().copied().filter(|_| caps.matrix) {
        let (flags, sizes) = (Flags::default(), Sizes::default());
        let (kernel, vars) = variant(caps, DType::Bf16, "tiles", tile, flags, &sizes);
        let label = label(kernel, &vars);
        let cut = label.split_once("bf16 ").unwrap().1.split(" no-scaled").next().unwrap();
        products.push(if tile.direct { format!("direct {cut}") } else { cut.to_owned() });
    }
    let cells = format!("{:<20} {:<9} {tier:<9} {rows:<7} {pieces:>2}", known.name, known.matrices);
    format!("{cells}  {}\n", products.join(" | "))
}

#[test]
fn every_known_device_gets_the_variants_written_down_for_it() {
    let got: String = DEVICES.iter().map(decided).collect();
    assert_eq!(got, DECIDED, "\n{got}");
}

#[test]
fn a_layer_with_adapters_is_recorded_within_the_limits_of_every_known_device() {
    for known in &DEVICES {
        let gpu = open(known);
        let twin = Twin::new(&gpu, DType::Bf16, Placement::linear(8, 1, 0).unwrap());
        let mut pool = twin.pool(&gpu, 2);
        pin(&mut pool, 0, &adapter(1, 9, DType::F16, &[Site::ExpertGate, Site::ExpertDown], false));
        for tokens in [1, 11, 40] {
            let x = Rng::new(7).floats(tokens * SHAPE.hidden);
            let mapping = (0..tokens as i32).map(|t| t % 2 - 1).collect();
            let batch = OnDevice::new(&gpu, &Batch { x, mapping, residual: None });
            // wgpu checks pipelines, bindings and dispatches; `run_in` fails on what it finds.
            gpu_run::run_in(&mut poisoned(&gpu), |rec, pass| batch.record(rec, pass, &twin.device, Some(&pool)));
        }
        assert!(gpu.tier() == Tier::Baseline || known.subgroups.is_some());
    }
}

/// The labels of a prompt of 200 tokens, all of whose logits are wanted, and how many layers have experts, and have not.
fn prompt_labels(gpu: &Gpu, adapter: Option<&str>) -> (Vec<String>, [usize; 2]) {
    let folder = Path::new("tests/data/tiny/qwen3_moe");
    let checkpoint = Checkpoint::open(folder).unwrap();
    let (model, _) = Model::load(gpu, &checkpoint, &LoadOptions::default(), &mut |_, _| {}).unwrap();
    let mut engine = Engine::new(gpu, model, EngineOptions { adapter_slots: 1, ..EngineOptions::default() }).unwrap();
    let adapter = adapter.map(|name| {
        let adapter = Adapter::open(&folder.join("adapters").join(name), engine.config()).unwrap();
        engine.load_adapter(name, &adapter).unwrap()
    });
    let prompt = (0..200).map(|t| t % 256).collect();
    engine.submit(Request { prompt, adapter, max_tokens: 0, logits: true, ..Request::default() }).unwrap();
    engine.labels();
    while !engine.is_idle() {
        engine.begin_step().unwrap();
        engine.wait().unwrap();
    }
    let of = |kind: MlpKind| engine.config().layers.iter().filter(|layer| **layer == kind).count();
    let layers = [MlpKind::Experts, MlpKind::Dense].map(of);
    (engine.labels(), layers)
}

#[test]
fn many_rows_on_matrices_are_packed_by_the_norms_that_make_them() {
    for gpu in DEVICES.iter().map(open).filter(|gpu| gpu.capabilities().matrix) {
        for exact in [false, true] {
            let own = gpu.capabilities();
            let tuning = Tuning { exact_matrix_rows: if exact { 9 } else { 1 << 16 }, ..own.tuning };
            let gpu = gpu.with_capabilities(Capabilities { tuning, ..own.clone() });
            for adapter in [None, Some("attn_only"), Some("all_linear")] {
                let (labels, [experts, dense]) = prompt_labels(&gpu, adapter);
                let stem = |stem: &str| labels.iter().filter(|l| l.split('[').next() == Some(stem)).count();
                let norms = |word: &str| {
                    let has = |l: &&String| l.trim_end_matches(']').split(' ').any(|w| w == word);
                    labels.iter().filter(|l| l.starts_with("norm_pack[")).filter(has).count()
                };
                let layers = experts + dense;
                // What attention leaves is packed apart, and the activations of a dense layer.
                let expected = [0, 2 * layers + 1, layers + dense];
                assert_eq!([stem("norm"), stem("norm_pack"), stem("pack")], expected, "{labels:?}");
                assert_eq!(norms("twice"), if exact { experts } else { 0 }, "{labels:?}");
                // f32 is written for a router that reads it; its adapters do, too.
                if adapter != Some("all_linear") {
                    assert_eq!(norms("plain"), if exact { 0 } else { experts }, "{labels:?}");
                }
            }
        }
    }
}

#[test]
fn a_layer_on_matrices_packs_its_tokens_once() {
    for gpu in DEVICES.iter().map(open).filter(|gpu| gpu.capabilities().matrix) {
        let own = gpu.capabilities();
        let tuning = Tuning { exact_matrix_rows: 9, ..own.tuning };
        let gpu = gpu.with_capabilities(Capabilities { tuning, ..own.clone() });
        let twin = Twin::new(&gpu, DType::Bf16, Placement::linear(8, 1, 0).unwrap());
        let (tokens, mut rec) = (300, poisoned(&gpu));
        let x = Rng::new(7).floats(tokens * SHAPE.hidden);
        let batch = OnDevice::new(&gpu, &Batch { x, mapping: vec![-1; tokens], residual: None });
        rec.labels();
        gpu_run::run_in(&mut rec, |rec, pass| batch.record(rec, pass, &twin.device, None));
        let labels = rec.labels();
        let packs: Vec<bool> =
            labels.iter().filter(|l| l.starts_with("pack[")).map(|l| l.contains(" twice ")).collect();
        assert_eq!(packs, [true], "{labels:?}");
    }
}

#[test]
fn a_layer_takes_the_cuts_of_another_table() {
    for gpu in DEVICES.iter().map(open).filter(|gpu| gpu.capabilities().matrix) {
        let own = gpu.capabilities();
        let lowest = own.cuts.experts[0];
        let direct = *own.cuts.experts.last().unwrap();
        let experts = vec![
            MatrixTile { height: 32, columns: 32, depth: 32, ahead: 1, x_ahead: 1, sub_columns: 32, ..lowest },
            MatrixTile { height: 96, sub_rows: 48, sub_columns: 32, ..lowest },
            MatrixTile { height: 64, columns: 64, sub_columns: 64, depth: 32, x_ahead: 2, ..direct },
        ];
        let cuts = Cuts { experts, dense: own.cuts.dense.clone() };
        assert_eq!(cuts.check(own.edge), Ok(()));
        let gpu = gpu.with_capabilities(Capabilities { cuts: Arc::new(cuts), ..own.clone() });
        let twin = Twin::new(&gpu, DType::Bf16, Placement::linear(8, 1, 0).unwrap());
        let mut pool = twin.pool(&gpu, 2);
        pin(&mut pool, 0, &adapter(1, 9, DType::F16, &[Site::ExpertGate, Site::ExpertDown], false));
        let mut rec = poisoned(&gpu);
        for (tokens, cut) in
            [(60, "tiles 32 32 32 1 1 16 32"), (200, "tiles 96 64 64 2 2 48 32"), (500, "tiles 64 64 32 2 32 64")]
        {
            let x = Rng::new(7).floats(tokens * SHAPE.hidden);
            let mapping = (0..tokens as i32).map(|t| t % 2 - 1).collect();
            let batch = OnDevice::new(&gpu, &Batch { x, mapping, residual: None });
            rec.labels();
            gpu_run::run_in(&mut rec, |rec, pass| batch.record(rec, pass, &twin.device, Some(&pool)));
            let labels = rec.labels();
            let products = labels.iter().filter(|label| label.starts_with("expert_gemm_") && label.contains(" tiles "));
            let took = products.map(|label| label.contains(cut)).collect::<Vec<_>>();
            assert_eq!(took, [true, true], "{tokens}: {labels:#?}");
        }
    }
}

#[test]
fn a_table_that_was_never_read_is_checked_all_the_same() {
    let gpu = open(&DEVICES[0]);
    let mut table = TuningTable::built_in().unwrap();
    assert!(gpu.with_tuning(&table).is_ok());
    table.cuts.of_16.experts[0].columns = 40;
    let error = gpu.with_tuning(&table).unwrap_err().to_string();
    assert!(error.contains("`cuts`: `16`: `experts[0]`: `columns`: expected a multiple of 16"), "{error}");
}

#[test]
fn logits_in_parts_are_added_up_before_experts_are_chosen() {
    let shape = MoeShape { experts: 64, top_k: 1, ..SHAPE };
    for gpu in DEVICES.iter().map(open).filter(|gpu| gpu.capabilities().matrix && gpu.capabilities().along_depth) {
        for (exact_matrix_rows, chosen_late) in [(9, false), (65_535, true)] {
            let own = gpu.capabilities();
            let tuning = Tuning { exact_matrix_rows, ..own.tuning };
            let gpu = gpu.with_capabilities(Capabilities { tuning, ..own.clone() });
            let share = ExpertShare::whole(shape.experts, shape.expert_width).unwrap();
            let twin = Twin::of(&gpu, DType::Bf16, shape, share);
            let (tokens, mut rec) = (12, poisoned(&gpu));
            let x = Rng::new(7).floats(tokens * shape.hidden);
            let batch = OnDevice::new(&gpu, &Batch { x, mapping: vec![-1; tokens], residual: None });
            rec.labels();
            gpu_run::run_in(&mut rec, |rec, pass| batch.record(rec, pass, &twin.device, None));
            let labels = rec.labels();
            // Single pairs choose for themselves, but only of whole logits.
            assert_eq!(!labels.iter().any(|label| label.starts_with("route[")), chosen_late, "{labels:?}");
        }
    }
}
