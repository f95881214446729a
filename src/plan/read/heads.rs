//! Byte ranges of a rank's heads in tensors that ranks do not share out as experts.

use super::slice::Span;
use crate::checkpoint::TensorHeader;
use crate::family::class::{HeadProjection, attention_tensor};
use crate::placement::HeadShare;

/// The bytes of a tensor outside the experts: those of this rank's heads in a projection of attention, otherwise all.
///
/// What cannot be cut by its shape, such as packed words, is read whole: more bytes, never a wrong result.
pub(super) fn spans(header: &TensorHeader<'_>, share: &HeadShare) -> Vec<Span> {
    cut(header, share).unwrap_or_else(|| Span::whole(header.n_bytes))
}

fn cut(header: &TensorHeader<'_>, share: &HeadShare) -> Option<Vec<Span>> {
    if share.is_whole() || header.n_bytes == 0 {
        return None;
    }
    let (projection, weight) = attention_tensor(header.name)?;
    let all = share.all();
    let (range, heads) = match projection {
        HeadProjection::Q | HeadProjection::Output => (share.q_range(), all.heads),
        HeadProjection::KeyOrValue => (share.kv_range(), all.kv_heads),
    };
    if projection == HeadProjection::Output && !weight {
        // Added once.
        return (range.start > 0).then(Vec::new);
    }
    let axis = usize::from(projection == HeadProjection::Output);
    let dimensions = if weight { 2 } else { 1 };
    if header.shape.len() != dimensions || header.shape[axis] != heads * all.head_dim {
        return None;
    }
    // Ranges along the axis, one for each row in front of it.
    let count: u64 = header.shape[..axis].iter().map(|&n| n as u64).product();
    let steps = count * header.shape[axis] as u64;
    let step = header.n_bytes / steps;
    if step * steps != header.n_bytes {
        return None;
    }
    let (begin, len) = (range.start as u64 * step, range.len() as u64 * step);
    Some(vec![Span { begin, len, stride: step * header.shape[axis] as u64, count }])
}
