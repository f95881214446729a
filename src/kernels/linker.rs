//! From WGSL parts to a cached pipeline.
//!
//! A shader is a file of `shaders/`, rendered once for each set of [`Var`]s: loops over tiles are unrolled there, since
//! naga writes loops that drivers do not unroll, and parts of `shaders/shared/` are linked in with `{% include %}`.
//! Without variables a file still reads as WGSL.

use std::borrow::Cow;
use std::sync::{Arc, LazyLock};

use crate::error::{Error, ErrorKind, Result};
use crate::gpu::Gpu;
use crate::kernels::barriers;
use crate::plan::matrix::EDGE;

/// A stage's shader: its stem, and how many buffers it reads and writes (bindings 1.. in that order; 0 is `params`).
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Kernel {
    /// File stem in `shaders/`, and the word in labels, tests and profiles.
    pub stem: &'static str,
    /// Read-only storage buffers.
    pub reads: usize,
    /// Storage buffers that are written.
    pub writes: usize,
}

/// One variable of a shader: a tile size, a lane count, a type name or a switch.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Var {
    /// A number.
    Number(u32),
    /// A word, such as a storage type.
    Word(&'static str),
    /// A switch.
    Flag(bool),
}

impl From<u32> for Var {
    fn from(v: u32) -> Self {
        Self::Number(v)
    }
}
impl From<&'static str> for Var {
    fn from(v: &'static str) -> Self {
        Self::Word(v)
    }
}
impl From<bool> for Var {
    fn from(v: bool) -> Self {
        Self::Flag(v)
    }
}

/// The variables of one variant, by name.
pub type Vars = Vec<(&'static str, Var)>;

/// What a pipeline is cached by.
pub type PipelineKey = (&'static str, Vars);

/// A compiled variant.
#[derive(Debug)]
pub struct Pipeline {
    /// Stem and variant, as in `expert_gemm[bf16 tiles 4 2 16]`.
    pub label: String,
    pub(crate) raw: wgpu::ComputePipeline,
    pub(crate) layout: wgpu::BindGroupLayout,
    pub(crate) buffers: usize,
    kernel: &'static Kernel,
    vars: Vars,
}

impl Pipeline {
    /// Its WGSL, rendered again.
    pub(crate) fn source(&self) -> Result<String> {
        render(self.kernel, &self.vars)
    }
}

macro_rules! sources {
    ($($name:literal),* $(,)?) => { &[$(($name, include_str!(concat!("../../shaders/", $name)))),*] };
}

/// Every WGSL file, by path under `shaders/`.
const SOURCES: &[(&str, &str)] = sources![
    "shared/rows.wgsl",
    "shared/bits.wgsl",
    "shared/eight.wgsl",
    "shared/weights.wgsl",
    "shared/factor.wgsl",
    "shared/factors.wgsl",
    "shared/addend.wgsl",
    "shared/projection.wgsl",
    "shared/pair_shrink.wgsl",
    "shared/pair_factor.wgsl",
    "shared/shrink_row.wgsl",
    "shared/shrink_pair.wgsl",
    "shared/reduce.wgsl",
    "shared/logits.wgsl",
    "shared/logit_total.wgsl",
    "shared/score.wgsl",
    "shared/places.wgsl",
    "shared/choice_weights.wgsl",
    "shared/choose.wgsl",
    "shared/announce.wgsl",
    "shared/align.wgsl",
    "shared/align_runs.wgsl",
    "shared/count_chunks.wgsl",
    "shared/tiles.wgsl",
    "shared/walk.wgsl",
    "shared/halves.wgsl",
    "shared/blocks.wgsl",
    "shared/packed_row.wgsl",
    "shared/norm_row.wgsl",
    "shared/long_row.wgsl",
    "shared/slots.wgsl",
    "shared/matrices.wgsl",
    "shared/matrix_params.wgsl",
    "shared/matrix_sizes.wgsl",
    "shared/weight_rows.wgsl",
    "shared/matrix_item.wgsl",
    "shared/matrix_weights.wgsl",
    "shared/begin_rows.wgsl",
    "shared/store_tiles.wgsl",
    "shared/store_rows.wgsl",
    "shared/fold_scan.wgsl",
    "shared/tile_slots.wgsl",
    "shared/tile_projections.wgsl",
    "shared/fold.wgsl",
    "shared/fold_direct.wgsl",
    "shared/gated_shift.wgsl",
    "shared/store_gated.wgsl",
    "shared/store_halves.wgsl",
    "shared/gate.wgsl",
    "shared/gated.wgsl",
    "shared/weighted_sum.wgsl",
    "route.wgsl",
    "count.wgsl",
    "localise.wgsl",
    "localise_quotas.wgsl",
    "localise_copies.wgsl",
    "remap.wgsl",
    "align_few.wgsl",
    "align_count.wgsl",
    "align_scatter.wgsl",
    "runs_count.wgsl",
    "runs_scatter.wgsl",
    "pack.wgsl",
    "tile_rows.wgsl",
    "fold_blocks.wgsl",
    "expert_gemm.wgsl",
    "expert_gemm_matrix.wgsl",
    "expert_gemm_direct.wgsl",
    "lora_shrink.wgsl",
    "lora_shrink_matrix.wgsl",
    "lora_expand_tiles.wgsl",
    "lora_expand.wgsl",
    "lora_gather.wgsl",
    "pair_shrink.wgsl",
    "pair_shrink_packed.wgsl",
    "pair_gemm.wgsl",
    "pair_gemm_shrink.wgsl",
    "pair_expand_shrink.wgsl",
    "dense_gemm.wgsl",
    "down_combine.wgsl",
    "activation.wgsl",
    "activation_pack.wgsl",
    "activation_blocks.wgsl",
    "combine.wgsl",
    "combine_tiles.wgsl",
    "embed.wgsl",
    "norm.wgsl",
    "norm_pack.wgsl",
    "expand_norm.wgsl",
    "rope.wgsl",
    "attention.wgsl",
    "attention_pack.wgsl",
    "attention_matrix.wgsl",
    "attention_split.wgsl",
    "attention_combine.wgsl",
    "sample.wgsl",
    "matrix_probe.wgsl",
    "random.wgsl",
    "rate.wgsl",
    "stream.wgsl",
];

static TEMPLATES: LazyLock<minijinja::Environment<'static>> = LazyLock::new(|| {
    let mut env = minijinja::Environment::new();
    match minijinja::syntax::SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build() {
        Ok(syntax) => env.set_syntax(syntax),
        Err(e) => log::error!("template syntax: {e:#}"),
    }
    env.set_undefined_behavior(minijinja::UndefinedBehavior::Strict);
    for (name, source) in SOURCES {
        if let Err(e) = env.add_template(name, source) {
            // The sources are part of the crate and every variant is rendered in the tests.
            log::error!("shader {name}: {e:#}");
        }
    }
    env
});

/// The label of a variant.
pub fn label(kernel: &Kernel, vars: &Vars) -> String {
    let words: Vec<String> = vars
        .iter()
        // Matrices of the edge that shaders speak of go without saying.
        .filter(|v| **v != ("edge", Var::Number(EDGE)))
        .map(|(name, v)| match v {
            Var::Number(n) if *name == "edge" => format!("edge-{n}"),
            Var::Number(n) => n.to_string(),
            Var::Word(w) => (*w).to_string(),
            Var::Flag(on) => {
                if *on {
                    (*name).to_string()
                } else {
                    format!("no-{name}")
                }
            }
        })
        .collect();
    format!("{}[{}]", kernel.stem, words.join(" "))
}

/// The WGSL of a variant.
///
/// # Errors
/// [`ErrorKind::Unsupported`] when a variable that the file uses is missing: a defect of the caller.
pub fn render(kernel: &Kernel, vars: &Vars) -> Result<String> {
    let fail =
        |e: minijinja::Error| Error::new(ErrorKind::Unsupported, format!("shader `{}`: {e:#}", label(kernel, vars)));
    let context: std::collections::BTreeMap<&str, minijinja::Value> = vars
        .iter()
        .map(|(name, v)| {
            (
                *name,
                match v {
                    Var::Number(n) => minijinja::Value::from(*n),
                    Var::Word(w) => minijinja::Value::from(*w),
                    Var::Flag(on) => minijinja::Value::from(*on),
                },
            )
        })
        .collect();
    let name = format!("{}.wgsl", kernel.stem);
    TEMPLATES.get_template(&name).and_then(|t| t.render(context)).map_err(fail)
}

/// The compiled variant, from the cache or compiled now.
///
/// # Errors
/// [`ErrorKind::Device`] when the device was lost or refuses the shader.
pub fn pipeline(gpu: &Gpu, kernel: &'static Kernel, vars: Vars) -> Result<Arc<Pipeline>> {
    let key = (kernel.stem, vars);
    if let Some(found) = lock(gpu.pipelines()).get(&key) {
        return Ok(found.clone());
    }
    // A lost device reports nothing: what it is asked for looks made.
    gpu.check()?;
    let label = label(kernel, &key.1);
    let source = render(kernel, &key.1)?;
    let widened = if gpu.info().backend == "vulkan" { barriers::for_vulkan(&source)? } else { None };
    let source = match widened {
        Some(module) => wgpu::ShaderSource::Naga(Cow::Owned(module)),
        None => wgpu::ShaderSource::Wgsl(source.into()),
    };
    let layout = bind_group_layout(gpu, kernel.reads, kernel.writes);
    let device = gpu.device();
    // What wgpu refuses, and what the driver's own compiler refuses.
    let refused = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let not_compiled = device.push_error_scope(wgpu::ErrorFilter::Internal);
    let desc = wgpu::ShaderModuleDescriptor { label: Some(&label), source };
    // SAFETY: every loop of our shaders ends, and every index is bounded by `params`, by ids that the align and remap
    // stages have clamped, or by a cut that `MatrixTile::check` has passed; `Recording::dispatch` is given views of the sizes that each stage's fields state. A caller's
    // smaller view is caught by the driver's robust buffer access, which wgpu leaves on. The kernel tests run the same
    // shaders with the checks on (debug assertions).
    let module = unsafe { device.create_shader_module_trusted(desc, runtime_checks()) };
    let pipeline_layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
        label: Some(&label),
        bind_group_layouts: &[Some(&layout)],
        immediate_size: 0,
    });
    let raw = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: Some(&label),
        layout: Some(&pipeline_layout),
        module: &module,
        entry_point: Some("main"),
        compilation_options: wgpu::PipelineCompilationOptions {
            constants: &[],
            zero_initialize_workgroup_memory: false,
        },
        cache: None,
    });
    let not_compiled = pollster::block_on(not_compiled.pop());
    let refused = pollster::block_on(refused.pop());
    if let Some(e) = not_compiled.or(refused) {
        return Err(Error::new(ErrorKind::Device, format!("shader `{label}`: {e}")));
    }
    log::debug!("compiled {label} on {}, {} tier, {}", gpu.info().backend, gpu.tier(), gpu.info().name);
    let (buffers, vars) = (kernel.reads + kernel.writes, key.1.clone());
    let made = Arc::new(Pipeline { label, raw, layout, buffers, kernel, vars });
    lock(gpu.pipelines()).insert(key, made.clone());
    Ok(made)
}

fn runtime_checks() -> wgpu::ShaderRuntimeChecks {
    if cfg!(debug_assertions) { wgpu::ShaderRuntimeChecks::checked() } else { wgpu::ShaderRuntimeChecks::unchecked() }
}

fn bind_group_layout(gpu: &Gpu, reads: usize, writes: usize) -> wgpu::BindGroupLayout {
    lock(gpu.layouts())
        .entry((reads, writes))
        .or_insert_with(|| {
            let mut entries = vec![entry(0, wgpu::BufferBindingType::Uniform, true)];
            for i in 0..reads + writes {
                entries.push(entry(i as u32 + 1, wgpu::BufferBindingType::Storage { read_only: i < reads }, false));
            }
            let label = format!("{reads} read, {writes} written");
            gpu.device()
                .create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: Some(&label), entries: &entries })
        })
        .clone()
}

fn entry(binding: u32, ty: wgpu::BufferBindingType, has_dynamic_offset: bool) -> wgpu::BindGroupLayoutEntry {
    wgpu::BindGroupLayoutEntry {
        binding,
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: wgpu::BindingType::Buffer { ty, has_dynamic_offset, min_binding_size: None },
        count: None,
    }
}

/// The caches hold no invariant that a panic elsewhere could break.
fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
