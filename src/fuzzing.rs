//! Readers of files from strangers, as functions of bytes: for the fuzz targets and the test of their seeds.

use std::path::Path;

use crate::adapter::config::AdapterConfig;
use crate::checkpoint::untrusted::Object;
use crate::checkpoint::{header, torch};

/// Reads `bytes` as a safetensors file; every range it gives must lie in them. True when the file is accepted.
pub fn safetensors(bytes: &[u8]) -> bool {
    let Ok(entries) = header::parse(bytes) else { return false };
    for entry in entries.values() {
        assert!(bytes.get(entry.begin..entry.end).is_some(), "range outside the file");
        if let Ok(dtype) = entry.dtype {
            assert_eq!(entry.shape.iter().product::<usize>() * dtype.size(), entry.end - entry.begin);
        }
    }
    true
}

/// Reads `bytes` as a file of `torch.save`; every range it gives must lie in them. True when the file is accepted.
pub fn torch(bytes: &[u8]) -> bool {
    let Ok(entries) = torch::parse(bytes) else { return false };
    for entry in entries.values() {
        if let Ok((dtype, range)) = &entry.data {
            assert!(bytes.get(range.clone()).is_some(), "range outside the file");
            assert_eq!(entry.shape.iter().product::<usize>() * dtype.size(), range.len());
        }
    }
    true
}

/// Reads `bytes` as `adapter_config.json` and asks it about a few names. True when the file is accepted.
pub fn adapter_config(bytes: &[u8]) -> bool {
    let object = Object::parse(Path::new("adapter_config.json"), bytes);
    let Ok(config) = object.and_then(|object| AdapterConfig::read(&object)) else { return false };
    for name in ["", "model.layers.0.self_attn.q_proj", "model.layers.10.mlp.experts.gate_up_proj"] {
        let _ = (config.targets_module(name), config.targets_parameter(name));
        if let Ok(rank) = config.rank_of(name) {
            assert!(rank > 0, "rank 0");
            assert!(config.scale_of(name, rank).is_ok_and(f32::is_finite) || config.scale_of(name, rank).is_err());
        }
    }
    let _ = (config.peft_version(), config.expert_columns(), config.has_bias(), config.ties_weights());
    true
}
