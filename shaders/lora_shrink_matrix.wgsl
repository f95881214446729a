// First half of an adapter on cooperative matrices: u[p] = s A x[row(p)] for 16 pairs of one virtual expert, one projection
// and 16 rows of A a workgroup. Its subgroups share the depth among them and add up their sums at the end. Both operands
// pass through workgroup memory as f16: rows of x come packed, each with its power of two; a factor's A has one, too. The
// intermediate carries the scale, and the powers of two of x and of the base weights that y keeps.
{% if folded %}
// It is f16, times 2^-{{ lift }}: `expert_gemm_matrix` adds B u.
{% else %}
// It is f32: `lora_expand_tiles` adds B u.
{% endif %}
enable f16;
enable wgpu_cooperative_matrix;
// Which part of the depth a subgroup owns is uniform within it, but not for the analysis.
diagnostic(off, derivative_uniformity);

struct LoraShrinkMatrixParams {
    rows: u32,
    row_div: u32,
    // Groups of eight in a row of A and of x.
    groups: u32,
    // Entries of this site in `index`, projections of the site, and the rank that u has room for.
    index_base: u32,
    projections: u32,
    max_rank: u32,
    buckets: u32,
    expert_base: u32,
    sorted_base: u32,
    // Where the exponents of the rows begin in x, in words of eight bytes.
    exponents: u32,
    // The power of two of the base weights.
    w_scale: f32,
    pad0: u32,
}

@group(0) @binding(0) var<uniform> params: LoraShrinkMatrixParams;
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>; // f16 [rows / row_div, K], exponents [rows / row_div]
@group(0) @binding(2) var<storage, read> pool: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> index: array<Factor>; // [V, projections] from index_base
@group(0) @binding(4) var<storage, read> ids: array<i32>; // alignment over V buckets in tiles of 16
{% if folded %}
@group(0) @binding(5) var<storage, read_write> u: array<u32>; // f16 [P, projections, max_rank]
{% else %}
@group(0) @binding(5) var<storage, read_write> u: array<f32>; // [P, projections, max_rank]
{% endif %}

alias Left = coop_mat16x16<f16, A>;
alias Right = coop_mat16x16<f16, B>;
alias Sum = coop_mat16x16<f32, C>;

{# Groups of eight that a subgroup takes in one round, and rows that it loads at a time. #}
{% set part = 8 %}
{% set rows_at_once = width // part %}
{# Rows in workgroup memory are eight halves longer, so that lanes meet different banks. #}
{% set row = (part * 8 + 8) // 4 %}
const ROW = {{ row }}u;
var<workgroup> x_tile: array<vec4<f16>, {{ subgroups * 16 * row }}>;
var<workgroup> a_tile: array<vec4<f16>, {{ subgroups * 16 * row }}>;
var<workgroup> u_tile: array<f32, {{ subgroups * 256 }}>;

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
    let item = folded(workgroup);
    if (item >= u32(ids[65])) {
        return;
    }
    let label = ids[params.expert_base + item];
    if (label < 0 || label >= i32(params.buckets)) {
        return;
    }
    let rank_tiles = (params.max_rank + 15u) / 16u;
    let projection = workgroup.x / rank_tiles;
    let factor = index[params.index_base + u32(label) * params.projections + projection];
    let rank = factor.rank_type & 0xffffu;
    let storage = storage_of(factor);
    // A bias is a column of B whose element of u is the scale alone.
    let a_rows = rank - biased(factor);
    let r_begin = workgroup.x % rank_tiles * 16u;
    // u is read in whole vec4: the rows up to the next multiple of eight are written as 0.
    let padded_rank = (rank + 7u) / 8u * 8u;
    if (r_begin >= padded_rank) {
        return;
    }

    let part = subgroup_lane % {{ part }}u;
    let first_pair = u32(ids[params.sorted_base + item * 16u]);
    {% for i in range(16 // rows_at_once) %}
    let row{{ i }} = subgroup_lane / {{ part }}u + {{ i * rows_at_once }}u;
    let pair{{ i }} = u32(ids[params.sorted_base + item * 16u + row{{ i }}]);
    // A row of padding reads the first pair's, which is in the cache: what becomes of it is never written.
    let x_at{{ i }} = select(first_pair, pair{{ i }}, pair{{ i }} < params.rows) / params.row_div * params.groups;
    let a_at{{ i }} = min(r_begin + row{{ i }}, a_rows - 1u) * params.groups;
    {% endfor %}
    let begin = subgroup * {{ 16 * row }}u;
    let to_halves = a_scale(factor);
    var sum = Sum();
    {% for i in range(16 // rows_at_once) %}
    var x{{ i }} = vec4<u32>();
    var a{{ i }} = vec4<u32>();
    var b{{ i }} = vec4<u32>();
    {% endfor %}
    {# A loop for each width of a storage type: a load in a branch is waited for at the end of that branch. #}
    {% macro fetch(round, wide) %}
    {
        // Past the end of a row the last part of it is loaded again, and x counts as 0 there.
        let place = min({{ round }} + subgroup * {{ part }}u + part, params.groups - 1u);
        {% for i in range(16 // rows_at_once) %}
        x{{ i }} = x[x_at{{ i }} + place];
        {% if wide %}
        a{{ i }} = pool[factor.a + (a_at{{ i }} + place) * 2u];
        b{{ i }} = pool[factor.a + (a_at{{ i }} + place) * 2u + 1u];
        {% else %}
        a{{ i }} = pool[factor.a + a_at{{ i }} + place];
        {% endif %}
        {% endfor %}
    }
    {% endmacro %}
    {% macro walk(wide) %}
    {{ fetch("0u", wide) }}
    for (var round = 0u; round < params.groups; round = round + {{ subgroups * part }}u) {
        let inside = round + subgroup * {{ part }}u + part < params.groups;
        workgroupBarrier();
        {% for i in range(16 // rows_at_once) %}
        {
            let at = begin + row{{ i }} * ROW + part * 2u;
            let words = select(vec4<u32>(), x{{ i }}, inside);
            x_tile[at] = halves(words.xy);
            x_tile[at + 1u] = halves(words.zw);
            {% if wide %}
            a_tile[at] = vec4<f16>(bitcast<vec4<f32>>(a{{ i }}) * to_halves);
            a_tile[at + 1u] = vec4<f16>(bitcast<vec4<f32>>(b{{ i }}) * to_halves);
            {% else %}
            a_tile[at] = vec4<f16>(decode_factor4(a{{ i }}.xy, storage) * to_halves);
            a_tile[at + 1u] = vec4<f16>(decode_factor4(a{{ i }}.zw, storage) * to_halves);
            {% endif %}
        }
        {% endfor %}
        workgroupBarrier();
        {{ fetch("round + " ~ subgroups * part ~ "u", wide) }}
        {% for q in range(part // 2) %}
        {
            let left = coopLoadT<Left>(&x_tile[begin + {{ q * 4 }}u], ROW);
            let right = coopLoad<Right>(&a_tile[begin + {{ q * 4 }}u], ROW);
            sum = coopMultiplyAdd(left, right, sum);
        }
        {% endfor %}
    }
    {% endmacro %}
    if (storage == 0u) {
        {{ walk(true) }}
    } else {
        {{ walk(false) }}
    }
    let own = &u_tile[subgroup * 256u];
    coopStoreT(sum, own, 16u);
    workgroupBarrier();
    {% set per_lane = 2 if folded else 1 %}
    for (var at = lane * {{ per_lane }}u; at < 256u; at = at + {{ subgroups * width * per_lane }}u) {
        let r = r_begin + at % 16u;
        let pair = u32(ids[params.sorted_base + item * 16u + at / 16u]);
        if (pair < params.rows && r < padded_rank) {
            let e_at = params.exponents + pair / params.row_div;
            let shift = i32(unpack2x16float(x[e_at / 2u][e_at % 2u * 2u]).x);
            {% for j in range(per_lane) %}
            var value{{ j }} = 0.0;
            for (var s = 0u; s < {{ subgroups }}u; s = s + 1u) {
                value{{ j }} = value{{ j }} + u_tile[s * 256u + at + {{ j }}u];
            }
            value{{ j }} = select(power_of_two(shift), value{{ j }} / to_halves, r + {{ j }}u < a_rows) * params.w_scale;
            value{{ j }} = select(0.0, value{{ j }} * factor.scale, r + {{ j }}u < rank);
            {% endfor %}
            let to = (pair * params.projections + projection) * params.max_rank + r;
            {% if folded %}
            u[to / 2u] = pack2x16float(vec2<f32>(value0, value1) * {{ 1 / 2 ** lift }});
            {% else %}
            u[to] = value0;
            {% endif %}
        }
    }
}
