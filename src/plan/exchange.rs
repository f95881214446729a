//! How ranks exchange what a layer with experts needs: two ways, what each sends, and which one is taken.

use crate::placement::Topology;
use crate::shape::MoeShape;

/// How ranks work together on a layer with experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExchangeWay {
    /// Every rank has every token and computes its own experts; partial outputs are added up.
    Sums,
    /// Each rank has sequences of its own, with their attention and cache; tokens are sent to the ranks that hold their
    /// experts, and what these computed comes back.
    Dispatch,
}

impl std::fmt::Display for ExchangeWay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Sums => "sums",
            Self::Dispatch => "dispatch",
        })
    }
}

/// What dispatch waits for more than sums do in each layer: one more round trip between host and device.
const ROUND_TRIP_SECONDS: f64 = 80e-6;
/// What a rank sends in a second, from device to device through hosts and network.
const BYTES_PER_SECOND: f64 = 10e9;

/// Bytes that all ranks together send for a token in one layer when partial sums of width `hidden` (D) are exchanged: each
/// rank adds up one part and hands it round.
pub fn sums_bytes(ranks: usize, hidden: usize) -> f64 {
    (2 * (ranks - 1) * hidden * 4) as f64
}

/// Ranks that hold one of the `top_k` (A) experts of a token, on average, when all are equally likely.
pub fn ranks_met(ranks: usize, top_k: usize) -> f64 {
    let n = ranks as f64;
    n * (1.0 - (1.0 - 1.0 / n).powf(top_k as f64))
}

/// Bytes that all ranks together send for a token in one layer when it is dispatched: x there and an output back, with A ids
/// and weights and the adapter, for each of the other ranks that it meets.
pub fn dispatch_bytes(ranks: usize, moe: &MoeShape) -> f64 {
    let others = ranks_met(ranks, moe.top_k) * (1.0 - 1.0 / ranks as f64);
    others * (2 * moe.hidden * 4 + moe.top_k * 8 + 8) as f64
}

/// Whether ranks can dispatch: each must be an expert group of its own, with all heads of attention.
pub fn can_dispatch(world: Topology) -> bool {
    world.attention_tp() == 1 && world.moe_tp() == 1
}

/// The way for a `world` whose steps have a row for each of `sequences` sequences: dispatch where the bytes it saves take longer
/// than its second round trip. What attention saves is not counted, so this errs towards sums.
pub fn way(world: Topology, moe: &MoeShape, sequences: usize) -> ExchangeWay {
    let ranks = world.world();
    if !can_dispatch(world) || ranks == 1 {
        return ExchangeWay::Sums;
    }
    let saved = (sums_bytes(ranks, moe.hidden) - dispatch_bytes(ranks, moe)) * sequences as f64 / ranks as f64;
    if saved / BYTES_PER_SECOND > ROUND_TRIP_SECONDS { ExchangeWay::Dispatch } else { ExchangeWay::Sums }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QWEN3_30B: MoeShape = MoeShape { experts: 128, top_k: 8, hidden: 2048, expert_width: 768 };

    #[test]
    fn bytes_a_token_are_those_of_the_documentation() {
        let rows = [
            (2, 16_384, 16_392, 1.99),
            (4, 49_152, 44_426, 3.60),
            (8, 114_688, 75_611, 5.25),
            (16, 245_760, 99_546, 6.45),
            (64, 1_032_192, 122_721, 7.58),
        ];
        for (ranks, sums, dispatch, met) in rows {
            assert_eq!(sums_bytes(ranks, 2048).round() as u64, sums, "{ranks}");
            assert_eq!(dispatch_bytes(ranks, &QWEN3_30B).round() as u64, dispatch, "{ranks}");
            assert!((ranks_met(ranks, 8) - met).abs() < 0.005, "{ranks}");
        }
    }

    #[test]
    fn dispatch_is_for_many_ranks_and_large_batches() {
        let way = |ep, sequences| way(Topology::new(None, Some(ep), 0).unwrap(), &QWEN3_30B, sequences);
        let cases = [
            (1, 4096, ExchangeWay::Sums),
            (2, 4096, ExchangeWay::Sums),
            (4, 64, ExchangeWay::Sums),
            (8, 64, ExchangeWay::Sums),
            (8, 256, ExchangeWay::Dispatch),
            (16, 32, ExchangeWay::Sums),
            (16, 128, ExchangeWay::Dispatch),
            (64, 128, ExchangeWay::Dispatch),
        ];
        for (ep, sequences, expected) in cases {
            assert_eq!(way(ep, sequences), expected, "{ep} ranks, {sequences} sequences");
        }
        for ep in [8, 16] {
            let heads = Topology::new(Some(16), Some(ep), 0).unwrap();
            assert_eq!(super::way(heads, &QWEN3_30B, 4096), ExchangeWay::Sums);
        }
    }
}
