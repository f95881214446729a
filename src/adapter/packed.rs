//! Pairs with a dimension for the experts: A `[E, R, in]` and B `[E, out, R]`, either `[1, …]` when all experts share it
//! (Megatron-Bridge, SkyRL, Tinker).

use std::sync::Arc;

use super::decode::Decoder;
use super::names::{Packed, Pair};
use super::{Factor, Matrix, Site, layout};
use crate::checkpoint::ExpertPart;
use crate::error::Result;

/// One matrix of every expert, or the one that all share.
struct Side {
    matrices: Vec<Arc<Matrix>>,
}

impl Side {
    fn of(&self, expert: usize) -> &Arc<Matrix> {
        // One for all, or one for each.
        &self.matrices[if self.matrices.len() == 1 { 0 } else { expert }]
    }

    /// `n` rows from `first` on of each; what was shared stays shared.
    fn rows(&self, first: usize, n: usize) -> Self {
        Self { matrices: self.matrices.iter().map(|m| Arc::new(layout::rows(m, first, n))).collect() }
    }
}

impl Decoder<'_> {
    /// The factors of all experts of a packed pair.
    pub(super) fn packed(&self, pair: &Pair, layer: usize, part: Packed, factors: &mut Vec<Factor>) -> Result<()> {
        let family = self.model.family;
        let probe = ExpertPart::Down.fused_role(layer);
        if family.shape(probe, self.model).is_none() {
            return Err(self.does_not_fit(&pair.a, "the model has no experts in this layer".to_owned()));
        }
        let (d, f) = (self.model.moe.hidden, self.model.moe.expert_width);
        let (out, inn) = match part {
            Packed::GateUp => (2 * f, d),
            Packed::Gate | Packed::Up => (f, d),
            Packed::Down => (d, f),
        };
        let (rank, scale) = self.rank_and_scale(&pair.module)?;
        let a = self.side(&pair.a, [rank, inn])?;
        let b = self.side(&pair.b, [out, rank])?;
        let mut push = |site, b: &Side| {
            factors.extend((0..self.model.moe.experts).map(|expert| Factor {
                layer,
                site,
                expert,
                rank,
                scale,
                a: a.of(expert).clone(),
                b: b.of(expert).clone(),
                bias: None,
            }));
        };
        match part {
            Packed::GateUp => {
                push(Site::ExpertGate, &b.rows(0, f));
                push(Site::ExpertUp, &b.rows(f, f));
            }
            Packed::Gate => push(Site::ExpertGate, &b),
            Packed::Up => push(Site::ExpertUp, &b),
            Packed::Down => push(Site::ExpertDown, &b),
        }
        Ok(())
    }

    /// The tensor `name`, `[E, rows, cols]` or `[1, rows, cols]`.
    fn side(&self, name: &str, [rows, cols]: [usize; 2]) -> Result<Side> {
        let shared = self.file.tensor(name)?.shape.first() == Some(&1);
        let n = if shared { 1 } else { self.model.moe.experts };
        let view = self.float(name, &[n, rows, cols])?;
        // The view holds n · rows · cols elements.
        let n_bytes = rows * cols * view.dtype.size();
        let matrices = (0..n).map(|i| {
            let bytes = view.bytes(i * n_bytes..(i + 1) * n_bytes)?.to_vec();
            Ok(Arc::new(Matrix { dtype: view.dtype, rows, cols, bytes }))
        });
        Ok(Side { matrices: matrices.collect::<Result<_>>()? })
    }
}
