// First half of the adapters of pairs that hardly share any, for a product on cooperative matrices that adds B u
// (`expert_gemm_matrix`): u[p] = s A x[row(p)] 2^-{{ lift }} as f16, two rows of A by a subgroup. Rows of x come packed; u keeps their
// powers of two.
struct PairShrinkParams {
    // P.
    rows: u32,
    // Pairs that share a row of x.
    row_div: u32,
    // Row of x, and of A, in groups of eight.
    x_stride: u32,
    groups: u32,
    // Entries of this site in `index`, projections of the site, and the rank that u has room for.
    index_base: u32,
    projections: u32,
    max_rank: u32,
    // Pairs of a token.
    top_k: u32,
    // Experts of this rank, and adapter slots.
    experts: u32,
    slots: u32,
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<uniform> params: PairShrinkParams;
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>; // f16 [rows / row_div, K]
@group(0) @binding(2) var<storage, read> pool: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> index: array<Factor>; // [L, E_l, projections] from index_base
@group(0) @binding(4) var<storage, read> ids: array<i32>; // [P], local; unused when dense
@group(0) @binding(5) var<storage, read> token_lora_mapping: array<i32>; // [T]
@group(0) @binding(6) var<storage, read_write> u: array<u32>; // f16 [P, projections, max_rank]
@group(0) @binding(7) var<storage, read_write> status: array<atomic<u32>>; // [1]

{% include "shared/factors.wgsl" %}

@compute @workgroup_size({{ lanes }})
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    @builtin(subgroup_id) subgroup: u32,
) {
    let pair = workgroup.x;
    let row = (workgroup.y * {{ lanes // depth_lanes }}u + subgroup) * 2u;
    {% if dense %}
    let id = 0;
    {% else %}
    let id = ids[pair];
    {% endif %}
    {% include "shared/pair_factor.wgsl" %}
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
