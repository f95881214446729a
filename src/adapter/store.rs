//! The device memory of one layer of the pool: for each site a buffer of 16-byte words and its free ranges, and the index.

use crate::adapter::free_list::FreeList;
use crate::adapter::image::{Entry, WORD};
use crate::adapter::sites::{PoolSites, Run};
use crate::error::Result;
use crate::gpu::Gpu;
use crate::kernels::View;
use crate::kernels::lora::Factors;

/// What one slot holds of one site.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// First word.
    pub begin: u64,
    /// Size in words.
    pub words: u64,
    /// The entries of its factors, counted from `begin`.
    pub entries: Vec<Entry>,
}

/// Factors and index of one layer. Its methods take the ordinal of a site.
pub(crate) struct LayerStore {
    pub sites: PoolSites,
    pub factors: Factors,
    stores: Vec<SiteStore>,
}

/// What is known of the buffer of one site, which [`Factors::pools`] has.
struct SiteStore {
    run: Run,
    /// Slots that have factors here.
    users: Vec<usize>,
    /// Words of the buffer that are handed out.
    capacity: u64,
    free: FreeList,
}

impl LayerStore {
    /// An empty layer. Its index is allocated for all slots; a site's buffer comes with the first factors.
    ///
    /// Errors: when the device has no room for the index.
    pub fn new(gpu: &Gpu, sites: PoolSites) -> Result<Self> {
        // Fresh buffers are zero, and rank 0 means: nothing here.
        let index = gpu.buffer("adapter index", sites.entries() as u64 * WORD, wgpu::BufferUsages::empty())?;
        // Sites without factors share one word that nothing reads.
        let none = View::whole(&gpu.buffer("adapter factors", WORD, wgpu::BufferUsages::empty())?);
        let new = |run| SiteStore { run, users: Vec::new(), capacity: 0, free: FreeList::default() };
        let stores: Vec<SiteStore> = sites.runs().into_iter().map(new).collect();
        let (pools, empty) = (vec![none; stores.len()], (0..stores.len()).collect());
        Ok(Self { sites, factors: Factors { pools, index: View::whole(&index), empty }, stores })
    }

    /// Number of sites.
    pub fn len(&self) -> usize {
        self.stores.len()
    }

    /// What messages call a site.
    pub fn name(&self, site: usize) -> &'static str {
        self.stores[site].run.name
    }

    /// Words of the site's buffer.
    pub fn capacity(&self, site: usize) -> u64 {
        self.stores[site].capacity
    }

    /// Whether a range of `words` is free once `given` has been given back.
    pub fn takes<'a>(&self, site: usize, words: u64, given: impl Iterator<Item = &'a Held>) -> bool {
        let mut free = self.stores[site].free.clone();
        given.for_each(|held| free.give(held.begin, held.words));
        free.take(words).is_some()
    }

    /// Gives back what a slot held.
    pub fn give(&mut self, site: usize, held: &Held) {
        self.stores[site].free.give(held.begin, held.words);
    }

    /// Takes a range.
    pub fn take(&mut self, site: usize, words: u64) -> Option<u64> {
        self.stores[site].free.take(words)
    }

    /// Moves what `kept` slots hold to the front of `buffer`, which takes the place of the old one, and rewrites their
    /// entries. Queue order keeps steps already submitted on the old buffer and the old entries.
    pub fn replace<'a>(
        &mut self,
        gpu: &Gpu,
        site: usize,
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
                let old = &self.factors.pools[site].buffer;
                encoder.copy_buffer_to_buffer(old, held.begin * WORD, buffer, next * WORD, held.words * WORD);
            }
            if held.begin != next {
                held.begin = next;
                moved.push((slot, &*held));
            }
            next += held.words;
        }
        if next > 0 {
            gpu.queue().submit([encoder.finish()]);
        }
        self.factors.pools[site] = View::whole(buffer);
        let store = &mut self.stores[site];
        store.capacity = capacity;
        store.free = FreeList::default();
        store.free.give(next, capacity - next);
        for (slot, held) in moved {
            self.publish(gpu, site, slot, held);
        }
    }

    /// Writes the words of `held`.
    pub fn write(&self, gpu: &Gpu, site: usize, held: &Held, words: &[u8]) {
        if !words.is_empty() {
            gpu.queue().write_buffer(&self.factors.pools[site].buffer, held.begin * WORD, words);
        }
    }

    /// Writes every index entry that a slot has of a site, those that it has no factor for included.
    pub fn publish(&mut self, gpu: &Gpu, site: usize, slot: usize, held: &Held) {
        let SiteStore { run: Run { base, count, .. }, users, .. } = &mut self.stores[site];
        users.retain(|user| *user != slot);
        users.extend((!held.entries.is_empty()).then_some(slot));
        self.factors.empty.retain(|empty| *empty != site);
        self.factors.empty.extend(users.is_empty().then_some(site));
        let mut rows = vec![[0u32; 4]; *count];
        for Entry { at, words: [a, b, rank_type, scale] } in &held.entries {
            rows[at - *base] = [a + held.begin as u32, b + held.begin as u32, *rank_type, *scale];
        }
        let at = (*base + slot * *count) as u64 * WORD;
        gpu.queue().write_buffer(&self.factors.index.buffer, at, bytemuck::cast_slice(&rows));
    }
}
