// hidden[t] = table[id(t)]. A row with a negative token takes the id that `sample` left for its sequence, so that a
// sampled token never visits the host before it is used.
struct EmbedParams {
    rows: u32,
    groups: u32,
    // Vocabulary entries of this piece.
    first: u32,
    count: u32,
}

@group(0) @binding(0) var<uniform> params: EmbedParams;
@group(0) @binding(1) var<storage, read> rows: array<vec4<i32>>; // [T] token or -1, position, sequence, slot
@group(0) @binding(2) var<storage, read> last_ids: array<i32>; // [sequences]
@group(0) @binding(3) var<storage, read> w: array<vec4<u32>>; // [count, D]
@group(0) @binding(4) var<storage, read_write> hidden: array<vec4<f32>>; // [T, D]

{% include "shared/rows.wgsl" %}
{% include "shared/weights.wgsl" %}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let at = folded(workgroup) * 64u + lane;
    let row = at / params.groups;
    let group = at % params.groups;
    if (row >= params.rows) {
        return;
    }
    var id = rows[row].x;
    if (id < 0) {
        id = last_ids[rows[row].z];
    }
    // A failed sample left -1: the row is computed from entry 0 and its sequence is failed by the host.
    let entry = u32(max(id, 0));
    if (entry < params.first || entry >= params.first + params.count) {
        return;
    }
    let value = load_weight8((entry - params.first) * params.groups + group);
    hidden[at * 2u] = value.lo;
    hidden[at * 2u + 1u] = value.hi;
}
