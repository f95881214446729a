// Virtual expert ids: expert e of adapter slot s is bucket s * E_l + e of one flat stack. Every negative id comes back
// bit for bit; an id past the experts becomes -1, so that it cannot land in the next slot's range. The LoRA stages
// read the result, `align` sorts it.
struct RemapParams {
    pairs: u32,
    top_k: u32,
    experts: u32,
    slots: u32,
    // Tokens without adapter: 0 gives -1 (they cost nothing), 1 keeps the id (one table for all; apply `lora_mask`).
    unshifted: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

@group(0) @binding(0) var<uniform> params: RemapParams;
@group(0) @binding(1) var<storage, read> topk_ids: array<i32>; // [P], local
@group(0) @binding(2) var<storage, read> token_lora_mapping: array<i32>; // [T]
@group(0) @binding(3) var<storage, read_write> virtual_topk_ids: array<i32>; // [P]
@group(0) @binding(4) var<storage, read_write> lora_mask: array<u32>; // [T]
@group(0) @binding(5) var<storage, read_write> status: array<atomic<u32>>; // [1]

{% include "shared/rows.wgsl" %}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let pair = folded(workgroup) * 64u + lane;
    if (pair >= params.pairs) {
        return;
    }
    let token = pair / params.top_k;
    let slot = token_lora_mapping[token];
    let adapted = slot >= 0 && slot < i32(params.slots);
    if (slot >= i32(params.slots)) {
        atomicOr(&status[0], 2u);
    }
    if (pair % params.top_k == 0u) {
        lora_mask[token] = select(0u, 1u, adapted);
    }
    let id = topk_ids[pair];
    var virtual_id = id;
    if (id >= i32(params.experts)) {
        atomicOr(&status[0], 4u);
        virtual_id = -1;
    } else if (id >= 0) {
        if (adapted) {
            virtual_id = id + slot * i32(params.experts);
        } else if (params.unshifted == 0u) {
            virtual_id = -1;
        }
    }
    virtual_topk_ids[pair] = virtual_id;
}
