//! Every shader variant parses, validates with what its tier may use, binds what its host file says, and lays out its
//! parameters as the host struct does.

mod common;

use std::collections::HashSet;
use std::sync::Arc;

use common::each_case;
use naga::valid::{Capabilities as Naga, ValidationFlags, Validator};
use naga::{AddressSpace, Module, StorageAccess, TypeInner};
use wgmoe::Tier;
use wgmoe::kernels::linker::{Kernel, Vars, label, render};
use wgmoe::kernels::params::Params;
use wgmoe::kernels::variants::variants;
use wgmoe::kernels::{
    activation, activation_blocks, align, attention, attention_matrix, attention_split, combine, count, dense_gemm,
    down_combine, embed, expand_norm, expert_gemm, expert_gemm_matrix, fold_blocks, localise, lora, lora_gather,
    lora_matrix, matrix_probe, norm, norm_pack, pack, pair_expand_shrink, pair_gemm, pair_gemm_shrink, pair_shrink,
    random, rate, remap, rope, route, runs, sample, stream, tile_rows,
};
use wgmoe::plan::capabilities::Capabilities;
use wgmoe::plan::classes::classes;
use wgmoe::plan::matrix::{Cuts, MatrixTile, workgroup_bytes};

/// A host struct: WGSL name, (field, offset), size.
type Layout = (&'static str, &'static [(&'static str, usize)], usize);

fn layout<P: Params>() -> Layout {
    (P::NAME, P::FIELDS, size_of::<P>())
}

fn params_of(stem: &str) -> Layout {
    match stem {
        "route" => layout::<route::RouteParams>(),
        "count" => layout::<count::CountParams>(),
        "localise" => layout::<localise::LocaliseParams>(),
        "localise_quotas" => layout::<localise::LocaliseQuotasParams>(),
        "localise_copies" => layout::<localise::LocaliseCopiesParams>(),
        "remap" => layout::<remap::RemapParams>(),
        "align_few" | "align_count" | "align_scatter" => layout::<align::AlignParams>(),
        "runs_count" | "runs_scatter" => layout::<runs::AlignRunsParams>(),
        "expert_gemm" => layout::<expert_gemm::ExpertGemmParams>(),
        "lora_shrink" => layout::<lora::LoraShrinkParams>(),
        "lora_shrink_matrix" => layout::<lora_matrix::LoraShrinkMatrixParams>(),
        "lora_expand_tiles" => layout::<lora_matrix::LoraExpandTilesParams>(),
        "lora_expand" => layout::<lora::LoraExpandParams>(),
        "lora_gather" => layout::<lora_gather::LoraGatherParams>(),
        "pair_shrink" | "pair_shrink_packed" => layout::<pair_shrink::PairShrinkParams>(),
        "pair_gemm" => layout::<pair_gemm::PairGemmParams>(),
        "pair_gemm_shrink" => layout::<pair_gemm_shrink::PairGemmShrinkParams>(),
        "pair_expand_shrink" => layout::<pair_expand_shrink::PairExpandShrinkParams>(),
        "dense_gemm" => layout::<dense_gemm::DenseGemmParams>(),
        "down_combine" => layout::<down_combine::DownCombineParams>(),
        "matrix_probe" => layout::<matrix_probe::MatrixProbeParams>(),
        "pack" => layout::<pack::PackParams>(),
        "fold_blocks" => layout::<fold_blocks::FoldBlocksParams>(),
        "tile_rows" => layout::<tile_rows::TileRowsParams>(),
        "expert_gemm_matrix" | "expert_gemm_direct" => layout::<expert_gemm_matrix::ExpertGemmMatrixParams>(),
        "activation" => layout::<activation::ActivationParams>(),
        "activation_pack" => layout::<activation::ActivationPackParams>(),
        "activation_blocks" => layout::<activation_blocks::ActivationBlocksParams>(),
        "combine" => layout::<combine::CombineParams>(),
        "combine_tiles" => layout::<combine::CombineTilesParams>(),
        "embed" => layout::<embed::EmbedParams>(),
        "norm" => layout::<norm::NormParams>(),
        "norm_pack" => layout::<norm_pack::NormPackParams>(),
        "expand_norm" => layout::<expand_norm::ExpandNormParams>(),
        "rope" => layout::<rope::RopeParams>(),
        "attention" => layout::<attention::AttentionParams>(),
        "attention_pack" => layout::<attention_matrix::AttentionPackParams>(),
        "attention_matrix" => layout::<attention_matrix::AttentionMatrixParams>(),
        "attention_split" => layout::<attention_split::AttentionSplitParams>(),
        "attention_combine" => layout::<attention_split::AttentionCombineParams>(),
        "sample" => layout::<sample::SampleParams>(),
        "random" => layout::<random::RandomParams>(),
        "rate" => layout::<rate::RateParams>(),
        "stream" => layout::<stream::StreamParams>(),
        _ => panic!("shader `{stem}` has no parameter struct here"),
    }
}

/// What a backend grants the shaders of a tier; no 64-bit integers.
fn granted(tier: Tier) -> Naga {
    // Every Vulkan, Metal and DX12 device has `unpack2x16float`.
    let baseline = Naga::empty() | Naga::SHADER_FLOAT16_IN_FLOAT32;
    match tier {
        Tier::Baseline => baseline,
        Tier::Subgroup => baseline | Naga::SUBGROUP,
        Tier::Matrix => {
            baseline | Naga::SUBGROUP | Naga::SUBGROUP_BARRIER | Naga::SHADER_FLOAT16 | Naga::COOPERATIVE_MATRIX
        }
    }
}

fn validated(source: &str, granted: Naga) -> Result<Module, String> {
    let mut frontend = naga::front::wgsl::Frontend::new_with_options({
        let mut options = naga::front::wgsl::Options::new();
        options.capabilities = granted;
        options
    });
    let module = frontend.parse(source).map_err(|e| e.emit_to_string(source))?;
    let mut validator = Validator::new(ValidationFlags::all(), granted);
    if granted.contains(Naga::SUBGROUP) {
        validator
            .subgroup_stages(naga::valid::ShaderStages::COMPUTE)
            .subgroup_operations(naga::valid::SubgroupOperationSet::all());
    }
    let info = validator.validate(&module).map_err(|e| e.emit_to_string(source))?;
    if granted.contains(Naga::COOPERATIVE_MATRIX) {
        // naga's writer panics on some uses of cooperative matrices that its validator lets pass.
        naga::back::spv::write_vec(&module, &info, &naga::back::spv::Options::default(), None)
            .map_err(|e| e.to_string())?;
    }
    Ok(module)
}

fn check_bindings(module: &Module, kernel: &Kernel) -> Result<(), String> {
    let mut has_params = false;
    for (_, global) in module.global_variables.iter() {
        let Some(binding) = &global.binding else { continue };
        let name = global.name.clone().unwrap_or_default();
        if binding.group != 0 {
            return Err(format!("`{name}` is in group {}", binding.group));
        }
        let at = binding.binding as usize;
        let write = at > kernel.reads;
        let expected = match at {
            0 => AddressSpace::Uniform,
            _ if write => AddressSpace::Storage { access: StorageAccess::LOAD | StorageAccess::STORE },
            _ => AddressSpace::Storage { access: StorageAccess::LOAD },
        };
        if global.space != expected {
            return Err(format!("binding {at} `{name}`: expected {expected:?}, got {:?}", global.space));
        }
        if at > kernel.reads + kernel.writes {
            return Err(format!("binding {at} `{name}` is not announced"));
        }
        has_params |= at == 0 && name == "params";
    }
    if has_params { Ok(()) } else { Err("binding 0 is not `params`".to_owned()) }
}

fn check_layout(module: &Module, (name, fields, size): Layout) -> Result<(), String> {
    let found = module.types.iter().find(|(_, t)| t.name.as_deref() == Some(name));
    let Some((_, naga::Type { inner: TypeInner::Struct { members, span }, .. })) = found else {
        return Err(format!("no struct `{name}`"));
    };
    let got: Vec<(&str, usize)> =
        members.iter().map(|m| (m.name.as_deref().unwrap_or(""), m.offset as usize)).collect();
    if got != fields || *span as usize != size || size % 16 != 0 {
        return Err(format!("`{name}`: host {fields:?} in {size} bytes, shader {got:?} in {span}"));
    }
    Ok(())
}

fn check(kernel: &'static Kernel, vars: &Vars, caps: &Capabilities) -> Result<(), String> {
    let source = render(kernel, vars).map_err(|e| e.to_string())?;
    if kernel.reads + kernel.writes > 8 {
        return Err("more than eight storage buffers".to_owned());
    }
    let module = validated(&source, granted(caps.tier))?;
    let entries: Vec<&str> = module.entry_points.iter().map(|e| e.name.as_str()).collect();
    if entries != ["main"] {
        return Err(format!("entry points {entries:?}"));
    }
    let [x, y, z] = module.entry_points[0].workgroup_size;
    if x * y * z > 256 {
        return Err(format!("{x} x {y} x {z} invocations"));
    }
    check_bindings(&module, kernel)?;
    check_layout(&module, params_of(kernel.stem))?;
    match kernel.stem {
        "sample" => check_layout(&module, layout::<sample::Pick>()),
        "lora_shrink" | "lora_shrink_matrix" | "lora_expand" | "lora_expand_tiles" | "lora_gather" | "pair_shrink"
        | "pair_gemm_shrink" | "pair_expand_shrink" => {
            check_layout(&module, ("Factor", &[("a", 0), ("b", 4), ("rank_type", 8), ("scale", 12)], 16))
        }
        _ => Ok(()),
    }
}

#[test]
fn every_variant_validates_and_agrees_with_its_host_file() {
    let mut failures = Vec::new();
    let mut n = 0;
    for caps in classes() {
        for (kernel, vars) in variants(&caps) {
            n += 1;
            if let Err(why) = check(kernel, &vars, &caps) {
                failures.push(format!("{}: {why}", label(kernel, &vars)));
            }
        }
    }
    assert!(failures.is_empty(), "{} of {n} variants\n{}", failures.len(), failures.join("\n"));
}

/// Bytes that a shader takes of workgroup memory.
fn workgroup_memory(module: &Module) -> u32 {
    let own = module.global_variables.iter().filter(|(_, global)| global.space == AddressSpace::WorkGroup);
    own.map(|(_, global)| module.types[global.ty].inner.size(module.to_ctx())).sum()
}

#[test]
fn every_cut_that_is_taken_makes_a_shader() {
    // Sizes that are far from those of the table, one of a kind or drawn.
    let mut rng = common::Rng::new(7);
    let mut of = |choices: &[u32]| choices[rng.below(choices.len())];
    let mut drawn = Vec::new();
    while drawn.len() < 16 {
        let direct = of(&[0, 0, 1]) == 1;
        let ahead = if direct { 1 } else { of(&[1, 2, 3, 4]) };
        let cut = MatrixTile {
            height: 16 * of(&[1, 2, 3, 4, 5, 6, 8, 9, 12, 16]),
            columns: 16 * of(&[1, 2, 3, 4, 6, 8, 12, 16]),
            depth: 16 * of(&[1, 2, 3, 4, 8]),
            ahead,
            x_ahead: of(&[1, ahead, 2, 4]),
            sub_rows: 16 * of(&[1, 2, 3, 4, 5, 8]),
            sub_columns: 16 * of(&[1, 2, 3, 4, 8]),
            rests: !direct && of(&[0, 1]) == 1,
            kept: !direct && of(&[0, 1]) == 1,
            direct,
        };
        for edge in [16, 8] {
            if [false, true].iter().all(|dense| cut.check(edge, *dense).is_ok()) {
                drawn.push((edge, cut));
            }
        }
    }
    assert!(drawn.iter().any(|(_, cut)| cut.direct) && drawn.iter().any(|(_, cut)| !cut.direct));
    let classes = classes();
    each_case(&drawn, |(edge, cut)| {
        let class = classes.iter().find(|caps| caps.matrix && caps.edge == *edge).unwrap();
        let alone = Cuts { experts: vec![*cut], dense: vec![*cut] };
        let caps = Capabilities { cuts: Arc::new(alone), ..class.clone() };
        let own = |stem: &str| stem.starts_with("expert_gemm_") || ["fold_blocks", "tile_rows"].contains(&stem);
        let all: Vec<_> = variants(&caps).into_iter().filter(|(kernel, _)| own(kernel.stem)).collect();
        // Some of the products, with and without adapters, of both kinds of rows; and all that goes before them.
        let (products, others): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|(kernel, _)| kernel.stem.starts_with("expert_gemm_"));
        for (kernel, vars) in products.iter().step_by(7).chain(&others) {
            let named = |why: String| format!("{}: {why}", label(kernel, vars));
            check(kernel, vars, &caps).map_err(named)?;
            let module = validated(&render(kernel, vars).unwrap(), granted(caps.tier))?;
            let (bytes, room) = (workgroup_memory(&module), workgroup_bytes(*edge));
            if bytes > room {
                return Err(named(format!("{bytes} bytes of workgroup memory, and {room} are there")));
            }
        }
        Ok(())
    });
}

/// Shaders of the matrix tier alone.
const MATRIX_TIER: [&str; 15] = [
    "matrix_probe",
    "norm_pack",
    "pack",
    "fold_blocks",
    "tile_rows",
    "expert_gemm_direct",
    "pair_shrink_packed",
    "expert_gemm_matrix",
    "lora_shrink_matrix",
    "lora_expand_tiles",
    "activation_pack",
    "activation_blocks",
    "combine_tiles",
    "attention_pack",
    "attention_matrix",
];
/// Shaders for lanes along the depth alone.
const ALONG_DEPTH: [&str; 8] = [
    "pair_shrink",
    "pair_shrink_packed",
    "pair_gemm",
    "pair_gemm_shrink",
    "pair_expand_shrink",
    "expand_norm",
    "dense_gemm",
    "down_combine",
];
/// Shaders of hardware alone.
const HARDWARE: [&str; 2] = ["attention_split", "attention_combine"];

#[test]
fn variants_are_listed_once_and_cover_every_shader_file() {
    let caps = classes();
    assert!(caps.iter().any(|caps| caps.matrix));
    each_case(&caps, |caps| {
        let all = variants(caps);
        let twice = (0..all.len()).find(|i| all[..*i].contains(&all[*i]));
        if let Some(i) = twice {
            return Err(format!("{} is listed twice", label(all[i].0, &all[i].1)));
        }
        let stems: HashSet<&str> = all.iter().map(|(kernel, _)| kernel.stem).collect();
        for entry in std::fs::read_dir("shaders").unwrap() {
            let path = entry.unwrap().path();
            let stem = path.file_stem().unwrap().to_str().unwrap().to_owned();
            let expected = (caps.matrix || !MATRIX_TIER.contains(&stem.as_str()))
                && (caps.along_depth || !ALONG_DEPTH.contains(&stem.as_str()))
                && (caps.split_attention || !HARDWARE.contains(&stem.as_str()));
            if path.is_file() && stems.contains(stem.as_str()) != expected {
                return Err(format!("{stem}: expected a variant: {expected}"));
            }
        }
        Ok(())
    });
}
