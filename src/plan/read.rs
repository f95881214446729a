//! Which bytes of a checkpoint one rank reads: decided from headers alone, before any data is touched.

mod heads;
mod slice;

use std::collections::BTreeMap;
use std::ops::Range;

use serde::Serialize;
pub use slice::Span;

use crate::checkpoint::untrusted::shown;
use crate::checkpoint::{ModelConfig, TensorHeader};
use crate::error::{Error, ErrorKind, Result};
use crate::family::class::{ExpertTensor, Group, expert_tensor, group};
use crate::family::table::Stored;
use crate::placement::{HeadShare, Heads, Placement, PlacementRule, Topology};

/// Which block scales (and zero points, group indices) of routed experts a rank reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ScalePolicy {
    /// Those of the experts that it owns.
    #[default]
    Owned,
    /// All of them, whole, and all biases, as vLLM's filter does.
    All,
}

/// How a checkpoint lays out what ranks share out: what the headers do not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredLayout {
    /// E of the model's own layers. Draft layers may have another number; theirs is counted.
    pub experts: usize,
    /// F: width of one expert.
    pub width: usize,
    /// Layers of the model proper; layers past them are draft layers.
    pub layers: usize,
    /// Rows of gate and up alternate in fused tensors (gpt-oss); otherwise all gate rows come first.
    pub interleaved: bool,
    /// Bare fused parameters are `[E, in, out]` (gpt-oss in bf16); otherwise `[E, out, in]`.
    pub transposed: bool,
    /// Heads of attention.
    pub heads: Heads,
}

impl StoredLayout {
    /// The layout of the family of `config`.
    pub fn of(config: &ModelConfig) -> Self {
        let table = config.family.table();
        Self {
            experts: config.moe.experts,
            width: config.moe.expert_width,
            layers: config.n_layers(),
            interleaved: table.interleaved,
            transposed: table.stored != Stored::OutIn,
            heads: Heads::of(config),
        }
    }
}

/// What one rank reads of one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorRead {
    /// Its name in the file.
    pub name: String,
    /// What it is for.
    pub group: Group,
    /// The bytes to read, relative to the tensor's data; empty when all is skipped. No byte occurs twice.
    pub spans: Vec<Span>,
    /// Bytes that the rank reads.
    pub read: u64,
    /// Size of the tensor.
    pub n_bytes: u64,
}

/// Bytes and tensors of one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Bill {
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes left alone.
    pub skipped_bytes: u64,
    /// Tensors of which something is read.
    pub read_tensors: usize,
    /// Tensors left alone.
    pub skipped_tensors: usize,
}

/// What one rank reads of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadPlan {
    /// The place this plan is for.
    pub topology: Topology,
    /// Every tensor, in the order of the headers.
    pub tensors: Vec<TensorRead>,
    /// The bytes, by group.
    pub bills: BTreeMap<Group, Bill>,
}

impl ReadPlan {
    /// Decides for the rank at `topology`, from the headers of all files.
    ///
    /// Errors: `Tensor` for an expert that the model does not have, or a fused tensor of another number of experts;
    /// `Config` when `rule` does not fit; `Unsupported`, naming the tensor, where the split of the width would cut a
    /// quantisation group or packed word.
    pub fn new<'a>(
        headers: impl Iterator<Item = TensorHeader<'a>>,
        layout: &StoredLayout,
        rule: &PlacementRule,
        topology: Topology,
        scales: ScalePolicy,
    ) -> Result<Self> {
        let headers: Vec<_> = headers.collect();
        let placements = Placements::new(&headers, layout, rule, topology)?;
        let share = HeadShare::new(layout.heads, topology);
        let mut tensors = Vec::with_capacity(headers.len());
        let mut bills = BTreeMap::<Group, Bill>::new();
        for header in &headers {
            let (group, spans) = match expert_tensor(header.name) {
                Some(tensor) => {
                    let at = |e: Error| e.within(format!("tensor `{}`", shown(header.name)));
                    let placement = placements.of(tensor.module)?;
                    let rank = Rank { layout, placement, topology, scales };
                    (tensor.group, rank.spans(header, &tensor).map_err(at)?)
                }
                None => (group(header.name), heads::spans(header, &share)),
            };
            let read = spans.iter().map(Span::n_bytes).sum();
            let bill = bills.entry(group).or_default();
            bill.read_bytes += read;
            bill.skipped_bytes += header.n_bytes - read;
            // An empty tensor has nothing to skip.
            if read > 0 || header.n_bytes == 0 {
                bill.read_tensors += 1;
            } else {
                bill.skipped_tensors += 1;
            }
            tensors.push(TensorRead { name: header.name.to_owned(), group, spans, read, n_bytes: header.n_bytes });
        }
        Ok(Self { topology, tensors, bills })
    }

    /// Bytes that the rank reads.
    pub fn read_bytes(&self) -> u64 {
        self.bills.values().map(|b| b.read_bytes).sum()
    }

    /// Bytes that the rank leaves alone.
    pub fn skipped_bytes(&self) -> u64 {
        self.bills.values().map(|b| b.skipped_bytes).sum()
    }
}

/// The placement of each module with experts: draft layers may have another number of them.
struct Placements<'a> {
    main: Placement,
    drafts: BTreeMap<&'a str, Placement>,
    layers: usize,
}

impl<'a> Placements<'a> {
    fn new(
        headers: &[TensorHeader<'a>],
        layout: &StoredLayout,
        rule: &PlacementRule,
        topology: Topology,
    ) -> Result<Self> {
        let mut counts = BTreeMap::<&str, usize>::new();
        for header in headers {
            if let Some(tensor) = expert_tensor(header.name).filter(|t| !is_main(t.module, layout.layers)) {
                let n = match tensor.expert {
                    Some(expert) => expert.saturating_add(1),
                    // Side tensors without a number need not have a row an expert.
                    None if tensor.group == Group::ExpertPayload => header.shape.first().copied().unwrap_or(0),
                    None => 0,
                };
                let count = counts.entry(tensor.module).or_default();
                *count = n.max(*count);
            }
        }
        let main = rule.place(layout.experts, topology)?;
        let place = |(module, n): (&'a str, usize)| {
            let placed = rule.place(n.max(1), topology).map_err(|e| e.within(format!("`{}`", shown(module))))?;
            Ok((module, placed))
        };
        let drafts = counts.into_iter().map(place).collect::<Result<_>>()?;
        Ok(Self { main, drafts, layers: layout.layers })
    }

    fn of(&self, module: &str) -> Result<&Placement> {
        if is_main(module, self.layers) {
            return Ok(&self.main);
        }
        self.drafts
            .get(module)
            .ok_or_else(|| Error::new(ErrorKind::Tensor, format!("`{}`: no experts counted", shown(module))))
    }
}

/// Whether a module with experts is one of the model's own layers and not one of a draft.
fn is_main(module: &str, layers: usize) -> bool {
    let Some((before, rest)) = module.split_once("layers.") else {
        return false;
    };
    let number = rest.split_once('.').map_or(rest, |(n, _)| n);
    let draft = before.split('.').any(|part| part.contains("mtp") || part.contains("draft"));
    !draft && number.parse().is_ok_and(|n: usize| n < layers)
}

/// One rank's view of one module with experts.
struct Rank<'a> {
    layout: &'a StoredLayout,
    placement: &'a Placement,
    topology: Topology,
    scales: ScalePolicy,
}

impl Rank<'_> {
    fn spans(&self, header: &TensorHeader<'_>, tensor: &ExpertTensor<'_>) -> Result<Vec<Span>> {
        let experts = self.placement.experts();
        if let Some(expert) = tensor.expert.filter(|&e| e >= experts) {
            return Err(Error::new(ErrorKind::Tensor, format!("no expert {expert}, the layer has {experts}")));
        }
        let follows = match tensor.group {
            Group::ExpertPayload => true,
            Group::ExpertScale | Group::ExpertBias => self.scales == ScalePolicy::Owned,
            _ => false,
        };
        if !follows {
            return Ok(Span::whole(header.n_bytes));
        }
        let owned = match tensor.expert {
            Some(expert) if self.placement.local(expert).is_none() => return Ok(Vec::new()),
            // A tensor of its own is a stack of one.
            Some(_) => std::iter::once(0..1).collect(),
            None if header.shape.first() != Some(&experts) => {
                let message = format!("expected {experts} experts in the first dimension, got {:?}", header.shape);
                return Err(Error::new(ErrorKind::Tensor, message));
            }
            None => runs(&self.placement.owned()),
        };
        slice::spans(header, tensor, self.layout, self.topology, &owned)
    }
}

/// Consecutive numbers as ranges.
fn runs(sorted: &[usize]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for &n in sorted {
        match runs.last_mut() {
            Some(run) if run.end == n => run.end += 1,
            _ => runs.push(n..n + 1),
        }
    }
    runs
}
