//! The device: which adapters exist, what they can do, and the shared state of everything recorded on one of them.

mod asked;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

use serde::Serialize;

use crate::error::{Error, ErrorKind, Result};
use crate::kernels::linker::{Pipeline, PipelineKey};
use crate::plan::capabilities::Capabilities;
use crate::plan::matrix;
use crate::plan::tuning::TuningTable;

/// A class of kernel variants. Every stage has a baseline variant; higher tiers replace some of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// WebGPU's default limits, no optional feature.
    Baseline,
    /// Subgroup operations of any size from 4 to 128.
    Subgroup,
    /// Cooperative matrices of f16 with sums of f32.
    Matrix,
}

impl std::fmt::Display for Tier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Baseline => "baseline",
            Self::Subgroup => "subgroup",
            Self::Matrix => "matrix",
        })
    }
}

impl std::str::FromStr for Tier {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "baseline" => Ok(Self::Baseline),
            "subgroup" => Ok(Self::Subgroup),
            "matrix" => Ok(Self::Matrix),
            _ => Err(Error::new(
                ErrorKind::Device,
                format!("tier `{text}`: expected `baseline`, `subgroup` or `matrix`"),
            )),
        }
    }
}

/// What one adapter is and can do.
#[derive(Debug, Clone, Serialize)]
pub struct GpuInfo {
    /// Position in [`Gpu::list`].
    pub index: usize,
    /// Name given by the driver.
    pub name: String,
    /// `vulkan`, `metal` or `dx12`.
    pub backend: String,
    /// `discrete`, `integrated`, `virtual`, `cpu` or `other`.
    pub device_type: String,
    /// Name of the driver.
    pub driver: String,
    /// Version of the driver, as it describes itself.
    pub driver_info: String,
    /// Smallest and largest subgroup; (0, 0) where unknown. On the matrix tier of a device whose back end does not tell, what the
    /// device itself said when it was opened.
    pub subgroup_sizes: (u32, u32),
    /// Tiers this crate can run on it, lowest first.
    pub tiers: Vec<Tier>,
    /// Rows of the cooperative matrices that the matrix tier multiplies here: 16 or 8; `None` without that tier.
    pub matrix_edge: Option<u32>,
    /// Largest storage binding in bytes.
    pub max_binding_bytes: u64,
    /// Largest buffer in bytes.
    pub max_buffer_bytes: u64,
    /// Workgroup memory in bytes.
    pub max_workgroup_bytes: u32,
    /// Invocations of a workgroup.
    pub max_invocations: u32,
    /// Storage buffers of a shader stage.
    pub max_storage_buffers: u32,
    /// Half-precision arithmetic.
    pub shader_f16: bool,
    /// Runs on the CPU.
    pub software: bool,
}

impl GpuInfo {
    /// A DX12 device that would have more than the baseline tier if its shaders were compiled by DXC.
    fn lacks_dxc(&self) -> bool {
        self.backend == "dx12" && self.tiers == [Tier::Baseline]
    }

    /// Whether `text` means this one of `n` devices: its index, else a part of its name in any case. A number that is no
    /// index can be part of a name, as in `4090`.
    pub fn matches(&self, text: &str, n: usize) -> bool {
        match text.parse::<usize>() {
            Ok(index) if index < n => self.index == index,
            _ => self.name.to_lowercase().contains(&text.to_lowercase()),
        }
    }
}

/// Which device to open, and how.
#[derive(Debug, Clone, Default)]
pub struct GpuOptions {
    /// Index in [`Gpu::list`], or a part of the name (any case). `None` takes the first.
    pub device: Option<String>,
    /// Force a tier. `None` takes the best that the device can run.
    pub tier: Option<Tier>,
}

/// An open device. Cloning is cheap; clones share pipelines.
#[derive(Clone)]
pub struct Gpu {
    inner: Arc<Inner>,
}

struct Inner {
    device: wgpu::Device,
    queue: wgpu::Queue,
    info: GpuInfo,
    tier: Tier,
    capabilities: Capabilities,
    /// Why the device was lost. Only a device of our own says so.
    lost: Arc<OnceLock<String>>,
    /// By all that decides what is compiled, so that the same device with other decisions shares them.
    pipelines: Arc<Mutex<HashMap<PipelineKey, Arc<Pipeline>>>>,
    layouts: Arc<Mutex<HashMap<(usize, usize), wgpu::BindGroupLayout>>>,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gpu({}, {})", self.info().name, self.tier())
    }
}

fn instance() -> wgpu::Instance {
    let mut desc = wgpu::InstanceDescriptor::new_without_display_handle_from_env();
    // Dispatch arguments come from our own align stage, which bounds them; wgpu's check would add a dispatch to each.
    desc.flags.remove(wgpu::InstanceFlags::VALIDATION_INDIRECT_CALL);
    wgpu::Instance::new(desc)
}

/// Adapters in the order in which we number them: discrete GPUs first, software last.
async fn adapters(instance: &wgpu::Instance) -> Vec<wgpu::Adapter> {
    let mut all = instance.enumerate_adapters(wgpu::Backends::all()).await;
    all.sort_by_key(|a| match a.get_info().device_type {
        wgpu::DeviceType::DiscreteGpu => 0,
        wgpu::DeviceType::IntegratedGpu => 1,
        wgpu::DeviceType::VirtualGpu => 2,
        wgpu::DeviceType::Other => 3,
        wgpu::DeviceType::Cpu => 4,
    });
    all
}

fn describe(index: usize, adapter: &wgpu::Adapter) -> GpuInfo {
    let info = adapter.get_info();
    let limits = adapter.limits();
    let features = adapter.features();
    let mut tiers = vec![Tier::Baseline];
    let mut matrix_edge = None;
    if features.contains(wgpu::Features::SUBGROUP) && info.subgroup_min_size >= 4 {
        tiers.push(Tier::Subgroup);
        matrix_edge = matrix::offered(&info, &features, &limits, &adapter.cooperative_matrix_properties());
        tiers.extend(matrix_edge.map(|_| Tier::Matrix));
    }
    GpuInfo {
        index,
        name: info.name.clone(),
        backend: format!("{:?}", info.backend).to_lowercase(),
        device_type: match info.device_type {
            wgpu::DeviceType::DiscreteGpu => "discrete",
            wgpu::DeviceType::IntegratedGpu => "integrated",
            wgpu::DeviceType::VirtualGpu => "virtual",
            wgpu::DeviceType::Cpu => "cpu",
            wgpu::DeviceType::Other => "other",
        }
        .into(),
        driver: info.driver.clone(),
        driver_info: info.driver_info.clone(),
        subgroup_sizes: (info.subgroup_min_size, info.subgroup_max_size),
        tiers,
        matrix_edge,
        max_binding_bytes: limits.max_storage_buffer_binding_size,
        max_buffer_bytes: limits.max_buffer_size,
        max_workgroup_bytes: limits.max_compute_workgroup_storage_size,
        max_invocations: limits.max_compute_invocations_per_workgroup,
        max_storage_buffers: limits.max_storage_buffers_per_shader_stage,
        shader_f16: features.contains(wgpu::Features::SHADER_F16),
        software: info.device_type == wgpu::DeviceType::Cpu,
    }
}

/// What a DX12 device without subgroup operations may lack. FXC, which every Windows has, compiles for shader model 5.1
/// and so the baseline tier alone.
const DXC_HINT: &str = "if its driver is of this decade, put Microsoft's DXC (dxcompiler.dll, 1.8.2502 or newer) beside the program: without it DX12 has the baseline tier alone";

const NO_DEVICE: &str = "no Vulkan, Metal or DX12 device found; on Debian `apt-get install mesa-vulkan-drivers libvulkan1` brings a software one";

impl Gpu {
    /// Every adapter of this machine, in our numbering. Blocks.
    pub fn list() -> Vec<GpuInfo> {
        pollster::block_on(async {
            adapters(&instance()).await.iter().enumerate().map(|(i, a)| describe(i, a)).collect()
        })
    }

    /// Opens a device. Blocks.
    ///
    /// # Errors
    /// [`ErrorKind::Device`] when there is no adapter, none matches `options.device`, the tier is not available on
    /// it, or it lacks a needed limit.
    pub fn new(options: &GpuOptions) -> Result<Self> {
        pollster::block_on(Self::open(options))
    }

    async fn open(options: &GpuOptions) -> Result<Self> {
        let all = adapters(&instance()).await;
        if all.is_empty() {
            return Err(Error::new(ErrorKind::Device, NO_DEVICE));
        }
        let index = match &options.device {
            None => 0,
            Some(text) => choose(text, &all)?,
        };
        let adapter = &all[index];
        let (features, limits, experimental) = Self::wanted(adapter);
        let (device, queue) = adapter
            .request_device(&wgpu::DeviceDescriptor {
                label: Some("wgmoe"),
                required_features: features,
                required_limits: limits,
                experimental_features: experimental,
                memory_hints: wgpu::MemoryHints::Performance,
                trace: wgpu::Trace::Off,
            })
            .await
            .map_err(|e| Error::new(ErrorKind::Device, format!("device `{}`: {e}", adapter.get_info().name)))?;
        // Only on a device of our own: a caller's device keeps the caller's handler.
        device.on_uncaptured_error(Arc::new(|e| log::error!("device: {e}")));
        let lost = Arc::new(OnceLock::new());
        let flag = lost.clone();
        device.set_device_lost_callback(move |reason, message| {
            // The first reason stays.
            let _ = flag.set(format!("{reason:?}: {message}"));
        });
        Self::build(adapter, device, queue, index, options.tier, lost)
    }

    /// The adapter at `index` of [`Gpu::list`], for a device of the caller's own. Blocks.
    ///
    /// # Errors
    /// [`ErrorKind::Device`] when there are not so many.
    pub fn adapter(index: usize) -> Result<wgpu::Adapter> {
        let mut all = pollster::block_on(adapters(&instance()));
        if index >= all.len() {
            let message = format!("device {index}: expected an index below {}, the number of devices", all.len());
            return Err(Error::new(ErrorKind::Device, message));
        }
        Ok(all.swap_remove(index))
    }

    /// What a device must be created with, so that [`Gpu::from_wgpu`] can use all that `adapter` offers.
    pub fn wanted(adapter: &wgpu::Adapter) -> (wgpu::Features, wgpu::Limits, wgpu::ExperimentalFeatures) {
        let offered = adapter.limits();
        let matrices = describe(0, adapter).tiers.contains(&Tier::Matrix);
        let mut features = wgpu::Features::SUBGROUP
            | wgpu::Features::SHADER_F16
            | wgpu::Features::TIMESTAMP_QUERY
            | wgpu::Features::TIMESTAMP_QUERY_INSIDE_PASSES;
        if matrices {
            features |= matrix::FEATURES;
        }
        let features = adapter.features() & features;
        let limits = wgpu::Limits {
            max_buffer_size: offered.max_buffer_size,
            max_storage_buffer_binding_size: offered.max_storage_buffer_binding_size,
            max_compute_workgroup_storage_size: offered.max_compute_workgroup_storage_size,
            ..wgpu::Limits::defaults()
        };
        let experimental = if matrices {
            // SAFETY: the one experimental feature asked for is cooperative matrices; the shaders that use them load whole
            // blocks of workgroup memory, or of buffers that hold a whole number of them, within their bounds: every variant
            // of the crate's cuts is tested against the oracle, and `MatrixTile::check` stands before any other.
            unsafe { wgpu::ExperimentalFeatures::enabled() }
        } else {
            wgpu::ExperimentalFeatures::disabled()
        };
        (features, limits, experimental)
    }

    /// Uses a device and queue that the caller made, with the features and limits of [`Gpu::wanted`] or fewer:
    /// what the device lacks lowers the tier. The caller's instance decides whether indirect calls are validated.
    ///
    /// # Errors
    /// [`ErrorKind::Device`] when `tier` is not available or a needed limit is missing.
    pub fn from_wgpu(
        adapter: &wgpu::Adapter,
        device: wgpu::Device,
        queue: wgpu::Queue,
        tier: Option<Tier>,
    ) -> Result<Self> {
        Self::build(adapter, device, queue, 0, tier, Arc::default())
    }

    fn build(
        adapter: &wgpu::Adapter,
        device: wgpu::Device,
        queue: wgpu::Queue,
        index: usize,
        tier: Option<Tier>,
        lost: Arc<OnceLock<String>>,
    ) -> Result<Self> {
        let mut info = describe(index, adapter);
        let limits = device.limits();
        info.max_binding_bytes = limits.max_storage_buffer_binding_size;
        info.max_buffer_bytes = limits.max_buffer_size;
        if !device.features().contains(wgpu::Features::SUBGROUP) {
            info.tiers.retain(|t| *t == Tier::Baseline);
        }
        let granted = device.features();
        let fits = |edge: u32| limits.max_compute_workgroup_storage_size >= matrix::workgroup_bytes(edge);
        let runs = granted.contains(matrix::FEATURES.union(wgpu::Features::SUBGROUP));
        info.matrix_edge = info.matrix_edge.filter(|edge| runs && fits(*edge));
        let flags = adapter.get_downlevel_capabilities().flags;
        let open = |info: GpuInfo, tier: Tier| -> Result<Self> {
            let capabilities = Capabilities::new(&info, &limits, flags, tier)?;
            let (device, queue, lost) = (device.clone(), queue.clone(), lost.clone());
            let (pipelines, layouts) = (Arc::default(), Arc::default());
            let inner = Inner { device, queue, info, tier, capabilities, lost, pipelines, layouts };
            Ok(Self { inner: Arc::new(inner) })
        };
        let mut asked = None;
        if let Some(edge) = info.matrix_edge
            && matrix::asks_subgroups(adapter.get_info().backend)
            && tier.is_none_or(|tier| tier == Tier::Matrix)
        {
            asked = asked::subgroups(&open(info.clone(), Tier::Subgroup)?, edge).unwrap_or_else(|e| {
                log::warn!("device `{}`: no products on matrices: {e}", info.name);
                None
            });
            info.matrix_edge = asked.map(|_| edge);
        }
        if info.matrix_edge.is_none() {
            info.tiers.retain(|t| *t != Tier::Matrix);
        }
        let best = *info.tiers.last().unwrap_or(&Tier::Baseline);
        let tier = tier.unwrap_or(best);
        if !info.tiers.contains(&tier) {
            let offered: Vec<String> = info.tiers.iter().map(Tier::to_string).collect();
            let mut message =
                format!("tier `{tier}`: not available on `{}`, which offers {}", info.name, offered.join(", "));
            if info.lacks_dxc() {
                message = format!("{message}; {DXC_HINT}");
            }
            return Err(Error::new(ErrorKind::Device, message));
        }
        if info.lacks_dxc() {
            log::warn!("device `{}`: {DXC_HINT}", info.name);
        }
        // The lower tiers take subgroups of any size, as the back end says.
        if let (Some(size), Tier::Matrix) = (asked, tier) {
            info.subgroup_sizes = (size, size);
        }
        open(info, tier)
    }

    /// The same device with submissions of at most `macs` multiply-accumulates, where a layer does not need more: fewer
    /// than [`Capabilities::macs_per_submission`] for a slow GPU that also draws a desktop, whose driver resets it after
    /// about two seconds of work in one submission.
    pub fn with_macs_per_submission(&self, macs: u64) -> Self {
        self.with_capabilities(Capabilities { macs_per_submission: macs.max(1), ..self.capabilities().clone() })
    }

    /// The same device with the thresholds that `table` has for its tier, and its cuts for matrices of its kind, in the place of
    /// [the built-in ones](TuningTable::built_in). Ranks of one model need the same.
    ///
    /// ```no_run
    /// # fn main() -> wgmoe::Result<()> {
    /// use wgmoe::plan::tuning::TuningTable;
    /// use wgmoe::{Gpu, GpuOptions};
    ///
    /// let table = TuningTable::read(std::path::Path::new("tuning.json"))?;
    /// let gpu = Gpu::new(&GpuOptions::default())?.with_tuning(&table)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for a cut of which no right shader can be made.
    pub fn with_tuning(&self, table: &TuningTable) -> Result<Self> {
        table.cuts.check().map_err(|e| Error::new(ErrorKind::Config, format!("`cuts`: {e}")))?;
        let caps = self.capabilities().clone();
        let cuts = Arc::new(table.cuts.of(caps.edge).clone());
        Ok(self.with_capabilities(Capabilities { tuning: table.of(self.tier()), cuts, ..caps }))
    }

    /// The same device and queue with other decisions, which it must be able to run: so that tests meet the variants
    /// of devices that are not at hand.
    #[doc(hidden)]
    pub fn with_capabilities(&self, capabilities: Capabilities) -> Self {
        let inner = Inner {
            device: self.device().clone(),
            queue: self.queue().clone(),
            info: self.info().clone(),
            tier: capabilities.tier,
            capabilities,
            lost: self.inner.lost.clone(),
            pipelines: self.inner.pipelines.clone(),
            layouts: self.inner.layouts.clone(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Fails once the device is known to be lost: by a reset of the driver, removal, or [`wgpu::Device::destroy`].
    /// Nothing made on it can be used then; another [`Gpu`] can be opened. A caller's own device is only found out
    /// when results are read.
    ///
    /// # Errors
    /// [`ErrorKind::Device`] with the reason.
    pub fn check(&self) -> Result<()> {
        match self.inner.lost.get() {
            None => Ok(()),
            Some(why) => Err(Error::new(ErrorKind::Device, format!("device `{}`: lost, {why}", self.info().name))),
        }
    }

    /// The adapter behind this device.
    pub fn info(&self) -> &GpuInfo {
        &self.inner.info
    }

    /// The tier whose kernels run.
    pub fn tier(&self) -> Tier {
        self.inner.tier
    }

    /// What `plan` may assume of this device.
    pub fn capabilities(&self) -> &Capabilities {
        &self.inner.capabilities
    }

    /// The wgpu device.
    pub fn device(&self) -> &wgpu::Device {
        &self.inner.device
    }

    /// The wgpu queue.
    pub fn queue(&self) -> &wgpu::Queue {
        &self.inner.queue
    }

    pub(crate) fn pipelines(&self) -> &Mutex<HashMap<PipelineKey, Arc<Pipeline>>> {
        &self.inner.pipelines
    }

    pub(crate) fn layouts(&self) -> &Mutex<HashMap<(usize, usize), wgpu::BindGroupLayout>> {
        &self.inner.layouts
    }

    /// Makes an empty storage buffer of `bytes` (rounded up to 16).
    ///
    /// # Errors
    /// [`ErrorKind::Limit`] above the device's buffer limit, [`ErrorKind::OutOfMemory`] when the device has none left,
    /// [`ErrorKind::Device`] when it was lost.
    pub fn buffer(&self, label: &str, bytes: u64, extra: wgpu::BufferUsages) -> Result<wgpu::Buffer> {
        self.check()?;
        let size = bytes.max(16).next_multiple_of(16);
        if size > self.inner.info.max_buffer_bytes {
            return Err(Error::new(
                ErrorKind::Limit,
                format!("buffer `{label}`: {size} bytes, the device allows {}", self.inner.info.max_buffer_bytes),
            ));
        }
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::COPY_SRC | extra;
        self.create(&wgpu::BufferDescriptor { label: Some(label), size, usage, mapped_at_creation: false })
    }

    /// A buffer of any kind; errors: `OutOfMemory`.
    pub(crate) fn create(&self, desc: &wgpu::BufferDescriptor<'_>) -> Result<wgpu::Buffer> {
        let scope = self.device().push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let buffer = self.device().create_buffer(desc);
        match pollster::block_on(scope.pop()) {
            None => Ok(buffer),
            Some(e) => {
                let message = format!("buffer `{}` of {} bytes: {e}", desc.label.unwrap_or_default(), desc.size);
                Err(Error::new(ErrorKind::OutOfMemory, message))
            }
        }
    }

    /// A buffer of `bytes` or more that the host can read: one of `free`, or a new one in their place.
    ///
    /// Errors: `OutOfMemory`.
    pub(crate) fn readable(&self, free: &mut Vec<wgpu::Buffer>, label: &str, bytes: u64) -> Result<wgpu::Buffer> {
        if let Some(at) = free.iter().position(|b| b.size() >= bytes) {
            return Ok(free.swap_remove(at));
        }
        free.clear();
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        let size = bytes.next_power_of_two().max(256);
        self.create(&wgpu::BufferDescriptor { label: Some(label), size, usage, mapped_at_creation: false })
    }

    /// Copies `bytes` of `buffer` back to the host. Blocks until the device has finished; for tests and tools.
    ///
    /// # Errors
    /// [`ErrorKind::Device`] when the device was lost.
    pub fn read(&self, buffer: &wgpu::Buffer, offset: u64, bytes: u64) -> Result<Vec<u8>> {
        let size = bytes.next_multiple_of(4);
        let staging = self.device().create_buffer(&wgpu::BufferDescriptor {
            label: Some("read"),
            size,
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let mut encoder = self.device().create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("read") });
        encoder.copy_buffer_to_buffer(buffer, offset, &staging, 0, size);
        self.queue().submit([encoder.finish()]);
        staging.map_async(wgpu::MapMode::Read, .., |_| {});
        self.device()
            .poll(wgpu::PollType::wait_indefinitely())
            .map_err(|e| Error::new(ErrorKind::Device, format!("reading back: {e}")))?;
        let view =
            staging.get_mapped_range(..).map_err(|e| Error::new(ErrorKind::Device, format!("reading back: {e}")))?;
        Ok(view[..bytes as usize].to_vec())
    }
}

fn choose(text: &str, all: &[wgpu::Adapter]) -> Result<usize> {
    let infos: Vec<GpuInfo> = all.iter().enumerate().map(|(i, a)| describe(i, a)).collect();
    infos.iter().position(|info| info.matches(text, all.len())).ok_or_else(|| {
        let listed: Vec<String> = infos.iter().map(|info| format!("index {} is `{}`", info.index, info.name)).collect();
        let listed = listed.join(", ");
        let message = format!("device `{text}`: expected the index of a device or a part of its name; {listed}");
        Error::new(ErrorKind::Device, message)
    })
}
