// First half of the adapters of few pairs: u[p] = s A x[row(p)], each row of A by a subgroup. In front of the values stands
// where B is, so that `pair_gemm`, `down_combine` and `dense_gemm` find both in one place. A pair without adapter has no groups
// of B. With `dense` a pair is a whole token.
struct PairShrinkParams {
    // P.
    rows: u32,
    // Pairs that share a row of x.
    row_div: u32,
    // Row of x in vec4.
    x_stride: u32,
    // Groups of eight in a row of A.
    groups: u32,
    // Entries of this site in `index`, projections of the site, and the rank that u has room for.
    index_base: u32,
    projections: u32,
    max_rank: u32,
    // Pairs of a token.
    top_k: u32,
    // Experts of this rank, and adapter slots.
    experts: u32,
    slots: u32,
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<uniform> params: PairShrinkParams;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>; // [rows / row_div, K]
@group(0) @binding(2) var<storage, read> pool: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> index: array<Factor>; // [L, E_l, projections] from index_base
@group(0) @binding(4) var<storage, read> ids: array<i32>; // [P], local; unused when dense
@group(0) @binding(5) var<storage, read> token_lora_mapping: array<i32>; // [T]
// [P, projections, 4 + max_rank]: first group of B, groups of a row of B, storage type, 0, then u.
@group(0) @binding(6) var<storage, read_write> u: array<u32>;
@group(0) @binding(7) var<storage, read_write> status: array<atomic<u32>>; // [1]

{% include "shared/factors.wgsl" %}

@compute @workgroup_size({{ lanes }})
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    @builtin(subgroup_id) subgroup: u32,
) {
    let pair = workgroup.x;
    let row = workgroup.y * {{ lanes // depth_lanes }}u + subgroup;
    {% if dense %}
    let id = 0;
    {% else %}
    let id = ids[pair];
    {% endif %}
    {% include "shared/pair_factor.wgsl" %}
    // A bias is a column of B whose element of u is the scale alone.
    let a_rows = rank - biased(factor);
    let b_groups = (rank + 7u) / 8u;
    let at = (pair * params.projections + projection) * (params.max_rank + 4u);
    if (r == 0u && subgroup_lane == 0u) {
        u[at] = factor.b;
        u[at + 1u] = b_groups;
        u[at + 2u] = storage;
        u[at + 3u] = 0u;
    }
    // B is read in groups: u is 0 up to the end of the last one.
    if (r >= b_groups * 8u) {
        return;
    }
    let groups = params.groups;
    let w_row0 = min(r, a_rows - 1u) * groups;
    let x_row0 = pair / params.row_div * params.x_stride;
    var sum0_0 = 0.0;
    {% with tile = 1, per_lane = 1, carriers = 0, whole = true, input = "x", row = "x_row", load = "load_factor8(factor.a, ", storage = ", storage" %}
    {% include "shared/walk.wgsl" %}
    {% endwith %}
    if (subgroup_lane == 0u) {
        u[at + 4u + r] = bitcast<u32>(select(0.0, select(1.0, sum0_0, r < a_rows) * factor.scale, r < rank));
    }
}
