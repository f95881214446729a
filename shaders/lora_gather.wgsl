// First half of an adapter of the embedding: u[t] = s A[:, token(t)], since a token is a vector with a single one. The
// pool holds A transposed, so that a token's values are one row. `lora_expand` reads u.
struct LoraGatherParams {
    rows: u32,
    // Entry of slot 0, L, and the rank that u has room for.
    index_base: u32,
    slots: u32,
    max_rank: u32,
}

@group(0) @binding(0) var<uniform> params: LoraGatherParams;
@group(0) @binding(1) var<storage, read> rows: array<vec4<i32>>; // [T] token or -1, position, sequence, slot
@group(0) @binding(2) var<storage, read> last_ids: array<i32>; // [sequences]
@group(0) @binding(3) var<storage, read> pool: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> index: array<Factor>; // [L] from index_base
@group(0) @binding(5) var<storage, read_write> u: array<vec4<f32>>; // [T, max_rank]

{% include "shared/rows.wgsl" %}
{% include "shared/factors.wgsl" %}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let at = folded(workgroup) * 64u + lane;
    let row = at / (params.max_rank / 8u);
    let group = at % (params.max_rank / 8u);
    if (row >= params.rows) {
        return;
    }
    let slot = rows[row].w;
    if (slot < 0 || slot >= i32(params.slots)) {
        return;
    }
    let factor = index[params.index_base + u32(slot)];
    let groups = ((factor.rank_type & 0xffffu) + 7u) / 8u;
    if (group >= groups) {
        return;
    }
    var id = rows[row].x;
    if (id < 0) {
        id = last_ids[rows[row].z];
    }
    // A failed sample left -1: as in `embed`, the row is computed from entry 0 and its sequence is failed by the host.
    let value = load_factor8(factor.a, u32(max(id, 0)) * groups + group, storage_of(factor));
    u[at * 2u] = value.lo * factor.scale;
    u[at * 2u + 1u] = value.hi * factor.scale;
}
