{% import "shared/matrices.wgsl" as m %}
{% import "shared/matrix_sizes.wgsl" as size %}
// Grouped product y = W[e] x on cooperative matrices: a workgroup owns {{ height }} pairs of one expert and {{ columns }} output columns, a
// subgroup of it {{ sub_rows }} x {{ sub_columns }}. Both operands pass through workgroup memory as f16, {{ depth }} of the inner dimension at a time, and
// are loaded {{ ahead }} steps ahead: memory is far. Little workgroup memory matters more than few barriers: of low tiles a
// multiprocessor then holds several, of which one multiplies while another one stores. Rows of x come packed, each with its
// power of two (`pack`, `norm_pack`, `activation_pack`); weights become f16 on the way, times a power of two of their stack where their
// range needs one. Sums are f32.
{% if rows == "tiles" %}
// y lies in the order of the tiles, padding included, and keeps both powers of two: so the sums go to memory as they are. The
// activation, the adapters and combine know the place and the power of each pair.
{% endif %}
{% if parted %}
// Workgroups share out the depth, too: y has a sum for each part, which the reader adds up.
{% endif %}
{% if lora %}
// Adapters lengthen the inner dimension: behind W[e] stand the B of every adapter that a row of this tile has, times 2^{{ lift }},
// and behind a row of x the u of its own adapter, times 2^-{{ lift }}, and zeros for the others.
{% endif %}
enable f16;
enable wgpu_cooperative_matrix;
// Which part of a tile a subgroup owns is uniform within it, but not for the analysis.
diagnostic(off, derivative_uniformity);

{% include "shared/matrix_params.wgsl" %}

@group(0) @binding(0) var<uniform> params: ExpertGemmMatrixParams;
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>; // f16 [rows / row_div, K], exponents [rows / row_div]
@group(0) @binding(2) var<storage, read> w: array<vec4<u32>>; // [count, out_rows, K], rows padded to eight
@group(0) @binding(3) var<storage, read> ids: array<i32>; // alignment; unused when dense
{% if lora %}
@group(0) @binding(4) var<storage, read> u: array<vec4<u32>>; // f16 [P, projections, max_rank]; `lora_shrink_matrix`, `pair_shrink_packed`
@group(0) @binding(5) var<storage, read> pool: array<vec4<u32>>;
@group(0) @binding(6) var<storage, read> index: array<Factor>; // [slots, experts, projections] from index_base
@group(0) @binding(7) var<storage, read> token_lora_mapping: array<i32>; // [T]
{% endif %}
@group(0) @binding({{ 8 if lora else 4 }}) var<storage, read_write> y: array<f32>; // [C, y_stride] in tiles, [rows, y_stride] when dense

{% include "shared/matrices.wgsl" %}

{# Rows in workgroup memory are eight halves longer than the depth, so that lanes meet different banks. #}
{% set row = (depth + 8) // 4 %}
{% set column_subgroups = columns // sub_columns %}
{% set subgroups = height // sub_rows * column_subgroups %}
{% set lanes = subgroups * width %}
{# Groups of eight in a step, and rows that all invocations together load at a time. #}
{% set part = depth // 8 %}
{% set at_once = lanes // part %}
{% set x_loads = (height + at_once - 1) // at_once %}
{% set w_loads = (columns + at_once - 1) // at_once %}
const ROW = {{ row }}u;
var<workgroup> x_tile: array<{{ m.quad("f16") }}, {{ height * row }}>;
var<workgroup> w_tile: array<{{ m.quad("f16") }}, {{ columns * row }}>;
{% if rows == "dense" %}
var<workgroup> y_tile: array<f32, {{ subgroups * 16 * strip }}>;
{% endif %}

{% if lora %}
// What B is multiplied by, and u divided by: so that neither leaves the range of f16.
const LIFT = {{ 2 ** lift }}.0;
// Bits of the slots that the rows of each subgroup's loads have.
var<workgroup> slot_bits: array<vec4<u32>, {{ subgroups }}>;
// The slot of each row in the upper byte, 255 for none, and its pair.
var<workgroup> row_words: array<u32, {{ height }}>;
{% endif %}

{% include "shared/rows.wgsl" %}
{% include "shared/halves.wgsl" %}
{% if lora %}
{% include "shared/eight.wgsl" %}
{% include "shared/factors.wgsl" %}

{% include "shared/slots.wgsl" %}
{% endif %}

{% include "shared/matrix_weights.wgsl" %}
{% if rows == "dense" %}

fn row_exponent(row: u32) -> i32 {
    let at = params.exponents + row / params.row_div;
    return i32(unpack2x16float(x[at / 2u][at % 2u * 2u]).x);
}
{% endif %}

@compute @workgroup_size({{ lanes }})
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    {% if rows == "dense" %}
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    {% endif %}
    @builtin(subgroup_id) subgroup: u32,
) {
    {% include "shared/matrix_item.wgsl" %}
    {% if rows == "tiles" %}
    let first_pair = u32(ids[params.sorted_base + first_row]);
    {% endif %}

    // What this invocation brings into workgroup memory: {{ x_loads }} groups of x and {{ w_loads }} of W in each step.
    let part = lane % {{ part }}u;
    {% for i in range([x_loads, w_loads] | max) %}
    let row{{ i }} = lane / {{ part }}u + {{ i * at_once }}u;
    {% endfor %}
    {% for i in range(x_loads) %}
    {% if rows == "tiles" %}
    let pair{{ i }} = u32(ids[params.sorted_base + first_row + min(row{{ i }}, {{ height - 1 }}u)]);
    // A row of padding reads the first pair's, which is in the cache: what becomes of it is never read.
    let x_at{{ i }} = select(first_pair, pair{{ i }}, pair{{ i }} < params.rows) / params.row_div * {{ size.x_stride }};
    {% else %}
    let x_at{{ i }} = min(first_row + row{{ i }}, params.rows - 1u) / params.row_div * {{ size.x_stride }};
    {% endif %}
    {% for p in range(x_ahead) %}
    var x{{ p }}_{{ i }} = vec4<u32>();
    {% endfor %}
    {% endfor %}
    {% include "shared/weight_rows.wgsl" %}
    {% for i in range(w_loads) %}
    {% for p in range(ahead) %}
    var w{{ p }}_{{ i }} = vec4<u32>();
    {% endfor %}
    {% endfor %}

    // The part of the tile that this subgroup multiplies.
    let row_begin = subgroup / {{ column_subgroups }}u * {{ sub_rows }}u;
    let column_begin = subgroup % {{ column_subgroups }}u * {{ sub_columns }}u;
    {% if rows == "tiles" %}
    let busy = u32(ids[params.sorted_base + first_row + row_begin]) < params.rows;
    {% else %}
    let busy = first_row + row_begin < params.rows;
    {% endif %}
    {% for i in range(sub_rows // 16) %}
    {% for j in range(sub_columns // 16) %}
    {{ m.zero("sum" ~ i ~ "_" ~ j) }}
    {% endfor %}
    {% endfor %}
    {% if rows == "dense" %}
    {# The exponent of a row of x. #}
    {% macro exponent_of(row) %}row_exponent({{ row }}){% endmacro %}
    {% include "shared/begin_rows.wgsl" %}
    {% endif %}

    {# No load is conditional: a value that is loaded in a branch is waited for at the end of that branch. Past the end of a
       row the last part of it is loaded again, and x counts as 0 there. #}
    {% macro place(step) %}
    {% if ragged %}
        let place = min({{ step }} * {{ part }}u + part, {{ size.x_groups }} - 1u);
    {% else %}
        let place = {{ step }} * {{ part }}u + part;
    {% endif %}
    {% endmacro %}
    {% macro fetch_w(p, step) %}
    {
        {{ place(step) }}
        {% for i in range(w_loads) %}
        w{{ p }}_{{ i }} = w[w_at{{ i }} + place{% if twice %} - select(0u, {{ size.groups }}, place >= {{ size.groups }}){% endif %}];
        {% endfor %}
    }
    {% endmacro %}
    {% macro fetch_x(p, step) %}
    {
        {{ place(step) }}
        {% for i in range(x_loads) %}
        x{{ p }}_{{ i }} = x[x_at{{ i }} + place];
        {% endfor %}
    }
    {% endmacro %}
    {# Stores value `i` of an operand, unless it is past the rows of the tile. #}
    {% macro store(tile, i, rows, first, second) %}
    {% if (i + 1) * at_once > rows %}
    if (row{{ i }} < {{ rows }}u) {
    {% else %}
    {
    {% endif %}
        let at = row{{ i }} * ROW + part * 2u;
        {{ tile }}[at] = {{ m.to_quad("f16", first) }};
        {{ tile }}[at + 1u] = {{ m.to_quad("f16", second) }};
    }
    {% endmacro %}
    {% macro multiply() %}
            {% if rests %}
            if (busy) {
            {% else %}
            {
            {% endif %}
                {% for q in range(depth // 16) %}
                {
                    {% for i in range(sub_rows // 16) %}
                    {{ m.load_t("let left" ~ i, "Left", "x_tile", q * 4 ~ "u + (row_begin + " ~ i * 16 ~ "u) * ROW", "ROW") }}
                    {% endfor %}
                    {% for j in range(sub_columns // 16) %}
                    {{ m.load("let right" ~ j, "Right", "w_tile", q * 4 ~ "u + (column_begin + " ~ j * 16 ~ "u) * ROW", "ROW") }}
                    {% for i in range(sub_rows // 16) %}
                    {{ m.multiply_add("sum" ~ i ~ "_" ~ j, "left" ~ i, "right" ~ j) }}
                    {% endfor %}
                    {% endfor %}
                }
                {% endfor %}
            }
    {% endmacro %}
    // A multiple of {{ ahead }} steps, of which the last may lie past the end of ragged rows. {{ "" if kept else "Not a number in high tiles: a compiler would unroll
    // the loop, and load where a value is needed." }}
    let steps = ({{ size.x_groups if kept else "params.x_groups" }} + {{ ahead * part - 1 }}u) / {{ ahead * part }}u * {{ ahead }}u;
    {% if parted %}
    let first_step = min(depth_part * params.part_steps, steps);
    let end_step = min(first_step + params.part_steps, steps);
    {% endif %}
    {# Those of the first steps. #}
    {% macro early(p) %}{{ "min(first_step + " ~ p ~ "u, steps - 1u)" if parted else p ~ "u" }}{% endmacro %}
    {% for p in range(ahead) %}
    {{ fetch_w(p, early(p)) }}
    {% if p < x_ahead %}
    {{ fetch_x(p, early(p)) }}
    {% endif %}
    {% endfor %}
    {% if lora %}
    {% for i in range(x_loads) %}
    {% if rows == "dense" %}
    let pair{{ i }} = first_row + row{{ i }};
    {% endif %}
    let scan{{ i }} = row{{ i }};
    let counts{{ i }} = row{{ i }} < {{ height }}u && part == 0u;
    {% endfor %}
    {% set scans = x_loads %}
    {% include "shared/fold_scan.wgsl" %}
    {% endif %}
    for (var step = {{ "first_step" if parted else "0u" }}; step < {{ "end_step" if parted else "steps" }}; step = step + {{ ahead }}u) {
        {% for p in range(ahead) %}
        {
            {% if ragged %}
            let inside = (step + {{ p }}u) * {{ part }}u + part < {{ size.x_groups }};
            {% endif %}
            workgroupBarrier();
            {% for i in range(x_loads) %}
            {
                {% if ragged %}
                let words = select(vec4<u32>(), x{{ p % x_ahead }}_{{ i }}, inside);
                {% else %}
                let words = x{{ p % x_ahead }}_{{ i }};
                {% endif %}
                {{ store("x_tile", i, height, "halves(words.xy)", "halves(words.zw)") }}
            }
            {% endfor %}
            {% for i in range(w_loads) %}
            {% set words = "w" ~ p ~ "_" ~ i %}
            {{ store("w_tile", i, columns, "decode(" ~ words ~ ".xy)", "decode(" ~ words ~ ".zw)") }}
            {% endfor %}
            workgroupBarrier();
            {{ fetch_w(p, "min(step + " ~ (p + ahead) ~ "u, steps - 1u)") }}
            {{ fetch_x(p % x_ahead, "min(step + " ~ (p + x_ahead) ~ "u, steps - 1u)") }}
            {{ multiply() }}
        }
        {% endfor %}
    }

    {% if kept %}
    // A value with one use, behind a barrier, may be loaded only there, and waited for. So what the last steps loaded gets a use as
    // well: a store behind a row, which nobody reads.
    {
        var unread = vec4<u32>();
        {% for p in range(x_ahead) %}
        {% for i in range(x_loads) %}
        unread = unread ^ x{{ p }}_{{ i }};
        {% endfor %}
        {% endfor %}
        {% for p in range(ahead) %}
        {% for i in range(w_loads) %}
        unread = unread ^ w{{ p }}_{{ i }};
        {% endfor %}
        {% endfor %}
        if (part == 0u) {
            w_tile[row0 % {{ columns }}u * ROW + {{ depth // 4 }}u] = {{ m.to_quad("f16", "halves(unread.xy ^ unread.zw)") }};
        }
    }
    {% endif %}

    {% if lora %}
    {% if parted %}
    // To one of the parts.
    if (depth_part == 0u) {
    {% else %}
    {
    {% endif %}
        {% include "shared/fold.wgsl" %}
    }
    {% endif %}

    {% if rows == "tiles" %}
    if (busy) {
        {% include "shared/store_tiles.wgsl" %}
    }
    {% else %}
    {% include "shared/store_rows.wgsl" %}
    {% endif %}
}
