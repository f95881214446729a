// `product`: row `r` of A, of `a_rows`, times the row of x of `pair`, read by a subgroup. A loop for each width of a storage type.
let groups = params.groups;
let w_row0 = min(r, a_rows - 1u) * groups;
let x_row0 = pair{{ "" if dense else " / params.row_div" }} * params.x_stride;
var sum0_0 = 0.0;
if (storage == 0u) {
    {% with tile = 1, per_lane = 1, carriers = 0, whole = false, input = "x", row = "x_row", load = "load_wide8(factor.a, ", storage = "" %}
    {% include "shared/walk.wgsl" %}
    {% endwith %}
} else {
    {% with tile = 1, per_lane = 1, carriers = 0, whole = false, input = "x", row = "x_row", load = "load_narrow8(factor.a, ", storage = ", storage" %}
    {% include "shared/walk.wgsl" %}
    {% endwith %}
}
let product = subgroupAdd(sum0_0);
