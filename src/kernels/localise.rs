//! Global expert ids to the ids of this rank, and the choice among copies.

use crate::error::Result;
use crate::gpu::Gpu;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View, cover};
use crate::placement::{MAX_COPIED_EXPERTS, MAX_COPIED_RANKS, Placement};

/// The look-up.
pub static LOCALISE: Kernel = Kernel { stem: "localise", reads: 2, writes: 1 };
/// Divides the pairs of copied experts among the holders.
pub static LOCALISE_QUOTAS: Kernel = Kernel { stem: "localise_quotas", reads: 2, writes: 1 };
/// Takes back what other copies compute.
pub static LOCALISE_COPIES: Kernel = Kernel { stem: "localise_copies", reads: 3, writes: 1 };

/// Invocations of the two stages for copies.
const LANES: u32 = 256;
/// Words of the list of copied experts that are kept in workgroup memory.
const LISTED: u32 = 1024;
/// Added to a copied expert's place in the list, where others have their holder.
const COPIED: u32 = 1 << 31;

params! {
    /// Sizes of one localisation.
    LocaliseParams {
        /// P.
        pairs: u32,
        /// Pairs of real tokens; the rest becomes -1.
        valid_pairs: u32,
        /// E.
        experts: u32,
        /// Padding.
        pad0: u32,
    }
}

params! {
    /// Sizes of one division of pairs.
    LocaliseQuotasParams {
        /// Pairs of real tokens.
        valid_pairs: u32,
        /// E.
        experts: u32,
        /// Ranks that share out the experts (expert groups).
        ranks: u32,
        /// This one.
        rank: u32,
        /// Words of the list of copied experts.
        list_words: u32,
        /// Padding.
        pad0: u32,
        /// Padding.
        pad1: u32,
        /// Padding.
        pad2: u32,
    }
}

params! {
    /// Sizes of one choice among copies.
    LocaliseCopiesParams {
        /// Pairs of real tokens.
        valid_pairs: u32,
        /// Copied experts that this rank holds.
        held: u32,
        /// Word of their list.
        held_base: u32,
        /// Padding.
        pad0: u32,
    }
}

/// The variables of the division.
pub fn quota_vars() -> Vars {
    vec![
        ("experts", (MAX_COPIED_EXPERTS as u32).into()),
        ("ranks", (MAX_COPIED_RANKS as u32).into()),
        ("listed", LISTED.into()),
        ("lanes", LANES.into()),
    ]
}

/// The variables of the choice.
pub fn copy_vars() -> Vars {
    vec![("lanes", LANES.into())]
}

/// A [`Placement`] on the device.
#[derive(Debug, Clone)]
pub struct Owners {
    /// E.
    experts: usize,
    /// i32 `[E]`: the local number of each expert, -1 where it is not here.
    locals: View,
    /// `None` when no expert that is here is elsewhere too.
    copies: Option<Copies>,
}

/// The holders of every expert, where some have several.
#[derive(Debug, Clone)]
struct Copies {
    /// u32: the holder of each expert, or [`COPIED`] and its place in the list; then the list: for each copied one its id, the
    /// number of its holders and these; then the ids of those that are held here.
    holders: View,
    ranks: usize,
    rank: usize,
    list_words: usize,
    held: usize,
}

impl Owners {
    /// Puts `placement` on the device; `None` when its rank alone holds all experts in order, which needs no look-up.
    ///
    /// # Errors
    /// Those of [`Gpu::buffer`].
    pub fn upload(gpu: &Gpu, placement: &Placement) -> Result<Option<Self>> {
        if placement.is_identity() {
            return Ok(None);
        }
        let upload = |label: &str, words: &[u32]| -> Result<View> {
            let buffer = gpu.buffer(label, size_of_val(words) as u64, wgpu::BufferUsages::empty())?;
            gpu.queue().write_buffer(&buffer, 0, bytemuck::cast_slice(words));
            Ok(View::whole(&buffer))
        };
        let locals = upload("owners", bytemuck::cast_slice(placement.locals()))?;
        let (ranks, rank, experts) = (placement.ranks(), placement.rank(), placement.experts());
        let copied = placement.copied();
        let held: Vec<u32> = copied.iter().filter(|e| placement.local(**e).is_some()).map(|e| *e as u32).collect();
        let copies = if held.is_empty() {
            None
        } else {
            let mut words: Vec<u32> =
                (0..experts).map(|e| placement.holders(e).first().map_or(0, |rank| *rank as u32)).collect();
            for e in copied {
                let holders = placement.holders(e);
                words[e] = COPIED + (words.len() - experts) as u32;
                words.extend([e as u32, holders.len() as u32]);
                words.extend(holders.iter().map(|rank| *rank as u32));
            }
            let list_words = words.len() - experts;
            words.extend(&held);
            Some(Copies { holders: upload("copies", &words)?, ranks, rank, list_words, held: held.len() })
        };
        Ok(Some(Self { experts, locals, copies }))
    }
}

/// Semantics: `local[p] = locals[ids[p]]`; -1 past the real tokens, for ids that are no expert, and where another rank's copy
/// of the expert takes the pair; negative ids stay. Copies are chosen as
/// [`reference::localise`](crate::reference::localise()) says: every rank, from the same ids, chooses the same.
pub struct Localise<'a> {
    /// P.
    pub pairs: usize,
    /// Pairs of real tokens.
    pub valid_pairs: usize,
    /// i32 `[P]`, global.
    pub topk_ids: &'a View,
    /// Where experts are.
    pub owners: &'a Owners,
    /// i32 `[P]`, written.
    pub local_ids: &'a View,
}

impl Localise<'_> {
    /// Records the stage: the look-up, and two dispatches more where experts of this rank have copies elsewhere.
    ///
    /// # Errors
    /// When the device refuses a shader or has no room for scratch.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let Owners { experts, locals, copies } = self.owners;
        let lookup = pipeline(rec.gpu(), &LOCALISE, Vars::new())?;
        let (valid_pairs, experts) = (self.valid_pairs.min(self.pairs) as u32, *experts as u32);
        let params = LocaliseParams { pairs: self.pairs as u32, valid_pairs, experts, pad0: 0 };
        let buffers = [self.topk_ids, locals, self.local_ids];
        rec.dispatch(pass, &lookup, bytemuck::bytes_of(&params), &buffers, &cover(self.pairs));
        let Some(Copies { holders, ranks, rank, list_words, held }) = copies else { return Ok(()) };

        let divide = pipeline(rec.gpu(), &LOCALISE_QUOTAS, quota_vars())?;
        let quotas = rec.scratch("quotas", u64::from(experts) * 8)?;
        let params = LocaliseQuotasParams {
            valid_pairs,
            experts,
            ranks: *ranks as u32,
            rank: *rank as u32,
            list_words: *list_words as u32,
            pad0: 0,
            pad1: 0,
            pad2: 0,
        };
        let buffers = [self.topk_ids, holders, &quotas];
        rec.dispatch(pass, &divide, bytemuck::bytes_of(&params), &buffers, &Grid::folded(1, 1));

        let choose = pipeline(rec.gpu(), &LOCALISE_COPIES, copy_vars())?;
        let held = *held as u32;
        let params = LocaliseCopiesParams { valid_pairs, held, held_base: experts + *list_words as u32, pad0: 0 };
        let buffers = [self.topk_ids, holders, &quotas, self.local_ids];
        rec.dispatch(pass, &choose, bytemuck::bytes_of(&params), &buffers, &Grid::folded(1, held));
        Ok(())
    }
}
