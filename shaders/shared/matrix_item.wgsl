// What one workgroup of a product on matrices works on: the tile of rows `item`, from an alignment whose buffer is `ids` or of {{ height }}
// consecutive rows, its matrix `expert` of this piece, and its columns. It opens `main`, which ends here for other pieces.
let item = folded(workgroup);
let first_row = item * {{ height }}u;
{% if rows == "tiles" %}
// There are as many workgroups as tiles, and more only where z counts on.
if (workgroup.z > 0u && item >= u32(ids[65])) {
    return;
}
// Asked for at once: one after the other, each would be waited for.
let label = ids[params.expert_base + item];
{% if direct is defined %}
let row_behind_few = u32(ids[params.sorted_base + first_row + {{ sub_rows }}u]);
{% endif %}
if (label < i32(params.first) || label >= i32(params.first + params.count)) {
    return;
}
let expert = u32(label) - params.first;
{% else %}
if (first_row >= params.rows) {
    return;
}
let expert = 0u;
{% if lora %}
let label = 0;
{% endif %}
{% endif %}
{% if parted is defined and parted %}
// Parts of the depth have tiles of columns of their own, and a y.
let column_tiles = ({{ size.out_rows }} + {{ columns - 1 }}u) / {{ columns }}u;
let depth_part = workgroup.x / column_tiles;
let first_column = workgroup.x % column_tiles * {{ columns }}u;
let y_part = depth_part * params.rows * {{ size.y_stride }};
{% elif gated is defined and gated %}
// Of h: each is one of gate and one of up.
let first_column = workgroup.x * {{ columns // 2 }}u;
{% else %}
let first_column = workgroup.x * {{ columns }}u;
{% endif %}
