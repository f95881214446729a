//! What a rank keeps on its device: every buffer of weights, and into how many bindings each is cut.

use std::collections::BTreeMap;

use super::pieces::cut;
use crate::checkpoint::{Checkpoint, MlpKind};
use crate::error::Result;
use crate::family::class::Group;
use crate::family::{ExpertPart, Role};
use crate::placement::{PlacementRule, RankShare, Topology};

/// Elements that the kernels read at a time: rows on the device are padded with zeros to a multiple.
const ELEMENTS: usize = 8;

/// A stack of matrices of one size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stack {
    /// What it is, with its layer.
    pub label: String,
    /// What its bytes count as.
    pub group: Group,
    /// Number of matrices: experts, or 1.
    pub matrices: usize,
    /// Rows of each matrix.
    pub rows: usize,
    /// Bytes of a row, with padding.
    pub row_bytes: u64,
}

impl Stack {
    /// Bytes on the device.
    pub fn n_bytes(&self) -> u64 {
        (self.matrices * self.rows) as u64 * self.row_bytes
    }

    /// Bindings under `limit` bytes each. Errors: `Limit` when a row exceeds it.
    pub fn bindings(&self, limit: u64) -> Result<usize> {
        let pieces = cut(self.matrices, self.rows, self.row_bytes, limit);
        Ok(pieces.map_err(|e| e.within(&self.label))?.len())
    }
}

/// Bytes on the device by group.
pub fn by_group(stacks: &[Stack]) -> BTreeMap<Group, u64> {
    let mut groups = BTreeMap::new();
    for stack in stacks {
        *groups.entry(stack.group).or_default() += stack.n_bytes();
    }
    groups
}

/// Everything that the rank at `topology` keeps of `checkpoint`. Reads no data.
///
/// Errors: those of the rule and of the checkpoint.
pub fn stacks(checkpoint: &Checkpoint, rule: &PlacementRule, topology: Topology) -> Result<Vec<Stack>> {
    let config = checkpoint.config();
    let RankShare { heads, experts } = RankShare::new(config, rule, topology)?;
    let (owned, width) = (experts.placement().owned(), experts.padded_width());
    let (d, q, kv) = (config.hidden, heads.q_range().len(), heads.kv_range().len());
    let mut stacks = Vec::new();
    let mut push = |label: String, group, matrices, rows, columns: usize, element: usize| {
        let row_bytes = (columns.next_multiple_of(ELEMENTS) * element) as u64;
        if matrices > 0 && rows > 0 && row_bytes > 0 {
            stacks.push(Stack { label, group, matrices, rows, row_bytes });
        }
    };
    let size = |role| element_size(checkpoint, role);
    push("embedding".to_owned(), Group::Embedding, 1, config.vocab, d, size(Role::Embedding)?);
    if !config.tie_embeddings {
        push("lm_head".to_owned(), Group::Embedding, 1, config.vocab, d, size(Role::LmHead)?);
    }
    push("final norm".to_owned(), Group::Norm, 1, 1, d, 4);
    for (layer, kind) in config.layers.iter().enumerate() {
        let label = |what: &str| format!("layer {layer} {what}");
        push(label("input norm"), Group::Norm, 1, 1, d, 4);
        let length = |role| config.family.shape(role, config).map(|shape| shape.iter().product::<usize>());
        match (length(Role::QNorm { layer }), length(Role::KNorm { layer })) {
            (Some(q), Some(k)) if q == k => push(label("head norms"), Group::Norm, 1, 2, q, 4),
            (q, k) => {
                push(label("q norm"), Group::Norm, 1, 1, q.unwrap_or(0), 4);
                push(label("k norm"), Group::Norm, 1, 1, k.unwrap_or(0), 4);
            }
        }
        push(label("mlp norm"), Group::Norm, 1, 1, d, 4);
        push(label("qkv"), Group::Attention, 1, q + 2 * kv, d, size(Role::Q { layer })?);
        if length(Role::QBias { layer }).is_some() {
            push(label("qkv bias"), Group::Attention, 1, 1, q + 2 * kv, 4);
        }
        push(label("o"), Group::Attention, 1, d, q, size(Role::O { layer })?);
        match kind {
            MlpKind::Dense => {
                let f = config.dense_width;
                push(label("gate_up"), Group::DenseMlp, 1, 2 * f, d, size(Role::DenseGate { layer })?);
                push(label("down"), Group::DenseMlp, 1, d, f, size(Role::DenseDown { layer })?);
            }
            MlpKind::Experts => {
                push(label("router"), Group::Router, 1, config.moe.experts, d, size(Role::Router { layer })?);
                if length(Role::SharedDown { layer }).is_some() {
                    let s = config.shared_width;
                    let element = size(Role::SharedDown { layer })?;
                    push(label("shared gate_up"), Group::SharedExpert, 1, 2 * s, d, element);
                    push(label("shared down"), Group::SharedExpert, 1, d, s, element);
                    push(label("shared router"), Group::SharedExpert, 1, 1, d, element);
                }
                let Some(&first) = owned.first() else { continue };
                let up = checkpoint.expert_dtype(layer, first, ExpertPart::Gate)?.size();
                let down = checkpoint.expert_dtype(layer, first, ExpertPart::Down)?.size();
                push(label("experts gate_up"), Group::ExpertPayload, owned.len(), 2 * width, d, up);
                push(label("experts down"), Group::ExpertPayload, owned.len(), d, width, down);
            }
        }
    }
    Ok(stacks)
}

/// Bytes of an element of the tensor with `role`.
fn element_size(checkpoint: &Checkpoint, role: Role) -> Result<usize> {
    Ok(checkpoint.role(role)?.dtype.size())
}
