// What a subgroup does for row `row` of all projections' ranks of `pair`: one row of A, and with the first of a projection where B
// is. It opens a function without result; `u` is [P, projections, 4 + max_rank].
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
