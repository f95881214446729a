// Sums of a dense product to y: straight from the matrices where `begin_rows` found nothing in the way. Else through a strip of
// workgroup memory of each subgroup's own, {{ strip }} columns at a time, because only real rows are written, and each has its own scale.
if (plain) {
    {% include "shared/store_tiles.wgsl" %}
} else {
    let strip_begin = subgroup * {{ 16 * strip }}u;
    {% for i in range(sub_rows // 16) %}
    {
        // Lane l knows row l of these 16.
        let row = first_row + row_begin + {{ i * 16 }}u + subgroup_lane % 16u;
        let unscale = power_of_two(-{{ exponent_of("min(row, params.rows - 1u)") }});
        {% for s in range(sub_columns // strip) %}
        {
            {% for j in range(strip // 16) %}
            {{ m.hold("block" ~ j, "sum" ~ i ~ "_" ~ (s * (strip // 16) + j)) }}
            {{ m.point("place" ~ j, "y_tile", "strip_begin + " ~ j * 16 ~ "u") }}
            {{ m.store_t("block" ~ j, "place" ~ j, "y_tile", strip ~ "u", false) }}
            {% endfor %}
            subgroupBarrier();
            let column = first_column + column_begin + {{ s * strip }}u + subgroup_lane % {{ strip }}u;
            {% for r in range(16 * strip // width) %}
            {
                let r = {{ r * (width // strip) }}u + subgroup_lane / {{ strip }}u;
                let target_row = subgroupShuffle(row, r);
                let factor = subgroupShuffle(unscale, r);
                if (target_row < params.rows && column < {{ size.out_rows }}) {
                    let value = y_tile[strip_begin + r * {{ strip }}u + subgroup_lane % {{ strip }}u] * factor * params.w_unscale;
                    let to = {{ "y_part + " if parted is defined and parted }}target_row * {{ size.y_stride }} + params.out_begin + column;
                    if (params.accumulate != 0u) {
                        y[to] = y[to] + value;
                    } else {
                        y[to] = value;
                    }
                }
            }
            {% endfor %}
            subgroupBarrier();
        }
        {% endfor %}
    }
    {% endfor %}
}
