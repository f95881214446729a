//! What comes out of a step: its status word, sampled ids and wanted logits, in one buffer that can be mapped.

use crate::engine::message::{StepMessage, home};
use crate::error::{Error, ErrorKind, Result};

/// How the results of a step lie in bytes: the status word, i32 ids of all picks, then f32 `[rows, vocab]` wanted logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Results {
    pub picks: usize,
    pub logit_rows: usize,
    pub vocab: usize,
}

impl Results {
    /// Those of `step`.
    pub fn of(step: &StepMessage, vocab: usize) -> Self {
        let logit_rows = step.wanted.iter().map(|[_, count]| *count as usize).sum();
        Self { picks: step.picks.len(), logit_rows, vocab }
    }

    /// Where the logits begin.
    pub fn logit_base(&self) -> usize {
        (4 + self.picks * 4).next_multiple_of(16)
    }

    /// Bytes in all.
    pub fn bytes(&self) -> usize {
        self.logit_base() + self.logit_rows * self.vocab * 4
    }
}

/// The results of `step` from those of its homes, by rank.
///
/// # Errors
/// [`ErrorKind::Format`] for a number of bytes that does not fit.
pub(crate) fn merge(step: &StepMessage, vocab: usize, parts: &[Vec<u8>]) -> Result<Vec<u8>> {
    let ranks = parts.len();
    let all = Results::of(step, vocab);
    let mut data = vec![0; all.bytes()];
    // Where each rank's next id and next logits are.
    let mut ids = vec![4; ranks];
    let mut logits = Vec::new();
    for (rank, bytes) in parts.iter().enumerate() {
        let own = Results::of(&step.of_home(rank, ranks), vocab);
        if bytes.len() != own.bytes() {
            let text = format!("rank {rank} gave {} bytes of results, expected {}", bytes.len(), own.bytes());
            return Err(Error::new(ErrorKind::Format, text));
        }
        data[..4].iter_mut().zip(bytes).for_each(|(all, status)| *all |= status);
        logits.push(own.logit_base());
    }
    let mut put = |at: &mut usize, part: &[u8], from: &mut usize, n: usize| {
        data[*at..*at + n].copy_from_slice(&part[*from..*from + n]);
        *at += n;
        *from += n;
    };
    let mut at = 4;
    for pick in &step.picks {
        let rank = home(pick.sequence, ranks);
        put(&mut at, &parts[rank], &mut ids[rank], 4);
    }
    let mut at = all.logit_base();
    for [first, count] in &step.wanted {
        let rank = home(step.sequence_of(*first), ranks);
        put(&mut at, &parts[rank], &mut logits[rank], *count as usize * vocab * 4);
    }
    Ok(data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::sample::Pick;

    #[test]
    fn results_of_the_homes_come_back_in_the_order_of_the_step() {
        let pick =
            |row, sequence| Pick { row, sequence, temperature: 0.0, top_p: 1.0, top_k: 0, u: 0.0, pad0: 0, pad1: 0 };
        let step = StepMessage {
            rows: vec![[9, 4, 1, -1], [5, 0, 0, -1], [1, 0, 3, -1], [2, 1, 3, -1], [2, 1, 2, -1]],
            gather: vec![0, 1, 2, 3, 4],
            picks: vec![pick(0, 1), pick(1, 0), pick(4, 2)],
            wanted: vec![[2, 2], [4, 1]],
            ..StepMessage::default()
        };
        let words = |words: &[u32]| bytemuck::cast_slice::<u32, u8>(words).to_vec();
        // Vocabulary of 2. Rank 0 has the sequences 0 and 2, rank 1 has 1 and 3.
        let parts = [words(&[0, 50, 52, 0, 60, 61]), words(&[2, 51, 0, 0, 70, 71, 72, 73])];
        let all = words(&[2, 51, 50, 52, 70, 71, 72, 73, 60, 61]);
        assert_eq!(merge(&step, 2, &parts).unwrap(), all);
        assert_eq!(merge(&step, 2, std::slice::from_ref(&all)).unwrap(), all);
        let short = [words(&[0, 50, 52, 0, 60]), words(&[2, 51, 0, 0, 70, 71, 72, 73])];
        let error = merge(&step, 2, &short).unwrap_err();
        assert!(error.to_string().contains("rank 0 gave 20 bytes of results, expected 24"), "{error}");
    }
}
