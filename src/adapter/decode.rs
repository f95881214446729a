//! Pairs of tensors become canonical factors, each checked against the model. The headers of all tensors are checked; of the
//! data, only what the share holds is read.

use std::collections::HashMap;

use super::config::AdapterConfig;
use super::cut::Cut;
use super::names::{Names, Pair, Target};
use super::window::Windows;
use super::{Factor, Site};
use crate::checkpoint::Window;
use crate::checkpoint::file::WeightFile;
use crate::checkpoint::untrusted::shown;
use crate::checkpoint::{ModelConfig, TensorView};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::family::Role;
use crate::placement::RankShare;

/// Everything a pair is decoded against.
pub(crate) struct Decoder<'a> {
    pub(crate) file: &'a WeightFile,
    pub(crate) config: &'a AdapterConfig,
    pub(crate) model: &'a ModelConfig,
    /// `None`: everything.
    pub(crate) share: Option<&'a RankShare>,
}

/// Layer, site and expert.
pub(crate) type Place = (usize, Site, usize);

/// What pairs became.
#[derive(Default)]
pub(crate) struct Decoded {
    /// Those of the share.
    pub(crate) factors: Vec<Factor>,
    /// Every place that the file has factors for.
    pub(crate) places: Vec<Place>,
}

/// A factor about to be read: A `[R, in]` and B `[out, R]` in their whole width.
#[derive(Clone, Copy)]
pub(super) struct Whole {
    pub(super) rank: usize,
    pub(super) scale: f32,
    pub(super) a: Window,
    pub(super) b: Window,
}

/// The tensors a factor is read from.
pub(super) struct Sources<'a> {
    pub(super) a: Windows<'a>,
    pub(super) b: Windows<'a>,
    pub(super) bias: Option<Windows<'a>>,
}

impl<'f> Decoder<'f> {
    /// The factors of all pairs, in any order.
    pub(crate) fn decode(&self, names: &Names) -> Result<Decoded> {
        // A place occurs in one pair only, so the depths of a layer are distinct.
        let mut depths = HashMap::<usize, Vec<usize>>::new();
        for pair in &names.pairs {
            if let Target::Fused { layer, depth } = pair.target {
                depths.entry(layer).or_default().push(depth);
            }
        }
        for (name, role) in &names.copies {
            self.copy(name, *role)?;
        }
        let mut to = Decoded::default();
        for pair in &names.pairs {
            if let (Some(bias), false) = (&pair.bias, matches!(pair.target, Target::Weight(_))) {
                let message = "`lora_bias` on fused experts is not supported".to_owned();
                return Err(self.at(ErrorKind::Unsupported, bias, message));
            }
            match pair.target {
                Target::Weight(role) => self.weight(pair, role, &mut to)?,
                Target::Fused { layer, depth } => self.fused(pair, layer, depth, &depths[&layer], &mut to)?,
                Target::Packed { layer, part } => self.packed(pair, layer, part, &mut to)?,
                Target::Listed { layer, expert, part } => self.listed(pair, layer, expert, part, &mut to)?,
            }
        }
        Ok(to)
    }

    /// A copy of a base weight, which nothing reads.
    fn copy(&self, name: &str, role: Role) -> Result<()> {
        let Some(shape) = self.model.family.shape(role, self.model) else {
            return Err(self.does_not_fit(name, "the model has no such layer, expert or projection".to_owned()));
        };
        self.float(name, &shape).map(drop)
    }

    /// The factor of a plain weight.
    fn weight(&self, pair: &Pair, role: Role, to: &mut Decoded) -> Result<()> {
        let Some((layer, site, expert)) = place(role, self.model.n_layers()) else {
            let message = format!("LoRA on `{}` is not supported", shown(&pair.module));
            return Err(self.at(ErrorKind::Unsupported, &pair.a, message));
        };
        let shape = self.model.family.shape(role, self.model);
        let Some([out, inn]) = shape.as_deref().and_then(|s| s.first_chunk::<2>()).copied() else {
            return Err(self.does_not_fit(&pair.a, "the model has no such layer, expert or projection".to_owned()));
        };
        // The embedding takes one-hot tokens.
        let [out, inn] = if site == Site::Embedding { [inn, out] } else { [out, inn] };
        if matches!(site, Site::Embedding | Site::LmHead) && self.config.ties_weights() {
            let message = "`ensure_weight_tying` is not supported".to_owned();
            return Err(self.at(ErrorKind::Unsupported, &pair.a, message));
        }
        let parameter = format!("{}.weight", pair.module);
        let name = if self.config.targets_parameter(&parameter) { &parameter } else { &pair.module };
        if name == &pair.module && !self.config.targets_module(name) {
            log::warn!("`{}`: `{name}` has tensors but is not in `target_modules`", self.file.path().display());
        }
        let (rank, scale) = self.rank_and_scale(name)?;
        let (a, b) = (self.float(&pair.a, &[rank, inn])?, self.float(&pair.b, &[out, rank])?);
        let bias = self.bias(pair, site, out)?;
        let mut from = Sources { a: Windows::new(a), b: Windows::new(b), bias: bias.map(Windows::new) };
        let whole = Whole { rank, scale, a: Window::dense([rank, inn], 0), b: Window::dense([out, rank], 0) };
        self.push((layer, site, expert), &whole, &mut from, to)
    }

    /// The bias of B, `[out]`.
    fn bias(&self, pair: &Pair, site: Site, out: usize) -> Result<Option<TensorView<'f>>> {
        match (&pair.bias, self.config.has_bias()) {
            (_, true) if site == Site::Embedding => {
                let message = "`lora_bias` on an embedding is not supported".to_owned();
                Err(self.at(ErrorKind::Unsupported, &pair.a, message))
            }
            (Some(name), true) => self.float(name, &[out]).map(Some),
            (None, false) => Ok(None),
            (Some(name), false) => {
                let message = "expected no bias: `lora_bias` of `adapter_config.json` is not set".to_owned();
                Err(self.at(ErrorKind::Adapter, name, message))
            }
            (None, true) => {
                let message = "has no `lora_B.bias` to go with it, though `lora_bias` is set".to_owned();
                Err(self.at(ErrorKind::Adapter, &pair.b, message))
            }
        }
    }

    /// Notes a place and, where the share holds it, reads its factor, cut to the columns and heads of the share.
    pub(super) fn push(&self, place: Place, whole: &Whole, from: &mut Sources<'f>, to: &mut Decoded) -> Result<()> {
        let (layer, site, expert) = place;
        to.places.push(place);
        if !self.holds(site, expert) {
            return Ok(());
        }
        let (mut a, mut b) = (whole.a, whole.b);
        let mut bias = Window { rows: b.rows, cols: 1, begin: 0, row_step: 1, col_step: 1 };
        let mut biased = true;
        if let Some(cut) = self.share.and_then(|share| Cut::of(site, &share.heads, Some(&share.experts))) {
            biased = cut.adds_bias();
            let (first, n) = (cut.range.start, cut.range.len());
            if cut.inputs {
                a = a.cols(cut.range);
            } else {
                b = b.rows(first, n, 1);
                bias = bias.rows(first, n, 1);
            }
        }
        to.factors.push(Factor {
            layer,
            site,
            expert,
            rank: whole.rank,
            scale: whole.scale,
            a: from.a.matrix(a)?,
            b: from.b.matrix(b)?,
            bias: from.bias.as_mut().filter(|_| biased).map(|from| from.matrix(bias)).transpose()?,
        });
        Ok(())
    }

    /// Whether the share holds (a part of) this expert; everything else it holds.
    pub(super) fn holds(&self, site: Site, expert: usize) -> bool {
        !site.of_expert() || self.share.is_none_or(|share| share.experts.placement().local(expert).is_some())
    }

    pub(super) fn rank_and_scale(&self, name: &str) -> Result<(usize, f32)> {
        let within = |e: Error| e.within(format!("`{}`", self.file.path().display()));
        let rank = self.config.rank_of(name).map_err(within)?;
        Ok((rank, self.config.scale_of(name, rank).map_err(within)?))
    }

    /// The tensor `name`, which must hold floats and have this shape.
    pub(super) fn float(&self, name: &str, shape: &[usize]) -> Result<TensorView<'f>> {
        let view = self.file.tensor(name)?;
        if view.dtype == DType::I32 {
            return Err(self.at(ErrorKind::Adapter, name, "expected `F32`, `F16` or `BF16`, got `I32`".to_owned()));
        }
        if view.shape != shape {
            return Err(self.does_not_fit(name, format!("expected {shape:?}, got {:?}", view.shape)));
        }
        Ok(view)
    }

    pub(super) fn does_not_fit(&self, name: &str, message: String) -> Error {
        let at = self.at(ErrorKind::Adapter, name, message);
        at.within("adapter does not fit")
    }

    pub(super) fn at(&self, kind: ErrorKind, name: &str, message: String) -> Error {
        Error::new(kind, format!("`{}`: tensor `{}`: {message}", self.file.path().display(), shown(name)))
    }
}

/// Layer, site and expert of a weight; `None` for weights that adapters cannot change here.
fn place(role: Role, n_layers: usize) -> Option<Place> {
    let site = match role {
        Role::Embedding => Site::Embedding,
        Role::LmHead => Site::LmHead,
        Role::Q { .. } => Site::Q,
        Role::K { .. } => Site::K,
        Role::V { .. } => Site::V,
        Role::O { .. } => Site::O,
        Role::Router { .. } => Site::Router,
        Role::DenseGate { .. } => Site::Gate,
        Role::DenseUp { .. } => Site::Up,
        Role::DenseDown { .. } => Site::Down,
        Role::SharedGate { .. } => Site::SharedGate,
        Role::SharedUp { .. } => Site::SharedUp,
        Role::SharedDown { .. } => Site::SharedDown,
        Role::SharedRouter { .. } => Site::SharedRouter,
        Role::ExpertGate { layer, expert } => return Some((layer, Site::ExpertGate, expert)),
        Role::ExpertUp { layer, expert } => return Some((layer, Site::ExpertUp, expert)),
        Role::ExpertDown { layer, expert } => return Some((layer, Site::ExpertDown, expert)),
        _ => return None,
    };
    Some((role.layer().unwrap_or(n_layers), site, 0))
}
