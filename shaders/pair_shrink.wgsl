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
    {% include "shared/shrink_pair.wgsl" %}
}
