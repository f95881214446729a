//! Checkpoint to resident model.

use crate::activation::Activation;
use crate::checkpoint::{Checkpoint, MlpKind, ModelConfig};
use crate::error::{Error, ErrorKind, Result};
use crate::family::{ExpertPart, Role};
use crate::gpu::Gpu;
use crate::kernels::View;
use crate::layer::MoeLayer;
use crate::model::{DecoderLayer, Mlp, Model};
use crate::placement::ExpertShare;
use crate::router::RouteOptions;
use crate::upload::Uploader;

impl Model {
    /// Uploads every tensor of `checkpoint`; `progress(done, total)` counts bytes.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for sizes the kernels do not take, [`ErrorKind::Limit`] and
    /// [`ErrorKind::OutOfMemory`] from the device, and those of the checkpoint.
    pub fn load(gpu: &Gpu, checkpoint: &Checkpoint, progress: &mut dyn FnMut(u64, u64)) -> Result<Self> {
        let config = checkpoint.config().clone();
        config.family.check_decoder()?;
        check_sizes(&config)?;
        let share = ExpertShare::whole(config.moe.experts, config.moe.expert_width)?;
        let mut up = Uploader::new(gpu, total_bytes(checkpoint)?, progress);
        let d = config.hidden;
        let table = [config.vocab, d];
        let embedding = up.matrix(checkpoint, "embedding", table, &[Role::Embedding])?;
        let lm_head = if config.tie_embeddings {
            None
        } else {
            Some(up.matrix(checkpoint, "lm_head", table, &[Role::LmHead])?)
        };
        let final_norm = up.vectors(checkpoint, "final norm", &[Role::FinalNorm])?;
        let mut layers = Vec::with_capacity(config.layers.len());
        for (layer, kind) in config.layers.iter().enumerate() {
            layers.push(load_layer(&mut up, gpu, checkpoint, layer, *kind, &share)?);
        }
        up.settle()?;
        let bytes_loaded = up.done();
        Ok(Self { config, embedding, lm_head, final_norm, layers, share, bytes_loaded })
    }
}

/// The kernels read rows in groups of eight and hold at most 256 values of a head.
fn check_sizes(config: &ModelConfig) -> Result<()> {
    let q = config.heads * config.head_dim;
    let mut sizes =
        vec![("hidden_size", config.hidden), ("num_attention_heads * head_dim", q), ("head_dim", config.head_dim)];
    if config.layers.contains(&MlpKind::Experts) {
        sizes.push(("moe_intermediate_size", config.moe.expert_width));
    }
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

fn total_bytes(checkpoint: &Checkpoint) -> Result<u64> {
    let mut total = 0;
    let config = checkpoint.config();
    let unused = config.tie_embeddings.then(|| config.family.tensor_name(Role::LmHead));
    for name in checkpoint.names().filter(|name| Some(*name) != unused.as_deref()) {
        total += checkpoint.tensor(name)?.n_bytes() as u64;
    }
    Ok(total)
}

fn load_layer(
    up: &mut Uploader<'_>,
    gpu: &Gpu,
    checkpoint: &Checkpoint,
    layer: usize,
    kind: MlpKind,
    share: &ExpertShare,
) -> Result<DecoderLayer> {
    let config = checkpoint.config();
    let d = config.hidden;
    let q = config.heads * config.head_dim;
    let kv = config.kv_heads * config.head_dim;
    let label = |what: &str| format!("layer {layer} {what}");
    let input_norm = up.vectors(checkpoint, &label("input norm"), &[Role::InputNorm { layer }])?;
    let qkv = up.matrix(
        checkpoint,
        &label("qkv"),
        [q + 2 * kv, d],
        &[Role::Q { layer }, Role::K { layer }, Role::V { layer }],
    )?;
    let head_norms = up.vectors(checkpoint, &label("head norms"), &[Role::QNorm { layer }, Role::KNorm { layer }])?;
    let o = up.matrix(checkpoint, &label("o"), [d, q], &[Role::O { layer }])?;
    let mlp_norm = up.vectors(checkpoint, &label("mlp norm"), &[Role::PostAttentionNorm { layer }])?;
    let mlp = match kind {
        MlpKind::Dense => {
            let f = config.dense_width;
            let gate_up = [Role::DenseGate { layer }, Role::DenseUp { layer }];
            Mlp::Dense {
                gate_up: up.matrix(checkpoint, &label("gate_up"), [2 * f, d], &gate_up)?,
                down: up.matrix(checkpoint, &label("down"), [d, f], &[Role::DenseDown { layer }])?,
            }
        }
        MlpKind::Experts => {
            let f = config.moe.expert_width;
            let placement = share.placement();
            let owned = placement.owned();
            let part = |local: usize, part: ExpertPart| {
                let slice = checkpoint.expert_rows(layer, owned[local], part)?;
                Ok((slice.dtype, slice.bytes))
            };
            let owners = if placement.is_identity() {
                None
            } else {
                let buffer =
                    gpu.buffer(&label("owners"), size_of_val(placement.owners()) as u64, wgpu::BufferUsages::empty())?;
                gpu.queue().write_buffer(&buffer, 0, bytemuck::cast_slice(placement.owners()));
                Some(View::whole(&buffer))
            };
            Mlp::Experts(Box::new(MoeLayer {
                shape: config.moe,
                experts: owned.len(),
                width: share.padded_width(),
                owners,
                router: up.matrix(checkpoint, &label("router"), [config.moe.experts, d], &[Role::Router { layer }])?,
                options: RouteOptions { renormalise: config.norm_topk_prob, ..RouteOptions::default() },
                gate_up: up.stack(&label("experts gate_up"), owned.len(), [2 * f, d], &|m| {
                    Ok(vec![part(m, ExpertPart::Gate)?, part(m, ExpertPart::Up)?])
                })?,
                down: up
                    .stack(&label("experts down"), owned.len(), [d, f], &|m| Ok(vec![part(m, ExpertPart::Down)?]))?,
                activation: Activation::Silu,
            }))
        }
    };
    Ok(DecoderLayer { input_norm, qkv, head_norms, o, mlp_norm, mlp })
}
