//! What the IR of a shader must keep to on every back end.

use naga::front::Typifier;
use naga::proc::ResolveContext;
use naga::{AddressSpace, Module, TypeInner};
use wgmoe::kernels::variants::Variant;

/// Bytes of workgroup memory: WebGPU's default.
const WORKGROUP_BYTES: u32 = 16 << 10;
/// WebGPU's defaults.
const INVOCATIONS: u32 = 256;
const STORAGE_BUFFERS: usize = 8;
/// DX12 has no more in z, WebGPU's default is the same.
const MAX_Z: u32 = 64;

/// Limits that hold for all back ends.
pub fn module(module: &Module, variant: &Variant) -> Result<(), String> {
    let [x, y, z] = module.entry_points[0].workgroup_size;
    if x * y * z > INVOCATIONS || z > MAX_Z {
        return Err(format!("workgroups of {x} x {y} x {z} invocations"));
    }
    let buffers = storage_buffers(module).count();
    if buffers > STORAGE_BUFFERS || buffers > variant.kernel.reads + variant.kernel.writes {
        return Err(format!("{buffers} storage buffers"));
    }
    let bytes = workgroup_bytes(module)?;
    // On the matrix tier what a device must have to be offered its matrices.
    let edge = matrix_sizes(module).into_iter().next();
    let most = edge.map_or(WORKGROUP_BYTES, wgmoe::plan::matrix::workgroup_bytes);
    if bytes > most {
        return Err(format!("{bytes} bytes of workgroup memory, at most {most}"));
    }
    Ok(())
}

/// Bindings, and whether each is written.
pub fn storage_buffers(module: &Module) -> impl Iterator<Item = (u32, bool)> {
    module.global_variables.iter().filter_map(|(_, global)| match (global.space, &global.binding) {
        (AddressSpace::Storage { access }, Some(at)) => Some((at.binding, access.contains(naga::StorageAccess::STORE))),
        _ => None,
    })
}

fn workgroup_bytes(module: &Module) -> Result<u32, String> {
    let mut layouter = naga::proc::Layouter::default();
    layouter.update(module.to_ctx()).map_err(|e| e.to_string())?;
    let globals = module.global_variables.iter().filter(|(_, g)| g.space == AddressSpace::WorkGroup);
    Ok(globals.map(|(_, g)| layouter[g.ty].size.next_multiple_of(16)).sum())
}

/// Whether a cooperative matrix is loaded by the address of a vector.
pub fn matrix_of_vectors(module: &Module) -> bool {
    let entries = module.entry_points.iter().map(|entry| &entry.function);
    module.functions.iter().map(|(_, function)| function).chain(entries).any(|function| {
        let context = ResolveContext::with_locals(module, &function.local_variables, &function.arguments);
        let mut types = Typifier::new();
        function.expressions.iter().any(|(_, expression)| {
            let naga::Expression::CooperativeLoad { data, .. } = expression else { return false };
            types.grow(data.pointer, &function.expressions, &context).unwrap();
            match *types.get(data.pointer, &module.types) {
                TypeInner::Pointer { base, .. } => matches!(module.types[base].inner, TypeInner::Vector { .. }),
                TypeInner::ValuePointer { size, .. } => size.is_some(),
                _ => false,
            }
        })
    })
}

/// Sizes of the cooperative matrices that a shader names.
pub fn matrix_sizes(module: &Module) -> Vec<u32> {
    let matrix = |inner: &TypeInner| match inner {
        TypeInner::CooperativeMatrix { columns, rows, .. } => Some([*columns as u32, *rows as u32]),
        _ => None,
    };
    module.types.iter().filter_map(|(_, t)| matrix(&t.inner)).flatten().collect()
}
