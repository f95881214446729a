{% import "shared/matrices.wgsl" as m %}
// First half of an adapter on cooperative matrices: u[p] = s A x[row(p)]. A workgroup takes a run of {{ height }} pairs of one virtual expert, and 16
// rows of A of each of {{ per }} projections. Its subgroups share the {{ "pairs" if tall else "depth" }} among them{{ "" if tall else " and add up their sums at the end" }}. Both
// operands pass through workgroup memory as f16: rows of x come packed, each with its power of two; a factor's A has one, too.
{% if blocks %}
// x comes in the blocks of the direct product, from where it goes straight into matrices: a run may begin and end within one. Without it
// so little is left in workgroup memory that many runs are on a multiprocessor at once.
{% endif %}
// The intermediate carries the scale, and the powers of two of x and of the base weights that y keeps.
{% if leaves %}
// x has been read by then: it is left as the blocks of the direct product on the way, which then needs no stage of its own for that.
{% endif %}
{% if folded %}
// It is f16, times 2^-{{ lift }}: the product adds B u.
{% else %}
// It is f32: `lora_expand_tiles` adds B u.
{% endif %}
enable f16;
enable wgpu_cooperative_matrix;
// Which part of the depth a subgroup owns is uniform within it, but not for the analysis.
diagnostic(off, derivative_uniformity);

struct LoraShrinkMatrixParams {
    row_div: u32,
    // Groups of eight in a row of A, and of x.
    groups: u32,
    // Entries of this site in `index`, projections of the site, and the rank that u has room for.
    index_base: u32,
    projections: u32,
    max_rank: u32,
    // Where runs and sorted pairs begin in the alignment.
    run_base: u32,
    sorted_base: u32,
    // Where the exponents of the rows begin in x, in words of eight bytes.
    exponents: u32,
    // The power of two of the base weights.
    w_scale: f32,
    // Groups from a row of x to the next: more may lie between; or blocks of a row.
    x_stride: u32,
    // Blocks of a row where they are left.
    blocks: u32,
    pad0: u32,
}

@group(0) @binding(0) var<uniform> params: LoraShrinkMatrixParams;
{% if blocks %}
@group(0) @binding(1) var<storage, read> x: array<{{ m.quad("f16") }}>; // [C / 16, K / 16, 16, 16]
{% else %}
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>; // f16 [rows / row_div, K], exponents [rows / row_div]
{% endif %}
@group(0) @binding(2) var<storage, read> pool: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> index: array<Factor>; // [V, projections] from index_base
@group(0) @binding(4) var<storage, read> ids: array<i32>; // alignment with runs of {{ height }}
{% if folded %}
@group(0) @binding(5) var<storage, read_write> u: array<u32>; // f16 [P, projections, max_rank]
{% else %}
@group(0) @binding(5) var<storage, read_write> u: array<f32>; // [P, projections, max_rank]
{% endif %}
{% if leaves %}
@group(0) @binding(6) var<storage, read_write> left_blocks: array<vec4<u32>>; // f16 [C / 16, K / 16, 16, 16]
// What stands behind the blocks, by a binding of its own: else it would halve the stores of all of them.
@group(0) @binding(7) var<storage, read_write> left_exponents: array<vec2<u32>>; // [C]
{% endif %}

{% include "shared/matrices.wgsl" %}

{# Groups of eight that a subgroup takes in one round, and rows that it loads at a time. #}
{% set part = round * 2 %}
{% set rows_at_once = width // part %}
{% set loads = 16 // rows_at_once %}
{# Pairs by blocks need a subgroup more, which brings nothing of A. #}
{% set a_loads = loads // (height // 16) if tall else loads %}
{% set a_copies = 1 if tall else subgroups %}
{# Rows in workgroup memory are eight halves longer, so that lanes meet different banks. #}
{% set row = (part * 8 + 8) // 4 %}
{# Rounds that are loaded ahead: stores of blocks delay what stands behind them. #}
{% set sets = 3 if leaves else 1 %}
const ROW = {{ row }}u;
{% if not blocks %}
var<workgroup> x_tile: array<{{ m.quad("f16") }}, {{ subgroups * 16 * row }}>;
{% endif %}
var<workgroup> a_tile: array<{{ m.quad("f16") }}, {{ a_copies * per * 16 * row }}>;
{# Three workgroups that leave blocks fit a multiprocessor where their subgroups take turns with their sums. #}
{% set turns = 2 if leaves else 1 %}
var<workgroup> u_tile: array<f32, {{ subgroups // turns * 256 }}>;

{% include "shared/rows.wgsl" %}
{% include "shared/factors.wgsl" %}
{% include "shared/halves.wgsl" %}

@compute @workgroup_size({{ subgroups * width }})
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    @builtin(subgroup_id) subgroup: u32,
) {
    {% if blocks %}
    // The last run first: of the blocks, what was written last is still in the cache; and behind it stands the product, whose first tiles
    // then are.
    let from_end = folded(workgroup);
    let run_count = u32(ids[66]);
    if (from_end >= run_count) {
        return;
    }
    let item = run_count - 1u - from_end;
    {% else %}
    let item = folded(workgroup);
    // There are as many workgroups as runs, and more only where z counts on.
    if (workgroup.z > 0u && item >= u32(ids[66])) {
        return;
    }
    {% endif %}
    // Asked for at once: one after the other, each would be waited for.
    let label = ids[params.run_base + item * 4u];
    let first_place = u32(ids[params.run_base + item * 4u + 1u]);
    let end_place = u32(ids[params.run_base + item * 4u + 2u]);
    {% if blocks %}
    let first_row = params.sorted_base + first_place;
    let own_block = first_place / 16u + subgroup;
    let own_rows = params.sorted_base + own_block * 16u;
    {% else %}
    let own_rows = params.sorted_base + first_place{{ " + subgroup * 16u" if tall }};
    {% endif %}
    let end_row = params.sorted_base + end_place;
    let part = subgroup_lane % {{ part }}u;
    {% for i in range(loads) %}
    let row{{ i }} = subgroup_lane / {{ part }}u + {{ i * rows_at_once }}u;
    {% if not blocks %}
    // Past the end of a run its last pair is read again, which is in the cache: what becomes of it is never written.
    let x_at{{ i }} = u32(ids[min(own_rows + row{{ i }}, end_row - 1u)]) / params.row_div * params.x_stride;
    {% endif %}
    {% endfor %}
    let rank_tiles = (params.max_rank + 15u) / 16u;
    let r_begin = workgroup.x % rank_tiles * 16u;
    {% for p in range(per) %}
    {% if per == 1 %}
    let projection{{ p }} = workgroup.x / rank_tiles;
    {% else %}
    let projection{{ p }} = {{ p }}u;
    {% endif %}
    let factor{{ p }} = index[params.index_base + u32(label) * params.projections + projection{{ p }}];
    let rank{{ p }} = factor{{ p }}.rank_type & 0xffffu;
    // A bias is a column of B whose element of u is the scale alone.
    let a_rows{{ p }} = rank{{ p }} - biased(factor{{ p }});
    // u is read in whole vec4: the rows up to the next multiple of eight are written as 0.
    let padded_rank{{ p }} = (rank{{ p }} + 7u) / 8u * 8u;
    // It has no adapter here, or one of fewer ranks. Beside others it is read as of two bytes, from where some A stands.
    let live{{ p }} = r_begin < padded_rank{{ p }};
    let storage{{ p }} = select(1u, storage_of(factor{{ p }}), live{{ p }});
    {% endfor %}
    {% if leaves %}
    let leaves = workgroup.x == 0u;
    let none_live = {% for p in range(per) %}{{ " && " if p > 0 }}!live{{ p }}{% endfor %};
    if (none_live && !leaves) {
    {% else %}
    if ({% for p in range(per) %}{{ " && " if p > 0 }}!live{{ p }}{% endfor %}) {
    {% endif %}
        return;
    }

    {% for i in range(a_loads) %}
    {% if tall %}
    let a_row{{ i }} = row{{ i }} + subgroup * {{ a_loads * rows_at_once }}u;
    {% else %}
    let a_row{{ i }} = row{{ i }};
    {% endif %}
    {% for p in range(per) %}
    let a_at{{ p }}_{{ i }} = min(r_begin + a_row{{ i }}, max(a_rows{{ p }}, 1u) - 1u) * params.groups;
    {% endfor %}
    {% endfor %}
    {% if blocks %}
    let x_begin = own_block * params.x_stride * 64u;
    let brings = subgroup < {{ height // 16 }}u;
    {% else %}
    let x_begin = subgroup * {{ 16 * row }}u;
    {% endif %}
    {% if tall %}
    let a_begin = 0u;
    let begin = 0u;
    let busy = own_rows < end_row;
    {% else %}
    let a_begin = subgroup * {{ per * 16 * row }}u;
    // Where in a round of all subgroups its part begins.
    let begin = subgroup * {{ part }}u;
    {% endif %}
    {% for p in range(per) %}
    let to_halves{{ p }} = a_scale(factor{{ p }});
    {{ m.zero("sum" ~ p) }}
    {% for s in range(sets) %}
    {% for i in range(a_loads) %}
    var a{{ s }}_{{ p }}_{{ i }} = vec4<u32>();
    var b{{ s }}_{{ p }}_{{ i }} = vec4<u32>();
    {% endfor %}
    {% endfor %}
    {% endfor %}
    {% if not blocks %}
    {% for s in range(sets) %}
    {% for i in range(loads) %}
    var x{{ s }}_{{ i }} = vec4<u32>();
    {% endfor %}
    {% endfor %}
    {% endif %}
    {% if leaves %}
    // Where the rows of this subgroup go, and with the first word of each what stands behind the row.
    {% for i in range(loads) %}
    let place{{ i }} = own_rows - params.sorted_base + row{{ i }};
    let leaves{{ i }} = leaves && own_rows + row{{ i }} < end_row;
    let left_at{{ i }} = (place{{ i }} / 16u * params.blocks * 16u + place{{ i }} % 16u) * 2u;
    if (leaves{{ i }} && part == 0u) {
        let word_at = params.exponents + x_at{{ i }} / params.x_stride;
        let words = x[word_at / 2u];
        left_exponents[place{{ i }}] = select(words.xy, words.zw, word_at % 2u == 1u);
    }
    {% endfor %}
    {% endif %}
    {# A loop for each width of a storage type: a load in a branch is waited for at the end of that branch. #}
    {% macro fetch(s, round, ps, wide) %}
    {
        // Past the end of a row the last part of it is loaded again, and x counts as 0 there.
        let place = min({{ round }} + begin + part, params.groups - 1u);
        {% if not blocks %}
        {% for i in range(loads) %}
        x{{ s }}_{{ i }} = x[x_at{{ i }} + place];
        {% endfor %}
        {% endif %}
        {% for i in range(a_loads) %}
        {% for p in ps %}
        {% if wide %}
        a{{ s }}_{{ p }}_{{ i }} = pool[factor{{ p }}.a + (a_at{{ p }}_{{ i }} + place) * 2u];
        b{{ s }}_{{ p }}_{{ i }} = pool[factor{{ p }}.a + (a_at{{ p }}_{{ i }} + place) * 2u + 1u];
        {% else %}
        a{{ s }}_{{ p }}_{{ i }} = pool[factor{{ p }}.a + a_at{{ p }}_{{ i }} + place];
        {% endif %}
        {% endfor %}
        {% endfor %}
    }
    {% endmacro %}
    {# The sums of projections `ps`. Subgroups that share the depth have their own parts of workgroup memory, so their own barriers would
       do; those of the whole workgroup keep the loads in their places. Those that share the pairs fill one tile of A together. #}
    {% macro walk(ps, wide) %}
    {% for s in range(sets) %}
    {{ fetch(s, s * part ~ "u", ps, wide) }}
    {% endfor %}
    {% if blocks %}
    {% for q in range(part // 2) %}
    {{ m.load_t("var left" ~ q, "Left", "x", "x_begin + " ~ 64 * q ~ "u", "4u") }}
    {% endfor %}
    {% endif %}
    for (var begin_round = 0u; begin_round < params.groups; begin_round = begin_round + {{ sets * a_copies * part }}u) {
    {% for s in range(sets) %}
    {
        let round = begin_round{% if s > 0 %} + {{ s * part }}u{% endif %};
        let inside = round + begin + part < params.groups;
        workgroupBarrier();
        {% if not blocks %}
        {% for i in range(loads) %}
        {
            let x_to = x_begin + row{{ i }} * ROW + part * 2u;
            let words = select(vec4<u32>(), x{{ s }}_{{ i }}, inside);
            {% if leaves %}
            // To the end of the last block, zeros included.
            let left_group = round + part;
            if (leaves{{ i }} && left_group < params.blocks * 2u) {
                left_blocks[left_at{{ i }} + left_group / 2u * 32u + left_group % 2u] = words;
            }
            {% endif %}
            x_tile[x_to] = {{ m.to_quad("f16", "halves(words.xy)") }};
            x_tile[x_to + 1u] = {{ m.to_quad("f16", "halves(words.zw)") }};
        }
        {% endfor %}
        {% endif %}
        {% for i in range(a_loads) %}
        {% if blocks %}
        // x holds zeros past the end of a row.
        if (brings) {
        {% else %}
        {
        {% endif %}
            {% for p in ps %}
            let a_to{{ p }} = a_begin + ({{ 16 * p }}u + a_row{{ i }}) * ROW + part * 2u;
            {% if wide %}
            a_tile[a_to{{ p }}] = {{ m.to_quad("f16", "vec4<f16>(bitcast<vec4<f32>>(a" ~ s ~ "_" ~ p ~ "_" ~ i ~ ") * to_halves" ~ p ~ ")") }};
            a_tile[a_to{{ p }} + 1u] = {{ m.to_quad("f16", "vec4<f16>(bitcast<vec4<f32>>(b" ~ s ~ "_" ~ p ~ "_" ~ i ~ ") * to_halves" ~ p ~ ")") }};
            {% else %}
            a_tile[a_to{{ p }}] = {{ m.to_quad("f16", "vec4<f16>(decode_factor4(a" ~ s ~ "_" ~ p ~ "_" ~ i ~ ".xy, storage" ~ p ~ ") * to_halves" ~ p ~ ")") }};
            a_tile[a_to{{ p }} + 1u] = {{ m.to_quad("f16", "vec4<f16>(decode_factor4(a" ~ s ~ "_" ~ p ~ "_" ~ i ~ ".zw, storage" ~ p ~ ") * to_halves" ~ p ~ ")") }};
            {% endif %}
            {% endfor %}
        }
        {% endfor %}
        workgroupBarrier();
        {{ fetch(s, "round + " ~ sets * a_copies * part ~ "u", ps, wide) }}
        // A subgroup rests {{ "where it has no pairs" if tall else "past the end of the rows" }}. The branch also keeps compilers from unrolling the loop: of an unrolled one, each
        // load was moved behind the barriers of the round that uses it, and waited for there.
        if ({{ "busy" if tall else "round + begin < params.groups" }}) {
            {% for q in range(part // 2) %}
            {
                {% if not blocks %}
                {{ m.load_t("let left" ~ q, "Left", "x_tile", "x_begin + " ~ q * 4 ~ "u", "ROW") }}
                {% endif %}
                {% for p in ps %}
                {{ m.load("let right" ~ p, "Right", "a_tile", "a_begin + " ~ (16 * p * row + q * 4) ~ "u", "ROW") }}
                {{ m.multiply_add("sum" ~ p, "left" ~ q, "right" ~ p) }}
                {% endfor %}
                {% if blocks %}
                // Past the end of a row whatever stands there is loaded, and not used.
                {{ m.load_t("left" ~ q, "Left", "x", "x_begin + (round / 2u + " ~ (q + part // 2) ~ "u) * 64u", "4u") }}
                {% endif %}
            }
            {% endfor %}
        }
    }
    {% endfor %}
    }
    {
        // A value with one use, behind a barrier, is loaded only there. So what the last round loaded gets a use as well: a store that
        // nobody reads.
        var unread = vec4<u32>();
        {% for s in range(sets) %}
        {% if not blocks %}
        {% for i in range(loads) %}
        unread = unread ^ x{{ s }}_{{ i }};
        {% endfor %}
        {% endif %}
        {% for p in ps %}
        {% for i in range(a_loads) %}
        unread = unread ^ a{{ s }}_{{ p }}_{{ i }}{% if wide %} ^ b{{ s }}_{{ p }}_{{ i }}{% endif %};
        {% endfor %}
        {% endfor %}
        {% endfor %}
        workgroupBarrier();
        {% if blocks %}
        a_tile[lane] = {{ m.to_quad("f16", "halves(unread.xy ^ unread.zw)") }};
        {% else %}
        x_tile[x_begin + subgroup_lane] = {{ m.to_quad("f16", "halves(unread.xy ^ unread.zw)") }};
        {% endif %}
    }
    {% endmacro %}
    {% set all = range(per) %}
    if ({% for p in all %}{{ " && " if p > 0 }}storage{{ p }} != 0u{% endfor %}) {
        {{ walk(all, false) }}
    } else {
        {% for p in all %}
        if (storage{{ p }} == 0u) {
            {{ walk([p], true) }}
        }{% if per > 1 %} else if (live{{ p }}) {
            {{ walk([p], false) }}
        }{% endif %}

        {% endfor %}
    }
    {% for p in all %}
    {% for turn in range(turns) %}
    {
        {% if p > 0 or turn > 0 %}
        workgroupBarrier();
        {% endif %}
        {% if turns > 1 %}
        let strip = subgroup % {{ subgroups // turns }}u * 256u;
        if (subgroup / {{ subgroups // turns }}u == {{ turn }}u) {
        {% else %}
        let strip = subgroup * 256u;
        {
        {% endif %}
            {{ m.point("own", "u_tile", "strip") }}
            {{ m.store_t("sum" ~ p, "own", "u_tile", "16u", false) }}
        }
        workgroupBarrier();
        {% set per_lane = 2 if folded else 1 %}
        {% if tall %}
        let end = {% if turns > 1 %}select(0u, 256u, subgroup / {{ subgroups // turns }}u == {{ turn }}u){% else %}256u{% endif %};
        for (var at = subgroup_lane * {{ per_lane }}u; at < end; at = at + {{ width * per_lane }}u) {
        {% else %}
        for (var at = lane * {{ per_lane }}u; at < 256u; at = at + {{ subgroups * width * per_lane }}u) {
        {% endif %}
            let r = r_begin + at % 16u;
            if ({{ "own_rows + at / 16u >= first_row && " if blocks }}own_rows + at / 16u < end_row && r < padded_rank{{ p }}) {
                let pair = u32(ids[own_rows + at / 16u]);
                {% if not folded %}
                let e_at = params.exponents + pair / params.row_div;
                let shift = i32(unpack2x16float(x[e_at / 2u][e_at % 2u * 2u]).x);
                {% endif %}
                {% for j in range(per_lane) %}
                {% if tall %}
                var value{{ j }} = u_tile[strip + at + {{ j }}u];
                {% else %}
                var value{{ j }} = 0.0;
                for (var s = 0u; s < {{ subgroups }}u; s = s + 1u) {
                    value{{ j }} = value{{ j }} + u_tile[s * 256u + at + {{ j }}u];
                }
                {% endif %}
                value{{ j }} = select({{ "0.0" if folded else "power_of_two(shift)" }}, value{{ j }} / to_halves{{ p }}, r + {{ j }}u < a_rows{{ p }}) * params.w_scale;
                value{{ j }} = select(0.0, value{{ j }} * factor{{ p }}.scale, r + {{ j }}u < rank{{ p }});
                {% endfor %}
                let to = (pair * params.projections + projection{{ p }}) * params.max_rank + r;
                {% if folded %}
                u[to / 2u] = pack2x16float(vec2<f32>(value0, value1) * {{ 1 / 2 ** lift }});
                {% else %}
                u[to] = value0;
                {% endif %}
            }
        }
    }
    {% endfor %}
    {% endfor %}
}
