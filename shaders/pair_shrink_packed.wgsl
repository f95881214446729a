// First half of the adapters of pairs that hardly share any, for a product on cooperative matrices that adds B u
// (`expert_gemm_matrix`): u[p] = s A x[row(p)] 2^-{{ lift }} as f16, two rows of A by a subgroup. Rows of x come packed; u keeps their
// powers of two.
{% include "shared/pair_shrink.wgsl" %}

@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>; // f16 [rows / row_div, K]
@group(0) @binding(6) var<storage, read_write> u: array<u32>; // f16 [P, projections, max_rank]

@compute @workgroup_size({{ lanes }})
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    @builtin(subgroup_id) subgroup: u32,
) {
    let pair = workgroup.x;
    let row = (workgroup.y * {{ lanes // depth_lanes }}u + subgroup) * 2u;
    {% with reports = true, ids = "ids" %}
    {% include "shared/pair_factor.wgsl" %}
    {% endwith %}
    // B is read in groups: u is 0 up to the end of the last one.
    if (r >= (rank + 7u) / 8u * 8u) {
        return;
    }
    let groups = params.groups;
    let a_row0 = min(r, rank - 1u) * groups;
    let a_row1 = min(r + 1u, rank - 1u) * groups;
    let x_row = pair / params.row_div * params.x_stride;
    var sum0 = 0.0;
    var sum1 = 0.0;
    {# A loop for each width of a storage type: a load in a branch is waited for at the end of that branch. #}
    {% macro walk(wide) %}
    for (var begin = 0u; begin < groups; begin = begin + {{ steps * depth_lanes }}u) {
        {% for q in range(steps) %}
        let g{{ q }} = begin + {{ q * depth_lanes }}u + subgroup_lane;
        let at{{ q }} = min(g{{ q }}, groups - 1u);
        let x{{ q }} = x[x_row + at{{ q }}];
        {% for j in range(2) %}
        {% if wide %}
        let low{{ q }}_{{ j }} = bitcast<vec4<f32>>(pool[factor.a + (a_row{{ j }} + at{{ q }}) * 2u]);
        let high{{ q }}_{{ j }} = bitcast<vec4<f32>>(pool[factor.a + (a_row{{ j }} + at{{ q }}) * 2u + 1u]);
        {% else %}
        let words{{ q }}_{{ j }} = pool[factor.a + a_row{{ j }} + at{{ q }}];
        {% endif %}
        {% endfor %}
        {% endfor %}
        {% for q in range(steps) %}
        {
            let words = select(vec4<u32>(), x{{ q }}, g{{ q }} < groups);
            let low = vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y));
            let high = vec4<f32>(unpack2x16float(words.z), unpack2x16float(words.w));
            {% for j in range(2) %}
            {% if wide %}
            sum{{ j }} = sum{{ j }} + dot(low, low{{ q }}_{{ j }}) + dot(high, high{{ q }}_{{ j }});
            {% else %}
            sum{{ j }} = sum{{ j }} + dot(low, decode_factor4(words{{ q }}_{{ j }}.xy, storage));
            sum{{ j }} = sum{{ j }} + dot(high, decode_factor4(words{{ q }}_{{ j }}.zw, storage));
            {% endif %}
            {% endfor %}
        }
        {% endfor %}
    }
    {% endmacro %}
    if (storage == 0u) {
        {{ walk(true) }}
    } else {
        {{ walk(false) }}
    }
    let totals = subgroupAdd(vec2<f32>(sum0, sum1)) * factor.scale * {{ 1 / 2 ** lift }};
    if (subgroup_lane == 0u) {
        let at = (pair * params.projections + projection) * params.max_rank + r;
        u[at / 2u] = pack2x16float(select(vec2<f32>(), totals, vec2<u32>(r, r + 1u) < vec2<u32>(rank)));
    }
}
