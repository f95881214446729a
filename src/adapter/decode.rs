//! Pairs of tensors become canonical factors, each checked against the model.

use std::collections::HashMap;
use std::sync::Arc;

use super::config::{AdapterConfig, ExpertColumns};
use super::layout::{self, Orientation, Stored};
use super::names::{Pair, Target};
use super::{Factor, Matrix, Site};
use crate::checkpoint::file::WeightFile;
use crate::checkpoint::untrusted::shown;
use crate::checkpoint::{ModelConfig, TensorView};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::family::Role;

/// Everything a pair is decoded against.
pub(crate) struct Decoder<'a> {
    pub(crate) file: &'a WeightFile,
    pub(crate) config: &'a AdapterConfig,
    pub(crate) model: &'a ModelConfig,
}

impl Decoder<'_> {
    /// The factors of all `pairs`, in any order.
    pub(crate) fn factors(&self, pairs: &[Pair]) -> Result<Vec<Factor>> {
        // A place occurs in one pair only, so the depths of a layer are distinct.
        let mut depths = HashMap::<usize, Vec<usize>>::new();
        for pair in pairs {
            if let Target::Fused { layer, depth } = pair.target {
                depths.entry(layer).or_default().push(depth);
            }
        }
        let mut factors = Vec::new();
        for pair in pairs {
            match pair.target {
                Target::Weight(role) => factors.push(self.weight(pair, role)?),
                Target::Fused { layer, depth } => {
                    let parameter = self.fused_parameter(pair, depth, &depths[&layer])?;
                    self.fused(pair, layer, parameter, &mut factors)?;
                }
                Target::Packed { layer, part } => self.packed(pair, layer, part, &mut factors)?,
            }
        }
        Ok(factors)
    }

    /// The factor of a plain weight.
    fn weight(&self, pair: &Pair, role: Role) -> Result<Factor> {
        let Some((layer, site, expert)) = site(role) else {
            let message = format!("LoRA on `{}` is not supported", shown(&pair.module));
            return Err(self.at(ErrorKind::Unsupported, &pair.a, message));
        };
        let shape = self.model.family.shape(role, self.model);
        let Some([out, inn]) = shape.as_deref().and_then(|s| s.first_chunk::<2>()) else {
            return Err(self.does_not_fit(&pair.a, "the model has no such layer, expert or projection".to_owned()));
        };
        let parameter = format!("{}.weight", pair.module);
        let name = if self.config.targets_parameter(&parameter) { &parameter } else { &pair.module };
        if name == &pair.module && !self.config.targets_module(name) {
            log::warn!("`{}`: `{name}` has tensors but is not in `target_modules`", self.file.path().display());
        }
        let (rank, scale) = self.rank_and_scale(name)?;
        let a = self.matrix(&pair.a, [rank, *inn])?;
        let b = self.matrix(&pair.b, [*out, rank])?;
        Ok(Factor { layer, site, expert, rank, scale, a: Arc::new(a), b: Arc::new(b), bias: None })
    }

    /// Which parameter of `mlp.experts` a pair belongs to. The names of the tensors do not say; PEFT wraps the parameters
    /// in the order the module registers them, gate_up first, so two wrappers settle it and one needs the configuration.
    fn fused_parameter(&self, pair: &Pair, depth: usize, depths: &[usize]) -> Result<Fused> {
        let n_wrappers = depths.len();
        if let Some(deepest) = depths.iter().find(|d| **d >= n_wrappers) {
            let message = format!("expected a pair for each of {} nested wrappers, got {n_wrappers}", deepest + 1);
            return Err(self.at(ErrorKind::Adapter, &pair.a, message));
        }
        match (n_wrappers, depth) {
            (2, 1) => Ok(Fused::GateUp),
            (2, 0) => Ok(Fused::Down),
            (1, 0) => {
                let targeted = |p: Fused| self.config.targets_parameter(&format!("{}.{}", pair.module, p.name()));
                match (targeted(Fused::GateUp), targeted(Fused::Down)) {
                    (true, false) => Ok(Fused::GateUp),
                    (false, true) => Ok(Fused::Down),
                    (both, _) => {
                        let got = if both { "both" } else { "neither" };
                        let message = format!(
                            "expected `target_parameters` to name `gate_up_proj` or `down_proj` of this module, got {got}"
                        );
                        Err(self.at(ErrorKind::Adapter, &pair.a, message))
                    }
                }
            }
            _ => {
                let message = format!("expected at most two fused parameters, got {n_wrappers}");
                Err(self.at(ErrorKind::Adapter, &pair.a, message))
            }
        }
    }

    /// The factors of all experts of one fused parameter.
    fn fused(&self, pair: &Pair, layer: usize, parameter: Fused, factors: &mut Vec<Factor>) -> Result<()> {
        let role = match parameter {
            Fused::GateUp => Role::FusedGateUp { layer },
            Fused::Down => Role::FusedDown { layer },
        };
        let shape = self.model.family.shape(role, self.model);
        let Some(&[n_experts, out, inn]) = shape.as_deref().and_then(|s| s.first_chunk::<3>()) else {
            return Err(self.does_not_fit(&pair.a, "the model has no experts in this layer".to_owned()));
        };
        let (rank, scale) = self.rank_and_scale(&format!("{}.{}", pair.module, parameter.name()))?;
        // With three dimensions, [E, R, X] and [Y, R, E], the order of the elements is the same.
        let (a_shape, b_shape) = (self.file.tensor(&pair.a)?.shape, self.file.tensor(&pair.b)?.shape);
        let (Some(&x), Some(&y)) = (a_shape.last(), b_shape.first()) else {
            let message = format!("expected two dimensions, got {a_shape:?} and {b_shape:?}");
            return Err(self.at(ErrorKind::Adapter, &pair.a, message));
        };
        let orientation = layout::orientation([y, x], [out, inn], Stored::OutIn, self.config.peft_version())
            .map_err(|reason| self.at(ErrorKind::Adapter, &pair.a, reason.to_owned()))?
            // Fits neither way: the check of the canonical shape below says so.
            .unwrap_or(Orientation::Canonical);
        let [y, x] = match orientation {
            Orientation::Canonical => [out, inn],
            Orientation::Transposed => [inn, out],
        };
        let stacked = a_shape.len() == 3 && b_shape.len() == 3;
        let (a, b) = if stacked {
            (
                self.flattened(&pair.a, [n_experts, rank, x], true)?,
                self.flattened(&pair.b, [y, rank, n_experts], false)?,
            )
        } else {
            (self.matrix(&pair.a, [rank * n_experts, x])?, self.matrix(&pair.b, [y, rank * n_experts])?)
        };
        let columns = if stacked { ExpertColumns::RankMajor } else { self.columns(pair)? };
        let f = self.model.moe.expert_width;
        for expert in 0..n_experts {
            let (a, b) = layout::expert_factors(&a, &b, expert, rank, orientation, columns);
            let a = Arc::new(a);
            let mut push = |site, b| {
                factors.push(Factor { layer, site, expert, rank, scale, a: a.clone(), b: Arc::new(b), bias: None });
            };
            match parameter {
                Fused::GateUp => {
                    push(Site::ExpertGate, layout::rows(&b, 0, f));
                    push(Site::ExpertUp, layout::rows(&b, f, f));
                }
                Fused::Down => push(Site::ExpertDown, b),
            }
        }
        Ok(())
    }

    fn columns(&self, pair: &Pair) -> Result<ExpertColumns> {
        self.config.expert_columns().ok_or_else(|| {
            let message = "saved by a tool that has used two layouts of `lora_B`; set `lora_B_layout` in \
                           `adapter_config.json` to `rank_major` or `grouped_by_expert`";
            self.at(ErrorKind::Unsupported, &pair.b, message.to_owned())
        })
    }

    pub(super) fn rank_and_scale(&self, name: &str) -> Result<(usize, f32)> {
        let within = |e: Error| e.within(format!("`{}`", self.file.path().display()));
        let rank = self.config.rank_of(name).map_err(within)?;
        Ok((rank, self.config.scale_of(name, rank).map_err(within)?))
    }

    /// The tensor `name`, which must be a float matrix of this shape.
    fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<Matrix> {
        let view = self.float(name, &shape)?;
        Ok(Matrix { dtype: view.dtype, rows: shape[0], cols: shape[1], bytes: view.all().to_vec() })
    }

    /// The tensor `name` of this shape, as a matrix: the `first` two dimensions taken together, or the last two.
    fn flattened(&self, name: &str, shape: [usize; 3], first: bool) -> Result<Matrix> {
        let view = self.float(name, &shape)?;
        let [x, y, z] = shape;
        let (rows, cols) = if first { (x * y, z) } else { (x, y * z) };
        Ok(Matrix { dtype: view.dtype, rows, cols, bytes: view.all().to_vec() })
    }

    /// The tensor `name`, which must hold floats and have this shape.
    pub(super) fn float(&self, name: &str, shape: &[usize]) -> Result<TensorView<'_>> {
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

    fn at(&self, kind: ErrorKind, name: &str, message: String) -> Error {
        Error::new(kind, format!("`{}`: tensor `{}`: {message}", self.file.path().display(), shown(name)))
    }
}

/// A parameter that holds a projection of all experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fused {
    GateUp,
    Down,
}

impl Fused {
    const fn name(self) -> &'static str {
        match self {
            Self::GateUp => "gate_up_proj",
            Self::Down => "down_proj",
        }
    }
}

/// Layer, site and expert of a weight; `None` for weights that adapters cannot change here.
fn site(role: Role) -> Option<(usize, Site, usize)> {
    Some(match role {
        Role::Q { layer } => (layer, Site::Q, 0),
        Role::K { layer } => (layer, Site::K, 0),
        Role::V { layer } => (layer, Site::V, 0),
        Role::O { layer } => (layer, Site::O, 0),
        Role::Router { layer } => (layer, Site::Router, 0),
        Role::DenseGate { layer } => (layer, Site::Gate, 0),
        Role::DenseUp { layer } => (layer, Site::Up, 0),
        Role::DenseDown { layer } => (layer, Site::Down, 0),
        Role::ExpertGate { layer, expert } => (layer, Site::ExpertGate, expert),
        Role::ExpertUp { layer, expert } => (layer, Site::ExpertUp, expert),
        Role::ExpertDown { layer, expert } => (layer, Site::ExpertDown, expert),
        _ => return None,
    })
}
