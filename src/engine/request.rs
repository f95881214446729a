//! What a caller asks for, and what comes back.

use crate::adapter::pool::AdapterId;
use crate::checkpoint::ModelConfig;
use crate::error::{Error, ErrorKind, Result};
use crate::plan::exchange::ExchangeWay;

/// Sizes of an engine. They are fitted to the model and the device: [`Engine::options`](crate::engine::Engine::options)
/// tells what is in force.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Sequences that run together, at most 4,096; more wait.
    pub max_sequences: usize,
    /// Tokens of prompt and answer together; 0: as the model allows, with at most 4 GiB of keys and values. Lowered to what
    /// one binding of the device can hold.
    pub max_context: usize,
    /// Rows of one step: decoded tokens and prompt tokens together. A longer prompt takes several steps. Raised to
    /// `max_sequences`, lowered to what a binding can hold.
    pub max_step_tokens: usize,
    /// L: adapters on the device at a time. Any number can be loaded.
    pub adapter_slots: usize,
    /// Bytes of the device's memory for the factors of those adapters, as in
    /// [`PoolOptions::budget`](crate::adapter::pool::PoolOptions); `None`: what the device has. Adapters that do not fit
    /// together take turns.
    pub adapter_memory: Option<u64>,
    /// Count how often each expert of each layer is chosen, for [`Engine::routing_counts`](crate::Engine::routing_counts): one
    /// small dispatch a layer.
    pub count_routing: bool,
    /// How several ranks exchange; `None`: as [`way`](crate::plan::exchange::way) says. One rank alone exchanges nothing.
    pub exchange: Option<ExchangeWay>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            max_sequences: 64,
            max_context: 0,
            max_step_tokens: 512,
            adapter_slots: 8,
            adapter_memory: None,
            count_routing: false,
            exchange: None,
        }
    }
}

/// Names one submitted request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub(crate) u64);

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// 0 takes the most probable token; otherwise logits are divided by it.
    pub temperature: f32,
    /// Only the k largest logits are candidates; 0: all.
    pub top_k: u32,
    /// Only the most probable candidates that together reach this mass; 1: all.
    pub top_p: f32,
    /// The same seed gives the same answer, whatever else is in the batch.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 }
    }
}

impl Sampling {
    /// The uniform number in [0, 1) for the n-th token of an answer: splitmix64 (Steele, Lea and Flood 2014) of seed and n.
    pub(crate) fn uniform(&self, n: usize) -> f32 {
        let mut z = self.seed.wrapping_add((n as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        (z >> 40) as f32 / (1u64 << 24) as f32
    }
}

/// One prompt and what to do with it.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// Token ids; at least one.
    pub prompt: Vec<u32>,
    /// `None`: the base model.
    pub adapter: Option<AdapterId>,
    /// Longest answer; 0 only reads the prompt. Cache blocks for all of it are taken when the sequence starts, so that a
    /// running answer never lacks one.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Ids that end the answer.
    pub stop_ids: Vec<u32>,
    /// Return the logits of every prompt position.
    pub logits: bool,
}

impl Request {
    pub(crate) fn check(&self, config: &ModelConfig, max_context: usize) -> Result<()> {
        let fail = |message: String| Err(Error::new(ErrorKind::Request, message));
        if self.prompt.is_empty() {
            return fail("prompt: empty, expected at least one token".into());
        }
        if let Some(id) = self.prompt.iter().chain(&self.stop_ids).find(|id| **id as usize >= config.vocab) {
            return fail(format!("token id {id}: expected less than {}", config.vocab));
        }
        let room = max_context.saturating_sub(usize::from(self.max_tokens > 0));
        if self.prompt.len() > room {
            return fail(format!("prompt of {} tokens: longer than the context of {max_context}", self.prompt.len()));
        }
        let s = &self.sampling;
        if !(s.temperature.is_finite() && s.temperature >= 0.0) {
            return fail(format!("temperature {}: expected 0 or more", s.temperature));
        }
        if !(s.top_p > 0.0 && s.top_p <= 1.0) {
            return fail(format!("top_p {}: expected more than 0 and at most 1", s.top_p));
        }
        Ok(())
    }
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop id, which was reported as the last token.
    Stop,
    /// `max_tokens`, or the end of the context.
    Length,
    /// [`Engine::cancel`](crate::engine::Engine::cancel).
    Cancelled,
}

/// Something that happened.
#[derive(Debug, Clone)]
pub enum Event {
    /// The next token of an answer, stop id included.
    Token {
        /// Whose.
        sequence: SequenceId,
        /// Token id.
        id: u32,
    },
    /// Logits of prompt positions, in order, maybe over several events.
    Logits {
        /// Whose.
        sequence: SequenceId,
        /// First position of `rows`.
        position: usize,
        /// f32 `[n, vocab]`: row i predicts the token after position `position + i`.
        rows: Vec<f32>,
    },
    /// No more events of this sequence.
    Finished {
        /// Whose.
        sequence: SequenceId,
        /// Why.
        reason: FinishReason,
    },
    /// No more events of this sequence: it could not be computed.
    Failed {
        /// Whose.
        sequence: SequenceId,
        /// Why.
        error: Error,
    },
}
