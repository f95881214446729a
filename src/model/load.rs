//! Checkpoint to resident model: what one rank owns, and nothing else.

use crate::activation::Activation;
use crate::checkpoint::{Checkpoint, MlpKind, ModelConfig};
use crate::error::{Error, ErrorKind, Result};
use crate::family::{ExpertPart, Role};
use crate::gpu::Gpu;
use crate::kernels::View;
use crate::kernels::expert_gemm::Weights;
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
        let config = checkpoint.config().clone();
        config.family.check_decoder()?;
        check_sizes(&config)?;
        let share = RankShare::new(&config, &options.placement, options.topology)?;
        let mut loader = Loader { gpu, checkpoint, share: &share, up: Uploader::new(gpu) };
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
        let (topology, placement) = (options.topology, options.placement.clone());
        let model = Self { config, embedding, lm_head, final_norm, layers, topology, placement, share, bytes_resident };
        Ok((model, up))
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

/// Makes the buffers of one rank, and notes where their bytes come from.
struct Loader<'a, 'c> {
    gpu: &'a Gpu,
    checkpoint: &'c Checkpoint,
    share: &'a RankShare,
    up: Uploader<'c>,
}

impl Loader<'_, '_> {
    /// One matrix made of the rows of several tensors.
    fn matrix(&mut self, label: &str, shape: [usize; 2], roles: &[Role]) -> Result<Weights> {
        let checkpoint = self.checkpoint;
        self.up.stack(label, 1, shape, &|_| roles.iter().map(|role| checkpoint.block(*role)).collect())
    }

    /// Norm weights, one after the other.
    fn vectors(&mut self, label: &str, roles: &[Role]) -> Result<View> {
        let blocks = roles.iter().map(|role| self.checkpoint.block(*role)).collect::<Result<Vec<_>>>()?;
        self.up.vectors(label, &blocks)
    }

    fn layer(&mut self, layer: usize, kind: MlpKind) -> Result<DecoderLayer> {
        let config = self.checkpoint.config();
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
        let (checkpoint, heads) = (self.checkpoint, &self.share.heads);
        let (q, kv) = (heads.q_range(), heads.kv_range());
        let shape = [q.len() + 2 * kv.len(), checkpoint.config().hidden];
        let parts = [(Role::Q { layer }, &q), (Role::K { layer }, &kv), (Role::V { layer }, &kv)];
        self.up.stack(&format!("layer {layer} qkv"), 1, shape, &|_| {
            parts.iter().map(|(role, rows)| checkpoint.block(*role)?.take_rows((*rows).clone())).collect()
        })
    }

    /// The columns of o that take this rank's heads.
    fn output(&mut self, layer: usize) -> Result<Weights> {
        let (checkpoint, q) = (self.checkpoint, self.share.heads.q_range());
        self.up.stack(&format!("layer {layer} o"), 1, [checkpoint.config().hidden, q.len()], &|_| {
            Ok(vec![checkpoint.block(Role::O { layer })?.take_cols(q.clone())?])
        })
    }

    /// This rank's experts of a layer, and the router, which every rank has whole.
    fn experts(&mut self, layer: usize) -> Result<MoeLayer> {
        let (checkpoint, share) = (self.checkpoint, &self.share.experts);
        let config = checkpoint.config();
        let (d, f) = (config.hidden, share.padded_width());
        let placement = share.placement();
        let owned = placement.owned();
        let label = |what: &str| format!("layer {layer} {what}");
        let owners = if placement.is_identity() {
            None
        } else {
            let n_bytes = size_of_val(placement.owners()) as u64;
            let buffer = self.gpu.buffer(&label("owners"), n_bytes, wgpu::BufferUsages::empty())?;
            self.gpu.queue().write_buffer(&buffer, 0, bytemuck::cast_slice(placement.owners()));
            Some(View::whole(&buffer))
        };
        let part = |local: usize, part| checkpoint.expert_block(layer, owned[local], part, share.width());
        Ok(MoeLayer {
            shape: config.moe,
            experts: owned.len(),
            width: f,
            owners,
            router: self.matrix(&label("router"), [config.moe.experts, d], &[Role::Router { layer }])?,
            options: RouteOptions { renormalise: config.norm_topk_prob, ..RouteOptions::default() },
            gate_up: self.up.stack(&label("experts gate_up"), owned.len(), [2 * f, d], &|m| {
                Ok(vec![part(m, ExpertPart::Gate)?.padded_to(f), part(m, ExpertPart::Up)?.padded_to(f)])
            })?,
            down: self
                .up
                .stack(&label("experts down"), owned.len(), [d, f], &|m| Ok(vec![part(m, ExpertPart::Down)?]))?,
            activation: Activation::Silu,
        })
    }
}
