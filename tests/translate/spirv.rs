//! Vulkan: SPIR-V, with the capabilities that wgpu enables on a device of the tier.

use naga::Module;
use naga::back::spv::{self, Capability};
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};
use naga::valid::ModuleInfo;
use wgmoe::Tier;

use crate::BackEnd;

pub const BACK_END: BackEnd =
    BackEnd { name: "vulkan", ending: "spv", supported: spv::supported_capabilities, translate, lint };

/// As `wgpu_hal::vulkan` lists them for the features of the tier.
fn capabilities(tier: Tier) -> Vec<Capability> {
    let mut all = vec![Capability::Shader, Capability::Matrix];
    if tier >= Tier::Subgroup {
        all.extend([
            Capability::GroupNonUniform,
            Capability::GroupNonUniformVote,
            Capability::GroupNonUniformArithmetic,
            Capability::GroupNonUniformBallot,
            Capability::GroupNonUniformShuffle,
            Capability::GroupNonUniformShuffleRelative,
        ]);
    }
    if tier >= Tier::Matrix {
        all.extend([Capability::Float16, Capability::CooperativeMatrixKHR, Capability::VulkanMemoryModel]);
    }
    all
}

fn translate(module: &Module, info: &ModuleInfo, tier: Tier, checked: bool) -> Result<Vec<u8>, String> {
    let policy = if checked { BoundsCheckPolicy::Restrict } else { BoundsCheckPolicy::Unchecked };
    let options = spv::Options {
        // Vulkan 1.1 takes 1.3, the first with subgroups; matrices come with Vulkan 1.3.
        lang_version: if tier >= Tier::Matrix { (1, 6) } else { (1, 3) },
        capabilities: Some(capabilities(tier).into_iter().collect()),
        bounds_check_policies: BoundsCheckPolicies {
            index: policy,
            buffer: policy,
            image_load: policy,
            binding_array: BoundsCheckPolicy::Unchecked,
        },
        zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
        force_loop_bounding: checked,
        emit_int_div_checks: checked,
        ..spv::Options::default()
    };
    let entry = spv::PipelineOptions { shader_stage: naga::ShaderStage::Compute, entry_point: "main".to_owned() };
    let mut module = module.clone();
    wgmoe::kernels::barriers::widen(&mut module);
    let words = spv::write_vec(&module, info, &options, Some(&entry)).map_err(|e| e.to_string())?;
    Ok(words.iter().flat_map(|word| word.to_le_bytes()).collect())
}

/// `spirv-val` does the rest, in `make test-portability`.
fn lint(_: &Module, _: Tier, bytes: &[u8]) -> Result<(), String> {
    if bytes.starts_with(&0x0723_0203u32.to_le_bytes()) { Ok(()) } else { Err("not SPIR-V".to_owned()) }
}
