// How often each expert was chosen: adds the pairs of real tokens to the counts of one layer. Nothing in a step reads
// them; the host does, now and then. Integers, so the order of the additions does not show.
struct CountParams {
    valid_pairs: u32,
    experts: u32,
    // First count of the layer.
    base: u32,
    pad0: u32,
}

@group(0) @binding(0) var<uniform> params: CountParams;
@group(0) @binding(1) var<storage, read> topk_ids: array<i32>; // [P], global
@group(0) @binding(2) var<storage, read_write> counts: array<atomic<u32>>; // [layers, E]

{% include "shared/rows.wgsl" %}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let pair = folded(workgroup) * 64u + lane;
    if (pair >= params.valid_pairs) {
        return;
    }
    let id = topk_ids[pair];
    if (id >= 0 && id < i32(params.experts)) {
        atomicAdd(&counts[params.base + u32(id)], 1u);
    }
}
