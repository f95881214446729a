// The product of few rows with one matrix, adapters included: y[t] (+)= W x[t] + B u[t]. With `shrinks` it is the product alone,
// and u comes from other workgroups of the same dispatch: whoever reads y adds B u. A subgroup owns {{ per_lane }} columns of
// {{ tile }} rows and reads each row of the weights with all its lanes. The projections of a site, such as q, k and v, stand
// side by side in y. What a lane adds of an adapter, and what it adds to, is read before the weights, so that nothing is
// waited for afterwards. Whoever reads y reads that of `expert_gemm` and `lora_expand`, which this stage replaces.
struct DenseGemmParams {
    // T.
    rows: u32,
    // Row of x in vec4.
    x_stride: u32,
    // Groups of eight in a row of W.
    groups: u32,
    // Columns of y in this piece, and where they stand in y.
    out_rows: u32,
    out_begin: u32,
    y_stride: u32,
    // 1: add to y.
    accumulate: u32,
    // Projections of the site, and the rank that u has room for.
    projections: u32,
    max_rank: u32,
    // Entries of the site in `index`, adapter slots, and rows of workgroups that shrink: none but with the first piece.
    index_base: u32,
    slots: u32,
    shrink_tiles: u32,
    // First column of each projection; past every column where there is none.
    site_begin: vec4<u32>,
}

@group(0) @binding(0) var<uniform> params: DenseGemmParams;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>; // [T, K]
@group(0) @binding(2) var<storage, read> w: array<vec4<u32>>; // [out_rows, K]
{% if shrinks %}
@group(0) @binding(3) var<storage, read> pool: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> index: array<Factor>; // [L, projections] from index_base
@group(0) @binding(5) var<storage, read> token_lora_mapping: array<i32>; // [T]
@group(0) @binding(6) var<storage, read_write> y: array<f32>; // [T, y_stride]
@group(0) @binding(7) var<storage, read_write> u: array<u32>; // [T, projections, 4 + max_rank], as `pair_shrink` has it
@group(0) @binding(8) var<storage, read_write> status: array<atomic<u32>>; // [1]
{% else %}
@group(0) @binding(3) var<storage, read> u: array<vec4<u32>>; // [T, projections, 1 + max_rank / 4] from `pair_shrink`
@group(0) @binding(4) var<storage, read> pool: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read_write> y: array<f32>; // [T, y_stride]
{% endif %}

{% include "shared/weights.wgsl" %}
{% set sums = tile * per_lane %}
{% set subgroups = lanes // depth_lanes %}
{% if shrinks %}
{% include "shared/factors.wgsl" %}

fn shrink(pair: u32, row: u32, subgroup_lane: u32) {
    {% with dense = true, steps = a_steps %}
    {% include "shared/shrink_pair.wgsl" %}
    {% endwith %}
}
{% endif %}
{% if lora %}
{% include "shared/factors.wgsl" %}
{% include "shared/addend.wgsl" %}

// What an adapter adds to sum `sum` of a subgroup by one group of eight columns of B, as it was read.
struct Addend {
    sum: u32,
    group: Group,
    of_u: Eight,
}

fn read_addend(item: u32, first_row: u32, first_column: u32) -> Addend {
    let parts = params.max_rank / 8u;
    let part = item % parts;
    let sum = item / parts;
    let row = first_row + sum / {{ per_lane }}u;
    let piece_column = first_column + sum % {{ per_lane }}u;
    let inside = (sum < {{ sums }}u) & (row < params.rows) & (piece_column < params.out_rows);
    let column = params.out_begin + min(piece_column, params.out_rows - 1u);
    var projection = 0u;
    {% for i in range(1, 4) %}
    projection = select(projection, {{ i }}u, column >= params.site_begin[{{ i }}]);
    {% endfor %}
    let at = (min(row, params.rows - 1u) * params.projections + projection) * (params.max_rank / 4u + 1u);
    // Without a group there is nothing to add.
    let head = select(vec4<u32>(), u[at], inside);
    return Addend(sum, read_group(head, column - params.site_begin[projection], part), read_u(head, at + 1u, part));
}
{% endif %}

@compute @workgroup_size({{ lanes }})
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    @builtin(subgroup_id) subgroup: u32,
) {
    // Rows vary first, so that tiles which read the same weights do so at about the same time.
    {% if shrinks %}
    // The shrink comes first: its loads are the longer chain.
    if (workgroup.y < params.shrink_tiles) {
        let tiles = (params.rows + {{ tile - 1 }}u) / {{ tile }}u;
        let item = workgroup.y * tiles + workgroup.x;
        // Past the last row of A of all projections it ends at once.
        shrink(item % params.rows, item / params.rows * {{ subgroups }}u + subgroup, subgroup_lane);
        return;
    }
    let column_tile = workgroup.y - params.shrink_tiles;
    {% else %}
    let column_tile = workgroup.y;
    {% endif %}
    let first_row = workgroup.x * {{ tile }}u;
    let first_column = (column_tile * {{ subgroups }}u + subgroup) * {{ per_lane }}u;
    if (first_row >= params.rows) {
        return;
    }
    let groups = params.groups;
    {% for i in range(tile) %}
    let x_row{{ i }} = min(first_row + {{ i }}u, params.rows - 1u) * params.x_stride;
    {% for j in range(per_lane) %}
    var sum{{ i }}_{{ j }} = 0.0;
    {% endfor %}
    {% endfor %}
    {% for j in range(per_lane) %}
    let w_row{{ j }} = min(first_column + {{ j }}u, params.out_rows - 1u) * groups;
    {% endfor %}

    // Sum k is written by lane k of the subgroup, modulo its size.
    {% set turns = (sums + depth_lanes - 1) // depth_lanes %}
    {% for n in range(turns) %}
    let mine{{ n }} = subgroup_lane + {{ n * depth_lanes }}u;
    let row{{ n }} = first_row + mine{{ n }} / {{ per_lane }}u;
    let column{{ n }} = first_column + mine{{ n }} % {{ per_lane }}u;
    let writes{{ n }} = mine{{ n }} < {{ sums }}u && row{{ n }} < params.rows && column{{ n }} < params.out_rows;
    let at{{ n }} = row{{ n }} * params.y_stride + params.out_begin + column{{ n }};
    var before{{ n }} = 0.0;
    if (writes{{ n }} && params.accumulate != 0u) {
        before{{ n }} = y[at{{ n }}];
    }
    {% endfor %}
    {% if lora %}
    let addend = read_addend(subgroup_lane, first_row, first_column);
    {% endif %}

    // The last tile may not be full.
    {% for height in [1, 2] if height < tile %}
    if (first_row + {{ height }}u >= params.rows) {
        {% with tile = height, carriers = 0, whole = false, input = "x", row = "x_row", load = "load_weight8(", storage = "" %}
        {% include "shared/walk.wgsl" %}
        {% endwith %}
    } else
    {% endfor %}
    {
        {% with carriers = 0, whole = false, input = "x", row = "x_row", load = "load_weight8(", storage = "" %}
        {% include "shared/walk.wgsl" %}
        {% endwith %}
    }

    {% if lora %}
    {% macro add(addend) %}
    {
        let value = product_of({{ addend }}.group, {{ addend }}.of_u);
        {% for i in range(tile) %}
        {% for j in range(per_lane) %}
        sum{{ i }}_{{ j }} = sum{{ i }}_{{ j }} + select(0.0, value, {{ addend }}.sum == {{ i * per_lane + j }}u);
        {% endfor %}
        {% endfor %}
    }
    {% endmacro %}
    {{ add("addend") }}
    // High ranks have more of it than lanes.
    let items = {{ sums }}u * (params.max_rank / 8u);
    for (var item = subgroup_lane + {{ depth_lanes }}u; item < items; item = item + {{ depth_lanes }}u) {
        let more = read_addend(item, first_row, first_column);
        {{ add("more") }}
    }
    {% endif %}

    {% for i in range(tile) %}
    {% for j in range(per_lane) %}
    sum{{ i }}_{{ j }} = subgroupAdd(sum{{ i }}_{{ j }});
    {% endfor %}
    {% endfor %}
    {% for n in range(turns) %}
    if (writes{{ n }}) {
        var total = 0.0;
        {% for i in range(tile) %}
        {% for j in range(per_lane) %}
        {% if (i * per_lane + j) // depth_lanes == n %}
        total = select(total, sum{{ i }}_{{ j }}, mine{{ n }} == {{ i * per_lane + j }}u);
        {% endif %}
        {% endfor %}
        {% endfor %}
        y[at{{ n }}] = before{{ n }} + total;
    }
    {% endfor %}
}
