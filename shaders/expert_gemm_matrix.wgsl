// Grouped product y[p] = W[e(p)] x[row(p)] on cooperative matrices: a workgroup owns {{ height }} pairs of one expert and
// {{ columns }} output columns, a subgroup of it {{ sub_rows }} x {{ sub_columns }}. Both operands pass through workgroup memory as f16, in
// two halves of it, so that one barrier a step of {{ depth }} along the inner dimension is enough; what comes into them is loaded
// {{ ahead }} steps ahead, because few workgroups fit a multiprocessor and memory is far. Rows of x come packed, each with its power of two (`pack`, `activation_pack`); weights become
// f16 on the way, times a power of two of their stack where their range needs one. Sums are f32.
enable f16;
enable wgpu_cooperative_matrix;
// Which part of a tile a subgroup owns is uniform within it, but not for the analysis.
diagnostic(off, derivative_uniformity);

struct ExpertGemmMatrixParams {
    // P, or T when dense.
    rows: u32,
    // Pairs that share a row of x: A for gate and up, 1 for down.
    row_div: u32,
    // Groups of eight in a row of W and of x.
    groups: u32,
    // Rows of W (columns of y) of this piece, and where they stand in y.
    out_rows: u32,
    out_begin: u32,
    y_stride: u32,
    // Matrices of this piece.
    first: u32,
    count: u32,
    // 1: add to y.
    accumulate: u32,
    // Parts of `ids` when it is an alignment.
    expert_base: u32,
    sorted_base: u32,
    // Where the exponents of the rows begin in x, in vec4.
    exponents: u32,
    // What a weight is multiplied by when it becomes f16, and the inverse.
    w_scale: f32,
    w_unscale: f32,
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<uniform> params: ExpertGemmMatrixParams;
@group(0) @binding(1) var<storage, read> x: array<vec4<f16>>; // [rows / row_div, K], exponents [rows / row_div]
{% if dtype == "f16" %}
@group(0) @binding(2) var<storage, read> w: array<vec4<f16>>; // [count, out_rows, K]
{% else %}
@group(0) @binding(2) var<storage, read> w: array<vec4<u32>>; // [count, out_rows, K], rows padded to eight
{% endif %}
@group(0) @binding(3) var<storage, read> ids: array<i32>; // alignment; unused when dense
@group(0) @binding(4) var<storage, read_write> y: array<f32>; // [rows, y_stride]

alias Left = coop_mat16x16<f16, A>;
alias Right = coop_mat16x16<f16, B>;
alias Sum = coop_mat16x16<f32, C>;

{# Rows in workgroup memory are eight halves longer than the depth, so that lanes meet different banks. #}
{% set row = (depth + 8) // 4 %}
{% set row_subgroups = height // sub_rows %}
{% set column_subgroups = columns // sub_columns %}
{% set subgroups = row_subgroups * column_subgroups %}
{% set lanes = subgroups * width %}
{% set x_loads = height * depth // 4 // lanes %}
{% set w_loads = columns * depth // 8 // lanes %}
const ROW = {{ row }}u;
const STRIP = {{ strip }}u;
var<workgroup> x_tile: array<vec4<f16>, {{ 2 * height * row }}>;
var<workgroup> w_tile: array<vec4<f16>, {{ 2 * columns * row }}>;
var<workgroup> y_tile: array<f32, {{ subgroups * 16 * strip }}>;

{% include "shared/rows.wgsl" %}
{% include "shared/halves.wgsl" %}

{% if dtype == "bf16" %}
fn decode(words: vec2<u32>) -> vec4<f16> {
    let v = bitcast<vec4<f32>>(vec4<u32>(words.x << 16u, words.x & 0xffff0000u, words.y << 16u, words.y & 0xffff0000u));
    return vec4<f16>(v{% if scaled %} * params.w_scale{% endif %});
}
{% endif %}

@compute @workgroup_size({{ lanes }})
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    @builtin(subgroup_id) subgroup: u32,
) {
    let item = folded(workgroup);
    {% if rows == "tiles" %}
    if (item >= u32(ids[65])) {
        return;
    }
    let label = ids[params.expert_base + item];
    {% else %}
    if (item * {{ height }}u >= params.rows) {
        return;
    }
    let label = 0;
    {% endif %}
    if (label < i32(params.first) || label >= i32(params.first + params.count)) {
        return;
    }
    let expert = u32(label) - params.first;
    let first_column = workgroup.x * {{ columns }}u;

    // What this invocation brings into workgroup memory: {{ x_loads }} vec4 of x and {{ w_loads }} groups of W in each step.
    let x_part = lane % {{ depth // 4 }}u;
    let w_part = lane % {{ depth // 8 }}u;
    {% if rows == "tiles" %}
    let first_pair = u32(ids[params.sorted_base + item * {{ height }}u]);
    {% else %}
    let first_pair = item * {{ height }}u;
    {% endif %}
    {% for i in range(x_loads) %}
    let x_row{{ i }} = lane / {{ depth // 4 }}u + {{ i * (lanes * 4 // depth) }}u;
    {% if rows == "tiles" %}
    let pair{{ i }} = u32(ids[params.sorted_base + item * {{ height }}u + x_row{{ i }}]);
    {% else %}
    let pair{{ i }} = item * {{ height }}u + x_row{{ i }};
    {% endif %}
    // A row of padding reads the first pair's, which is in the cache: what becomes of it is never written.
    let row_of_pair{{ i }} = select(first_pair, pair{{ i }}, pair{{ i }} < params.rows) / params.row_div;
    let x_at{{ i }} = row_of_pair{{ i }} * params.groups * 2u;
    {% for p in range(ahead) %}
    var x{{ p }}_{{ i }} = vec4<f16>();
    {% endfor %}
    {% endfor %}
    {% for i in range(w_loads) %}
    let w_row{{ i }} = lane / {{ depth // 8 }}u + {{ i * (lanes * 8 // depth) }}u;
    let w_at{{ i }} = (expert * params.out_rows + min(first_column + w_row{{ i }}, params.out_rows - 1u)) * params.groups;
    {% for p in range(ahead) %}
    {% if dtype == "f16" %}
    var w{{ p }}_{{ i }} = vec4<f16>();
    var v{{ p }}_{{ i }} = vec4<f16>();
    {% else %}
    var w{{ p }}_{{ i }} = vec4<u32>();
    {% endif %}
    {% endfor %}
    {% endfor %}

    // The part of the tile that this subgroup multiplies.
    let row_begin = subgroup / {{ column_subgroups }}u * {{ sub_rows }}u;
    let column_begin = subgroup % {{ column_subgroups }}u * {{ sub_columns }}u;
    {% if rows == "tiles" %}
    let busy = u32(ids[params.sorted_base + item * {{ height }}u + row_begin]) < params.rows;
    {% else %}
    let busy = item * {{ height }}u + row_begin < params.rows;
    {% endif %}
    {% for i in range(sub_rows // 16) %}
    {% for j in range(sub_columns // 16) %}
    var sum{{ i }}_{{ j }} = Sum();
    {% endfor %}
    {% endfor %}

    {# No load is conditional: a value that is loaded in a branch is waited for at the end of that branch. Past the end of a
       row the last part of it is loaded again, and x counts as 0 there. #}
    {% macro fetch(p, step) %}
    {
        let x_column = {{ step }} * {{ depth // 4 }}u + x_part;
        let w_column = {{ step }} * {{ depth // 8 }}u + w_part;
        {% if ragged %}
        let x_place = min(x_column, params.groups * 2u - 1u);
        let w_place = min(w_column, params.groups - 1u);
        {% else %}
        let x_place = x_column;
        let w_place = w_column;
        {% endif %}
        {% for i in range(w_loads) %}
        {% if dtype == "f16" %}
        w{{ p }}_{{ i }} = w[(w_at{{ i }} + w_place) * 2u];
        v{{ p }}_{{ i }} = w[(w_at{{ i }} + w_place) * 2u + 1u];
        {% else %}
        w{{ p }}_{{ i }} = w[w_at{{ i }} + w_place];
        {% endif %}
        {% endfor %}
        {% for i in range(x_loads) %}
        x{{ p }}_{{ i }} = x[x_at{{ i }} + x_place];
        {% endfor %}
    }
    {% endmacro %}
    // A multiple of {{ ahead }} steps, of which the last may lie past the end of ragged rows.
    let steps = (params.groups + {{ ahead * depth // 8 - 1 }}u) / {{ ahead * depth // 8 }}u * {{ ahead }}u;
    {% for p in range(ahead) %}
    {{ fetch(p, p ~ "u") }}
    {% endfor %}
    for (var step = 0u; step < steps; step = step + {{ ahead }}u) {
        {% for p in range(ahead) %}
        {
            {% if ragged %}
            let inside = (step + {{ p }}u) * {{ depth // 4 }}u + x_part < params.groups * 2u;
            {% endif %}
            {% for i in range(x_loads) %}
            {% if ragged %}
            x_tile[{{ p % 2 * height * row }}u + x_row{{ i }} * ROW + x_part] = select(vec4<f16>(), x{{ p }}_{{ i }}, inside);
            {% else %}
            x_tile[{{ p % 2 * height * row }}u + x_row{{ i }} * ROW + x_part] = x{{ p }}_{{ i }};
            {% endif %}
            {% endfor %}
            {% for i in range(w_loads) %}
            {
                let at = {{ p % 2 * columns * row }}u + w_row{{ i }} * ROW + w_part * 2u;
                {% if dtype == "f16" %}
                w_tile[at] = w{{ p }}_{{ i }};
                w_tile[at + 1u] = v{{ p }}_{{ i }};
                {% else %}
                w_tile[at] = decode(w{{ p }}_{{ i }}.xy);
                w_tile[at + 1u] = decode(w{{ p }}_{{ i }}.zw);
                {% endif %}
            }
            {% endfor %}
            workgroupBarrier();
            {{ fetch(p, "min(step + " ~ (p + ahead) ~ "u, steps - 1u)") }}
            if (busy) {
                {% for q in range(depth // 16) %}
                {
                    {% for i in range(sub_rows // 16) %}
                    let left{{ i }} = coopLoadT<Left>(&x_tile[{{ p % 2 * height * row + q * 4 }}u + (row_begin + {{ i * 16 }}u) * ROW], ROW);
                    {% endfor %}
                    {% for j in range(sub_columns // 16) %}
                    let right{{ j }} = coopLoad<Right>(&w_tile[{{ p % 2 * columns * row + q * 4 }}u + (column_begin + {{ j * 16 }}u) * ROW], ROW);
                    {% for i in range(sub_rows // 16) %}
                    sum{{ i }}_{{ j }} = coopMultiplyAdd(left{{ i }}, right{{ j }}, sum{{ i }}_{{ j }});
                    {% endfor %}
                    {% endfor %}
                }
                {% endfor %}
            }
        }
        {% endfor %}
    }

    // Through workgroup memory once more, because only rows of real pairs are written, and each has its own scale.
    let strip_begin = subgroup * {{ 16 * strip }}u;
    {% for i in range(sub_rows // 16) %}
    {
        // Lane l knows row l of these 16.
        let at = item * {{ height }}u + row_begin + {{ i * 16 }}u + subgroup_lane % 16u;
        {% if rows == "tiles" %}
        let pair = u32(ids[params.sorted_base + at]);
        {% else %}
        let pair = at;
        {% endif %}
        let shift = x[params.exponents + min(pair, params.rows - 1u) / params.row_div].x;
        let unscale = power_of_two(-i32(shift));
        {% for s in range(sub_columns // strip) %}
        {
            {% for j in range(strip // 16) %}
            let block{{ j }} = sum{{ i }}_{{ s * (strip // 16) + j }};
            let place{{ j }} = &y_tile[strip_begin + {{ j * 16 }}u];
            coopStoreT(block{{ j }}, place{{ j }}, STRIP);
            {% endfor %}
            workgroupBarrier();
            let column = first_column + column_begin + {{ s * strip }}u + subgroup_lane % STRIP;
            {% for r in range(16 * strip // width) %}
            {
                let row = {{ r * (width // strip) }}u + subgroup_lane / STRIP;
                let target_pair = subgroupShuffle(pair, row);
                let factor = subgroupShuffle(unscale, row);
                if (target_pair < params.rows && column < params.out_rows) {
                    let value = y_tile[strip_begin + row * STRIP + subgroup_lane % STRIP] * factor * params.w_unscale;
                    let to = target_pair * params.y_stride + params.out_begin + column;
                    if (params.accumulate != 0u) {
                        y[to] = y[to] + value;
                    } else {
                        y[to] = value;
                    }
                }
            }
            {% endfor %}
            workgroupBarrier();
        }
        {% endfor %}
    }
    {% endfor %}
}
