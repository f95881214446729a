//! Metal: MSL of the oldest version that wgpu uses for the tier.

use naga::Module;
use naga::back::msl::{self, BindTarget, EntryPointResources};
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};
use naga::valid::ModuleInfo;
use wgmoe::Tier;

use crate::{BackEnd, lint};

pub const BACK_END: BackEnd =
    BackEnd { name: "metal", ending: "metal", supported: msl::supported_capabilities, translate, lint: lint_msl };

/// Arguments of a kernel that are buffers.
const MAX_BUFFERS: u32 = 31;

fn translate(module: &Module, info: &ModuleInfo, tier: Tier, checked: bool) -> Result<Vec<u8>, String> {
    let policy = if checked { BoundsCheckPolicy::Restrict } else { BoundsCheckPolicy::Unchecked };
    let mut resources = EntryPointResources::default();
    // As wgpu gives them out: by binding, in whatever order a shader declares them. The writer names a size by the variable's number.
    let (mut sizes_buffer, mut sizes) = (0, String::new());
    for (handle, global) in module.global_variables.iter() {
        let Some(binding) = global.binding else { continue };
        let slot = binding.binding as u8;
        let mutable = matches!(global.space, naga::AddressSpace::Storage { access } if access.contains(naga::StorageAccess::STORE));
        resources.resources.insert(binding, BindTarget { buffer: Some(slot), mutable, ..BindTarget::default() });
        sizes_buffer = sizes_buffer.max(slot + 1);
        sizes += &format!("// size{} is of buffer({slot})\n", handle.index());
    }
    // wgpu passes the sizes of buffers in one of its own.
    resources.sizes_buffer = Some(sizes_buffer);
    let options = msl::Options {
        lang_version: if tier >= Tier::Matrix { (2, 3) } else { (2, 1) },
        per_entry_point_map: [("main".to_owned(), resources)].into_iter().collect(),
        fake_missing_bindings: false,
        bounds_check_policies: BoundsCheckPolicies {
            index: policy,
            buffer: policy,
            image_load: policy,
            binding_array: BoundsCheckPolicy::Unchecked,
        },
        zero_initialize_workgroup_memory: false,
        force_loop_bounding: checked,
        emit_int_div_checks: checked,
        ..msl::Options::default()
    };
    let entry = msl::PipelineOptions {
        entry_point: Some((naga::ShaderStage::Compute, "main".to_owned())),
        ..msl::PipelineOptions::default()
    };
    let (text, written) = msl::write_string(module, info, &options, &entry).map_err(|e| e.to_string())?;
    for name in written.entry_point_names {
        name.map_err(|e| e.to_string())?;
    }
    // For who runs it: portability/msl/replay.py.
    Ok((text + "\n" + &sizes).into_bytes())
}

fn lint_msl(module: &Module, tier: Tier, bytes: &[u8]) -> Result<(), String> {
    let text = String::from_utf8_lossy(bytes);
    let buffers = lint::storage_buffers(module).count() as u32 + 2;
    if buffers > MAX_BUFFERS {
        return Err(format!("{buffers} buffers, at most {MAX_BUFFERS}"));
    }
    if lint::matrix_sizes(module).iter().any(|n| *n != 8) || text.contains("16x16") {
        return Err("cooperative matrices other than 8 x 8".to_owned());
    }
    // naga passes a pointer to what the array holds; Metal loads matrices from scalars alone.
    if lint::matrix_of_vectors(module) {
        return Err("a cooperative matrix is loaded from an array of vectors".to_owned());
    }
    // Metal numbers `subgroup_id` and its like only from 2.1 on, which is what is asked for.
    if tier == Tier::Baseline && text.contains("simd_") {
        return Err("subgroup operations in a shader of the baseline tier".to_owned());
    }
    Ok(())
}
