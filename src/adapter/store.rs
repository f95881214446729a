//! The device memory of one layer of the pool: a buffer of 16-byte words, its free ranges, and the index.

use crate::adapter::free_list::FreeList;
use crate::adapter::image::{Entry, WORD};
use crate::adapter::sites::PoolSites;
use crate::error::Result;
use crate::gpu::Gpu;
use crate::kernels::View;
use crate::kernels::lora::Factors;

/// What one slot holds in one layer.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// First word.
    pub begin: u64,
    /// Size in words.
    pub words: u64,
    /// The entries of its factors, counted from `begin`.
    pub entries: Vec<Entry>,
}

/// Factors and index of one layer.
pub(crate) struct LayerStore {
    pub sites: PoolSites,
    pub factors: Factors,
    /// First entry of a site and a slot that has factors there.
    used: Vec<(usize, usize)>,
    /// Words of the buffer that are handed out.
    capacity: u64,
    free: FreeList,
}

impl LayerStore {
    /// An empty layer. Its index is allocated for all slots; its buffer comes with the first factors.
    ///
    /// Errors: when the device has no room for the index.
    pub fn new(gpu: &Gpu, sites: PoolSites) -> Result<Self> {
        // Fresh buffers are zero, and rank 0 means: nothing here.
        let index = gpu.buffer("adapter index", sites.entries() as u64 * WORD, wgpu::BufferUsages::empty())?;
        let pool = gpu.buffer("adapter factors", WORD, wgpu::BufferUsages::empty())?;
        let blocks: Vec<usize> = sites.blocks().into_iter().map(|(base, _)| base).collect();
        let factors = Factors { pool: View::whole(&pool), index: View::whole(&index), empty: blocks };
        Ok(Self { sites, factors, used: Vec::new(), capacity: 0, free: FreeList::default() })
    }

    /// Words of the buffer.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Whether a range of `words` is free once `given` has been given back.
    pub fn takes<'a>(&self, words: u64, given: impl Iterator<Item = &'a Held>) -> bool {
        let mut free = self.free.clone();
        given.for_each(|held| free.give(held.begin, held.words));
        free.take(words).is_some()
    }

    /// Gives back what a slot held.
    pub fn give(&mut self, held: &Held) {
        self.free.give(held.begin, held.words);
    }

    /// Takes a range.
    pub fn take(&mut self, words: u64) -> Option<u64> {
        self.free.take(words)
    }

    /// Moves what `kept` slots hold to the front of `buffer`, which takes the place of the old one, and rewrites their
    /// entries. Queue order keeps steps already submitted on the old buffer and the old entries.
    pub fn replace<'a>(
        &mut self,
        gpu: &Gpu,
        buffer: &wgpu::Buffer,
        capacity: u64,
        kept: impl Iterator<Item = (usize, &'a mut Held)>,
    ) {
        let mut encoder = gpu
            .device()
            .create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("move adapter factors") });
        let mut next = 0;
        let mut moved = Vec::new();
        for (slot, held) in kept {
            if held.words > 0 {
                let old = &self.factors.pool.buffer;
                encoder.copy_buffer_to_buffer(old, held.begin * WORD, buffer, next * WORD, held.words * WORD);
            }
            if held.begin != next {
                held.begin = next;
                moved.push((slot, &*held));
            }
            next += held.words;
        }
        gpu.queue().submit([encoder.finish()]);
        self.factors.pool = View::whole(buffer);
        self.capacity = capacity;
        self.free = FreeList::default();
        self.free.give(next, capacity - next);
        for (slot, held) in moved {
            self.publish(gpu, slot, held);
        }
    }

    /// Writes the words of `held`.
    pub fn write(&self, gpu: &Gpu, held: &Held, words: &[u8]) {
        if !words.is_empty() {
            gpu.queue().write_buffer(&self.factors.pool.buffer, held.begin * WORD, words);
        }
    }

    /// Writes every index entry of a slot, those that it has no factor for included.
    pub fn publish(&mut self, gpu: &Gpu, slot: usize, held: &Held) {
        self.used.retain(|(_, user)| *user != slot);
        self.factors.empty.clear();
        for (base, count) in self.sites.blocks() {
            if held.entries.iter().any(|entry| (base..base + count).contains(&entry.at)) {
                self.used.push((base, slot));
            }
            if self.used.iter().all(|(site, _)| *site != base) {
                self.factors.empty.push(base);
            }
            let mut rows = vec![[0u32; 4]; count];
            for entry in &held.entries {
                if let Some(at) = entry.at.checked_sub(base).filter(|at| *at < count) {
                    let [a, b, rank_type, scale] = entry.words;
                    rows[at] = [a + held.begin as u32, b + held.begin as u32, rank_type, scale];
                }
            }
            let at = (base + slot * count) as u64 * WORD;
            gpu.queue().write_buffer(&self.factors.index.buffer, at, bytemuck::cast_slice(&rows));
        }
    }
}
