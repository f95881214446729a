// Global expert ids to this rank's ids. Rows past the real tokens are masked after the look-up; an id that is not an
// expert never reaches the table. Where several ranks hold a copy of an expert, token t goes to copy (t + e) mod n: every
// rank knows that without asking another, and neighbouring tokens share the copies evenly. Remap, align, activation and
// combine all take the result.
struct LocaliseParams {
    pairs: u32,
    valid_pairs: u32,
    experts: u32,
    top_k: u32,
}

// Where an expert is: its local id here or -1, and which of its copies this one is, of how many.
struct Owner {
    local: i32,
    copy_and_copies: u32,
}

@group(0) @binding(0) var<uniform> params: LocaliseParams;
@group(0) @binding(1) var<storage, read> topk_ids: array<i32>; // [P], global
@group(0) @binding(2) var<storage, read> owners: array<Owner>; // [E]
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
        let owner = owners[id];
        let copies = owner.copy_and_copies >> 16u;
        let turn = (pair / params.top_k + u32(id)) % max(copies, 1u);
        id = select(-1, owner.local, turn == (owner.copy_and_copies & 0xffffu));
    }
    if (pair >= params.valid_pairs) {
        id = -1;
    }
    local_ids[pair] = id;
}
