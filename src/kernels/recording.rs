//! What recorded work needs until the device has finished it: parameters, scratch buffers and bind groups.

use std::collections::HashMap;

use crate::error::{Error, ErrorKind, Result};
use crate::gpu::Gpu;
use crate::kernels::linker::Pipeline;

/// A part of a storage buffer. Offsets are multiples of [`View::ALIGN`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct View {
    /// The buffer.
    pub buffer: wgpu::Buffer,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
}

impl View {
    /// Bytes of which the offset of every view is a multiple; no device asks for more.
    pub const ALIGN: u64 = 256;

    /// `size` bytes of this view from its byte `offset` on, a multiple of [`View::ALIGN`].
    pub fn part(&self, offset: u64, size: u64) -> Self {
        debug_assert!(
            offset.is_multiple_of(Self::ALIGN) && offset + size <= self.size,
            "{offset} + {size} of {self:?}"
        );
        Self { buffer: self.buffer.clone(), offset: self.offset + offset, size }
    }

    /// The whole of `buffer`.
    pub fn whole(buffer: &wgpu::Buffer) -> Self {
        Self { buffer: buffer.clone(), offset: 0, size: buffer.size() }
    }

    fn binding(&self) -> wgpu::BindingResource<'_> {
        wgpu::BindingResource::Buffer(wgpu::BufferBinding {
            buffer: &self.buffer,
            offset: self.offset,
            size: std::num::NonZeroU64::new(self.size),
        })
    }
}

impl From<&wgpu::Buffer> for View {
    fn from(buffer: &wgpu::Buffer) -> Self {
        Self::whole(buffer)
    }
}

/// How many workgroups a dispatch has.
#[derive(Debug, Clone)]
pub enum Grid {
    /// Known on the host.
    Direct([u32; 3]),
    /// Three u32 at this byte of a buffer that an earlier stage writes.
    Indirect(wgpu::Buffer, u64),
}

impl Grid {
    /// `columns` workgroups in x and `n` folded over y and z, as every consumer of tiles or pairs expects it.
    pub fn folded(columns: u32, n: u32) -> Self {
        Self::Direct([columns, n.min(MAX_GROUPS), n.div_ceil(MAX_GROUPS).max(1)])
    }
}

/// One dispatch as it was recorded: all that another program needs to do the same.
#[doc(hidden)]
#[derive(Debug, Clone)]
pub struct Traced {
    /// Stem and variant.
    pub label: String,
    /// The shader.
    pub wgsl: String,
    /// Binding 0.
    pub params: Vec<u8>,
    /// Bindings from 1 on.
    pub buffers: Vec<View>,
    /// Workgroups.
    pub grid: Grid,
}

/// Workgroups that every device allows in one dimension.
pub const MAX_GROUPS: u32 = 65_535;

/// Parameter blocks start at multiples of this; no device asks for more.
const PARAMS_STRIDE: u64 = 256;
const CHUNK_BYTES: u64 = 1 << 18;

struct Chunk {
    buffer: wgpu::Buffer,
    bytes: Vec<u8>,
    flushed: usize,
}

/// Owns the parameters and scratch of recorded work.
///
/// Stages record into the caller's pass and leave their parameters here. Call [`Recording::flush`] before the commands
/// are submitted. Several recordings can precede one submission. After a submission [`Recording::reset`] may follow at
/// once: the queue runs in order, so new parameters and reused scratch cannot overtake work already submitted.
pub struct Recording {
    gpu: Gpu,
    chunks: Vec<Chunk>,
    current: usize,
    scratch: HashMap<&'static str, wgpu::Buffer>,
    groups: HashMap<(usize, wgpu::BindGroupLayout, Vec<View>), wgpu::BindGroup>,
    trace: Option<Vec<Traced>>,
    profile: Option<Profile>,
    labels: Option<Vec<String>>,
}

/// Where dispatches leave the time at which they ended.
struct Profile {
    queries: wgpu::QuerySet,
    capacity: usize,
    labels: Vec<String>,
}

impl Recording {
    /// An empty recording on `gpu`.
    pub fn new(gpu: &Gpu) -> Self {
        let (scratch, groups) = (HashMap::new(), HashMap::new());
        let (trace, profile, labels) = (None, None, None);
        Self { gpu: gpu.clone(), chunks: Vec::new(), current: 0, scratch, groups, trace, profile, labels }
    }

    /// Keeps what is dispatched from now on, and gives what was kept so far: for tests that repeat it elsewhere.
    #[doc(hidden)]
    pub fn trace(&mut self) -> Vec<Traced> {
        self.trace.replace(Vec::new()).unwrap_or_default()
    }

    /// Keeps the label of what is dispatched from now on, and gives those kept so far: which way was chosen.
    pub fn labels(&mut self) -> Vec<String> {
        self.labels.replace(Vec::new()).unwrap_or_default()
    }

    /// The device it records for.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// A scratch buffer of at least `bytes`. The same label gives the same buffer, so that layers recorded one after
    /// the other share it; its contents are those of its last use.
    ///
    /// # Errors
    /// [`ErrorKind::Limit`] above the binding limit; as [`Gpu::buffer`].
    pub fn scratch(&mut self, label: &'static str, bytes: u64) -> Result<View> {
        let limit = self.gpu.capabilities().max_binding_bytes;
        if bytes > limit {
            let message =
                format!("scratch `{label}`: {bytes} bytes, the device's binding limit is {limit}; use smaller steps");
            return Err(Error::new(ErrorKind::Limit, message));
        }
        let enough = self.scratch.get(label).is_some_and(|b| b.size() >= bytes);
        if !enough {
            // Half as much again, so that slowly growing batches do not replace the buffer at each step.
            let had = self.scratch.get(label).map_or(0, wgpu::Buffer::size);
            let size = if had == 0 { bytes } else { bytes.max(had + had / 2) };
            let size = size.min(limit).max(bytes);
            let made = self.gpu.buffer(label, size, wgpu::BufferUsages::INDIRECT)?;
            self.scratch.insert(label, made);
            self.groups.clear();
        }
        let buffer = self.scratch[label].clone();
        let size = bytes.max(16).next_multiple_of(16).min(buffer.size());
        Ok(View { buffer, offset: 0, size })
    }

    /// Records one dispatch: `params` at binding 0, then `buffers` in the order of the shader's bindings.
    pub fn dispatch(
        &mut self,
        pass: &mut wgpu::ComputePass<'_>,
        pipeline: &Pipeline,
        params: &[u8],
        buffers: &[&View],
        grid: &Grid,
    ) {
        debug_assert_eq!(buffers.len(), pipeline.buffers, "{}", pipeline.label);
        if let Grid::Direct(n) = grid
            && n.contains(&0)
        {
            return;
        }
        if let Some(labels) = &mut self.labels {
            labels.push(pipeline.label.clone());
        }
        // The source is rendered anew: not for nothing.
        if let Some(trace) = &mut self.trace
            && let Ok(wgsl) = pipeline.source()
        {
            let buffers = buffers.iter().map(|v| (*v).clone()).collect();
            let (label, params, grid) = (pipeline.label.clone(), params.to_vec(), grid.clone());
            trace.push(Traced { label, wgsl, params, buffers, grid });
        }
        let (chunk, offset) = self.push(params);
        let key = (chunk, pipeline.layout.clone(), buffers.iter().map(|v| (*v).clone()).collect::<Vec<_>>());
        let gpu = &self.gpu;
        let uniform = &self.chunks[chunk].buffer;
        let group = self.groups.entry(key).or_insert_with(|| {
            let mut entries = vec![wgpu::BindGroupEntry {
                binding: 0,
                resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                    buffer: uniform,
                    offset: 0,
                    size: std::num::NonZeroU64::new(PARAMS_STRIDE),
                }),
            }];
            for (i, v) in buffers.iter().enumerate() {
                entries.push(wgpu::BindGroupEntry { binding: i as u32 + 1, resource: v.binding() });
            }
            gpu.device().create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some(&pipeline.label),
                layout: &pipeline.layout,
                entries: &entries,
            })
        });
        pass.set_pipeline(&pipeline.raw);
        pass.set_bind_group(0, &*group, &[offset]);
        match grid {
            Grid::Direct([x, y, z]) => pass.dispatch_workgroups(*x, *y, *z),
            Grid::Indirect(buffer, at) => pass.dispatch_workgroups_indirect(buffer, *at),
        }
        if let Some(profile) = &mut self.profile
            && profile.labels.len() < profile.capacity
        {
            pass.write_timestamp(&profile.queries, profile.labels.len() as u32);
            profile.labels.push(pipeline.label.clone());
        }
    }

    fn push(&mut self, params: &[u8]) -> (usize, u32) {
        if self.chunks.get(self.current).is_some_and(|c| c.bytes.len() as u64 + PARAMS_STRIDE > CHUNK_BYTES) {
            self.current += 1;
        }
        if self.chunks.len() == self.current {
            let buffer = self.gpu.device().create_buffer(&wgpu::BufferDescriptor {
                label: Some("params"),
                size: CHUNK_BYTES,
                usage: wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            });
            self.chunks.push(Chunk { buffer, bytes: Vec::new(), flushed: 0 });
        }
        let chunk = &mut self.chunks[self.current];
        let offset = chunk.bytes.len();
        chunk.bytes.extend_from_slice(params);
        chunk.bytes.resize(offset + PARAMS_STRIDE as usize, 0);
        (self.current, offset as u32)
    }

    /// Sends the parameters recorded since the last flush to the device. Must precede the submission of the commands.
    pub fn flush(&mut self) {
        for chunk in &mut self.chunks {
            if chunk.flushed < chunk.bytes.len() {
                self.gpu.queue().write_buffer(&chunk.buffer, chunk.flushed as u64, &chunk.bytes[chunk.flushed..]);
                chunk.flushed = chunk.bytes.len();
            }
        }
    }

    /// From now on the n-th dispatch leaves a timestamp in query n, while there are any; needs
    /// `TIMESTAMP_QUERY_INSIDE_PASSES`. It makes dispatches wait for each other, so their sum is more than the whole.
    pub fn profile(&mut self, queries: &wgpu::QuerySet, capacity: usize) {
        self.profile = Some(Profile { queries: queries.clone(), capacity, labels: Vec::new() });
    }

    /// The labels of the dispatches that were profiled, in order; those to come are not.
    pub fn profiled(&mut self) -> Vec<String> {
        self.profile.take().map(|p| p.labels).unwrap_or_default()
    }

    /// Starts over, keeping buffers and bind groups.
    pub fn reset(&mut self) {
        for chunk in &mut self.chunks {
            debug_assert_eq!(
                chunk.flushed,
                chunk.bytes.len(),
                "a recording was reset before its parameters were flushed"
            );
            chunk.bytes.clear();
            chunk.flushed = 0;
        }
        self.current = 0;
        // Weights that were freed must not live on in bind groups for ever.
        if self.groups.len() > 1 << 16 {
            self.groups.clear();
        }
    }

    /// Forgets cached bind groups, and with them the buffers they hold; after an adapter pool has grown.
    pub fn forget_bindings(&mut self) {
        self.groups.clear();
    }
}
