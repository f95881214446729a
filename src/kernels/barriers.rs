//! Subgroup barriers as Vulkan wants them.
//!
//! `subgroupBarrier()` orders what the lanes of a subgroup wrote to workgroup memory. naga 30 writes it to SPIR-V with the
//! semantics `SubgroupMemory` alone, a storage class that Vulkan does not have (VUID-StandaloneSpirv-MemorySemantics-10870), so
//! a driver may order nothing. Named beside the workgroup's memory it gets both words: the subgroup still waits for itself
//! only, and its writes to workgroup memory are ordered.

use naga::{Barrier, Block, Module, Statement};

use crate::error::{Error, ErrorKind, Result};

/// What a shader that waits for its subgroup says.
const CALL: &str = "subgroupBarrier()";

/// The module to compile on Vulkan in place of `source`, or none where the source will do.
///
/// # Errors
/// [`ErrorKind::Device`] when the source is not WGSL.
pub fn for_vulkan(source: &str) -> Result<Option<Module>> {
    if !source.contains(CALL) {
        return Ok(None);
    }
    let mut options = naga::front::wgsl::Options::new();
    options.capabilities = naga::valid::Capabilities::all();
    let mut module = naga::front::wgsl::Frontend::new_with_options(options)
        .parse(source)
        .map_err(|e| Error::new(ErrorKind::Device, e.emit_to_string(source)))?;
    widen(&mut module);
    Ok(Some(module))
}

/// Lets every subgroup barrier of the module order workgroup memory.
pub fn widen(module: &mut Module) {
    for (_, function) in module.functions.iter_mut() {
        widen_block(&mut function.body);
    }
    for entry in &mut module.entry_points {
        widen_block(&mut entry.function.body);
    }
}

fn widen_block(block: &mut Block) {
    for statement in block.iter_mut() {
        match statement {
            Statement::ControlBarrier(flags) if flags.contains(Barrier::SUB_GROUP) => *flags |= Barrier::WORK_GROUP,
            Statement::Block(inner) => widen_block(inner),
            Statement::If { accept, reject, .. } => {
                widen_block(accept);
                widen_block(reject);
            }
            Statement::Switch { cases, .. } => cases.iter_mut().for_each(|case| widen_block(&mut case.body)),
            Statement::Loop { body, continuing, .. } => {
                widen_block(body);
                widen_block(continuing);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "
        var<workgroup> t: array<u32, 64>;
        @compute @workgroup_size(64) fn main(@builtin(local_invocation_index) i: u32) {
            for (var k = 0u; k < 4u; k++) {
                if (t[0] == k) { t[i] = k; subgroupBarrier(); } else { workgroupBarrier(); }
            }
        }";

    fn barriers(block: &Block, found: &mut Vec<Barrier>) {
        for statement in block.iter() {
            match statement {
                Statement::ControlBarrier(flags) => found.push(*flags),
                Statement::Block(inner) => barriers(inner, found),
                Statement::If { accept, reject, .. } => {
                    barriers(accept, found);
                    barriers(reject, found);
                }
                Statement::Loop { body, .. } => barriers(body, found),
                _ => {}
            }
        }
    }

    #[test]
    fn subgroup_barriers_order_workgroup_memory_and_others_stay() {
        let module = for_vulkan(SOURCE).unwrap().unwrap();
        let mut found = Vec::new();
        barriers(&module.entry_points[0].function.body, &mut found);
        assert_eq!(found, [Barrier::SUB_GROUP | Barrier::WORK_GROUP, Barrier::WORK_GROUP]);
    }

    #[test]
    fn a_shader_without_them_is_compiled_from_its_source() {
        assert!(for_vulkan("fn f() { workgroupBarrier(); }").unwrap().is_none());
        assert_eq!(for_vulkan("subgroupBarrier(); ?").unwrap_err().kind(), ErrorKind::Device);
    }
}
