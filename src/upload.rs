//! From checkpoint bytes to resident buffers: cut under the binding limit, written in bounded portions, counted.

use crate::checkpoint::Checkpoint;
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::family::Role;
use crate::gpu::Gpu;
use crate::kernels::View;
use crate::kernels::expert_gemm::Weights;
use crate::plan::matrix;
use crate::plan::pieces::cut;

/// Staging memory that may be pending at a time.
const STAGING_BYTES: u64 = 64 << 20;

/// Writes weights to the device and reports how far it got.
pub struct Uploader<'a> {
    gpu: &'a Gpu,
    progress: &'a mut dyn FnMut(u64, u64),
    done: u64,
    total: u64,
    pending: u64,
}

impl<'a> Uploader<'a> {
    /// An uploader that will write `total` bytes and calls `progress(done, total)`.
    pub fn new(gpu: &'a Gpu, total: u64, progress: &'a mut dyn FnMut(u64, u64)) -> Self {
        progress(0, total);
        Self { gpu, progress, done: 0, total, pending: 0 }
    }

    /// Bytes written so far.
    pub fn done(&self) -> u64 {
        self.done
    }

    fn write(&mut self, buffer: &wgpu::Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
        for (i, part) in bytes.chunks(STAGING_BYTES as usize).enumerate() {
            let at = offset + i as u64 * STAGING_BYTES;
            if part.len() % 4 == 0 {
                self.gpu.queue().write_buffer(buffer, at, part);
            } else {
                let mut whole = part.to_vec();
                whole.resize(part.len().next_multiple_of(4), 0);
                self.gpu.queue().write_buffer(buffer, at, &whole);
            }
            self.pending += part.len() as u64;
            self.done += part.len() as u64;
            if self.pending >= STAGING_BYTES {
                self.settle()?;
            }
        }
        // Norms grow from 16 to 32 bits on the way.
        (self.progress)(self.done.min(self.total), self.total);
        Ok(())
    }

    /// Waits until the device has taken what was written, so that staging memory stays bounded.
    pub fn settle(&mut self) -> Result<()> {
        self.pending = 0;
        self.gpu.queue().submit([]);
        self.gpu
            .device()
            .poll(wgpu::PollType::wait_indefinitely())
            .map_err(|e| Error::new(ErrorKind::Device, format!("uploading weights: {e}")))?;
        Ok(())
    }

    /// Uploads a stack of `count` matrices `[out, in]`; `parts(m)` gives the row blocks of matrix m, top to bottom.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] when `in` is no multiple of 8 or the parts differ in type, [`ErrorKind::Limit`] when
    /// a row exceeds a binding, [`ErrorKind::OutOfMemory`].
    pub fn stack<'b>(
        &mut self,
        label: &str,
        count: usize,
        [out_dim, in_dim]: [usize; 2],
        parts: &dyn Fn(usize) -> Result<Vec<(DType, &'b [u8])>>,
    ) -> Result<Weights> {
        if in_dim % 8 != 0 {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("`{label}`: rows of {in_dim} weights, expected a multiple of 8"),
            ));
        }
        let dtype = match (count > 0).then(|| parts(0)).transpose()?.as_deref() {
            Some([(dtype, _), ..]) => *dtype,
            _ => DType::F32,
        };
        let row_bytes = (in_dim * dtype.size()) as u64;
        let mut pieces = Vec::new();
        let mut buffers: Vec<wgpu::Buffer> = Vec::new();
        for piece in cut(count, out_dim, row_bytes, self.gpu.capabilities().max_binding_bytes)? {
            let bytes = (piece.count * piece.rows) as u64 * row_bytes;
            let buffer = self.gpu.buffer(label, bytes, wgpu::BufferUsages::empty())?;
            pieces.push((piece, View::whole(&buffer)));
            buffers.push(buffer);
        }
        let measured = self.gpu.capabilities().matrix;
        let mut largest = vec![0f32; count];
        for (m, largest) in largest.iter_mut().enumerate() {
            // Where this part begins, in rows of the matrix.
            let mut row = 0;
            for (part_type, bytes) in parts(m)? {
                if part_type != dtype {
                    return Err(Error::new(
                        ErrorKind::Unsupported,
                        format!("`{label}`: stored as {} and {}, expected one type", dtype.name(), part_type.name()),
                    ));
                }
                if measured {
                    *largest = largest.max(matrix::largest(dtype, bytes));
                }
                let rows = bytes.len() / row_bytes as usize;
                for ((piece, _), buffer) in pieces.iter().zip(&buffers) {
                    if m < piece.first || m >= piece.first + piece.count {
                        continue;
                    }
                    let begin = row.max(piece.row_begin);
                    let end = (row + rows).min(piece.row_begin + piece.rows);
                    if begin < end {
                        let offset = ((m - piece.first) * piece.rows + begin - piece.row_begin) as u64 * row_bytes;
                        let from = (begin - row) * row_bytes as usize;
                        let to = (end - row) * row_bytes as usize;
                        self.write(buffer, offset, &bytes[from..to])?;
                    }
                }
                row += rows;
            }
        }
        let exponent = measured.then(|| matrix::weight_exponent(dtype, &largest)).flatten();
        Ok(Weights { dtype, count, out_dim, in_dim, pieces, exponent })
    }

    /// Uploads one matrix made of the rows of several tensors.
    ///
    /// # Errors
    /// As [`Uploader::stack`], and those of the checkpoint.
    pub fn matrix(
        &mut self,
        checkpoint: &Checkpoint,
        label: &str,
        shape: [usize; 2],
        roles: &[Role],
    ) -> Result<Weights> {
        self.stack(label, 1, shape, &|_| {
            roles
                .iter()
                .map(|role| {
                    let view = checkpoint.role(*role)?;
                    Ok((view.dtype, view.all()))
                })
                .collect()
        })
    }

    /// Uploads vectors (norm weights), decoded to f32, one after the other.
    ///
    /// # Errors
    /// Those of the checkpoint and of the device.
    pub fn vectors(&mut self, checkpoint: &Checkpoint, label: &str, roles: &[Role]) -> Result<View> {
        let mut values = Vec::new();
        for role in roles {
            values.extend(checkpoint.role(*role)?.to_f32());
        }
        let buffer = self.gpu.buffer(label, values.len() as u64 * 4, wgpu::BufferUsages::empty())?;
        self.write(&buffer, 0, bytemuck::cast_slice(&values))?;
        Ok(View::whole(&buffer))
    }
}
