{% import "shared/matrices.wgsl" as m %}
{% import "shared/matrix_sizes.wgsl" as size %}
// Product y = W[e] x on cooperative matrices for many rows: what `expert_gemm_matrix` does for few. A workgroup owns {{ height }}
// {{ "rows" if rows == "dense" else "pairs of one expert" }} and {{ columns }} output columns. Rows of x come as blocks (`pack`, `norm_pack`, `tile_rows`, `activation_blocks`,
// `activation_pack`, `lora_shrink_matrix`) that go from memory straight into matrices, {{ x_ahead * 16 }} of the inner dimension ahead. Only W passes through workgroup memory, as f16: so little
// of that is taken that two workgroups fit a multiprocessor, of which one multiplies while the other one waits (`docs/EXPERIMENTS.md`, "What a multiprocessor holds").
// Sums are f32.
{% if gated %}
// The activation is part of it: a tile has half as many columns of gate and as many of up, and leaves h = act(gate) * up as the blocks
// that the next direct product loads. By a bound on what gate and up can be, the power of two of a row of h is known beforehand
// (`shared/gated_shift.wgsl`).
{% elif rows == "tiles" %}
// y lies in the order of the tiles, padding included, and keeps the powers of two of x and of W.
{% if halves %}
// It is f16, for who reads it only adds it up, times a power of two that follows from a bound.
{% endif %}
{% endif %}
enable f16;
enable wgpu_cooperative_matrix;
// Which part of a tile a subgroup owns is uniform within it, but not for the analysis.
diagnostic(off, derivative_uniformity);

{% include "shared/matrix_params.wgsl" %}

@group(0) @binding(0) var<uniform> params: ExpertGemmMatrixParams;
@group(0) @binding(1) var<storage, read> x: array<{{ m.quad("f16") }}>; // [rows / 16, K / 16, 16, 16], exponents [rows] when dense
@group(0) @binding(2) var<storage, read> w: array<vec4<u32>>; // [count, out_rows, K], rows padded to eight
@group(0) @binding(3) var<storage, read> ids: array<i32>; // alignment; unused when dense
{% if lora %}
@group(0) @binding(4) var<storage, read> u: array<{{ m.quad("f16") }}>; // [rows / 16, projections, room, 16, 16] from `fold_blocks`
@group(0) @binding(5) var<storage, read> pool: array<vec4<u32>>;
@group(0) @binding(6) var<storage, read> factors: array<Factor>; // [tiles, {{ height // width }} + slots * projections]: of groups of rows, then of slots; from `fold_blocks`
{% endif %}
{% set first = 7 if lora else 4 %}
{% if gated %}
@group(0) @binding({{ first }}) var<storage, read_write> h_blocks: array<vec4<u32>>; // f16 [C / 16, F / 16, 16, 16]
@group(0) @binding({{ first + 1 }}) var<storage, read_write> h_rows: array<vec2<u32>>; // f16 [P, F], exponents [P]
{% else %}
@group(0) @binding({{ first }}) var<storage, read_write> y: array<{{ "vec4<u32>" if halves else "f32" }}>; // [C, y_stride] in tiles, [rows, y_stride] when dense
{% endif %}

{% include "shared/matrices.wgsl" %}

{# Rows in workgroup memory are eight halves longer than the depth, so that lanes meet different banks. #}
{% set row = (depth + 8) // 4 %}
{% set subgroups = height // sub_rows * (columns // sub_columns) %}
{% set lanes = subgroups * width %}
{# Groups of eight in a step, and rows that all invocations together load at a time. #}
{% set part = depth // 8 %}
{% set at_once = lanes // part %}
{% set w_loads = columns // at_once %}
{% set steps = depth // 16 %}
const ROW = {{ row }}u;
// W, and then B of the adapters.
var<workgroup> w_tile: array<{{ m.quad("f16") }}, {{ columns * row }}>;
{% if lora %}
// What B is multiplied by, and u divided by: so that neither leaves the range of f16.
const LIFT = {{ 2 ** lift }}.0;
{% endif %}
{% if gated or halves %}
// A block of sums of each subgroup.
var<workgroup> strip: array<{{ m.quad("f32") }}, {{ subgroups * 64 }}>;
{% elif rows == "dense" %}
var<workgroup> y_tile: array<f32, {{ subgroups * 256 }}>;
{% endif %}

{% include "shared/rows.wgsl" %}
{% include "shared/halves.wgsl" %}
{% if lora %}
{% include "shared/eight.wgsl" %}
{% include "shared/factors.wgsl" %}
{% endif %}
{% if gated %}
{% include "shared/gate.wgsl" %}
{% include "shared/gated_shift.wgsl" %}
{% endif %}
{% include "shared/matrix_weights.wgsl" %}

@compute @workgroup_size({{ lanes }})
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    {% if rows == "dense" or gated or halves %}
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    {% endif %}
    @builtin(subgroup_id) subgroup: u32,
) {
    {% set direct = true %}
    {% include "shared/matrix_item.wgsl" %}
    {# The exponent of a row of x. #}
    {% macro exponent_of(row) %}i32(x[params.exponents + {{ row }}].x){% endmacro %}
    {# Whether row `row` of the tile is one, or padding. #}
    {% if rows == "tiles" %}
    {% macro real(row) %}u32(ids[params.sorted_base + first_row + {{ row }}]) < params.rows{% endmacro %}
    {% else %}
    {% macro real(row) %}first_row + {{ row }} < params.rows{% endmacro %}
    {% endif %}

    // What this invocation brings into workgroup memory: {{ w_loads }} groups of W in each step.
    let part = lane % {{ part }}u;
    {% for i in range(w_loads) %}
    let row{{ i }} = lane / {{ part }}u + {{ i * at_once }}u;
    {% endfor %}
    {% include "shared/weight_rows.wgsl" %}
    {% for i in range(w_loads) %}
    var w{{ i }} = vec4<u32>();
    {% endfor %}
    {# Past the end of a row x is 0, and W is read again. #}
    {% macro load_w(step) %}
    {
        {% if ragged %}
        let place = min({{ step }} * {{ part }}u + part, {{ size.groups }} - 1u);
        {% else %}
        let place = {{ step }} * {{ part }}u + part;
        {% endif %}
        {% for i in range(w_loads) %}
        w{{ i }} = w[w_at{{ i }} + place];
        {% endfor %}
    }
    {% endmacro %}
    {{ load_w("0u") }}
    // Here x_groups counts blocks.
    let steps = {{ size.x_groups }} / {{ steps }}u;

    // Subgroups share out the rows of a tile, padding included, or its columns where it has few rows. Each way is a loop of its own: a
    // branch around the products would keep loads from running ahead of them.
    let few = {{ "row_behind_few >= params.rows" if rows == "tiles" else "first_row + " ~ sub_rows ~ "u >= params.rows" }};
    {% for shared in ["columns", "rows"] %}
    {% if shared == "columns" %}
    {% set column_subgroups = subgroups %}
    {% set sub_columns = columns // subgroups %}
    if (few) {
    {% else %}
    {% set column_subgroups = columns // sub_columns %}
    if (!few) {
    {% endif %}
        let row_begin = subgroup / {{ column_subgroups }}u * {{ sub_rows }}u;
        let column_begin = subgroup % {{ column_subgroups }}u * {{ sub_columns }}u;
        let x_at = (first_row + row_begin) / 16u * {{ size.x_groups }} * 64u;
        {% for i in range(sub_rows // 16) %}
        {% for j in range(sub_columns // 16) %}
        {{ m.zero("sum" ~ i ~ "_" ~ j) }}
        {% endfor %}
        {% endfor %}
        {% if rows == "dense" %}
        {% include "shared/begin_rows.wgsl" %}
        {% endif %}
        {% for q in range(x_ahead) %}
        {% for i in range(sub_rows // 16) %}
        {{ m.load_t("var left" ~ q ~ "_" ~ i, "Left", "x", "x_at + (" ~ i ~ "u * " ~ size.x_groups ~ " + " ~ q ~ "u) * 64u", "4u") }}
        {% endfor %}
        {% endfor %}
        for (var step = 0u; step < steps; step = step + 1u) {
            workgroupBarrier();
            {% for i in range(w_loads) %}
            {
                let at = row{{ i }} * ROW + part * 2u;
                w_tile[at] = {{ m.to_quad("f16", "decode(w" ~ i ~ ".xy)") }};
                w_tile[at + 1u] = {{ m.to_quad("f16", "decode(w" ~ i ~ ".zw)") }};
            }
            {% endfor %}
            workgroupBarrier();
            {{ load_w("min(step + 1u, steps - 1u)") }}
            {% for q in range(steps) %}
            {% set held = q % x_ahead %}
            {
                {% for j in range(sub_columns // 16) %}
                {{ m.load("let right" ~ j, "Right", "w_tile", q * 4 ~ "u + (column_begin + " ~ j * 16 ~ "u) * ROW", "ROW") }}
                {% for i in range(sub_rows // 16) %}
                {{ m.multiply_add("sum" ~ i ~ "_" ~ j, "left" ~ held ~ "_" ~ i, "right" ~ j) }}
                {% endfor %}
                {% endfor %}
                // Past the end of a row whatever stands there is loaded, and not used.
                let next = x_at + (step * {{ steps }}u + {{ q + x_ahead }}u) * 64u;
                {% for i in range(sub_rows // 16) %}
                {{ m.load_t("left" ~ held ~ "_" ~ i, "Left", "x", "next + " ~ i ~ "u * " ~ size.x_groups ~ " * 64u", "4u") }}
                {% endfor %}
            }
            {% endfor %}
        }

        {% if lora %}
        {% include "shared/fold_direct.wgsl" %}
        {% endif %}

        {% if rows == "tiles" %}
        // Where no row is a pair's, nothing is written.
        if ({{ real("row_begin") }}) {
            {% include "shared/store_gated.wgsl" if gated else ("shared/store_halves.wgsl" if halves else "shared/store_tiles.wgsl") %}
        }
        {% else %}
        {% set strip = 16 %}
        {% include "shared/store_rows.wgsl" %}
        {% endif %}
    }
    {% endfor %}
}
