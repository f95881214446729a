//! Checkpoint to resident model: what one rank owns, and nothing else.

use crate::activation::Activation;
use crate::checkpoint::{Block, Checkpoint, MlpKind, ModelConfig};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::family::{ExpertPart, Role};
use crate::gpu::Gpu;
use crate::kernels::View;
use crate::kernels::localise::Owners;
use crate::kernels::operands::Weights;
use crate::kernels::random::Random;
use crate::layer::MoeLayer;
use crate::model::{DecoderLayer, Mlp, Model};
use crate::placement::{PlacementRule, RankShare, Topology};
use crate::router::RouteOptions;
use crate::upload::{StreamOptions, Streamed, Uploader};

/// Which part of a model to load, and how.
#[derive(Debug, Clone, Default)]
pub struct LoadOptions<'a> {
    /// This rank's place among all; the default is one rank.
    pub topology: Topology,
    /// How experts are shared out over the expert groups.
    pub placement: PlacementRule,
    /// Reader threads, staging memory, cancellation.
    pub stream: StreamOptions<'a>,
}

impl Model {
    /// Loads what this rank owns of `checkpoint`: the experts of its group in its columns of their width, its heads of
    /// attention, and everything else whole. `progress(done, total)` counts bytes written to the device.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for sizes the kernels do not take, [`ErrorKind::Config`] for a placement that does not
    /// fit, [`ErrorKind::Cancelled`], [`ErrorKind::Limit`] and [`ErrorKind::OutOfMemory`] from the device, and those of the
    /// checkpoint.
    pub fn load(
        gpu: &Gpu,
        checkpoint: &Checkpoint,
        options: &LoadOptions<'_>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(Self, Streamed)> {
        let (model, uploader) = Self::begin_load(gpu, checkpoint, options)?;
        let streamed = uploader.run(&options.stream, progress)?;
        Ok((model, streamed))
    }

    /// The model with all its buffers, and what has to go into them. Nothing has been read but the norms; the model is of
    /// no use before the uploader has run.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn begin_load<'c>(
        gpu: &Gpu,
        checkpoint: &'c Checkpoint,
        options: &LoadOptions<'_>,
    ) -> Result<(Self, Uploader<'c>)> {
        Loader::model(gpu, Source::Checkpoint(checkpoint), checkpoint.config(), options)
    }

    /// A model of the sizes `config` with random weights of one type, made on the device, and norms of 1: what benchmarks
    /// measure. Columns that pad a rank's share are random, too, so ranks do not add up to the model of one rank.
    ///
    /// # Errors
    /// As [`load`](Self::load), but for those of the checkpoint.
    pub fn random(gpu: &Gpu, config: &ModelConfig, dtype: DType, options: &LoadOptions<'_>) -> Result<Self> {
        let (model, uploader) = Loader::model(gpu, Source::Random(dtype), config, options)?;
        uploader.run(&options.stream, &mut |_, _| {})?;
        Ok(model)
    }
}

/// The kernels read rows in groups of eight (the width of an expert may be any: what is kept of it is padded) and hold at most 256 values of a head.
fn check_sizes(config: &ModelConfig) -> Result<()> {
    let q = config.heads * config.head_dim;
    let mut sizes =
        vec![("hidden_size", config.hidden), ("num_attention_heads * head_dim", q), ("head_dim", config.head_dim)];
    if config.layers.contains(&MlpKind::Dense) {
        sizes.push(("intermediate_size", config.dense_width));
    }
    for (name, size) in sizes {
        if size == 0 || size % 8 != 0 {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("config.json: `{name}` is {size}, expected a multiple of 8"),
            ));
        }
    }
    if config.head_dim > 256 {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!("config.json: `head_dim` is {}, expected 256 or less", config.head_dim),
        ));
    }
    Ok(())
}

/// Where weights come from.
#[derive(Clone, Copy)]
enum Source<'c> {
    Checkpoint(&'c Checkpoint),
    /// Nowhere: weights of this type are made up.
    Random(DType),
}

/// Makes the buffers of one rank, and notes where their bytes come from.
struct Loader<'a, 'c> {
    gpu: &'a Gpu,
    source: Source<'c>,
    config: &'a ModelConfig,
    share: &'a RankShare,
    up: Uploader<'c>,
    /// Random stacks so far: seeds.
    stacks: u32,
}

impl<'c> Loader<'_, 'c> {
    /// The model of `config` with all its buffers, and what has to go into them.
    fn model(
        gpu: &Gpu,
        source: Source<'c>,
        config: &ModelConfig,
        options: &LoadOptions<'_>,
    ) -> Result<(Model, Uploader<'c>)> {
        config.family.check_decoder()?;
        check_sizes(config)?;
        let share = RankShare::new(config, &options.placement, options.topology)?;
        let mut loader = Loader { gpu, source, config, share: &share, up: Uploader::new(gpu), stacks: 0 };
        let table = [config.vocab, config.hidden];
        let embedding = loader.matrix("embedding", table, &[Role::Embedding])?;
        let lm_head =
            if config.tie_embeddings { None } else { Some(loader.matrix("lm_head", table, &[Role::LmHead])?) };
        let final_norm = loader.vectors("final norm", &[Role::FinalNorm])?;
        let layers = config
            .layers
            .iter()
            .enumerate()
            .map(|(layer, kind)| loader.layer(layer, *kind))
            .collect::<Result<Vec<_>>>()?;
        let up = loader.up;
        let bytes_resident = up.n_bytes();
        let (config, topology, placement) = (config.clone(), options.topology, options.placement.clone());
        let model =
            Model { config, embedding, lm_head, final_norm, layers, topology, placement, share, bytes_resident };
        Ok((model, up))
    }

    /// A stack of matrices whose parts a checkpoint has.
    fn stack(
        &mut self,
        label: &str,
        count: usize,
        shape: [usize; 2],
        parts: &dyn Fn(&'c Checkpoint, usize) -> Result<Vec<Block<'c>>>,
    ) -> Result<Weights> {
        match self.source {
            Source::Checkpoint(checkpoint) => self.up.stack(label, count, shape, &|m| parts(checkpoint, m)),
            Source::Random(dtype) => {
                self.stacks += 1;
                self.up.random(label, count, shape, Random::for_rows(dtype, shape[1], self.stacks))
            }
        }
    }

    /// One matrix made of the rows of several tensors.
    fn matrix(&mut self, label: &str, shape: [usize; 2], roles: &[Role]) -> Result<Weights> {
        self.stack(label, 1, shape, &|checkpoint, _| roles.iter().map(|role| checkpoint.block(*role)).collect())
    }

    /// Norm weights, one after the other.
    fn vectors(&mut self, label: &str, roles: &[Role]) -> Result<View> {
        let blocks = match self.source {
            Source::Checkpoint(checkpoint) => {
                roles.iter().map(|role| checkpoint.block(*role)).collect::<Result<Vec<_>>>()?
            }
            Source::Random(_) => {
                let shapes = roles.iter().filter_map(|role| self.config.family.shape(*role, self.config));
                shapes.map(|shape| Block::row(&vec![1.0; shape.iter().product()])).collect()
            }
        };
        self.up.vectors(label, &blocks)
    }

    fn layer(&mut self, layer: usize, kind: MlpKind) -> Result<DecoderLayer> {
        let config = self.config;
        let d = config.hidden;
        let label = |what: &str| format!("layer {layer} {what}");
        Ok(DecoderLayer {
            input_norm: self.vectors(&label("input norm"), &[Role::InputNorm { layer }])?,
            qkv: self.qkv(layer)?,
            head_norms: self.vectors(&label("head norms"), &[Role::QNorm { layer }, Role::KNorm { layer }])?,
            o: self.output(layer)?,
            mlp_norm: self.vectors(&label("mlp norm"), &[Role::PostAttentionNorm { layer }])?,
            mlp: match kind {
                MlpKind::Dense => {
                    let f = config.dense_width;
                    let gate_up = [Role::DenseGate { layer }, Role::DenseUp { layer }];
                    Mlp::Dense {
                        gate_up: self.matrix(&label("gate_up"), [2 * f, d], &gate_up)?,
                        down: self.matrix(&label("down"), [d, f], &[Role::DenseDown { layer }])?,
                    }
                }
                MlpKind::Experts => Mlp::Experts(Box::new(self.experts(layer)?)),
            },
        })
    }

    /// The rows of q, k and v that make this rank's heads.
    fn qkv(&mut self, layer: usize) -> Result<Weights> {
        let heads = &self.share.heads;
        let (q, kv) = (heads.q_range(), heads.kv_range());
        let shape = [q.len() + 2 * kv.len(), self.config.hidden];
        let parts = [(Role::Q { layer }, &q), (Role::K { layer }, &kv), (Role::V { layer }, &kv)];
        self.stack(&format!("layer {layer} qkv"), 1, shape, &|checkpoint, _| {
            parts.iter().map(|(role, rows)| checkpoint.block(*role)?.take_rows((*rows).clone())).collect()
        })
    }

    /// The columns of o that take this rank's heads.
    fn output(&mut self, layer: usize) -> Result<Weights> {
        let q = self.share.heads.q_range();
        self.stack(&format!("layer {layer} o"), 1, [self.config.hidden, q.len()], &|checkpoint, _| {
            Ok(vec![checkpoint.block(Role::O { layer })?.take_cols(q.clone())?])
        })
    }

    /// This rank's experts of a layer, and the router, which every rank has whole.
    fn experts(&mut self, layer: usize) -> Result<MoeLayer> {
        let (config, share) = (self.config, &self.share.experts);
        let (d, f) = (config.hidden, share.padded_width());
        let placement = share.placement();
        let owned = placement.owned();
        let label = |what: &str| format!("layer {layer} {what}");
        let owners = Owners::upload(self.gpu, placement)?;
        let part = |checkpoint: &'c Checkpoint, local: usize, part| {
            checkpoint.expert_block(layer, owned[local], part, share.width())
        };
        Ok(MoeLayer {
            shape: config.moe,
            experts: owned.len(),
            width: f,
            owners,
            router: self.matrix(&label("router"), [config.moe.experts, d], &[Role::Router { layer }])?,
            options: RouteOptions { renormalise: config.norm_topk_prob, ..RouteOptions::default() },
            gate_up: self.stack(&label("experts gate_up"), owned.len(), [2 * f, d], &|checkpoint, m| {
                let [gate, up] = [ExpertPart::Gate, ExpertPart::Up].map(|side| part(checkpoint, m, side));
                Ok(vec![gate?.padded_to(f), up?.padded_to(f)])
            })?,
            down: self.stack(&label("experts down"), owned.len(), [d, f], &|checkpoint, m| {
                Ok(vec![part(checkpoint, m, ExpertPart::Down)?])
            })?,
            activation: Activation::Silu,
        })
    }
}
