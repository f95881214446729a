// First half of the adapters of few pairs: u[p] = s A x[row(p)], each row of A by a subgroup. In front of the values stands
// where B is, so that `pair_gemm`, `down_combine` and `dense_gemm` find both in one place. A pair without adapter has no groups
// of B. With `dense` a pair is a whole token.
{% include "shared/pair_shrink.wgsl" %}

@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>; // [rows / row_div, K]
// [P, projections, 4 + max_rank]: first group of B, groups of a row of B, storage type, 0, then u.
@group(0) @binding(6) var<storage, read_write> u: array<u32>;

@compute @workgroup_size({{ lanes }})
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    @builtin(subgroup_id) subgroup: u32,
) {
    let pair = workgroup.x;
    let row = workgroup.y * {{ lanes // depth_lanes }}u + subgroup;
    {% with reports = true, ids = "ids" %}
    {% include "shared/pair_factor.wgsl" %}
    {% endwith %}
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
    {% include "shared/shrink_row.wgsl" %}
    if (subgroup_lane == 0u) {
        u[at + 4u + r] = bitcast<u32>(select(0.0, select(1.0, product, r < a_rows) * factor.scale, r < rank));
    }
}
