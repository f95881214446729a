//! DX12: HLSL for the lowest shader model that has what the tier needs.

use naga::Module;
use naga::back::hlsl::{self, BindTarget, ShaderModel};
use naga::valid::ModuleInfo;
use naga::{AddressSpace, ScalarKind, TypeInner};
use wgmoe::Tier;

use crate::{BackEnd, lint};

pub const BACK_END: BackEnd =
    BackEnd { name: "dx12", ending: "hlsl", supported: hlsl::supported_capabilities, translate, lint: lint_hlsl };

/// Unordered access views that every device of feature level 11.0 has.
const MAX_WRITTEN: usize = 8;

/// 6.2 has half-precision types, 6.0 wave operations; FXC compiles up to 5.1, and so must take the baseline tier.
pub fn shader_model(module: &Module, tier: Tier) -> ShaderModel {
    let halves = module.types.iter().any(|(_, t)| match t.inner {
        TypeInner::Scalar(s) | TypeInner::Vector { scalar: s, .. } => s.kind == ScalarKind::Float && s.width == 2,
        _ => false,
    });
    match tier {
        _ if halves => ShaderModel::V6_2,
        Tier::Baseline => ShaderModel::V5_1,
        _ => ShaderModel::V6_0,
    }
}

fn translate(module: &Module, info: &ModuleInfo, tier: Tier, checked: bool) -> Result<Vec<u8>, String> {
    let target = |register| BindTarget { space: 0, register, restrict_indexing: checked, ..BindTarget::default() };
    let mut options = hlsl::Options {
        shader_model: shader_model(module, tier),
        fake_missing_bindings: false,
        // wgpu passes the number of workgroups in a constant buffer of its own.
        special_constants_binding: Some(target(1)),
        zero_initialize_workgroup_memory: false,
        restrict_indexing: checked,
        force_loop_bounding: checked,
        ..hlsl::Options::default()
    };
    // One counter for each kind of view, as wgpu numbers them.
    let mut registers = [0; 2];
    for (_, global) in module.global_variables.iter() {
        let Some(binding) = global.binding else { continue };
        let register = match global.space {
            AddressSpace::Storage { access } => {
                let register = &mut registers[usize::from(access.contains(naga::StorageAccess::STORE))];
                *register += 1;
                *register - 1
            }
            _ => 0,
        };
        options.binding_map.insert(binding, target(register));
    }
    let mut text = String::new();
    let pipeline = hlsl::PipelineOptions::default();
    let written = hlsl::Writer::new(&mut text, &options, &pipeline).write(module, info, None);
    let reflection = written.map_err(|e| e.to_string())?;
    for name in reflection.entry_point_names {
        name.map_err(|e| e.to_string())?;
    }
    Ok(text.into_bytes())
}

fn lint_hlsl(module: &Module, tier: Tier, bytes: &[u8]) -> Result<(), String> {
    let text = String::from_utf8_lossy(bytes);
    let written = lint::storage_buffers(module).filter(|(_, written)| *written).count();
    if written > MAX_WRITTEN {
        return Err(format!("{written} buffers are written, at most {MAX_WRITTEN}"));
    }
    // Words of shader models above 5.1, which FXC would take for functions that nobody declared.
    let later = ["Wave", "float16_t", "uint64_t", "int64_t", "dot4add"];
    match later.iter().find(|word| tier == Tier::Baseline && text.contains(**word)) {
        Some(word) => Err(format!("`{word}` in a shader of the baseline tier")),
        None => Ok(()),
    }
}
