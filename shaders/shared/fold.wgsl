// Adds the adapters to the sums of a tile: behind W[e] stand the B of every adapter that a row of the tile has, times LIFT, and
// behind a row of x the u of its own, over LIFT, and zeros for the others; {{ depth }} ranks at a time. It stands in `main` of a
// product, behind its loop, whose operands passed through `w_tile` and `x_tile`: B and u do so, too. `fold_direct` is that of direct
// products.
{# Groups of eight in a step, and rows that all invocations together load at a time. #}
{% set u_loads = (height + at_once - 1) // at_once %}
{% set b_loads = (columns + at_once - 1) // at_once %}
{% include "shared/tile_slots.wgsl" %}
{% include "shared/tile_projections.wgsl" %}
let slot_chunks = {% if across %}projections * {% endif %}(params.max_rank / 16u);
let chunks = used_slots * slot_chunks;
// A lane has one group of eight ranks: in {{ u_loads }} rows of u, and in {{ b_loads }} columns of B.
let fold_part = lane % {{ part }}u;
{% for i in range([u_loads, b_loads] | max) %}
let fold_row{{ i }} = lane / {{ part }}u + {{ i * at_once }}u;
{% endfor %}
for (var begin = 0u; begin < chunks; begin = begin + {{ depth // 16 }}u) {
    let chunk = min(begin + fold_part / 2u, chunks - 1u);
    let slot = nth_slot(slots, chunk / slot_chunks);
    let of_slot = chunk % slot_chunks * 16u;
    {% if across %}
    let projection = first_projection + of_slot / params.max_rank;
    let group = of_slot % params.max_rank / 8u + fold_part % 2u;
    {% else %}
    let projection = first_projection;
    let group = of_slot / 8u + fold_part % 2u;
    {% endif %}
    let factor = index[params.index_base + (slot * params.experts + u32(label)) * params.projections + projection];
    let factor_groups = ((factor.rank_type & 0xffffu) + 7u) / 8u;
    let inside = begin + fold_part / 2u < chunks && group < factor_groups;
    let storage = storage_of(factor);
    // Where nothing stands, something else is read and counts as 0.
    let b_group = min(group, max(factor_groups, 1u) - 1u);
    let own_slot = select(256u, slot, inside);
    {% for i in range(b_loads) %}
    {% if across %}
    let offset{{ i }} = y_begin + fold_row{{ i }} - params.span_begin[projection];
    let column{{ i }} = offset{{ i }} / params.step;
    let held{{ i }} = y_begin + fold_row{{ i }} >= params.span_begin[projection]
        && offset{{ i }} % params.step == 0u && column{{ i }} < params.span_rows[projection];
    let b_at{{ i }} = select(0u, column{{ i }}, held{{ i }}) * factor_groups + b_group;
    {% else %}
    let column{{ i }} = min(y_begin + fold_row{{ i }} - params.span_begin[projection], params.span_rows[projection] - 1u);
    let b_at{{ i }} = column{{ i }} * factor_groups + b_group;
    {% endif %}
    {% endfor %}
    workgroupBarrier();
    {
        {% for i in range(u_loads) %}
        let word{{ i }} = row_words[min(fold_row{{ i }}, {{ height - 1 }}u)];
        let u_pair{{ i }} = min(word{{ i }} & 0xffffffu, params.rows - 1u);
        let at{{ i }} = (u_pair{{ i }} * params.projections + projection) * (params.max_rank / 8u) + group;
        let read{{ i }} = u[at{{ i }}];
        {% endfor %}
        {% for i in range(u_loads) %}
        {
            let words = select(vec4<u32>(), read{{ i }}, word{{ i }} >> 24u == own_slot);
            {% if (i + 1) * at_once > height %}
            if (fold_row{{ i }} < {{ height }}u) {
            {% else %}
            {
            {% endif %}
                let at = fold_row{{ i }} * ROW + fold_part * 2u;
                x_tile[at] = {{ m.to_quad("f16", "halves(words.xy)") }};
                x_tile[at + 1u] = {{ m.to_quad("f16", "halves(words.zw)") }};
            }
        }
        {% endfor %}
    }
    {# A loop for each width of a storage type: a load in a branch is waited for at the end of that branch. #}
    {% macro fetch_b(wide) %}
        {% for i in range(b_loads) %}
        {% if wide %}
        let lo{{ i }} = pool[factor.b + b_at{{ i }} * 2u];
        let hi{{ i }} = pool[factor.b + b_at{{ i }} * 2u + 1u];
        {% else %}
        let lo{{ i }} = pool[factor.b + b_at{{ i }}];
        {% endif %}
        {% endfor %}
        {% for i in range(b_loads) %}
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
            {% if (i + 1) * at_once > columns %}
            if (fold_row{{ i }} < {{ columns }}u) {
            {% else %}
            {
            {% endif %}
                let at = fold_row{{ i }} * ROW + fold_part * 2u;
                w_tile[at] = {{ m.to_quad("f16", "first") }};
                w_tile[at + 1u] = {{ m.to_quad("f16", "second") }};
            }
        }
        {% endfor %}
    {% endmacro %}
    if (storage == 0u) {
        {{ fetch_b(true) }}
    } else {
        {{ fetch_b(false) }}
    }
    workgroupBarrier();
    {% if rests %}
    if (busy) {
    {% else %}
    {
    {% endif %}
        {% for q in range(depth // 16) %}
        {
            {% for i in range(sub_rows // 16) %}
            {{ m.load_t("let u" ~ q ~ "_" ~ i, "Left", "x_tile", q * 4 ~ "u + (row_begin + " ~ i * 16 ~ "u) * ROW", "ROW") }}
            {% endfor %}
            {% for j in range(sub_columns // 16) %}
            {{ m.load("let right" ~ j, "Right", "w_tile", q * 4 ~ "u + (column_begin + " ~ j * 16 ~ "u) * ROW", "ROW") }}
            {% for i in range(sub_rows // 16) %}
            {{ m.multiply_add("sum" ~ i ~ "_" ~ j, "u" ~ q ~ "_" ~ i, "right" ~ j) }}
            {% endfor %}
            {% endfor %}
        }
        {% endfor %}
    }
}
