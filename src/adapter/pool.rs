//! Adapters on the device: slots, pins, eviction. A load decides whether everything fits before it touches anything.
//!
//! An adapter is stored by the experts and columns that this rank holds, at its own rank, in its own type. Factors and
//! index are rewritten with queue writes and copies: work already submitted still sees the old ones, later work only the
//! new. Work recorded with the pool must be submitted before the pool is changed.

use crate::adapter::Adapter;
use crate::adapter::check;
use crate::adapter::image::{Image, WORD};
use crate::adapter::room::{Bounds, LayerRoom, Refusal, capacities};
use crate::adapter::sites::{LayerSites, PoolSites};
use crate::adapter::store::{Held, LayerStore};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::Gpu;
use crate::kernels::lora::Factors;
use crate::placement::ExpertShare;

/// Names one load of one adapter for ever: a reload under the same name gets another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AdapterId(pub(crate) u64);

impl AdapterId {
    /// The id of one load, for callers that drive an [`AdapterPool`] themselves; a number must never be used twice.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }
}

/// What a pool is made for.
#[derive(Debug, Clone)]
pub struct PoolOptions {
    /// Each decoder layer's sites and, where it has experts, what this rank holds of them.
    pub layers: Vec<(LayerSites, Option<ExpertShare>)>,
    /// L: adapters on the device at a time.
    pub slots: usize,
    /// Bytes that the factors of all layers together may take of the device's memory; `None`: what the device has. Not
    /// counted: the index, 16 bytes for each (slot, projection, expert), and an outgrown buffer until the steps that
    /// read it have finished.
    pub budget: Option<u64>,
}

/// An adapter on the device.
struct Slot {
    id: AdapterId,
    pins: usize,
    last_use: u64,
    max_rank: usize,
    /// By layer.
    held: Vec<Held>,
}

impl Slot {
    fn bytes(&self) -> u64 {
        self.held.iter().map(|held| held.words).sum::<u64>() * WORD
    }
}

/// Holds up to L adapters on the device.
pub struct AdapterPool {
    gpu: Gpu,
    layers: Vec<LayerStore>,
    slots: Vec<Option<Slot>>,
    budget: Option<u64>,
    clock: u64,
    growths: u64,
    /// See [`AdapterPool::fail_buffers_after`].
    buffers_left: Option<usize>,
}

/// How a load will go, decided and provided for before anything changes.
struct Plan<'a> {
    slot: usize,
    /// Slots whose tenants go.
    evicted: Vec<usize>,
    images: Vec<Image<'a>>,
    /// A new buffer and its words, where a layer needs one.
    buffers: Vec<Option<(wgpu::Buffer, u64)>>,
}

/// Why a load has to wait or cannot be.
enum Obstacle {
    /// Every slot is pinned.
    Slots,
    /// Something does not fit beside what is pinned.
    Room(Error),
}

impl AdapterPool {
    /// An empty pool without a budget; the arguments are those of [`PoolOptions`].
    ///
    /// # Errors
    /// When the device has no room for the index.
    pub fn new(gpu: &Gpu, layers: Vec<(LayerSites, Option<ExpertShare>)>, slots: usize) -> Result<Self> {
        Self::with_options(gpu, PoolOptions { layers, slots, budget: None })
    }

    /// An empty pool.
    ///
    /// # Errors
    /// When the device has no room for the index.
    pub fn with_options(gpu: &Gpu, options: PoolOptions) -> Result<Self> {
        let PoolOptions { layers, slots, budget } = options;
        let layers = layers
            .into_iter()
            .map(|(sites, share)| LayerStore::new(gpu, PoolSites { sites, share }))
            .collect::<Result<_>>()?;
        let slots = (0..slots).map(|_| None).collect();
        Ok(Self { gpu: gpu.clone(), layers, slots, budget, clock: 0, growths: 0, buffers_left: None })
    }

    /// L.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// The sites and factors of a layer.
    pub fn layer(&self, layer: usize) -> (&LayerSites, &Factors) {
        (&self.layers[layer].sites.sites, &self.layers[layer].factors)
    }

    /// The largest rank of the adapter in `slot`, 0 when it is empty.
    pub fn max_rank(&self, slot: usize) -> usize {
        self.slots[slot].as_ref().map_or(0, |s| s.max_rank)
    }

    /// The slot of a resident adapter.
    pub fn resident(&self, id: AdapterId) -> Option<usize> {
        self.slots.iter().position(|s| s.as_ref().is_some_and(|s| s.id == id))
    }

    /// How often a layer's buffer was replaced by another. Bind groups made before keep the old one alive.
    pub fn growths(&self) -> u64 {
        self.growths
    }

    /// Bytes of the device's memory that the factors of all layers have, free ranges included; never more than the budget.
    pub fn bytes(&self) -> u64 {
        self.layers.iter().map(LayerStore::capacity).sum::<u64>() * WORD
    }

    /// Bytes of the factors of pinned adapters.
    pub fn pinned_bytes(&self) -> u64 {
        self.slots.iter().flatten().filter(|s| s.pins > 0).map(Slot::bytes).sum()
    }

    /// Checks that every factor of `adapter` has a place in this model and the shape of it, whole or cut for this rank,
    /// and that the adapter fits when nothing else is resident.
    ///
    /// # Errors
    /// [`ErrorKind::Adapter`] naming the first factor that has no place; [`ErrorKind::Limit`] when a layer of it exceeds the
    /// device's binding limit, or all of it the budget.
    pub fn check(&self, adapter: &Adapter) -> Result<()> {
        let sites: Vec<&PoolSites> = self.layers.iter().map(|layer| &layer.sites).collect();
        check::check(&sites, adapter)?;
        let alone: Vec<LayerRoom> = self
            .images(adapter)
            .iter()
            .map(|image| LayerRoom { capacity: 0, live: 0, new: image.words, in_place: false })
            .collect();
        capacities(&alone, self.bounds(), false).map(|_| ()).map_err(|refusal| self.refused(refusal))
    }

    /// Makes `adapter` resident without pinning it, evicting what nothing pins where it has to, least recently used first.
    /// Returns its slot. A load that fails changes nothing.
    ///
    /// # Errors
    /// Those of [`AdapterPool::check`]; [`ErrorKind::Limit`] when every slot is pinned, or what is pinned leaves too little of
    /// the budget or of a layer's binding; [`ErrorKind::OutOfMemory`].
    pub fn load(&mut self, id: AdapterId, adapter: &Adapter) -> Result<usize> {
        let slot = match self.resident(id) {
            Some(slot) => slot,
            None => {
                self.check(adapter)?;
                match self.plan(adapter) {
                    Ok(plan) => self.commit(plan, id, adapter),
                    Err(Obstacle::Room(error)) => return Err(error),
                    Err(Obstacle::Slots) => {
                        let message = format!("adapter pool: all {} slots are pinned", self.slots.len());
                        return Err(Error::new(ErrorKind::Limit, message));
                    }
                }
            }
        };
        self.touch(slot);
        Ok(slot)
    }

    /// Makes `adapter` resident, as [`AdapterPool::load`] does, and pins it: it stays until [`AdapterPool::unpin`]. `None` when
    /// it has to wait until something is unpinned: every slot is pinned, or what is pinned leaves no room.
    ///
    /// # Errors
    /// Those of [`AdapterPool::check`]; [`ErrorKind::OutOfMemory`] when the device has no room although nothing is pinned.
    pub fn pin(&mut self, id: AdapterId, adapter: &Adapter) -> Result<Option<usize>> {
        let slot = match self.resident(id) {
            Some(slot) => slot,
            None => {
                self.check(adapter)?;
                match self.plan(adapter) {
                    Ok(plan) => self.commit(plan, id, adapter),
                    Err(Obstacle::Room(error)) if self.slots.iter().flatten().all(|s| s.pins == 0) => {
                        return Err(error);
                    }
                    Err(_) => return Ok(None),
                }
            }
        };
        self.touch(slot);
        if let Some(held) = &mut self.slots[slot] {
            held.pins += 1;
        }
        Ok(Some(slot))
    }

    /// Gives back one pin.
    pub fn unpin(&mut self, slot: usize) {
        if let Some(held) = &mut self.slots[slot] {
            held.pins = held.pins.saturating_sub(1);
        }
    }

    /// Frees the slot of `id`. False when it is not resident, or pinned: then it stays.
    pub fn unload(&mut self, id: AdapterId) -> bool {
        match self.resident(id) {
            Some(slot) if self.slots[slot].as_ref().is_some_and(|s| s.pins == 0) => {
                self.release(slot);
                true
            }
            _ => false,
        }
    }

    /// Lets the creation of buffers fail after `n` more, as on a device without memory: so that tests meet it.
    #[doc(hidden)]
    pub fn fail_buffers_after(&mut self, n: Option<usize>) {
        self.buffers_left = n;
    }

    fn touch(&mut self, slot: usize) {
        self.clock += 1;
        if let Some(held) = &mut self.slots[slot] {
            held.last_use = self.clock;
        }
    }

    fn images<'a>(&self, adapter: &'a Adapter) -> Vec<Image<'a>> {
        self.layers.iter().enumerate().map(|(layer, store)| Image::new(&store.sites, layer, adapter)).collect()
    }

    fn bounds(&self) -> Bounds {
        // An index entry counts words in 32 bits.
        let layer = (self.gpu.capabilities().max_binding_bytes / WORD).min(u64::from(u32::MAX));
        Bounds { layer, budget: self.budget.map(|bytes| bytes / WORD) }
    }

    fn refused(&self, refusal: Refusal) -> Error {
        let message = match refusal {
            Refusal::Layer { layer, live, new } => format!(
                "adapter factors: {} bytes in layer {layer}, where {} are pinned and the device's binding limit is {}",
                new * WORD,
                live * WORD,
                self.bounds().layer * WORD
            ),
            Refusal::Budget { live, new } => format!(
                "adapter memory: {} bytes needed, where {} are pinned and the budget is {}",
                new * WORD,
                live * WORD,
                self.budget.unwrap_or(0)
            ),
        };
        Error::new(ErrorKind::Limit, message)
    }

    /// Finds the fewest evictions, least recently used first, after which `adapter` fits, and makes the buffers. Changes
    /// nothing: what was made is dropped where it does not suffice.
    fn plan<'a>(&mut self, adapter: &'a Adapter) -> Result<Plan<'a>, Obstacle> {
        let mut idle = self.idle();
        let mut evicted = Vec::new();
        let slot = match self.slots.iter().position(Option::is_none) {
            Some(slot) => slot,
            None => {
                evicted.push(idle.next().ok_or(Obstacle::Slots)?);
                evicted[0]
            }
        };
        let images = self.images(adapter);
        loop {
            let obstacle = match self.buffers(&images, &evicted) {
                Ok(buffers) => return Ok(Plan { slot, evicted, images, buffers }),
                Err(e) => e,
            };
            evicted.push(idle.next().ok_or(Obstacle::Room(obstacle))?);
        }
    }

    /// The new buffers that the layers need for `images` once the tenants of `evicted` are gone.
    fn buffers(&mut self, images: &[Image<'_>], evicted: &[usize]) -> Result<Vec<Option<(wgpu::Buffer, u64)>>> {
        let rooms: Vec<LayerRoom> = (0..self.layers.len()).map(|i| self.room(i, images[i].words, evicted)).collect();
        let mut last = None;
        for slack in [true, false] {
            let sizes = capacities(&rooms, self.bounds(), slack).map_err(|refusal| self.refused(refusal))?;
            match rooms.iter().zip(&sizes).map(|(room, size)| self.replacement(room, *size)).collect() {
                Ok(buffers) => return Ok(buffers),
                Err(e) => last = Some(e),
            }
        }
        Err(last.unwrap_or_else(|| Error::new(ErrorKind::OutOfMemory, "adapter factors: no memory")))
    }

    fn room(&self, layer: usize, new: u64, evicted: &[usize]) -> LayerRoom {
        let store = &self.layers[layer];
        let held = |slot: usize| self.slots[slot].as_ref().map(|s| &s.held[layer]);
        let live = (0..self.slots.len()).filter(|s| !evicted.contains(s)).filter_map(held).map(|h| h.words).sum();
        let in_place = store.takes(new, evicted.iter().copied().filter_map(held));
        LayerRoom { capacity: store.capacity(), live, new, in_place }
    }

    fn replacement(&mut self, room: &LayerRoom, size: u64) -> Result<Option<(wgpu::Buffer, u64)>> {
        if room.in_place && size == room.capacity {
            return Ok(None);
        }
        if let Some(left) = &mut self.buffers_left {
            *left =
                left.checked_sub(1).ok_or_else(|| Error::new(ErrorKind::OutOfMemory, "adapter factors: no memory"))?;
        }
        let buffer = self.gpu.buffer("adapter factors", size * WORD, wgpu::BufferUsages::empty())?;
        Ok(Some((buffer, size)))
    }

    /// Carries a plan out; from here on nothing can fail. A layer at a time, so that staging memory stays bounded.
    fn commit(&mut self, plan: Plan<'_>, id: AdapterId, adapter: &Adapter) -> usize {
        for slot in &plan.evicted {
            self.release(*slot);
        }
        let mut held = Vec::with_capacity(self.layers.len());
        for (layer, (image, buffer)) in plan.images.into_iter().zip(plan.buffers).enumerate() {
            let store = &mut self.layers[layer];
            if let Some((buffer, capacity)) = buffer {
                let kept = self.slots.iter_mut().enumerate();
                let kept = kept.filter_map(|(slot, s)| Some((slot, &mut s.as_mut()?.held[layer])));
                store.replace(&self.gpu, &buffer, capacity, kept);
                self.growths += 1;
            }
            let begin = store.take(image.words).expect("the plan made room");
            let new = Held { begin, words: image.words, entries: image.entries.clone() };
            store.write(&self.gpu, &new, &image.bytes());
            store.publish(&self.gpu, plan.slot, &new);
            self.gpu.queue().submit([]);
            held.push(new);
        }
        let max_rank = adapter.factors.iter().map(|f| f.rank).max().unwrap_or(0);
        self.slots[plan.slot] = Some(Slot { id, pins: 0, last_use: self.clock, max_rank, held });
        plan.slot
    }

    /// Empties a slot; whoever maps a token to it finds nothing.
    fn release(&mut self, slot: usize) {
        let Some(old) = self.slots[slot].take() else { return };
        for (store, held) in self.layers.iter_mut().zip(&old.held) {
            store.give(held);
            store.publish(&self.gpu, slot, &Held::default());
        }
    }

    /// Slots with a tenant that nothing pins, least recently used first.
    fn idle(&self) -> impl Iterator<Item = usize> + use<> {
        let mut idle: Vec<(u64, usize)> = self
            .slots
            .iter()
            .enumerate()
            .filter_map(|(i, s)| s.as_ref().filter(|s| s.pins == 0).map(|s| (s.last_use, i)))
            .collect();
        idle.sort_unstable();
        idle.into_iter().map(|(_, i)| i)
    }
}
