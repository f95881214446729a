//! One load, in three parts: the images of its sites, the plan with all new buffers, and what carries it out.

use super::{AdapterId, AdapterPool, Slot};
use crate::adapter::Adapter;
use crate::adapter::image::{Image, WORD};
use crate::adapter::room::{Bounds, Refusal, SiteRoom, capacities};
use crate::adapter::sites::PoolSites;
use crate::adapter::store::Held;
use crate::error::{Error, ErrorKind, Result};
use crate::plan::matrix::larger;

/// How a load will go, decided and provided for before anything changes.
pub(super) struct Plan<'a> {
    slot: usize,
    /// Slots whose tenants go.
    evicted: Vec<usize>,
    /// By place.
    images: Vec<Image<'a>>,
    /// A new buffer and its words, where a site needs one.
    buffers: Vec<Option<(wgpu::Buffer, u64)>>,
}

/// Why a load has to wait or cannot be.
pub(super) enum Obstacle {
    /// Every slot is pinned.
    Slots,
    /// Something does not fit beside what is pinned.
    Room(Error),
}

impl AdapterPool {
    /// What each place takes of `adapter`.
    pub(super) fn images<'a>(&self, adapter: &'a Adapter) -> Vec<Image<'a>> {
        self.layers
            .iter()
            .enumerate()
            .flat_map(|(layer, store)| Image::of_layer(&store.sites, layer, adapter))
            .collect()
    }

    pub(super) fn bounds(&self) -> Bounds {
        // An index entry counts words in 32 bits.
        let site = (self.gpu.capabilities().max_binding_bytes / WORD).min(u64::from(u32::MAX));
        Bounds { site, budget: self.budget.map(|bytes| bytes / WORD) }
    }

    pub(super) fn refused(&self, refusal: Refusal) -> Error {
        let message = match refusal {
            Refusal::Site { site, live, new } => {
                let (layer, site) = self.places[site];
                let store = &self.layers[layer];
                let place = match store.sites {
                    PoolSites::Layer(..) => format!("`{}` of layer {layer}", store.name(site)),
                    PoolSites::Ends(_) => format!("`{}`", store.name(site)),
                };
                let limit = self.bounds().site;
                format!(
                    "adapter factors: {} bytes for {place}, where {} are pinned and the device's binding limit is {}, \
                     which holds {} of this size",
                    new * WORD,
                    live * WORD,
                    limit * WORD,
                    limit / new.max(1)
                )
            }
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
    pub(super) fn plan<'a>(&mut self, adapter: &'a Adapter) -> Result<Plan<'a>, Obstacle> {
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

    /// The new buffers that the places need for `images` once the tenants of `evicted` are gone.
    fn buffers(&mut self, images: &[Image<'_>], evicted: &[usize]) -> Result<Vec<Option<(wgpu::Buffer, u64)>>> {
        let rooms: Vec<SiteRoom> = (0..self.places.len()).map(|i| self.room(i, images[i].words, evicted)).collect();
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

    fn room(&self, place: usize, new: u64, evicted: &[usize]) -> SiteRoom {
        let (layer, site) = self.places[place];
        let store = &self.layers[layer];
        let held = |slot: usize| self.slots[slot].as_ref().map(|s| &s.held[place]);
        let live = (0..self.slots.len()).filter(|s| !evicted.contains(s)).filter_map(held).map(|h| h.words).sum();
        let in_place = store.takes(site, new, evicted.iter().copied().filter_map(held));
        SiteRoom { capacity: store.capacity(site), live, new, in_place }
    }

    fn replacement(&mut self, room: &SiteRoom, size: u64) -> Result<Option<(wgpu::Buffer, u64)>> {
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
    pub(super) fn commit(&mut self, plan: Plan<'_>, id: AdapterId, adapter: &Adapter) -> usize {
        for slot in &plan.evicted {
            self.release(*slot);
        }
        let mut held = Vec::with_capacity(self.places.len());
        let (mut folds, mut reach) = (true, 0f32);
        for (place, (image, buffer)) in plan.images.into_iter().zip(plan.buffers).enumerate() {
            let (layer, site) = self.places[place];
            let store = &mut self.layers[layer];
            if let Some((buffer, capacity)) = buffer {
                let kept = self.slots.iter_mut().enumerate();
                let kept = kept.filter_map(|(slot, s)| Some((slot, &mut s.as_mut()?.held[place])));
                store.replace(&self.gpu, site, &buffer, capacity, kept);
                self.growths += 1;
            }
            let begin = store.take(site, image.words).expect("the plan made room");
            let (entries, these_fold, this_reach) = image.measured();
            folds &= these_fold;
            reach = larger(reach, this_reach);
            let new = Held { begin, words: image.words, entries };
            store.write(&self.gpu, site, &new, &image.bytes());
            store.publish(&self.gpu, site, plan.slot, &new);
            if site + 1 == store.len() {
                self.gpu.queue().submit([]);
            }
            held.push(new);
        }
        let ranks = adapter.factors.iter().map(|f| f.rank + usize::from(f.bias.is_some()));
        let max_rank = ranks.max().unwrap_or(0);
        self.slots[plan.slot] = Some(Slot { id, pins: 0, last_use: self.clock, max_rank, folds, reach, held });
        plan.slot
    }
}
