//! Sizes of an engine under the device's limits: cache blocks, rows of a step, rows of logits.

use crate::checkpoint::ModelConfig;
use crate::placement::HeadShare;
use crate::plan::matrix::DEPTH_PARTS;

/// Bytes of keys and values that the engine takes when nobody asks for a context.
const DEFAULT_CACHE_BYTES: u64 = 4 << 30;
/// Bytes of logits of one step.
const LOGIT_BYTES: u64 = 64 << 20;

/// What fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineSizes {
    /// Cache blocks of all sequences together.
    pub blocks: usize,
    /// Tokens of a sequence.
    pub max_context: usize,
    /// Rows of a step.
    pub step_tokens: usize,
    /// Rows of logits of a step.
    pub logit_rows: usize,
    /// Sequences that run together.
    pub sequences: usize,
}

/// Chooses sizes for a rank with the heads `heads`, for `sequences` sequences of `max_context` tokens (0: as long as the model allows) and steps of
/// `step_tokens` rows, so that no binding exceeds `limit` bytes. `block_size` is the positions of a cache block.
pub fn engine_sizes(
    config: &ModelConfig,
    heads: &HeadShare,
    limit: u64,
    sequences: usize,
    max_context: usize,
    step_tokens: usize,
    block_size: usize,
) -> EngineSizes {
    let row = |bytes: usize| (limit / bytes.max(1) as u64).max(1) as usize;
    // A decoding sequence has one row of logits and of everything else.
    let widest = widest_row(config, heads);
    let sequences = sequences.clamp(1, 4096).min(row(config.vocab * 4)).min(row(widest * 4));
    let step_tokens = step_tokens.max(sequences).min(row(widest * 4));
    let logit_rows = row(config.vocab * 4).min((LOGIT_BYTES / (config.vocab as u64 * 4)) as usize).max(sequences);
    let block_bytes = (block_size * heads.kv_range().len() * 4) as u64;
    let asked = if max_context == 0 { config.max_positions } else { max_context.min(config.max_positions) };
    let mut blocks = asked.div_ceil(block_size) * sequences;
    if max_context == 0 {
        let all_layers = block_bytes * 2 * config.layers.len() as u64;
        blocks = blocks.min((DEFAULT_CACHE_BYTES / all_layers.max(1)) as usize);
    }
    let blocks = blocks.min((limit / block_bytes.max(1)) as usize).max(1);
    // The rotary table is a binding too.
    let positions = (blocks * block_size).min(row(config.head_dim * 4));
    EngineSizes { blocks, max_context: asked.min(positions), step_tokens, logit_rows, sequences }
}

/// Values of the widest scratch row of one token.
fn widest_row(config: &ModelConfig, heads: &HeadShare) -> usize {
    let attention = heads.q_range().len() + 2 * heads.kv_range().len();
    let experts = config.moe.top_k * config.hidden.max(2 * config.moe.expert_width);
    // The adapters' intermediate: three projections of the largest rank that is read and a bias, one row a pair.
    let adapters = config.moe.top_k.max(1) * 3 * (crate::adapter::MAX_RANK + 1).next_multiple_of(8);
    // On matrices the router's logits come in parts.
    let logits = DEPTH_PARTS * config.moe.experts;
    attention.max(experts).max(2 * config.dense_width).max(config.hidden).max(adapters).max(logits)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::checkpoint::MlpKind;
    use crate::family::Family;
    use crate::placement::{Heads, Topology};
    use crate::shape::MoeShape;

    /// Qwen3-30B-A3B.
    pub(crate) fn qwen3_30b() -> ModelConfig {
        ModelConfig {
            family: Family::Qwen3Moe,
            hidden: 2048,
            vocab: 151_936,
            heads: 32,
            kv_heads: 4,
            head_dim: 128,
            rms_eps: 1e-6,
            rope_theta: 1e6,
            max_positions: 40_960,
            tie_embeddings: false,
            dense_width: 6144,
            shared_width: 0,
            moe: MoeShape { experts: 128, top_k: 8, hidden: 2048, expert_width: 768 },
            norm_topk_prob: true,
            layers: vec![MlpKind::Experts; 48],
            mixers: Vec::new(),
            stop_ids: Vec::new(),
        }
    }

    fn all_heads() -> HeadShare {
        HeadShare::whole(Heads::of(&qwen3_30b()))
    }

    #[test]
    fn a_rank_with_fewer_heads_has_room_for_more_positions() {
        let config = qwen3_30b();
        let fourth = HeadShare::new(Heads::of(&config), Topology::new(Some(4), None, 0).unwrap());
        let blocks = |heads| engine_sizes(&config, heads, 2 << 30, 64, 0, 512, 16).blocks;
        assert_eq!(blocks(&fourth) / 4, blocks(&all_heads()));
    }

    #[test]
    fn an_asked_context_is_given_and_the_default_one_is_bounded() {
        let config = qwen3_30b();
        let wide = 2 << 30;
        assert_eq!(engine_sizes(&config, &all_heads(), wide, 1, 30_000, 512, 16).max_context, 30_000);
        let default = engine_sizes(&config, &all_heads(), wide, 64, 0, 512, 16);
        assert!(default.blocks * 16 * 4 * 128 * 4 * 2 * 48 <= 4 << 30);
        assert_eq!(default.max_context, default.blocks * 16);
    }

    #[test]
    fn no_scratch_or_cache_exceeds_a_small_binding() {
        let config = qwen3_30b();
        for limit in [16 << 20, 128 << 20] {
            let sizes = engine_sizes(&config, &all_heads(), limit, 4096, 0, 100_000, 16);
            assert!((sizes.step_tokens * widest_row(&config, &all_heads()) * 4) as u64 <= limit, "{sizes:?}");
            assert!((sizes.logit_rows * config.vocab * 4) as u64 <= limit, "{sizes:?}");
            assert!((sizes.blocks * 16 * 4 * 128 * 4) as u64 <= limit, "{sizes:?}");
            assert!(sizes.sequences <= sizes.step_tokens);
        }
    }
}
