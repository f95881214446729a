//! Pairs with a dimension for the experts: A `[E, R, in]` and B `[E, out, R]`, either `[1, …]` when all experts share it
//! (Megatron-Bridge, SkyRL, Tinker).

use super::Site;
use super::decode::{Decoded, Decoder, Sources, Whole};
use super::names::{Packed, Pair};
use super::window::Windows;
use crate::checkpoint::Window;
use crate::error::{ErrorKind, Result};

/// One side of all experts, or the one that all share.
struct Side<'a> {
    from: Windows<'a>,
    shape: [usize; 2],
    shared: bool,
}

impl Side<'_> {
    /// The whole matrix of an expert.
    fn window(&self, expert: usize) -> Window {
        let [rows, cols] = self.shape;
        Window::dense(self.shape, if self.shared { 0 } else { expert * rows * cols })
    }
}

impl<'f> Decoder<'f> {
    /// The factors of all experts of a packed pair.
    pub(super) fn packed(&self, pair: &Pair, layer: usize, part: Packed, to: &mut Decoded) -> Result<()> {
        self.need_experts(pair, layer)?;
        let table = self.model.family.table();
        if !table.gated() && matches!(part, Packed::GateUp | Packed::Gate) {
            return Err(self.does_not_fit(&pair.a, "the experts of the model have no gate".to_owned()));
        }
        if table.interleaved && part == Packed::GateUp {
            let message = "packed gate and up are not supported where the model keeps them row by row".to_owned();
            return Err(self.at(ErrorKind::Unsupported, &pair.a, message));
        }
        let (d, f) = (self.model.moe.hidden, self.model.moe.expert_width);
        let (out, inn) = match part {
            Packed::GateUp => (2 * f, d),
            Packed::Gate | Packed::Up => (f, d),
            Packed::Down => (d, f),
        };
        let (rank, scale) = self.rank_and_scale(&pair.module)?;
        let (a, b) = (self.side(&pair.a, [rank, inn])?, self.side(&pair.b, [out, rank])?);
        let windows: Vec<_> = (0..self.model.moe.experts).map(|expert| (a.window(expert), b.window(expert))).collect();
        let mut from = Sources { a: a.from, b: b.from, bias: None };
        let mut push = |site, first: usize, n: usize| {
            windows.iter().enumerate().try_for_each(|(expert, (a, b))| {
                let whole = Whole { rank, scale, a: *a, b: b.rows(first, n, 1) };
                self.push((layer, site, expert), &whole, &mut from, to)
            })
        };
        match part {
            Packed::GateUp => {
                push(Site::ExpertGate, 0, f)?;
                push(Site::ExpertUp, f, f)
            }
            Packed::Gate => push(Site::ExpertGate, 0, f),
            Packed::Up => push(Site::ExpertUp, 0, f),
            Packed::Down => push(Site::ExpertDown, 0, d),
        }
    }

    /// The tensor `name`, `[E, rows, cols]` or `[1, rows, cols]`.
    fn side(&self, name: &str, shape: [usize; 2]) -> Result<Side<'f>> {
        let shared = self.file.tensor(name)?.shape.first() == Some(&1);
        let n = if shared { 1 } else { self.model.moe.experts };
        let view = self.float(name, &[n, shape[0], shape[1]])?;
        Ok(Side { from: Windows::new(view), shape, shared })
    }
}
