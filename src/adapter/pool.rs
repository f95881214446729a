//! Adapters on the device: slots, pins, eviction. A load decides whether everything fits before it touches anything.
//!
//! An adapter is stored by the experts and columns that this rank holds, at its own rank, in its own type. Factors and
//! index are rewritten with queue writes and copies: work already submitted still sees the old ones, later work only the
//! new. Work recorded with the pool must be submitted before the pool is changed.

mod load;

use crate::adapter::check;
use crate::adapter::image::WORD;
use crate::adapter::room::{SiteRoom, capacities};
use crate::adapter::sites::{EndSites, LayerSites, PoolSites};
use crate::adapter::store::{Held, LayerStore};
use crate::adapter::{Adapter, Site};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::Gpu;
use crate::kernels::lora::Factors;
use crate::placement::ExpertShare;
use load::Obstacle;

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
    /// The sites of embedding and LM head; `None`: adapters of them are refused.
    pub ends: Option<EndSites>,
    /// L: adapters on the device at a time.
    pub slots: usize,
    /// Bytes that the factors of all layers together may take of the device's memory; `None`: what the device has. No part
    /// of it is set aside for a layer or a site: each takes what its factors need. Not counted: the index, 16 bytes for each
    /// (slot, projection, expert), and an outgrown buffer until the steps that read it have finished.
    pub budget: Option<u64>,
}

/// An adapter on the device.
struct Slot {
    id: AdapterId,
    pins: usize,
    last_use: u64,
    max_rank: usize,
    folds: bool,
    reach: f32,
    /// By place.
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
    /// Those of the decoder, then maybe the one outside them.
    layers: Vec<LayerStore>,
    /// Layer and ordinal of every site, in order.
    places: Vec<(usize, usize)>,
    slots: Vec<Option<Slot>>,
    budget: Option<u64>,
    clock: u64,
    growths: u64,
    /// See [`AdapterPool::fail_buffers_after`].
    buffers_left: Option<usize>,
}

impl AdapterPool {
    /// An empty pool without a budget, for adapters of the layers alone; the arguments are those of [`PoolOptions`].
    ///
    /// # Errors
    /// When the device has no room for the index.
    pub fn new(gpu: &Gpu, layers: Vec<(LayerSites, Option<ExpertShare>)>, slots: usize) -> Result<Self> {
        Self::with_options(gpu, PoolOptions { layers, ends: None, slots, budget: None })
    }

    /// An empty pool.
    ///
    /// # Errors
    /// When the device has no room for the index.
    pub fn with_options(gpu: &Gpu, options: PoolOptions) -> Result<Self> {
        let PoolOptions { layers, ends, slots, budget } = options;
        let layers: Vec<LayerStore> = layers
            .into_iter()
            .map(|(sites, share)| PoolSites::Layer(Box::new(sites), share))
            .chain(ends.map(PoolSites::Ends))
            .map(|sites| LayerStore::new(gpu, sites))
            .collect::<Result<_>>()?;
        let sites = |(layer, store): (usize, &LayerStore)| (0..store.len()).map(move |site| (layer, site));
        let places = layers.iter().enumerate().flat_map(sites).collect();
        let slots = (0..slots).map(|_| None).collect();
        Ok(Self { gpu: gpu.clone(), layers, places, slots, budget, clock: 0, growths: 0, buffers_left: None })
    }

    /// L.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// The sites and factors of a layer.
    ///
    /// # Panics
    /// When the model has no such layer.
    pub fn layer(&self, layer: usize) -> (&LayerSites, &Factors) {
        let store = &self.layers[layer];
        match &store.sites {
            PoolSites::Layer(sites, _) => (sites.as_ref(), &store.factors),
            PoolSites::Ends(_) => panic!("layer {layer}: the model has {layer} layers"),
        }
    }

    /// The sites and factors of embedding and LM head; `None` when the pool was made without.
    pub fn ends(&self) -> Option<(&EndSites, &Factors)> {
        self.layers.last().and_then(|store| match &store.sites {
            PoolSites::Ends(sites) => Some((sites, &store.factors)),
            PoolSites::Layer(..) => None,
        })
    }

    /// Whether the adapter in `slot` changes `site`, which must be [`Site::Embedding`] or [`Site::LmHead`].
    pub fn changes(&self, slot: usize, site: Site) -> bool {
        let Some(layer) = self.layers.len().checked_sub(1).filter(|_| self.ends().is_some()) else { return false };
        let Some((ordinal, _)) = self.layers[layer].sites.entry(site, 0) else { return false };
        let at = self.places.iter().position(|place| *place == (layer, ordinal));
        let held = self.slots.get(slot).and_then(Option::as_ref).zip(at).and_then(|(s, at)| s.held.get(at));
        held.is_some_and(|held| !held.entries.is_empty())
    }

    /// The largest rank of the adapter in `slot`, a bias counted; 0 when it is empty.
    pub fn max_rank(&self, slot: usize) -> usize {
        self.slots[slot].as_ref().map_or(0, |s| s.max_rank)
    }

    /// Whether products on cooperative matrices can add the adapter in `slot`: its factors keep within the range of f16. True
    /// for an empty slot.
    pub fn folds(&self, slot: usize) -> bool {
        self.slots[slot].as_ref().is_none_or(|s| s.folds)
    }

    /// What the adapter in `slot` adds at most to a product of an expert, over the norm of the row of x
    /// ([`factor_reach`](crate::plan::matrix::factor_reach)): 0 for an empty slot.
    pub fn reach(&self, slot: usize) -> f32 {
        self.slots[slot].as_ref().map_or(0.0, |s| s.reach)
    }

    /// The slot of a resident adapter.
    pub fn resident(&self, id: AdapterId) -> Option<usize> {
        self.slots.iter().position(|s| s.as_ref().is_some_and(|s| s.id == id))
    }

    /// How often a site's buffer was replaced by another. Bind groups made before keep the old one alive.
    pub fn growths(&self) -> u64 {
        self.growths
    }

    /// Bytes of the device's memory that the factors of all layers have, free ranges included; never more than the budget.
    pub fn bytes(&self) -> u64 {
        self.places.iter().map(|(layer, site)| self.layers[*layer].capacity(*site)).sum::<u64>() * WORD
    }

    /// Bytes of the factors of pinned adapters.
    pub fn pinned_bytes(&self) -> u64 {
        self.slots.iter().flatten().filter(|s| s.pins > 0).map(Slot::bytes).sum()
    }

    /// Checks that every factor of `adapter` has a place in this model and the shape of it, whole or cut for this rank,
    /// and that the adapter fits when nothing else is resident.
    ///
    /// # Errors
    /// [`ErrorKind::Adapter`] naming the first factor that has no place; [`ErrorKind::Limit`] when a site of it exceeds the
    /// device's binding limit, or all of it the budget.
    pub fn check(&self, adapter: &Adapter) -> Result<()> {
        let sites: Vec<&PoolSites> = self.layers.iter().map(|layer| &layer.sites).collect();
        check::check(&sites, adapter)?;
        let alone: Vec<SiteRoom> = self
            .images(adapter)
            .iter()
            .map(|image| SiteRoom { capacity: 0, live: 0, new: image.words, in_place: false })
            .collect();
        capacities(&alone, self.bounds(), false).map(|_| ()).map_err(|refusal| self.refused(refusal))
    }

    /// Makes `adapter` resident without pinning it, evicting what nothing pins where it has to, least recently used first.
    /// Returns its slot. A load that fails changes nothing.
    ///
    /// # Errors
    /// Those of [`AdapterPool::check`]; [`ErrorKind::Limit`] when every slot is pinned, or what is pinned leaves too little of
    /// the budget or of a site's binding; [`ErrorKind::OutOfMemory`].
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

    /// Empties a slot; whoever maps a token to it finds nothing.
    fn release(&mut self, slot: usize) {
        let Some(old) = self.slots[slot].take() else { return };
        for ((layer, site), held) in self.places.iter().zip(&old.held) {
            let store = &mut self.layers[*layer];
            store.give(*site, held);
            store.publish(&self.gpu, *site, slot, &Held::default());
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
