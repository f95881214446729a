//! Adapters on the device: slots, pins, eviction. Room for all layers is made before a byte is written.

use std::collections::HashMap;
use std::sync::Arc;

use crate::adapter::free_list::FreeList;
use crate::adapter::sites::LayerSites;
use crate::adapter::{Adapter, MAX_RANK, Matrix};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::Gpu;
use crate::kernels::View;
use crate::kernels::lora::Factors;
use crate::placement::ExpertShare;

/// Bytes of a pool word: what an index entry counts in.
const WORD: u64 = 16;

/// Names one load of one adapter for ever: a reload under the same name gets another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AdapterId(pub(crate) u64);

impl AdapterId {
    /// The id of one load, for callers that drive an [`AdapterPool`] themselves; a number must never be used twice.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }
}

/// The factors of one layer: a buffer of 16-byte words, its free ranges, and the index.
struct LayerPool {
    sites: LayerSites,
    share: Option<ExpertShare>,
    factors: Factors,
    capacity: u64,
    free: FreeList,
}

struct Slot {
    id: AdapterId,
    pins: usize,
    last_use: u64,
    max_rank: usize,
    /// (layer, first word, words).
    ranges: Vec<(usize, u64, u64)>,
}

/// What one layer of an adapter becomes on the device.
struct LayerImage {
    words: Vec<u8>,
    /// (entry without slot, site offsets relative to the range) of each factor.
    entries: Vec<(usize, [u32; 4])>,
}

/// Holds up to L adapters on the device.
pub struct AdapterPool {
    gpu: Gpu,
    layers: Vec<LayerPool>,
    slots: Vec<Option<Slot>>,
    clock: u64,
    growths: u64,
}

impl AdapterPool {
    /// An empty pool with one entry in `layers` for each decoder layer: its sites and, where it has experts, what this rank holds of
    /// them.
    ///
    /// # Errors
    /// When the device has no room for the index.
    pub fn new(gpu: &Gpu, layers: Vec<(LayerSites, Option<ExpertShare>)>, slots: usize) -> Result<Self> {
        let layers = layers
            .into_iter()
            .map(|(sites, share)| {
                // Fresh buffers are zero, and rank 0 means: nothing here.
                let index = gpu.buffer("adapter index", sites.entries as u64 * WORD, wgpu::BufferUsages::empty())?;
                let pool = gpu.buffer("adapter factors", WORD, wgpu::BufferUsages::empty())?;
                let factors = Factors { pool: View::whole(&pool), index: View::whole(&index) };
                Ok(LayerPool { sites, share, factors, capacity: 0, free: FreeList::default() })
            })
            .collect::<Result<_>>()?;
        Ok(Self { gpu: gpu.clone(), layers, slots: (0..slots).map(|_| None).collect(), clock: 0, growths: 0 })
    }

    /// L.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// The sites and factors of a layer.
    pub fn layer(&self, layer: usize) -> (&LayerSites, &Factors) {
        (&self.layers[layer].sites, &self.layers[layer].factors)
    }

    /// The largest rank of the adapter in `slot`, 0 when it is empty.
    pub fn max_rank(&self, slot: usize) -> usize {
        self.slots[slot].as_ref().map_or(0, |s| s.max_rank)
    }

    /// The slot of a resident adapter.
    pub fn resident(&self, id: AdapterId) -> Option<usize> {
        self.slots.iter().position(|s| s.as_ref().is_some_and(|s| s.id == id))
    }

    /// How often a layer's buffer was replaced by a larger one.
    pub fn growths(&self) -> u64 {
        self.growths
    }

    /// Checks that every factor of `adapter` has a place in this model and the shape of it.
    ///
    /// # Errors
    /// [`ErrorKind::Adapter`] naming the first factor that does not fit.
    pub fn check(&self, adapter: &Adapter) -> Result<()> {
        for f in &adapter.factors {
            let place = || format!("layer {} {:?} {}", f.layer, f.site, f.expert);
            let fail = |what: String| Err(Error::new(ErrorKind::Adapter, format!("{}: {what}", place())));
            let Some(layer) = self.layers.get(f.layer) else { return fail("the model has no such layer".into()) };
            let experts = layer.share.as_ref().map_or(0, |share| share.placement().experts());
            let Some([out, input]) = layer.sites.shape(f.site, layer.share.is_some()) else {
                return fail("the layer has no such projection".into());
            };
            if is_expert(f.site) && f.expert >= experts {
                return fail(format!("expected an expert below {experts}"));
            }
            if [f.a.rows, f.a.cols, f.b.rows, f.b.cols] != [f.rank, input, out, f.rank] || f.rank > MAX_RANK {
                let got = format!("[{}, {}] and [{}, {}]", f.a.rows, f.a.cols, f.b.rows, f.b.cols);
                return fail(format!("expected A [{}, {input}] and B [{out}, {}], got {got}", f.rank, f.rank));
            }
        }
        Ok(())
    }

    /// Makes `adapter` resident and pins it: it stays until [`AdapterPool::unpin`]. `None` when it has to wait until
    /// something is unpinned: every slot is pinned, or what is pinned leaves no room.
    ///
    /// # Errors
    /// [`ErrorKind::Limit`] or [`ErrorKind::OutOfMemory`] when the factors do not fit even alone.
    pub fn pin(&mut self, id: AdapterId, adapter: &Adapter) -> Result<Option<usize>> {
        self.clock += 1;
        let slot = match self.resident(id) {
            Some(slot) => slot,
            None => {
                let Some(slot) = self.victim() else { return Ok(None) };
                if !self.make_room(slot, adapter)? {
                    return Ok(None);
                }
                self.load(slot, id, adapter)?;
                slot
            }
        };
        if let Some(held) = &mut self.slots[slot] {
            held.pins += 1;
            held.last_use = self.clock;
        }
        Ok(Some(slot))
    }

    /// Gives back one pin.
    pub fn unpin(&mut self, slot: usize) {
        if let Some(held) = &mut self.slots[slot] {
            held.pins = held.pins.saturating_sub(1);
        }
    }

    /// Frees the slot of `id`, unless a sequence still uses it.
    pub fn forget(&mut self, id: AdapterId) {
        if let Some(slot) = self.resident(id)
            && self.slots[slot].as_ref().is_some_and(|s| s.pins == 0)
        {
            self.release(slot);
            // An empty slot has no factors, whoever maps a token to it.
            let nothing = LayerImage { words: Vec::new(), entries: Vec::new() };
            for layer in &self.layers {
                layer.publish(&self.gpu, slot, 0, &nothing);
            }
        }
    }

    /// An empty slot, else the least recently used one that nothing pins.
    fn victim(&self) -> Option<usize> {
        self.slots.iter().position(Option::is_none).or_else(|| self.idle().next())
    }

    fn release(&mut self, slot: usize) {
        if let Some(old) = self.slots[slot].take() {
            for (layer, begin, size) in old.ranges {
                self.layers[layer].free.give(begin, size);
            }
        }
    }

    /// Makes room for `adapter` in every layer: by growing, else by evicting what nothing pins, first the tenant of `slot`,
    /// then the least recently used. False when what is pinned is in the way.
    fn make_room(&mut self, slot: usize, adapter: &Adapter) -> Result<bool> {
        let sizes: Vec<u64> = self
            .layers
            .iter()
            .enumerate()
            .map(|(layer, pool)| pool.image(layer, adapter).words.len() as u64 / WORD)
            .collect();
        let mut next = Some(slot);
        loop {
            let refused =
                self.layers.iter_mut().zip(&sizes).find_map(|(pool, words)| match pool.reserve(&self.gpu, *words) {
                    Ok(grown) => {
                        self.growths += u64::from(grown);
                        None
                    }
                    Err(e) => Some(e),
                });
            let Some(error) = refused else {
                self.release(slot);
                return Ok(true);
            };
            match next.take().or_else(|| self.idle().find(|i| self.slots[*i].is_some())) {
                Some(evicted) => self.release(evicted),
                None if self.slots.iter().flatten().any(|s| s.pins > 0) => return Ok(false),
                None => return Err(error),
            }
        }
    }

    /// Slots with a tenant that nothing pins, least recently used first.
    fn idle(&self) -> impl Iterator<Item = usize> {
        let mut idle: Vec<(u64, usize)> = self
            .slots
            .iter()
            .enumerate()
            .filter_map(|(i, s)| s.as_ref().filter(|s| s.pins == 0).map(|s| (s.last_use, i)))
            .collect();
        idle.sort_unstable();
        idle.into_iter().map(|(_, i)| i)
    }

    /// Queue writes run in order: steps already submitted still see the old factors, later ones only the new. A layer at
    /// a time, so that staging memory stays bounded.
    fn load(&mut self, slot: usize, id: AdapterId, adapter: &Adapter) -> Result<()> {
        let mut ranges = Vec::new();
        for (layer, pool) in self.layers.iter_mut().enumerate() {
            let image = pool.image(layer, adapter);
            let size = image.words.len() as u64 / WORD;
            let begin = pool
                .free
                .take(size)
                .ok_or_else(|| Error::new(ErrorKind::Limit, "adapter pool: reserved room is gone"))?;
            ranges.push((layer, begin, size));
            pool.publish(&self.gpu, slot, begin, &image);
            self.gpu.queue().submit([]);
        }
        let max_rank = adapter.factors.iter().map(|f| f.rank).max().unwrap_or(0);
        self.slots[slot] = Some(Slot { id, pins: 0, last_use: self.clock, max_rank, ranges });
        Ok(())
    }
}

impl LayerPool {
    fn image(&self, layer: usize, adapter: &Adapter) -> LayerImage {
        let mut image = LayerImage { words: Vec::new(), entries: Vec::new() };
        // gate and up of a fused adapter share A: it is stored once.
        let mut stored: HashMap<*const Matrix, u32> = HashMap::new();
        let first = adapter.factors.partition_point(|f| f.layer < layer);
        for factor in adapter.factors[first..].iter().take_while(|f| f.layer == layer) {
            let expert = match (&self.share, is_expert(factor.site)) {
                (Some(share), true) => match share.placement().local(factor.expert) {
                    Some(local) => local,
                    // Another rank holds this expert.
                    None => continue,
                },
                _ => 0,
            };
            let Some(entry) = self.sites.entry(0, factor.site, expert) else { continue };
            let (a, b, dtype) = if factor.a.dtype == factor.b.dtype {
                let a = place(&mut image.words, &mut stored, &factor.a);
                (a, place(&mut image.words, &mut stored, &factor.b), factor.a.dtype)
            } else {
                // An entry has one type for both.
                let a = append(&mut image.words, &to_f32(&factor.a));
                (a, append(&mut image.words, &to_f32(&factor.b)), DType::F32)
            };
            let kind = match dtype {
                DType::F16 => 1,
                DType::Bf16 => 2,
                _ => 0,
            };
            image.entries.push((entry, [a, b, factor.rank as u32 | kind << 16, factor.scale.to_bits()]));
        }
        image
    }

    /// Makes sure that one range of `words` is free, growing the buffer where needed; true when it grew.
    fn reserve(&mut self, gpu: &Gpu, words: u64) -> Result<bool> {
        if let Some(begin) = self.free.take(words) {
            if words > 0 {
                self.free.give(begin, words);
            }
            return Ok(false);
        }
        let limit = gpu.capabilities().max_binding_bytes / WORD;
        // What is free at the end counts towards the range.
        let needed = self.capacity + words - self.free.tail(self.capacity);
        let wanted = (self.capacity * 2).max(needed).min(limit);
        if wanted < needed {
            let message = format!(
                "adapter factors: {} bytes in one layer, the device's binding limit is {}",
                needed * WORD,
                limit * WORD
            );
            return Err(Error::new(ErrorKind::Limit, message));
        }
        let grown = gpu.buffer("adapter factors", wanted * WORD, wgpu::BufferUsages::empty())?;
        if self.capacity > 0 {
            let mut encoder = gpu
                .device()
                .create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("grow adapter factors") });
            encoder.copy_buffer_to_buffer(&self.factors.pool.buffer, 0, &grown, 0, self.capacity * WORD);
            gpu.queue().submit([encoder.finish()]);
        }
        self.factors.pool = View::whole(&grown);
        self.free.give(self.capacity, wanted - self.capacity);
        self.capacity = wanted;
        Ok(true)
    }

    /// Writes the factors and every index entry of the slot, those that the adapter does not have included.
    fn publish(&self, gpu: &Gpu, slot: usize, begin: u64, image: &LayerImage) {
        if !image.words.is_empty() {
            gpu.queue().write_buffer(&self.factors.pool.buffer, begin * WORD, &image.words);
        }
        let s = &self.sites;
        for (site, experts) in [
            (Some(&s.qkv), 1),
            (Some(&s.o), 1),
            (s.router.as_ref(), 1),
            (Some(&s.gate_up), s.experts),
            (Some(&s.down), s.experts),
        ] {
            let Some(site) = site else { continue };
            let count = experts * site.out_dims.len();
            let mut rows = vec![[0u32; 4]; count];
            for (entry, [a, b, rank_type, scale]) in &image.entries {
                if let Some(at) = entry.checked_sub(site.index_base).filter(|at| *at < count) {
                    rows[at] = [a + begin as u32, b + begin as u32, *rank_type, *scale];
                }
            }
            let at = (site.index_base + slot * count) as u64 * WORD;
            gpu.queue().write_buffer(&self.factors.index.buffer, at, bytemuck::cast_slice(&rows));
        }
    }
}

fn is_expert(site: crate::adapter::Site) -> bool {
    use crate::adapter::Site;
    matches!(site, Site::ExpertGate | Site::ExpertUp | Site::ExpertDown)
}

/// Appends a matrix unless it is there already; returns its first word.
fn place(words: &mut Vec<u8>, stored: &mut HashMap<*const Matrix, u32>, matrix: &Arc<Matrix>) -> u32 {
    *stored.entry(Arc::as_ptr(matrix)).or_insert_with(|| append(words, matrix))
}

/// Appends a matrix with rows padded to eight columns; returns its first word.
fn append(words: &mut Vec<u8>, matrix: &Matrix) -> u32 {
    let at = (words.len() as u64 / WORD) as u32;
    let row = matrix.cols * matrix.dtype.size();
    let padded = matrix.cols.next_multiple_of(8) * matrix.dtype.size();
    for r in 0..matrix.rows {
        words.extend_from_slice(&matrix.bytes[r * row..(r + 1) * row]);
        words.resize(words.len() + padded - row, 0);
    }
    at
}

fn to_f32(matrix: &Matrix) -> Matrix {
    let bytes = DType::F32.encode(&matrix.dtype.decode(&matrix.bytes));
    Matrix { dtype: DType::F32, bytes, ..*matrix }
}
