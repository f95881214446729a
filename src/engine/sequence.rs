//! One sequence between submission and end.

use crate::engine::request::Request;

/// What a running sequence holds.
pub(crate) struct Place {
    /// Row of the block table and of the last ids.
    pub row: u32,
    /// Cache blocks, for prompt and answer.
    pub blocks: Vec<u32>,
    /// Adapter slot.
    pub slot: Option<usize>,
}

/// A sequence.
pub(crate) struct Sequence {
    pub request: Request,
    /// `None` while it waits.
    pub place: Option<Place>,
    /// Prompt tokens that steps have been begun for.
    pub read: usize,
    /// Answer tokens that steps have been begun for.
    pub sampled: usize,
    /// Answer tokens that have arrived.
    pub arrived: usize,
    /// The last of them.
    pub last: u32,
    /// Longest answer: `max_tokens`, cut at the context.
    pub max_tokens: usize,
}

impl Sequence {
    pub fn new(request: Request, max_context: usize) -> Self {
        let max_tokens = request.max_tokens.min(max_context - request.prompt.len());
        Self { request, place: None, read: 0, sampled: 0, arrived: 0, last: 0, max_tokens }
    }

    /// Positions it will need at most. The last token of an answer is never read.
    pub fn positions(&self) -> usize {
        self.request.prompt.len() + self.max_tokens.saturating_sub(1)
    }

    pub fn prompt_left(&self) -> usize {
        self.request.prompt.len() - self.read
    }

    /// A token can be decoded: the prompt is read, one was sampled, more are wanted.
    pub fn decodes(&self) -> bool {
        self.place.is_some() && self.prompt_left() == 0 && self.sampled > 0 && self.sampled < self.max_tokens
    }
}
