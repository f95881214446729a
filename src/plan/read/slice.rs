//! Byte ranges of a part of an expert's width, in stored tensors of any packing.

use std::ops::Range;

use super::StoredLayout;
use crate::checkpoint::TensorHeader;
use crate::error::{Error, ErrorKind, Result};
use crate::family::class::{ExpertTensor, Group, Projection};
use crate::placement::Topology;

/// `count` ranges of `len` bytes, the first at `begin`, each `stride` bytes after the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// First byte.
    pub begin: u64,
    /// Bytes of each range.
    pub len: u64,
    /// Bytes from one range to the next, at least `len`.
    pub stride: u64,
    /// Number of ranges.
    pub count: u64,
}

impl Span {
    /// Bytes of all ranges together.
    pub fn n_bytes(&self) -> u64 {
        self.len * self.count
    }

    /// The ranges one by one.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let Self { begin, len, stride, count } = *self;
        (0..count).map(move |i| begin + i * stride..begin + i * stride + len)
    }

    /// All of `n_bytes`; nothing of nothing.
    pub(super) fn whole(n_bytes: u64) -> Vec<Self> {
        if n_bytes == 0 { Vec::new() } else { vec![Self { begin: 0, len: n_bytes, stride: n_bytes, count: 1 }] }
    }
}

/// The bytes of the `owned` experts that belong to the width of this rank.
pub(super) fn spans(
    header: &TensorHeader<'_>,
    tensor: &ExpertTensor<'_>,
    layout: &StoredLayout,
    topology: Topology,
    owned: &[Range<usize>],
) -> Result<Vec<Span>> {
    let (experts, inner) = match tensor.expert {
        Some(_) => (1, header.shape),
        None => (header.shape[0], &header.shape[1..]),
    };
    if header.n_bytes == 0 {
        return Ok(Vec::new());
    }
    let expert_bytes = header.n_bytes / experts as u64;
    let part = match part(inner, tensor, layout, topology)? {
        Part::Nothing => return Ok(Vec::new()),
        Part::Whole => {
            let run = |r: &Range<usize>| {
                let len = r.len() as u64 * expert_bytes;
                Span { begin: r.start as u64 * expert_bytes, len, stride: len, count: 1 }
            };
            return Ok(owned.iter().map(run).collect());
        }
        Part::Along { axis, ranges } => (axis, ranges),
    };
    let (axis, ranges) = part;
    let before: u64 = inner[..axis].iter().map(|&n| n as u64).product();
    let rows = before * inner[axis] as u64;
    // One step along the axis.
    let step = expert_bytes / rows;
    if step * rows != expert_bytes {
        return Err(unsupported("a step along the expert width is no whole byte".to_owned()));
    }
    let stride = step * inner[axis] as u64;
    let mut spans = Vec::new();
    for run in owned {
        for range in ranges.iter().filter(|r| !r.is_empty()) {
            spans.push(Span {
                begin: run.start as u64 * expert_bytes + range.start as u64 * step,
                len: range.len() as u64 * step,
                stride,
                count: run.len() as u64 * before,
            });
        }
    }
    Ok(spans)
}

/// Which part of an expert's own tensor a rank reads.
enum Part {
    Nothing,
    Whole,
    Along { axis: usize, ranges: Vec<Range<usize>> },
}

fn part(inner: &[usize], tensor: &ExpertTensor<'_>, layout: &StoredLayout, topology: Topology) -> Result<Part> {
    if topology.moe_tp() == 1 {
        return Ok(Part::Whole);
    }
    let Some(projection) = tensor.projection else {
        return Err(unsupported("the expert width cannot be split: unknown projection".to_owned()));
    };
    let down = projection == Projection::Down;
    if tensor.group == Group::ExpertBias && down {
        // Added once.
        return Ok(if topology.moe_tp_rank() == 0 { Part::Whole } else { Part::Nothing });
    }
    let bare = tensor.expert.is_none() && inner.len() == 2 && tensor.group == Group::ExpertPayload;
    let input_first = tensor.input_first || (bare && layout.transposed);
    let axis = match (inner.len(), tensor.group) {
        // A scale of the whole tensor.
        (0, _) => return Ok(Part::Whole),
        // One bias an output.
        (1, Group::ExpertBias) => 0,
        // One group index an input; one scale of the whole tensor.
        (1, _) if down && inner[0] != 1 => 0,
        (1, _) => return Ok(Part::Whole),
        _ => usize::from(down != input_first),
    };
    let width = topology.width_range(layout.width);
    let stored = inner[axis];
    let halves = if projection == Projection::GateUp { 2 } else { 1 };
    // A scale or zero point for the whole width serves every part of it.
    if stored == halves && tensor.group != Group::ExpertPayload && layout.width != 1 {
        return Ok(Part::Whole);
    }
    let half = stored / halves;
    if half == 0 || half * halves != stored || !layout.width.is_multiple_of(half) {
        return Err(unsupported(format!("the width {} cannot be split: stored as {stored} steps", layout.width)));
    }
    // Elements of the width in one stored step: a packed word, or a quantisation group.
    let each = layout.width / half;
    // A step of another size is the rounding of a block at the end, whose true size the header does not tell.
    let cut = !each.is_power_of_two() || !width.start.is_multiple_of(each) || !width.end.is_multiple_of(each);
    if cut && !width.is_empty() {
        return Err(unsupported(format!(
            "the part {}..{} of the width {} would cut a packed word or quantisation group of {each}",
            width.start, width.end, layout.width
        )));
    }
    let (begin, end) = (width.start / each, width.end / each);
    let ranges = match (projection, layout.interleaved) {
        (Projection::GateUp, true) => std::iter::once(2 * begin..2 * end).collect(),
        (Projection::GateUp, false) => vec![begin..end, half + begin..half + end],
        _ => std::iter::once(begin..end).collect(),
    };
    Ok(Part::Along { axis, ranges })
}

fn unsupported(message: String) -> Error {
    Error::new(ErrorKind::Unsupported, message)
}
