// Grouped product y = W[e] x on cooperative matrices: a workgroup owns {{ height }} pairs of one expert and {{ columns }} output columns, a
// subgroup of it {{ sub_rows }} x {{ sub_columns }}. Both operands pass through workgroup memory as f16, {{ depth }} of the inner dimension at a time, and
// are loaded {{ ahead }} steps ahead: memory is far. Little workgroup memory matters more than few barriers: of low tiles a
// multiprocessor then holds several, of which one multiplies while another one stores. Rows of x come packed, each with its
// power of two (`pack`, `activation_pack`); weights become f16 on the way, times a power of two of their stack where their
// range needs one. Sums are f32.
{% if rows == "tiles" %}
// y lies in the order of the tiles, padding included, and keeps both powers of two: so the sums go to memory as they are. The
// activation, the adapters and combine know the place and the power of each pair.
{% endif %}
{% if lora %}
// Adapters lengthen the inner dimension: behind W[e] stand the B of every adapter that a row of this tile has, times 2^{{ lift }},
// and behind a row of x the u of its own adapter, times 2^-{{ lift }}, and zeros for the others.
{% endif %}
enable f16;
enable wgpu_cooperative_matrix;
// Which part of a tile a subgroup owns is uniform within it, but not for the analysis.
diagnostic(off, derivative_uniformity);

struct ExpertGemmMatrixParams {
    // P, or T when dense.
    rows: u32,
    // Pairs that share a row of x: A for gate and up, 1 for down.
    row_div: u32,
    // Groups of eight in a row of W, and in a row of x: as many, or twice as many with the rest of each value behind all.
    groups: u32,
    x_groups: u32,
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
    // Where the exponents of the rows begin in x, in words of eight bytes.
    exponents: u32,
    // What a weight is multiplied by when it becomes f16, and the inverse.
    w_scale: f32,
    w_unscale: f32,
    // Adapters: pairs of a token, slots and experts, entries of this site in `index`, its projections, and the rank that u
    // has room for, a multiple of 16.
    top_k: u32,
    slots: u32,
    experts: u32,
    index_base: u32,
    projections: u32,
    max_rank: u32,
    // From a column of a projection to the next in y.
    step: u32,
    pad0: u32,
    pad1: u32,
    // For each projection: first column in y, columns.
    span_begin: vec4<u32>,
    span_rows: vec4<u32>,
}

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

alias Left = coop_mat16x16<f16, A>;
alias Right = coop_mat16x16<f16, B>;
alias Sum = coop_mat16x16<f32, C>;

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
var<workgroup> x_tile: array<vec4<f16>, {{ height * row }}>;
var<workgroup> w_tile: array<vec4<f16>, {{ columns * row }}>;
{% if rows == "dense" %}
const STRIP = {{ strip }}u;
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

{% include "shared/bits.wgsl" %}

// The slot number `n`, counted from 0, of those whose bits are set.
fn nth_slot(bits: vec4<u32>, n: u32) -> u32 {
    var rest = n;
    for (var word = 0u; word < 4u; word = word + 1u) {
        let count = countOneBits(bits[word]);
        if (rest < count) {
            return word * 32u + nth_bit(bits[word], rest);
        }
        rest = rest - count;
    }
    return 0u;
}
{% endif %}

fn decode(words: vec2<u32>) -> vec4<f16> {
    {% if dtype == "f16" %}
    return vec4<f16>(vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y)));
    {% else %}
    let v = bitcast<vec4<f32>>(vec4<u32>(words.x << 16u, words.x & 0xffff0000u, words.y << 16u, words.y & 0xffff0000u));
    return vec4<f16>(v{% if scaled %} * params.w_scale{% endif %});
    {% endif %}
}

@compute @workgroup_size({{ lanes }})
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    {% if rows == "dense" %}
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    {% endif %}
    @builtin(subgroup_id) subgroup: u32,
) {
    let item = folded(workgroup);
    let first_row = item * {{ height }}u;
    {% if rows == "tiles" %}
    if (item >= u32(ids[65])) {
        return;
    }
    let label = ids[params.expert_base + item];
    if (label < i32(params.first) || label >= i32(params.first + params.count)) {
        return;
    }
    let expert = u32(label) - params.first;
    let first_pair = u32(ids[params.sorted_base + first_row]);
    {% else %}
    if (first_row >= params.rows) {
        return;
    }
    let expert = 0u;
    {% if lora %}
    let label = 0;
    {% endif %}
    {% endif %}
    let first_column = workgroup.x * {{ columns }}u;

    // What this invocation brings into workgroup memory: {{ x_loads }} groups of x and {{ w_loads }} of W in each step.
    let part = lane % {{ part }}u;
    {% for i in range([x_loads, w_loads] | max) %}
    let row{{ i }} = lane / {{ part }}u + {{ i * at_once }}u;
    {% endfor %}
    {% for i in range(x_loads) %}
    {% if rows == "tiles" %}
    let pair{{ i }} = u32(ids[params.sorted_base + first_row + min(row{{ i }}, {{ height - 1 }}u)]);
    // A row of padding reads the first pair's, which is in the cache: what becomes of it is never read.
    let x_at{{ i }} = select(first_pair, pair{{ i }}, pair{{ i }} < params.rows) / params.row_div * params.x_groups;
    {% else %}
    let x_at{{ i }} = min(first_row + row{{ i }}, params.rows - 1u) / params.row_div * params.x_groups;
    {% endif %}
    {% for p in range(x_ahead) %}
    var x{{ p }}_{{ i }} = vec4<u32>();
    {% endfor %}
    {% endfor %}
    {% for i in range(w_loads) %}
    let w_at{{ i }} = (expert * params.out_rows + min(first_column + row{{ i }}, params.out_rows - 1u)) * params.groups;
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
    var sum{{ i }}_{{ j }} = Sum();
    {% endfor %}
    {% endfor %}

    {# No load is conditional: a value that is loaded in a branch is waited for at the end of that branch. Past the end of a
       row the last part of it is loaded again, and x counts as 0 there. #}
    {% macro place(step) %}
    {% if ragged %}
        let place = min({{ step }} * {{ part }}u + part, params.x_groups - 1u);
    {% else %}
        let place = {{ step }} * {{ part }}u + part;
    {% endif %}
    {% endmacro %}
    {% macro fetch_w(p, step) %}
    {
        {{ place(step) }}
        {% for i in range(w_loads) %}
        w{{ p }}_{{ i }} = w[w_at{{ i }} + place{% if twice %} - select(0u, params.groups, place >= params.groups){% endif %}];
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
        {{ tile }}[at] = {{ first }};
        {{ tile }}[at + 1u] = {{ second }};
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
                    let left{{ i }} = coopLoadT<Left>(&x_tile[{{ q * 4 }}u + (row_begin + {{ i * 16 }}u) * ROW], ROW);
                    {% endfor %}
                    {% for j in range(sub_columns // 16) %}
                    let right{{ j }} = coopLoad<Right>(&w_tile[{{ q * 4 }}u + (column_begin + {{ j * 16 }}u) * ROW], ROW);
                    {% for i in range(sub_rows // 16) %}
                    sum{{ i }}_{{ j }} = coopMultiplyAdd(left{{ i }}, right{{ j }}, sum{{ i }}_{{ j }});
                    {% endfor %}
                    {% endfor %}
                }
                {% endfor %}
            }
    {% endmacro %}
    // A multiple of {{ ahead }} steps, of which the last may lie past the end of ragged rows.
    let steps = (params.x_groups + {{ ahead * part - 1 }}u) / {{ ahead * part }}u * {{ ahead }}u;
    {% for p in range(ahead) %}
    {{ fetch_w(p, p ~ "u") }}
    {% if p < x_ahead %}
    {{ fetch_x(p, p ~ "u") }}
    {% endif %}
    {% endfor %}
    {% if lora %}
    // Which row has which slot is found while the first loads are on their way, and kept where it takes no registers from the products.
    var own_slots = vec4<u32>();
    {% for i in range(x_loads) %}
    {% if rows == "dense" %}
    let pair{{ i }} = first_row + row{{ i }};
    {% endif %}
    let mapped{{ i }} = token_lora_mapping[min(pair{{ i }}, params.rows - 1u) / params.top_k];
    {% endfor %}
    {% for i in range(x_loads) %}
    if (row{{ i }} < {{ height }}u && part == 0u) {
        var slot = 255u;
        if (pair{{ i }} < params.rows && mapped{{ i }} >= 0 && mapped{{ i }} < i32(params.slots)) {
            slot = u32(mapped{{ i }});
            own_slots[slot / 32u] = own_slots[slot / 32u] | (1u << (slot % 32u));
        }
        row_words[row{{ i }}] = slot << 24u | pair{{ i }} & 0xffffffu;
    }
    {% endfor %}
    slot_bits[subgroup] = subgroupOr(own_slots);
    {% endif %}
    for (var step = 0u; step < steps; step = step + {{ ahead }}u) {
        {% for p in range(ahead) %}
        {
            {% if ragged %}
            let inside = (step + {{ p }}u) * {{ part }}u + part < params.x_groups;
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
            w_tile[row0 % {{ columns }}u * ROW + {{ depth // 4 }}u] = halves(unread.xy ^ unread.zw);
        }
    }
    {% endif %}

    {% if lora %}
    var slots = slot_bits[0];
    {% for s in range(1, subgroups) %}
    slots = slots | slot_bits[{{ s }}];
    {% endfor %}
    let counts = countOneBits(slots);
    let y_begin = params.out_begin + first_column;
    // The projection whose columns this tile has{% if across %}, or the first of several{% endif %}, and chunks of 16 ranks.
    var first_projection = 0u;
    {% if across %}
    let y_end = params.out_begin + min(first_column + {{ columns }}u, params.out_rows);
    var projections = 1u;
    {% endif %}
    for (var i = 1u; i < params.projections; i = i + 1u) {
        if (params.span_begin[i] <= y_begin) {
            first_projection = i;
            {% if across %}
            projections = 1u;
        } else if (params.span_begin[i] < y_end) {
            projections = projections + 1u;
            {% endif %}
        }
    }
    {% if across %}
    if (params.step > 1u) {
        // They alternate.
        first_projection = 0u;
        projections = params.projections;
    }
    {% endif %}
    let slot_chunks = {% if across %}projections * {% endif %}(params.max_rank / 16u);
    let chunks = (counts.x + counts.y + counts.z + counts.w) * slot_chunks;
    for (var begin = 0u; begin < chunks; begin = begin + {{ depth // 16 }}u) {
        // A lane has one group of eight ranks: in {{ x_loads }} rows of u, and in {{ w_loads }} columns of B.
        let chunk = min(begin + part / 2u, chunks - 1u);
        let slot = nth_slot(slots, chunk / slot_chunks);
        let of_slot = chunk % slot_chunks * 16u;
        {% if across %}
        let projection = first_projection + of_slot / params.max_rank;
        let group = of_slot % params.max_rank / 8u + part % 2u;
        {% else %}
        let projection = first_projection;
        let group = of_slot / 8u + part % 2u;
        {% endif %}
        let factor = index[params.index_base + (slot * params.experts + u32(label)) * params.projections + projection];
        let groups = ((factor.rank_type & 0xffffu) + 7u) / 8u;
        let inside = begin + part / 2u < chunks && group < groups;
        let storage = storage_of(factor);
        // Where nothing stands, something else is read and counts as 0.
        let b_group = min(group, max(groups, 1u) - 1u);
        let own_slot = select(256u, slot, inside);
        {% for i in range(w_loads) %}
        {% if across %}
        let offset{{ i }} = y_begin + row{{ i }} - params.span_begin[projection];
        let column{{ i }} = offset{{ i }} / params.step;
        let held{{ i }} = y_begin + row{{ i }} >= params.span_begin[projection]
            && offset{{ i }} % params.step == 0u && column{{ i }} < params.span_rows[projection];
        let b_at{{ i }} = select(0u, column{{ i }}, held{{ i }}) * groups + b_group;
        {% else %}
        let column{{ i }} = min(y_begin + row{{ i }} - params.span_begin[projection], params.span_rows[projection] - 1u);
        let b_at{{ i }} = column{{ i }} * groups + b_group;
        {% endif %}
        {% endfor %}
        workgroupBarrier();
        {
            {% for i in range(x_loads) %}
            let word{{ i }} = row_words[min(row{{ i }}, {{ height - 1 }}u)];
            let u_pair{{ i }} = min(word{{ i }} & 0xffffffu, params.rows - 1u);
            let at{{ i }} = (u_pair{{ i }} * params.projections + projection) * (params.max_rank / 8u) + group;
            let read{{ i }} = u[at{{ i }}];
            {% endfor %}
            {% for i in range(x_loads) %}
            {
                let words = select(vec4<u32>(), read{{ i }}, word{{ i }} >> 24u == own_slot);
                {{ store("x_tile", i, height, "halves(words.xy)", "halves(words.zw)") }}
            }
            {% endfor %}
        }
        {# A loop for each width of a storage type: a load in a branch is waited for at the end of that branch. #}
        {% macro fetch_b(wide) %}
            {% for i in range(w_loads) %}
            {% if wide %}
            let lo{{ i }} = pool[factor.b + b_at{{ i }} * 2u];
            let hi{{ i }} = pool[factor.b + b_at{{ i }} * 2u + 1u];
            {% else %}
            let lo{{ i }} = pool[factor.b + b_at{{ i }}];
            {% endif %}
            {% endfor %}
            {% for i in range(w_loads) %}
            {
                let counts = inside{% if across %} && held{{ i }}{% endif %};
                let low = select(vec4<u32>(), lo{{ i }}, counts);
                {% if wide %}
                let high = select(vec4<u32>(), hi{{ i }}, counts);
                let first = vec4<f16>(bitcast<vec4<f32>>(low) * LIFT);
                let second = vec4<f16>(bitcast<vec4<f32>>(high) * LIFT);
                {% else %}
                let first = vec4<f16>(decode_factor4(low.xy, storage) * LIFT);
                let second = vec4<f16>(decode_factor4(low.zw, storage) * LIFT);
                {% endif %}
                {{ store("w_tile", i, columns, "first", "second") }}
            }
            {% endfor %}
        {% endmacro %}
        if (storage == 0u) {
            {{ fetch_b(true) }}
        } else {
            {{ fetch_b(false) }}
        }
        workgroupBarrier();
        {{ multiply() }}
    }
    {% endif %}

    {% if rows == "tiles" %}
    if (busy) {
        let stride = params.y_stride;
        {% for j in range(sub_columns // 16) %}
        if (first_column + column_begin + {{ j * 16 }}u < params.out_rows) {
            let at = (first_row + row_begin) * stride + params.out_begin + first_column + column_begin + {{ j * 16 }}u;
            {% for i in range(sub_rows // 16) %}
            {
                let block = sum{{ i }}_{{ j }};
                let place = &y[at + {{ i * 16 }}u * stride];
                coopStoreT(block, place, stride);
            }
            {% endfor %}
        }
        {% endfor %}
    }
    {% else %}
    // Through workgroup memory once more, because only real rows are written, and each has its own scale.
    let strip_begin = subgroup * {{ 16 * strip }}u;
    {% for i in range(sub_rows // 16) %}
    {
        // Lane l knows row l of these 16.
        let row = first_row + row_begin + {{ i * 16 }}u + subgroup_lane % 16u;
        let e_at = params.exponents + min(row, params.rows - 1u) / params.row_div;
        let unscale = power_of_two(-i32(unpack2x16float(x[e_at / 2u][e_at % 2u * 2u]).x));
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
                let r = {{ r * (width // strip) }}u + subgroup_lane / STRIP;
                let target_row = subgroupShuffle(row, r);
                let factor = subgroupShuffle(unscale, r);
                if (target_row < params.rows && column < params.out_rows) {
                    let value = y_tile[strip_begin + r * STRIP + subgroup_lane % STRIP] * factor * params.w_unscale;
                    let to = target_row * params.y_stride + params.out_begin + column;
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
    {% endif %}
}
