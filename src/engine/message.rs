//! A step as rank 0 tells it to the others, and the part of it that each of them computes.

use crate::kernels::sample::Pick;
use crate::plan::exchange::ExchangeWay;

/// One step of all ranks.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct StepMessage {
    /// Token or -1, position, sequence row, and place in `adapters` or -1. Slots are a rank's own affair.
    pub rows: Vec<[i32; 4]>,
    /// Adapters of the step: ids are the same on every rank.
    pub adapters: Vec<u64>,
    /// Cache blocks of sequences that are new in this step, by sequence row.
    pub blocks: Vec<(u32, Vec<u32>)>,
    /// Rows whose logits are computed.
    pub gather: Vec<u32>,
    /// Rows of logits that tokens are sampled from.
    pub picks: Vec<Pick>,
    /// Logits that somebody wants: first row of logits, and how many, all of one sequence.
    pub wanted: Vec<[u32; 2]>,
}

/// The rank that has a sequence row under dispatch.
pub(crate) fn home(row: u32, ranks: usize) -> usize {
    row as usize % ranks
}

impl StepMessage {
    /// What `rank` computes: of sums every row, and rank 0 alone what comes out; of dispatch the rows of its own sequences.
    pub fn part(&self, way: ExchangeWay, rank: usize, ranks: usize) -> Self {
        match way {
            ExchangeWay::Sums if rank == 0 => self.clone(),
            ExchangeWay::Sums => Self {
                rows: self.rows.clone(),
                adapters: self.adapters.clone(),
                blocks: self.blocks.clone(),
                ..Self::default()
            },
            ExchangeWay::Dispatch => self.of_home(rank, ranks),
        }
    }

    /// The adapter of one of the rows.
    pub fn adapter_of(&self, row: &[i32; 4]) -> Option<u64> {
        self.adapters.get(usize::try_from(row[3]).ok()?).copied()
    }

    /// The sequence of a row of logits.
    pub fn sequence_of(&self, logit_row: u32) -> u32 {
        self.rows[self.gather[logit_row as usize] as usize][2] as u32
    }

    /// The rows of the sequences of `rank`, and what comes out of them.
    pub fn of_home(&self, rank: usize, ranks: usize) -> Self {
        let own = |sequence: u32| home(sequence, ranks) == rank;
        // By old number: the new number of what stays.
        let renumber = |stays: &mut dyn Iterator<Item = bool>| -> Vec<u32> {
            stays
                .scan(0, |next, stays| {
                    *next += u32::from(stays);
                    Some(next.wrapping_sub(1))
                })
                .collect()
        };
        let rows = renumber(&mut self.rows.iter().map(|row| own(row[2] as u32)));
        let logit_rows = renumber(&mut (0..self.gather.len() as u32).map(|g| own(self.sequence_of(g))));
        let wanted = self.wanted.iter().filter(|[first, _]| own(self.sequence_of(*first)));
        Self {
            rows: self.rows.iter().filter(|row| own(row[2] as u32)).copied().collect(),
            adapters: self.adapters.clone(),
            blocks: self.blocks.iter().filter(|(row, _)| own(*row)).cloned().collect(),
            gather: self
                .gather
                .iter()
                .filter(|row| own(self.rows[**row as usize][2] as u32))
                .map(|row| rows[*row as usize])
                .collect(),
            picks: self
                .picks
                .iter()
                .filter(|pick| own(pick.sequence))
                .map(|pick| Pick { row: logit_rows[pick.row as usize], ..*pick })
                .collect(),
            wanted: wanted.map(|[first, count]| [logit_rows[*first as usize], *count]).collect(),
        }
    }

    /// As bytes; never empty, for no bytes at all mean the end.
    pub fn encode(&self) -> Vec<u8> {
        let mut words: Vec<u32> =
            [self.rows.len(), self.adapters.len(), self.blocks.len(), self.gather.len(), self.picks.len()]
                .map(|n| n as u32)
                .into();
        words.push(self.wanted.len() as u32);
        words.extend(self.rows.as_flattened().iter().map(|n| *n as u32));
        words.extend(self.adapters.iter().flat_map(|id| [*id as u32, (*id >> 32) as u32]));
        for (row, blocks) in &self.blocks {
            words.extend([*row, blocks.len() as u32]);
            words.extend(blocks);
        }
        words.extend(&self.gather);
        words.extend_from_slice(bytemuck::cast_slice(&self.picks));
        words.extend(self.wanted.as_flattened());
        bytemuck::cast_slice(&words).to_vec()
    }

    /// The inverse; `None` for other bytes, and for numbers of rows that there are not.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        if !bytes.len().is_multiple_of(4) {
            return None;
        }
        let words: Vec<u32> = bytemuck::pod_collect_to_vec(bytes);
        let mut rest = &words[..];
        let mut take = |n: usize| {
            let (taken, left) = rest.split_at_checked(n)?;
            rest = left;
            Some(taken)
        };
        let &[n_rows, n_adapters, n_blocks, n_gather, n_picks, n_wanted] = take(6)? else { return None };
        let rows = take((n_rows as usize).checked_mul(4)?)?.as_chunks::<4>().0;
        let rows = rows.iter().map(|row| row.map(|n| n as i32)).collect();
        let ids = take((n_adapters as usize).checked_mul(2)?)?.as_chunks::<2>().0;
        let adapters = ids.iter().map(|[low, high]| u64::from(*low) | u64::from(*high) << 32).collect();
        let mut blocks = Vec::new();
        for _ in 0..n_blocks {
            let &[row, n] = take(2)? else { return None };
            blocks.push((row, take(n as usize)?.to_vec()));
        }
        let gather = take(n_gather as usize)?.to_vec();
        let picks = take((n_picks as usize).checked_mul(size_of::<Pick>() / 4)?)?;
        let picks: Vec<Pick> = bytemuck::pod_collect_to_vec(picks);
        let wanted = take((n_wanted as usize).checked_mul(2)?)?.as_chunks::<2>().0.to_vec();
        let sound = gather.iter().all(|row| *row < n_rows)
            && picks.iter().all(|pick| pick.row < n_gather)
            && wanted
                .iter()
                .all(|[first, count]| *count > 0 && first.checked_add(*count).is_some_and(|end| end <= n_gather));
        (rest.is_empty() && sound).then_some(Self { rows, adapters, blocks, gather, picks, wanted })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pick(row: u32, sequence: u32) -> Pick {
        let (temperature, top_p, top_k, u) = (0.5, 0.9, 3, 0.25);
        Pick { row, sequence, temperature, top_p, top_k, u, pad0: 0, pad1: 0 }
    }

    /// Sequence row 1 decodes, 0 reads two tokens and samples, 3 reads two and its logits are wanted, 2 reads one.
    fn message() -> StepMessage {
        StepMessage {
            rows: vec![[9, 4, 1, -1], [5, 0, 0, 1], [7, 1, 0, 1], [1, 0, 3, 0], [2, 1, 3, 0], [8, 0, 2, -1]],
            adapters: vec![1, u64::MAX - 3],
            blocks: vec![(0, vec![4, 9]), (3, vec![])],
            gather: vec![0, 2, 3, 4],
            picks: vec![pick(0, 1), pick(1, 0)],
            wanted: vec![[2, 2]],
        }
    }

    #[test]
    fn messages_survive_the_way_and_broken_ones_are_noticed() {
        let message = message();
        let bytes = message.encode();
        assert_eq!(StepMessage::decode(&bytes), Some(message.clone()));
        assert!(!StepMessage::default().encode().is_empty());
        for n in 0..bytes.len() {
            assert_eq!(StepMessage::decode(&bytes[..n]), None, "{n}");
        }
        let endless = bytemuck::cast_slice(&[u32::MAX; 8]).to_vec();
        assert_eq!(StepMessage::decode(&endless), None);
        let nowhere = [
            StepMessage { gather: vec![6, 2, 3, 4], ..message.clone() },
            StepMessage { picks: vec![pick(4, 1)], ..message.clone() },
            StepMessage { wanted: vec![[2, 3]], ..message.clone() },
            StepMessage { wanted: vec![[2, u32::MAX]], ..message },
        ];
        for message in nowhere {
            assert_eq!(StepMessage::decode(&message.encode()), None, "{message:?}");
        }
    }

    #[test]
    fn under_sums_all_ranks_have_all_rows_and_rank_0_alone_what_comes_out() {
        let message = message();
        assert_eq!(message.part(ExchangeWay::Sums, 0, 3), message);
        let other = message.part(ExchangeWay::Sums, 2, 3);
        assert_eq!((&other.rows, &other.blocks, &other.adapters), (&message.rows, &message.blocks, &message.adapters));
        assert_eq!((other.gather.len(), other.picks.len(), other.wanted.len()), (0, 0, 0));
    }

    #[test]
    fn under_dispatch_each_rank_has_the_rows_of_its_sequences() {
        let message = message();
        assert_eq!(message.part(ExchangeWay::Dispatch, 0, 1), message);
        let [first, second] = [0, 1].map(|rank| message.part(ExchangeWay::Dispatch, rank, 2));
        let expected = StepMessage {
            rows: vec![[5, 0, 0, 1], [7, 1, 0, 1], [8, 0, 2, -1]],
            blocks: vec![(0, vec![4, 9])],
            gather: vec![1],
            picks: vec![pick(0, 0)],
            wanted: vec![],
            adapters: message.adapters.clone(),
        };
        assert_eq!(first, expected);
        let expected = StepMessage {
            rows: vec![[9, 4, 1, -1], [1, 0, 3, 0], [2, 1, 3, 0]],
            blocks: vec![(3, vec![])],
            gather: vec![0, 1, 2],
            picks: vec![pick(0, 1)],
            wanted: vec![[1, 2]],
            adapters: message.adapters.clone(),
        };
        assert_eq!(second, expected);
        // Of five ranks the last has none of the four sequences.
        let none = message.part(ExchangeWay::Dispatch, 4, 5);
        assert_eq!(none, StepMessage { adapters: message.adapters.clone(), ..StepMessage::default() });
    }
}
