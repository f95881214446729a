// Adds the adapters to the sums of a tile of a direct product: behind W[e] stand the B of every adapter that a row of the tile has,
// times LIFT, and behind a row of x the u of its own, over LIFT, and zeros for the others; {{ depth }} ranks at a time. It stands in
// `main`, behind the loop. B passes through `w_tile`, as W did; u goes straight into matrices. `fold_blocks` made its blocks, and left
// the factors of the tile's adapters in their order, so that nothing has to be looked up, and the range of them that a group of rows has.
{# Rows that all invocations together load at a time. #}
{% set b_loads = (columns + at_once - 1) // at_once %}
{# A tile of gate and up has two projections side by side, block by block; any other has one, or (`across`) one after the other. #}
{% set side_by_side = [0, 1] if gated else [0] %}
let table = item * params.table_stride;
{% set own_groups = (sub_rows + width - 1) // width %}
let used_slots = factors[table].a;
{% for g in range(own_groups) %}
let own{{ g }} = factors[table + row_begin / {{ width }}u + {{ g }}u];
{% endfor %}
{% if not gated %}
{% include "shared/tile_projections.wgsl" %}
{% endif %}
let rank_chunks = params.max_rank / 16u;
let slot_chunks = {% if across %}projections * {% endif %}rank_chunks;
let chunks = used_slots * slot_chunks;
// A lane has one group of eight ranks in {{ b_loads }} columns of B.
let fold_part = lane % {{ part }}u;
{% for i in range(b_loads) %}
let fold_row{{ i }} = lane / {{ part }}u + {{ i * at_once }}u;
{% if gated %}
let up{{ i }} = fold_row{{ i }} / 16u % 2u == 1u;
{% endif %}
{% endfor %}
{# What load `i` takes of the projections side by side. #}
{% macro of(name, i) %}{% if gated %}select({{ name }}0, {{ name }}1, up{{ i }}){% else %}{{ name }}0{% endif %}{% endmacro %}
for (var begin = 0u; begin < chunks; begin = begin + {{ depth // 16 }}u) {
    {% for q in range(depth // 16) %}
    {% for p in side_by_side %}
    {% for i in range(sub_rows // 16) %}
    {{ m.empty("u" ~ q ~ "_" ~ p ~ "_" ~ i, "Left") }}
    {% endfor %}
    {% endfor %}
    {% endfor %}
    let chunk = min(begin + fold_part / 2u, chunks - 1u);
    let of_slot = table + {{ height // width }}u + chunk / slot_chunks * params.projections;
    let group = chunk % rank_chunks * 2u + fold_part % 2u;
    {% for p in side_by_side %}
    {% if gated %}
    let projection{{ p }} = {{ p }}u;
    {% elif across %}
    let projection0 = first_projection + chunk % slot_chunks / rank_chunks;
    {% else %}
    let projection0 = first_projection;
    {% endif %}
    let factor{{ p }} = factors[of_slot + projection{{ p }}];
    let b{{ p }} = factor{{ p }}.b;
    let groups{{ p }} = ((factor{{ p }}.rank_type & 0xffffu) + 7u) / 8u;
    let storage{{ p }} = storage_of(factor{{ p }});
    {% endfor %}
    {% for i in range(b_loads) %}
    {% if gated %}
    let column{{ i }} = min(first_column + fold_row{{ i }} / 32u * 16u + fold_row{{ i }} % 16u, params.span_rows[0] - 1u);
    {% elif across %}
    let offset{{ i }} = y_begin + fold_row{{ i }} - params.span_begin[projection0];
    let held{{ i }} = y_begin + fold_row{{ i }} >= params.span_begin[projection0]
        && offset{{ i }} % params.step == 0u && offset{{ i }} / params.step < params.span_rows[projection0];
    let column{{ i }} = select(0u, offset{{ i }} / params.step, held{{ i }});
    {% else %}
    let column{{ i }} = min(y_begin + fold_row{{ i }} - params.span_begin[projection0], params.span_rows[projection0] - 1u);
    {% endif %}
    let groups_at{{ i }} = {{ of("groups", i) }};
    let inside{{ i }} = begin + fold_part / 2u < chunks && group < groups_at{{ i }}{% if across %} && held{{ i }}{% endif %};
    // Where nothing stands, something else is read and counts as 0.
    let group_at{{ i }} = column{{ i }} * groups_at{{ i }} + min(group, max(groups_at{{ i }}, 1u) - 1u);
    {% endfor %}
    // Of others than their own, the last of their own again, which is in the cache: nobody wrote those, and nobody multiplies them.
    {% for q in range(depth // 16) %}
    let chunk{{ q }} = begin + {{ q }}u;
    {% for g in range(own_groups) %}
    {
        let u_chunk = min(max(chunk{{ q }}, own{{ g }}.b * slot_chunks), max(own{{ g }}.rank_type * slot_chunks, 1u) - 1u);
        {% if across %}
        let u_projection = first_projection + u_chunk % slot_chunks / rank_chunks;
        let u_place = u_chunk / slot_chunks * rank_chunks + u_chunk % rank_chunks;
        {% else %}
        let u_projection = {{ "0u" if gated else "first_projection" }};
        let u_place = u_chunk;
        {% endif %}
        let u_at = (((first_row + row_begin) / 16u * params.projections + u_projection) * params.room + u_place) * 64u;
        {% for p in side_by_side %}
        {% for i in range(sub_rows // 16) if i * 16 // width == g %}
        {{ m.load_t("u" ~ q ~ "_" ~ p ~ "_" ~ i, "Left", "u", "u_at + (" ~ i ~ "u * params.projections + " ~ p ~ "u) * params.room * 64u", "4u") }}
        {% endfor %}
        {% endfor %}
    }
    {% endfor %}
    {% endfor %}
    workgroupBarrier();
    {# Without a branch where all are of two bytes: a load in a branch is waited for at the end of that branch. #}
    {% macro fetch_b(any) %}
        {% for i in range(b_loads) %}
        {% if any %}
        let wide{{ i }} = {{ of("storage", i) }} == 0u;
        let at{{ i }} = {{ of("b", i) }} + group_at{{ i }} * select(1u, 2u, wide{{ i }});
        let more{{ i }} = pool[at{{ i }} + select(0u, 1u, wide{{ i }})];
        {% else %}
        let at{{ i }} = {{ of("b", i) }} + group_at{{ i }};
        {% endif %}
        let words{{ i }} = pool[at{{ i }}];
        {% endfor %}
        {% for i in range(b_loads) %}
        {
            let words = select(vec4<u32>(), words{{ i }}, inside{{ i }});
            let storage = {{ of("storage", i) }};
            {% if any %}
            let more = select(vec4<u32>(), more{{ i }}, inside{{ i }});
            let eight = decode_factor8(words, more, storage);
            let first = vec4<f16>(eight.lo * LIFT);
            let second = vec4<f16>(eight.hi * LIFT);
            {% else %}
            let first = vec4<f16>(decode_factor4(words.xy, storage) * LIFT);
            let second = vec4<f16>(decode_factor4(words.zw, storage) * LIFT);
            {% endif %}
            {% if (i + 1) * at_once > columns %}
            if (fold_row{{ i }} < {{ columns }}u) {
            {% else %}
            {
            {% endif %}
                let to = fold_row{{ i }} * ROW + fold_part * 2u;
                w_tile[to] = {{ m.to_quad("f16", "first") }};
                w_tile[to + 1u] = {{ m.to_quad("f16", "second") }};
            }
        }
        {% endfor %}
    {% endmacro %}
    if ({% for p in side_by_side %}{{ " || " if p > 0 }}storage{{ p }} == 0u{% endfor %}) {
        {{ fetch_b(true) }}
    } else {
        {{ fetch_b(false) }}
    }
    workgroupBarrier();
    {% for q in range(depth // 16) %}
    {% for g in range(own_groups) %}
    if (chunk{{ q }} / slot_chunks >= own{{ g }}.b && chunk{{ q }} / slot_chunks < own{{ g }}.rank_type && begin + {{ q }}u < chunks) {
        {% for j in range(sub_columns // 16) %}
        {{ m.load("let right" ~ j, "Right", "w_tile", q * 4 ~ "u + (column_begin + " ~ j * 16 ~ "u) * ROW", "ROW") }}
        {% for i in range(sub_rows // 16) if i * 16 // width == g %}
        {{ m.multiply_add("sum" ~ i ~ "_" ~ j, "u" ~ q ~ "_" ~ (j % 2 if gated else 0) ~ "_" ~ i, "right" ~ j) }}
        {% endfor %}
        {% endfor %}
    }
    {% endfor %}
    {% endfor %}
}
