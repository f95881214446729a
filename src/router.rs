//! Options of the routing stages and the bits of the status word: shared by the kernels and by the oracle.

/// Status bit: a place of the top-k found no finite candidate, so its id is -1 and its weight 0.
pub const STATUS_NON_FINITE: u32 = 1;
/// Status bit: `token_lora_mapping` held a slot >= L; the token was treated as one without adapter.
pub const STATUS_SLOT: u32 = 2;
/// Status bit: an expert id was >= E (or >= E_l after localisation); it became -1.
pub const STATUS_ID: u32 = 4;

/// How a logit becomes a score.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Score {
    /// exp(logit) over the sum of all experts with a finite logit.
    #[default]
    Softmax,
    /// 1 / (1 + exp(-logit)), each expert on its own.
    Sigmoid,
}

/// How a group of experts is scored for group-limited selection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum GroupScore {
    /// The best score + bias of the group.
    #[default]
    Max,
    /// The sum of the two best; a group with one candidate scores that one.
    TopTwo,
}

/// How logits become `topk_ids` and `topk_weights`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouteOptions {
    /// Score of an expert.
    pub score: Score,
    /// Divide the weights of a token by their sum.
    pub renormalise: bool,
    /// Factor on every weight, after renormalisation.
    pub scale: f32,
    /// Groups of consecutive experts; divides E. 1 means that selection is not limited to groups.
    pub groups: u32,
    /// Groups whose experts stay candidates; ignored with one group.
    pub top_groups: u32,
    /// Score of a group.
    pub group_score: GroupScore,
}

impl Default for RouteOptions {
    fn default() -> Self {
        Self {
            score: Score::Softmax,
            renormalise: true,
            scale: 1.0,
            groups: 1,
            top_groups: 1,
            group_score: GroupScore::Max,
        }
    }
}

/// What the virtual ids of a token without adapter are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum NoAdapter {
    /// -1: its pairs cost nothing in the LoRA stream.
    #[default]
    Skip,
    /// The id as it is, so that one alignment serves base and LoRA. These are also the virtual ids of slot 0:
    /// a LoRA consumer has to apply `lora_mask`.
    Unshifted,
}
