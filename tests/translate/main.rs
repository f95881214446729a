//! Every shader variant that `plan` can choose, as each back end of wgpu would hand it to a driver: validated with what
//! that back end can express, translated by naga with the options that wgpu gives it, and linted for what naga lets
//! through and a driver would not. No device is needed.
//!
//! With `WGMOE_SHADERS=FOLDER` the results are left there for compilers that are not part of this test
//! (`make test-portability`); `variants.tsv` says what each file is.

mod hlsl;
mod lint;
mod msl;
mod output;
mod spirv;

use std::panic::{AssertUnwindSafe, catch_unwind};

use naga::Module;
use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};
use output::Folder;
use wgmoe::Tier;
use wgmoe::kernels::linker::{label, render};
use wgmoe::kernels::variants::{Variant, all};
use wgmoe::plan::matrix::takes_edge;

/// The text or words of a module; `checked`: as wgpu has them written in debug builds, else as in release builds.
type Translate = fn(&Module, &ModuleInfo, Tier, checked: bool) -> Result<Vec<u8>, String>;

/// One language that drivers are given.
struct BackEnd {
    name: &'static str,
    /// Ending of its files.
    ending: &'static str,
    /// What naga can write in it.
    supported: fn() -> Capabilities,
    translate: Translate,
    /// What naga lets through and a driver would not take.
    lint: fn(&Module, Tier, &[u8]) -> Result<(), String>,
}

const BACK_ENDS: [BackEnd; 3] = [spirv::BACK_END, hlsl::BACK_END, msl::BACK_END];

/// What wgpu grants the shaders of a tier, on devices that have it.
fn granted(tier: Tier) -> Capabilities {
    let mut granted = Capabilities::SHADER_FLOAT16_IN_FLOAT32;
    if tier >= Tier::Subgroup {
        granted |= Capabilities::SUBGROUP;
    }
    if tier >= Tier::Matrix {
        granted |= Capabilities::SUBGROUP_BARRIER | Capabilities::SHADER_FLOAT16 | Capabilities::COOPERATIVE_MATRIX;
    }
    granted
}

fn parsed(source: &str, granted: Capabilities) -> Result<(Module, ModuleInfo), String> {
    let mut options = naga::front::wgsl::Options::new();
    options.capabilities = granted;
    let mut front = naga::front::wgsl::Frontend::new_with_options(options);
    let module = front.parse(source).map_err(|e| e.emit_to_string(source))?;
    let mut validator = Validator::new(ValidationFlags::all(), granted);
    if granted.contains(Capabilities::SUBGROUP) {
        validator
            .subgroup_stages(naga::valid::ShaderStages::COMPUTE)
            .subgroup_operations(naga::valid::SubgroupOperationSet::all());
    }
    let info = validator.validate(&module).map_err(|e| e.emit_to_string(source))?;
    Ok((module, info))
}

/// Whether any device of this back end is given the variant.
fn offered(back_end: &BackEnd, module: &Module, tier: Tier) -> bool {
    if tier < Tier::Matrix {
        return true;
    }
    let sizes = lint::matrix_sizes(module);
    match back_end.name {
        // No cooperative matrices in HLSL. What packs rows for them names none and is translated for all.
        "dx12" => sizes.is_empty(),
        "metal" => sizes.iter().all(|n| takes_edge(wgpu::Backend::Metal, *n)),
        _ => sizes.iter().all(|n| takes_edge(wgpu::Backend::Vulkan, *n)),
    }
}

fn check(back_end: &BackEnd, variant: &Variant, source: &str, folder: Option<&Folder>) -> Result<bool, String> {
    let tier = variant.tiers[0];
    let (module, _) = parsed(source, granted(tier))?;
    if !offered(back_end, &module, tier) {
        return Ok(false);
    }
    let (module, info) = parsed(source, granted(tier) & (back_end.supported)())?;
    lint::module(&module, variant)?;
    for checked in [true, false] {
        let bytes = (back_end.translate)(&module, &info, tier, checked)?;
        (back_end.lint)(&module, tier, &bytes)?;
        if let Some(folder) = folder {
            folder.write(variant, back_end.ending, checked, &bytes);
        }
    }
    Ok(true)
}

/// The check, with a panic of naga as a failure like any other.
fn caught(back_end: &BackEnd, variant: &Variant, source: &str, folder: Option<&Folder>) -> Result<bool, String> {
    catch_unwind(AssertUnwindSafe(|| check(back_end, variant, source, folder))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        Err(format!("panic: {}", text.unwrap_or("of unknown kind")))
    })
}

#[test]
fn every_variant_translates_for_every_back_end() {
    let variants = all();
    let folder = Folder::from_env(&variants);
    let mut failures = Vec::new();
    let mut counts = [0; BACK_ENDS.len()];
    for variant in &variants {
        let name = label(variant.kernel, &variant.vars);
        let source = render(variant.kernel, &variant.vars).unwrap();
        if let Some(folder) = &folder {
            folder.write_wgsl(variant, &source);
        }
        for (back_end, count) in BACK_ENDS.iter().zip(&mut counts) {
            match caught(back_end, variant, &source, folder.as_ref()) {
                Ok(offered) => *count += usize::from(offered),
                Err(why) => failures.push(format!("{} {name}: {why}", back_end.name)),
            }
        }
    }
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
    for (back_end, count) in BACK_ENDS.iter().zip(counts) {
        println!("{}: {count} of {} variants, with and without run-time checks", back_end.name, variants.len());
    }
}

#[test]
fn a_shader_that_no_driver_takes_is_found() {
    let wrong = |source: &str, tier: Tier, back_end: &BackEnd| {
        let variant = Variant { tiers: vec![tier], ..all().remove(0) };
        caught(back_end, &variant, source, None).unwrap_err()
    };
    let main = "@compute @workgroup_size(64) fn main(@builtin(local_invocation_index) i: u32)";
    let output = "@group(0) @binding(1) var<storage, read_write> y: array<f32>;";
    for back_end in &BACK_ENDS {
        let large = format!("var<workgroup> t: array<f32, 8192>; {output} {main} {{ t[i] = 1.0; y[i] = t[i]; }}");
        assert!(wrong(&large, Tier::Baseline, back_end).contains("workgroup memory"));
        let subgroups = format!("{output} {main} {{ y[i] = subgroupAdd(1.0); }}");
        assert!(wrong(&subgroups, Tier::Baseline, back_end).contains("SUBGROUP"), "{}", back_end.name);
        let wide = format!("{output} {}", main.replace("64", "512") + " { y[i] = 1.0; }");
        assert!(wrong(&wide, Tier::Baseline, back_end).contains("invocations"));
    }
    // Metal loads matrices from scalars alone.
    let load = format!(
        "enable f16; enable wgpu_cooperative_matrix; var<workgroup> t: array<vec4<f16>, 64>; {output}
         {main} {{ let a = coopLoad<coop_mat8x8<f16, A>>(&t[0], 2u); y[i] = 1.0; }}"
    );
    assert!(wrong(&load, Tier::Matrix, &msl::BACK_END).contains("array of vectors"));
    // naga 30 panics where the operands of coopStore are no variables.
    let store = format!(
        "enable f16; enable wgpu_cooperative_matrix; @group(0) @binding(1) var<storage, read_write> y: array<f32>;
         {main} {{ var c = coop_mat16x16<f32, C>(); coopStoreT(c, &y[0], 16u + i); }}"
    );
    assert!(wrong(&store, Tier::Matrix, &spirv::BACK_END).starts_with("panic"));
}
