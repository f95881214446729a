// Global expert ids to this rank's ids. Rows past the real tokens are masked after the look-up; an id that is not an
// expert never reaches the table. Where several ranks hold a copy of an expert, each finds its own here, and
// `localise_copies` takes back what is another's. Remap, align, activation and combine all take the result.
struct LocaliseParams {
    pairs: u32,
    valid_pairs: u32,
    experts: u32,
    pad0: u32,
}

@group(0) @binding(0) var<uniform> params: LocaliseParams;
@group(0) @binding(1) var<storage, read> topk_ids: array<i32>; // [P], global
@group(0) @binding(2) var<storage, read> locals: array<i32>; // [E], -1 for an expert that is not here
@group(0) @binding(3) var<storage, read_write> local_ids: array<i32>; // [P]

{% include "shared/rows.wgsl" %}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let pair = folded(workgroup) * 64u + lane;
    if (pair >= params.pairs) {
        return;
    }
    var id = topk_ids[pair];
    if (id >= i32(params.experts)) {
        id = -1;
    } else if (id >= 0) {
        id = locals[id];
    }
    if (pair >= params.valid_pairs) {
        id = -1;
    }
    local_ids[pair] = id;
}
