//! Tokens to the ranks that hold their experts, and what these computed back: the host's part.
//!
//! A message holds the n rows that one rank has for another, field by field: x (f32 `[n, D]`), the ids of their experts (i32
//! `[n, A]`, global; -1 where the receiver does not compute the pair), weights (f32 `[n, A]`) and the global id of each row's
//! adapter (u64, 0 for none). Slots are a rank's own affair. The answer is one weighted sum a row, f32 `[n, D]`.

use super::Exchange;
use crate::error::{Error, ErrorKind, Result};
use crate::placement::Copies;

/// The tokens of one rank, and where those of the others come from.
pub(crate) struct Dispatch {
    /// D.
    hidden: usize,
    /// A.
    top_k: usize,
    copies: Copies,
    /// The rank that computes each pair of this rank's tokens.
    chosen: Vec<i32>,
    /// The tokens that each rank got, ascending.
    sent: Vec<Vec<usize>>,
    messages: Vec<Vec<u8>>,
}

/// Tokens that a rank has routed.
pub(crate) struct Tokens<'a> {
    /// f32 `[T, D]`, normed.
    pub x: &'a [u8],
    /// i32 `[T, A]`, global.
    pub topk_ids: &'a [i32],
    /// f32 `[T, A]`.
    pub topk_weights: &'a [u8],
    /// `[T]`: global ids, 0 for none.
    pub adapters: &'a [u64],
}

/// R rows that came from all ranks, in the order of the ranks.
pub(crate) struct Received {
    /// R.
    pub rows: usize,
    /// i32 `[R, A]`, global, -1 where another rank computes the pair.
    pub topk_ids: Vec<i32>,
    /// `[R]`.
    pub adapters: Vec<u64>,
    /// Rows of each rank.
    counts: Vec<usize>,
    messages: Vec<Vec<u8>>,
    x_bytes: usize,
    weight_bytes: usize,
}

impl Received {
    /// f32 `[R, D]`, a slice a rank.
    pub fn x(&self) -> Vec<&[u8]> {
        self.messages.iter().zip(&self.counts).map(|(m, n)| &m[..n * self.x_bytes]).collect()
    }

    /// f32 `[R, A]`, a slice a rank.
    pub fn topk_weights(&self) -> Vec<&[u8]> {
        let (begin, bytes) = (self.x_bytes + self.weight_bytes, self.weight_bytes);
        self.messages.iter().zip(&self.counts).map(|(m, n)| &m[n * begin..n * (begin + bytes)]).collect()
    }
}

impl Dispatch {
    /// For layers of width `hidden` (D) with `top_k` (A) experts a token.
    pub fn new(hidden: usize, top_k: usize, copies: Copies) -> Self {
        Self { hidden, top_k, copies, chosen: Vec::new(), sent: Vec::new(), messages: Vec::new() }
    }

    /// D and A.
    pub fn sizes(&self) -> [usize; 2] {
        [self.hidden, self.top_k]
    }

    /// Sends each token to the ranks of its experts, and takes what the other ranks sent to this one.
    ///
    /// # Errors
    /// Those of [`Exchange::all_to_all`]; [`ErrorKind::Format`] for a message of another size.
    pub fn send(&mut self, line: &mut dyn Exchange, tokens: &Tokens<'_>) -> Result<Received> {
        let (rank, ranks) = (line.rank(), line.ranks());
        let (a, x_bytes, weight_bytes) = (self.top_k, self.hidden * 4, self.top_k * 4);
        self.copies.choose(tokens.topk_ids, rank, &mut self.chosen);
        self.sent.resize(ranks, Vec::new());
        self.messages.resize(ranks, Vec::new());
        for (to, (sent, message)) in self.sent.iter_mut().zip(&mut self.messages).enumerate() {
            let there = |chosen: &i32| *chosen == to as i32;
            sent.clear();
            sent.extend((0..tokens.adapters.len()).filter(|t| self.chosen[t * a..(t + 1) * a].iter().any(there)));
            message.clear();
            for t in sent.iter() {
                message.extend_from_slice(&tokens.x[t * x_bytes..(t + 1) * x_bytes]);
            }
            for pair in sent.iter().flat_map(|t| t * a..(t + 1) * a) {
                let id = if there(&self.chosen[pair]) { tokens.topk_ids[pair] } else { -1 };
                message.extend_from_slice(&id.to_le_bytes());
            }
            for t in sent.iter() {
                message.extend_from_slice(&tokens.topk_weights[t * weight_bytes..(t + 1) * weight_bytes]);
            }
            for t in sent.iter() {
                message.extend_from_slice(&tokens.adapters[*t].to_le_bytes());
            }
        }
        let messages = line.all_to_all(&self.messages.iter().map(Vec::as_slice).collect::<Vec<_>>())?;
        let row = x_bytes + 2 * weight_bytes + 8;
        let mut received = Received {
            rows: 0,
            topk_ids: Vec::new(),
            adapters: Vec::new(),
            counts: Vec::new(),
            messages: Vec::new(),
            x_bytes,
            weight_bytes,
        };
        for (from, message) in messages.iter().enumerate() {
            if !message.len().is_multiple_of(row) {
                let text = format!("rank {from} sent {} bytes of tokens, expected rows of {row}", message.len());
                return Err(Error::new(ErrorKind::Format, text));
            }
            let n = message.len() / row;
            let ids = &message[n * x_bytes..n * (x_bytes + weight_bytes)];
            received.topk_ids.extend(ids.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)));
            let adapters = &message[n * (row - 8)..];
            received.adapters.extend(adapters.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)));
            received.counts.push(n);
            received.rows += n;
        }
        received.messages = messages;
        Ok(received)
    }

    /// Gives the ranks that sent `received` what was computed of it (`y`, f32 `[R, D]`), and puts into `sums` what the others
    /// computed of the tokens of this one: f32 `[T, D]`, added up in the order of the ranks. `tokens` is T.
    ///
    /// # Errors
    /// Those of [`Exchange::all_to_all`]; [`ErrorKind::Rank`] for outputs of another size.
    pub fn give_back(
        &self,
        line: &mut dyn Exchange,
        received: &Received,
        y: &[u8],
        tokens: usize,
        sums: &mut Vec<f32>,
    ) -> Result<()> {
        let row = self.hidden * 4;
        let mut rest = y;
        let parts: Vec<&[u8]> = received
            .counts
            .iter()
            .map(|n| {
                let (part, after) = rest.split_at(n * row);
                rest = after;
                part
            })
            .collect();
        let outputs = line.all_to_all(&parts)?;
        sums.clear();
        sums.resize(tokens * self.hidden, 0.0);
        for (from, (bytes, sent)) in outputs.iter().zip(&self.sent).enumerate() {
            super::check_length(from, bytes.len(), sent.len() * row)?;
            for (token, bytes) in sent.iter().zip(bytes.chunks_exact(row)) {
                let sum = &mut sums[token * self.hidden..(token + 1) * self.hidden];
                for (sum, value) in sum.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *sum += f32::from_le_bytes(*value);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exchange::Local;
    use crate::placement::{PlacementRule, Topology};

    const D: usize = 8;
    const A: usize = 3;
    const EXPERTS: usize = 7;

    /// What pair (x, expert, adapter) becomes: any function will do.
    fn pair(x: f32, expert: i32, adapter: u64) -> f32 {
        x * (1 + expert) as f32 + adapter as f32
    }

    struct Home {
        x: Vec<f32>,
        ids: Vec<i32>,
        weights: Vec<f32>,
        adapters: Vec<u64>,
    }

    impl Home {
        /// Rank 1 of more than one has no token.
        fn new(rank: usize) -> Self {
            let tokens = if rank == 1 { 0 } else { 2 + 3 * rank };
            let n = |i: usize, m: usize| (i * 7 + rank * 5 + i / 3) % m;
            Self {
                x: (0..tokens * D).map(|i| n(i, 13) as f32).collect(),
                // Distinct experts a token; one of ten pairs has none.
                ids: (0..tokens * A)
                    .map(|p| if n(p, 10) == 0 { -1 } else { ((n(p / A, EXPERTS) + p % A) % EXPERTS) as i32 })
                    .collect(),
                weights: (0..tokens * A).map(|p| n(p, 4) as f32 * 0.25).collect(),
                adapters: (0..tokens).map(|t| if n(t, 3) == 0 { 0 } else { u64::MAX - n(t, 3) as u64 }).collect(),
            }
        }

        fn tokens(&self) -> Tokens<'_> {
            Tokens {
                x: bytemuck::cast_slice(&self.x),
                topk_ids: &self.ids,
                topk_weights: bytemuck::cast_slice(&self.weights),
                adapters: &self.adapters,
            }
        }

        fn expected(&self) -> Vec<f32> {
            let mut out = vec![0.0; self.x.len()];
            for (p, id) in self.ids.iter().enumerate().filter(|(_, id)| **id >= 0) {
                let row = p / A * D..(p / A + 1) * D;
                for (out, x) in out[row.clone()].iter_mut().zip(&self.x[row]) {
                    *out += self.weights[p] * pair(*x, *id, self.adapters[p / A] % 16);
                }
            }
            out
        }
    }

    fn rules(ranks: usize) -> [PlacementRule; 4] {
        let table = |owners: &dyn Fn(usize) -> Vec<usize>| PlacementRule::Table((0..EXPERTS).map(owners).collect());
        [
            PlacementRule::Linear,
            PlacementRule::RoundRobin,
            table(&|e| (0..1 + e % ranks).map(|i| (e * 3 + i) % ranks).collect()),
            // All on the last rank.
            table(&|_| vec![ranks - 1]),
        ]
    }

    /// What one rank does in two layers; the pairs it computed.
    fn exchange(mut line: Local, rule: &PlacementRule) -> usize {
        let (rank, ranks) = (line.rank(), line.ranks());
        let world = Topology::new(None, Some(ranks), rank).unwrap();
        let placement = rule.place(EXPERTS, world).unwrap();
        let mut dispatch = Dispatch::new(D, A, Copies::new(rule, EXPERTS, world).unwrap());
        let home = Home::new(rank);
        let mut computed = 0;
        for _ in 0..2 {
            let received = dispatch.send(&mut line, &home.tokens()).unwrap();
            let x: Vec<f32> = bytemuck::pod_collect_to_vec(&received.x().concat());
            let weights: Vec<f32> = bytemuck::pod_collect_to_vec(&received.topk_weights().concat());
            let sizes = [x.len(), weights.len(), received.topk_ids.len(), received.adapters.len()];
            assert_eq!(sizes, [D, A, A, 1].map(|n| n * received.rows));
            let mut y = vec![0.0f32; x.len()];
            for (p, id) in received.topk_ids.iter().enumerate().filter(|(_, id)| **id >= 0) {
                assert!(placement.local(*id as usize).is_some(), "rank {rank} got expert {id}");
                computed += 1;
                for d in p / A * D..(p / A + 1) * D {
                    y[d] += weights[p] * pair(x[d], *id, received.adapters[p / A] % 16);
                }
            }
            let idle = received.topk_ids.chunks(A).any(|ids| ids.iter().all(|id| *id < 0));
            assert!(!idle, "a row without a pair was sent");
            let mut sums = vec![7.0];
            let tokens = home.adapters.len();
            dispatch.give_back(&mut line, &received, bytemuck::cast_slice(&y), tokens, &mut sums).unwrap();
            // Small integers and quarters: no order rounds.
            assert_eq!(sums, home.expected(), "rank {rank} of {ranks}");
        }
        Box::new(line).end();
        computed
    }

    #[test]
    fn every_pair_is_computed_once_where_its_expert_is_and_comes_back() {
        for ranks in [1, 2, 3, 5, 8] {
            for rule in rules(ranks) {
                let computed: usize = std::thread::scope(|scope| {
                    let lines = Local::lines(ranks).into_iter();
                    let threads: Vec<_> = lines.map(|line| scope.spawn(|| exchange(line, &rule))).collect();
                    threads.into_iter().map(|t| t.join().unwrap()).sum()
                });
                let pairs = (0..ranks).map(|r| Home::new(r).ids.iter().filter(|id| **id >= 0).count()).sum::<usize>();
                assert_eq!(computed, 2 * pairs, "{ranks} {rule:?}");
            }
        }
    }

    #[test]
    fn messages_of_another_size_are_noticed() {
        let world = Topology::new(None, Some(2), 0).unwrap();
        let errors: Vec<String> = std::thread::scope(|scope| {
            let threads: Vec<_> = Local::lines(2)
                .into_iter()
                .map(|mut line| {
                    scope.spawn(move || {
                        let copies = Copies::new(&PlacementRule::Linear, EXPERTS, world).unwrap();
                        // Ranks that think of other widths.
                        let mut dispatch = Dispatch::new(D + line.rank(), A, copies);
                        let x = vec![0u8; 4 * (D + line.rank())];
                        let (topk_ids, topk_weights) = (&[0, 6, -1][..], &[0u8; 4 * A][..]);
                        let tokens = Tokens { x: &x, topk_ids, topk_weights, adapters: &[0] };
                        dispatch.send(&mut line, &tokens).map(|_| ()).unwrap_err().to_string()
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert!(errors[0].contains("rank 1 sent 68 bytes of tokens, expected rows of 64"), "{errors:?}");
        assert!(errors[1].contains("rank 0 sent 64 bytes"), "{errors:?}");
    }
}
