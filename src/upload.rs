//! From checkpoint bytes to resident buffers: cut under the binding limit, read by several threads, written in bounded
//! portions, counted.

mod ring;
mod stream;

use ring::Ring;
use stream::{CHUNK_BYTES, Chunk, Run, stream};
pub use stream::{StreamOptions, Streamed};

use std::ops::Range;
use std::sync::Arc;

use crate::checkpoint::Block;
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::Gpu;
use crate::kernels::operands::Weights;
use crate::kernels::random::Random;
use crate::kernels::{Recording, View};
use crate::plan::matrix::{Magnitude, Measured};
use crate::plan::pieces::cut;

/// Collects what to write where; [`run`](Self::run) reads and writes it all.
///
/// Buffers are made at once, so that a model that does not fit is refused before a byte is read.
pub struct Uploader<'a> {
    gpu: Gpu,
    buffers: Vec<wgpu::Buffer>,
    chunks: Vec<Chunk<'a>>,
    /// Stacks whose weights are measured while they are read.
    measured: Vec<Arc<Measured>>,
    /// Bindings that are filled on the device: with what, from which weight on, and how many.
    made_up: Vec<(View, Random, u32, usize)>,
    /// Bytes read while collecting.
    bytes_read: u64,
    n_bytes: u64,
    made_up_bytes: u64,
}

/// Takes the number of a buffer, an offset in it and bytes.
pub type Sink<'a> = dyn FnMut(usize, u64, &[u8]) -> Result<()> + 'a;

impl<'a> Uploader<'a> {
    /// Uploads to `gpu`.
    pub fn new(gpu: &Gpu) -> Self {
        let (buffers, chunks, measured, made_up) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { gpu: gpu.clone(), buffers, chunks, measured, made_up, bytes_read: 0, n_bytes: 0, made_up_bytes: 0 }
    }

    /// Bytes that will be written, padding and random weights included.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes + self.made_up_bytes
    }

    /// A stack of `count` matrices `[out, in]` of random weights, which the device makes.
    ///
    /// # Errors
    /// As [`stack`](Self::stack).
    pub fn random(
        &mut self,
        label: &str,
        count: usize,
        [out_dim, in_dim]: [usize; 2],
        random: Random,
    ) -> Result<Weights> {
        check_columns(label, in_dim)?;
        let dtype = random.dtype;
        let limit = self.gpu.capabilities().max_binding_bytes;
        let mut pieces = Vec::new();
        for piece in cut(count, out_dim, (in_dim * dtype.size()) as u64, limit)? {
            let n = piece.count * piece.rows * in_dim;
            let n_bytes = (n * dtype.size()) as u64;
            let view = View::whole(&self.gpu.buffer(label, n_bytes, wgpu::BufferUsages::empty())?);
            let first = (piece.first * out_dim + piece.row_begin) * in_dim;
            self.made_up.push((view.clone(), random, first as u32, n));
            self.made_up_bytes += n_bytes;
            pieces.push((piece, view));
        }
        let magnitude = random.magnitude(in_dim);
        Ok(Weights { dtype, count, out_dim, in_dim, pieces, magnitude })
    }

    /// A stack of `count` matrices `[out, in]`; `parts(m)` gives the row blocks of matrix m, top to bottom. Blocks with
    /// fewer columns than `in` are filled up with zeros. For the matrix tier the weights are measured while they are read:
    /// their magnitude is known when [`run`](Self::run) has returned.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] when `in` is no multiple of 8 or the parts differ in type, [`ErrorKind::Tensor`] when the
    /// parts do not make up the matrix, [`ErrorKind::Limit`] when a row exceeds a binding, [`ErrorKind::OutOfMemory`].
    pub fn stack(
        &mut self,
        label: &str,
        count: usize,
        [out_dim, in_dim]: [usize; 2],
        parts: &dyn Fn(usize) -> Result<Vec<Block<'a>>>,
    ) -> Result<Weights> {
        check_columns(label, in_dim)?;
        let matrices = (0..count).map(parts).collect::<Result<Vec<_>>>()?;
        let dtype = matrices.first().and_then(|m| m.first()).map_or(DType::F32, Block::dtype);
        for block in matrices.iter().flatten() {
            if block.dtype() != dtype {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!("`{label}`: stored as {} and {}, expected one type", dtype.name(), block.dtype().name()),
                ));
            }
        }
        for matrix in &matrices {
            let rows: usize = matrix.iter().map(Block::height).sum();
            if let Some(wide) = matrix.iter().find(|b| b.cols() > in_dim) {
                let message = format!("`{label}`: expected {in_dim} columns or fewer, got {}", wide.cols());
                return Err(Error::new(ErrorKind::Tensor, message));
            }
            if rows != out_dim {
                return Err(Error::new(ErrorKind::Tensor, format!("`{label}`: expected {out_dim} rows, got {rows}")));
            }
        }
        let row_bytes = in_dim * dtype.size();
        let limit = self.gpu.capabilities().max_binding_bytes;
        let (measured, magnitude) = if self.gpu.capabilities().matrix {
            let (measured, magnitude) = Measured::new(dtype, count, in_dim);
            (measured.map(Arc::new), magnitude)
        } else {
            (None, Magnitude::known(None, None))
        };
        self.measured.extend(measured.clone());
        let mut pieces = Vec::new();
        for piece in cut(count, out_dim, row_bytes as u64, limit)? {
            let n_bytes = (piece.count * piece.rows * row_bytes) as u64;
            let view = self.buffer(label, n_bytes)?;
            let mut rows = Rows { row_bytes, buffer: self.buffers.len() - 1, first: 0, next: 0, runs: Vec::new() };
            for (m, matrix) in matrices.iter().enumerate().skip(piece.first).take(piece.count) {
                let (wanted, measured) =
                    (piece.row_begin..piece.row_begin + piece.rows, measured.as_ref().map(|s| (s, m)));
                rows.append(matrix, wanted, measured, &mut |chunk| self.push(chunk));
            }
            rows.flush(&mut |chunk| self.push(chunk));
            pieces.push((piece, view));
        }
        Ok(Weights { dtype, count, out_dim, in_dim, pieces, magnitude })
    }

    /// Vectors (norm weights), one after the other, decoded to f32 on the way.
    ///
    /// # Errors
    /// Those of the checkpoint and of the device.
    pub fn vectors(&mut self, label: &str, parts: &[Block<'_>]) -> Result<View> {
        let mut values = Vec::new();
        for block in parts {
            values.extend(block.dtype().decode(&block.to_vec()?));
            self.bytes_read += block.n_bytes() as u64;
        }
        let block = Block::row(&values);
        let n_bytes = block.n_bytes();
        let view = self.buffer(label, n_bytes as u64)?;
        let run = Run { block, rows: 0..1, at: 0, stride: n_bytes, measured: None };
        self.push(Chunk { buffer: self.buffers.len() - 1, offset: 0, n_bytes, runs: vec![run] });
        Ok(view)
    }

    /// Reads everything and writes it to the device, with `progress(done, total)` in bytes written.
    ///
    /// # Errors
    /// [`ErrorKind::Io`], [`ErrorKind::Cancelled`], and [`ErrorKind::Device`] when the device was lost.
    pub fn run(self, options: &StreamOptions<'_>, progress: &mut dyn FnMut(u64, u64)) -> Result<Streamed> {
        self.make_up()?;
        let mut ring = Ring::new(&self.gpu);
        let buffers = self.buffers.clone();
        let streamed =
            self.run_into(options, progress, &mut |buffer, offset, bytes| ring.write(&buffers[buffer], offset, bytes))?;
        ring.settle()?;
        Ok(streamed)
    }

    /// Reads everything and gives it to `sink(buffer, offset, bytes)`, in any order, buffers numbered as they were made; for
    /// tools that measure or check what is read.
    ///
    /// # Errors
    /// [`ErrorKind::Io`], [`ErrorKind::Cancelled`], and those of `sink`.
    pub fn run_into(
        self,
        options: &StreamOptions<'_>,
        progress: &mut dyn FnMut(u64, u64),
        sink: &mut Sink<'_>,
    ) -> Result<Streamed> {
        let mut done = 0;
        progress(0, self.n_bytes);
        let mut streamed = stream(&self.chunks, options, &mut |number, bytes| {
            let chunk = &self.chunks[number];
            sink(chunk.buffer, chunk.offset, bytes)?;
            done += bytes.len() as u64;
            progress(done, self.n_bytes);
            Ok(())
        })?;
        streamed.bytes_read += self.bytes_read;
        self.measured.iter().for_each(|measured| measured.finish());
        Ok(streamed)
    }

    /// Fills what is random, a binding a submission: a desktop driver minds long ones.
    fn make_up(&self) -> Result<()> {
        let mut rec = Recording::new(&self.gpu);
        for (view, random, first, n) in &self.made_up {
            let mut encoder =
                self.gpu.device().create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("random") });
            {
                let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
                random.fill(&mut rec, &mut pass, view, *first, *n)?;
            }
            rec.flush();
            self.gpu.queue().submit([encoder.finish()]);
        }
        Ok(())
    }

    /// A buffer that [`run`](Self::run) will write.
    fn buffer(&mut self, label: &str, n_bytes: u64) -> Result<View> {
        let buffer = self.gpu.buffer(label, n_bytes, wgpu::BufferUsages::empty())?;
        self.buffers.push(buffer.clone());
        Ok(View::whole(&buffer))
    }

    fn push(&mut self, chunk: Chunk<'a>) {
        if chunk.n_bytes > 0 {
            self.n_bytes += chunk.n_bytes as u64;
            self.chunks.push(chunk);
        }
    }
}

/// Kernels read rows in groups of eight.
fn check_columns(label: &str, in_dim: usize) -> Result<()> {
    if in_dim.is_multiple_of(8) {
        return Ok(());
    }
    let message = format!("`{label}`: rows of {in_dim} weights, expected a multiple of 8");
    Err(Error::new(ErrorKind::Unsupported, message))
}

/// Rows of a buffer, gathered into chunks.
struct Rows<'a> {
    row_bytes: usize,
    buffer: usize,
    /// First row of the chunk under construction, and the row after its last.
    first: usize,
    next: usize,
    runs: Vec<Run<'a>>,
}

impl<'a> Rows<'a> {
    /// Appends the rows `wanted` of a matrix made of `blocks`; `measured`: where its magnitude is wanted.
    fn append(
        &mut self,
        blocks: &[Block<'a>],
        wanted: Range<usize>,
        measured: Option<(&Arc<Measured>, usize)>,
        push: &mut dyn FnMut(Chunk<'a>),
    ) {
        let chunk_rows = (CHUNK_BYTES / self.row_bytes.max(1)).max(1);
        // Where this block begins, in rows of the matrix.
        let mut begin = 0;
        for block in blocks {
            let mut row = begin.max(wanted.start);
            let end = (begin + block.height()).min(wanted.end);
            while row < end {
                let room = chunk_rows - (self.next - self.first);
                let n = room.min(end - row);
                // Rows past those of the block stay zero.
                let rows = row - begin..(row - begin + n).min(block.rows());
                if !rows.is_empty() {
                    let at = (self.next - self.first) * self.row_bytes;
                    let measured = measured.map(|(stack, m)| (stack.clone(), m));
                    self.runs.push(Run { block: block.clone(), rows, at, stride: self.row_bytes, measured });
                }
                self.next += n;
                row += n;
                if self.next - self.first == chunk_rows {
                    self.flush(push);
                }
            }
            begin += block.height();
        }
    }

    /// Ends the chunk.
    fn flush(&mut self, push: &mut dyn FnMut(Chunk<'a>)) {
        let (offset, n_bytes) = ((self.first * self.row_bytes) as u64, (self.next - self.first) * self.row_bytes);
        push(Chunk { buffer: self.buffer, offset, n_bytes, runs: std::mem::take(&mut self.runs) });
        self.first = self.next;
    }
}
