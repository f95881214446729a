//! Expert ids and adapter slots to virtual expert ids.

use super::index;
use crate::router::{NoAdapter, STATUS_ID, STATUS_SLOT};

/// What [`remap`] returns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remapped {
    /// `virtual_topk_ids`: `[P]`, id + slot·E_l in 0..V, or negative.
    pub virtual_topk_ids: Vec<i32>,
    /// `lora_mask`: `[T]`, 1 for a token with an adapter, else 0.
    pub lora_mask: Vec<u32>,
    /// Status bits: `STATUS_SLOT`, `STATUS_ID` or 0.
    pub status: u32,
}

/// Semantics: `virtual_topk_ids[p] = ids[p] + token_lora_mapping[p / A] · E_l`.
///
/// `ids`: `[P]` localised, `token_lora_mapping`: `[T]`, results `[P]` and `[T]`. A negative id keeps its bits. An id >= E_l
/// becomes -1, so that it cannot land in the range of the next slot. A slot < 0 is a token without adapter, a slot >= L
/// counts as one; `mode` says what their ids become.
pub fn remap(
    ids: &[i32],
    token_lora_mapping: &[i32],
    top_k: usize,
    experts_local: usize,
    slots: usize,
    mode: NoAdapter,
) -> Remapped {
    let tokens = token_lora_mapping.len();
    assert_eq!(ids.len(), tokens * top_k, "ids: [T, A]");
    let mut remapped = Remapped { virtual_topk_ids: vec![-1; ids.len()], lora_mask: vec![0; tokens], status: 0 };
    for t in 0..tokens {
        let mut slot = index(token_lora_mapping[t]);
        if slot.is_some_and(|s| s >= slots) {
            remapped.status |= STATUS_SLOT;
            slot = None;
        }
        remapped.lora_mask[t] = u32::from(slot.is_some());
        for p in t * top_k..(t + 1) * top_k {
            let Some(id) = index(ids[p]) else {
                remapped.virtual_topk_ids[p] = ids[p];
                continue;
            };
            if id >= experts_local {
                remapped.status |= STATUS_ID;
                continue;
            }
            let virtual_id = match (slot, mode) {
                (Some(slot), _) => id + slot * experts_local,
                (None, NoAdapter::Unshifted) => id,
                (None, NoAdapter::Skip) => continue,
            };
            remapped.virtual_topk_ids[p] = i32::try_from(virtual_id).expect("V fits an i32");
        }
    }
    remapped
}
