// What one workgroup of a matrix product works on. It opens `main`: `workgroup` and `params` must exist, and the weight
// of what `label` names. `rows` is one of
//   tiles  a tile of {{ tile }} pairs of one expert, from `align`; `ids` is its output
//   pairs  a single pair, `ids` holds the id of each: few pairs share an expert, so sorting would not pay
//   chosen  the same, but its id is chosen here (`choose`), from the logits of its row
//   dense  {{ tile }} consecutive rows, one matrix for all
let item = folded(workgroup);
{% if rows == "tiles" %}
if (item >= u32(ids[65])) {
    return;
}
let label = ids[params.expert_base + item];
{% elif rows == "pairs" %}
if (item >= params.rows) {
    return;
}
let label = ids[item];
{% elif rows == "chosen" %}
if (item >= params.rows) {
    return;
}
let label = chosen(item, params.row_div, subgroup_lane, subgroup);
{% else %}
if (item * {{ tile }}u >= params.rows) {
    return;
}
let label = 0;
{% endif %}
{% for i in range(tile) %}
{% if rows == "tiles" %}
let pair{{ i }} = u32(ids[params.sorted_base + item * {{ tile }}u + {{ i }}u]);
{% else %}
let pair{{ i }} = item * {{ tile }}u + {{ i }}u;
{% endif %}
let x_row{{ i }} = min(pair{{ i }}, params.rows - 1u) / params.row_div * params.x_stride;
{% endfor %}
