// Between the two products of few pairs with adapters: h = act(gate + B u, up + B u) out of the sums of `pair_gemm_shrink`, and at
// once the first half of the adapters of down, s A h. A workgroup owns {{ chunk }} columns of one pair: its part of A h is a sum
// over these, and whoever reads u, `down_combine` or `pair_gemm`, adds up the parts. What is read of A and B is on its way
// before anything waits.
struct PairExpandShrinkParams {
    // P.
    rows: u32,
    // F.
    width: u32,
    // Rank that both u have room for.
    max_rank: u32,
    // Workgroups of a pair.
    chunks: u32,
    // Constants of the clamped swiglu.
    alpha: f32,
    limit: f32,
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<uniform> params: PairExpandShrinkParams;
@group(0) @binding(1) var<storage, read> sums: array<f32>; // [P, 2 F]
// For each pair: the entry of down; where B is, for gate and for up; u [2, max_rank]. See `pair_gemm_shrink`.
@group(0) @binding(2) var<storage, read> u: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> pool: array<vec4<u32>>; // factors of gate and up
@group(0) @binding(4) var<storage, read> down_pool: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read_write> h: array<f32>; // [P, F]
// [P, 4 + chunks max_rank]: first group of B, groups of a row of B, storage type, 0, then the parts of u.
@group(0) @binding(6) var<storage, read_write> down_u: array<u32>;
@group(0) @binding(7) var<storage, read_write> status: array<atomic<u32>>; // [1]

{% include "shared/factors.wgsl" %}
{% include "shared/addend.wgsl" %}
{% include "shared/gate.wgsl" %}

{% set subgroups = lanes // depth_lanes %}
{% set eighth = chunk // 8 %}
// Column c at (c % 8) {{ eighth }} + c / 8, so that lanes which read groups of eight meet in no bank.
var<workgroup> h_chunk: array<f32, {{ chunk }}>;

// Where `down_pool` has group `group` of row `row` of A; any place where there is no such row.
fn a_at(factor: Factor, row: u32, group: u32) -> u32 {
    let rank = factor.rank_type & 0xffffu;
    let rows = rank - min(biased(factor), rank);
    let at = min(row, max(rows, 1u) - 1u) * (params.width / 8u) + group;
    return select(0u, factor.a + select(at, 2u * at, storage_of(factor) == 0u), rows > 0u);
}

@compute @workgroup_size({{ lanes }})
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    @builtin(subgroup_id) subgroup: u32,
) {
    let lane = subgroup * {{ depth_lanes }}u + subgroup_lane;
    let pair = workgroup.x;
    let begin = workgroup.y * {{ chunk }}u;
    let pair_at = pair * (3u + params.max_rank / 2u);
    let entry = u[pair_at];
    let gate_head = u[pair_at + 1u];
    let up_head = u[pair_at + 2u];
    let gate_u_at = pair_at + 3u;
    let up_u_at = gate_u_at + params.max_rank / 4u;
    if (workgroup.y == 0u && lane == 0u && gate_head.w > 1u) {
        // Bit 3 is for a place of the top-k that found no expert.
        atomicOr(&status[0], (gate_head.w & 6u) | ((gate_head.w >> 3u) & 1u));
    }
    // An expert elsewhere: nobody reads this pair.
    if ((gate_head.w & 1u) == 0u) {
        return;
    }
    let down = Factor(entry.x, entry.y, entry.z, bitcast<f32>(entry.w));
    let storage = storage_of(down);
    let rank = down.rank_type & 0xffffu;
    let a_rows = rank - min(biased(down), rank);
    let b_groups = (rank + 7u) / 8u;
    let groups = params.width / 8u;

    {% macro read_rows(round) %}
    {% for k in range(ahead) %}
    let row{{ k }} = ({{ round }} * {{ ahead }}u + {{ k }}u) * {{ subgroups }}u + subgroup;
    {% for q in range(steps) %}
    let at{{ k }}_{{ q }} = a_at(down, row{{ k }}, min(begin / 8u + {{ q * depth_lanes }}u + subgroup_lane, groups - 1u));
    let a{{ k }}_{{ q }} = down_pool[at{{ k }}_{{ q }}];
    let more{{ k }}_{{ q }} = down_pool[select(at{{ k }}_{{ q }}, at{{ k }}_{{ q }} + 1u, (storage == 0u) & (a_rows > 0u))];
    {% endfor %}
    {% endfor %}
    {% endmacro %}
    {% macro add_rows() %}
    {% for k in range(ahead) %}
    var sum{{ k }} = 0.0;
    {% for q in range(steps) %}
    {
        let a = decode_factor8(a{{ k }}_{{ q }}, more{{ k }}_{{ q }}, storage);
        sum{{ k }} = sum{{ k }} + dot(a.lo, lo{{ q }}) + dot(a.hi, hi{{ q }});
    }
    {% endfor %}
    let product{{ k }} = subgroupAdd(sum{{ k }});
    // A bias is a column of B whose element of u is the scale alone. B is read in groups: u is 0 up to the end of the last one.
    if (subgroup_lane == 0u && row{{ k }} < b_groups * 8u) {
        let whole = select(select(0.0, 1.0, workgroup.y == 0u), product{{ k }}, row{{ k }} < a_rows);
        down_u[down_at + 4u + workgroup.y * params.max_rank + row{{ k }}] =
            bitcast<u32>(select(0.0, whole * down.scale, row{{ k }} < rank));
    }
    {% endfor %}
    {% endmacro %}
    {{ read_rows("0u") }}

    for (var c = lane; c < {{ chunk }}u; c = c + {{ lanes }}u) {
        let column = begin + c;
        let inside = column < params.width;
        let at = min(column, params.width - 1u);
        {% if kind == "swiglu_clamped" %}
        let gate_at = pair * 2u * params.width + 2u * at;
        let up_at = gate_at + 1u;
        {% else %}
        let gate_at = pair * 2u * params.width + at;
        let up_at = gate_at + params.width;
        {% endif %}
        var gate = sums[gate_at];
        var up = sums[up_at];
        {% for part in range(2) %}
        let gate_group{{ part }} = read_group(gate_head, at, {{ part }}u);
        let gate_u{{ part }} = read_u(gate_head, gate_u_at, {{ part }}u);
        let up_group{{ part }} = read_group(up_head, at, {{ part }}u);
        let up_u{{ part }} = read_u(up_head, up_u_at, {{ part }}u);
        {% endfor %}
        {% for part in range(2) %}
        gate = gate + product_of(gate_group{{ part }}, gate_u{{ part }});
        up = up + product_of(up_group{{ part }}, up_u{{ part }});
        {% endfor %}
        // Ranks above 16.
        for (var part = 2u; part < max(gate_head.y, up_head.y); part = part + 1u) {
            let gate_group = read_group(gate_head, at, part);
            let gate_u = read_u(gate_head, gate_u_at, part);
            let up_group = read_group(up_head, at, part);
            let up_u = read_u(up_head, up_u_at, part);
            gate = gate + product_of(gate_group, gate_u);
            up = up + product_of(up_group, up_u);
        }
        let value = select(0.0, gated(vec4<f32>(gate), vec4<f32>(up)).x, inside);
        if (inside) {
            h[pair * params.width + column] = value;
        }
        h_chunk[c % 8u * {{ eighth }}u + c / 8u] = value;
    }
    workgroupBarrier();

    {% for q in range(steps) %}
    {% for half in ["lo", "hi"] %}
    let {{ half }}{{ q }} = vec4<f32>(
        {% for i in range(4) %}
        h_chunk[{{ ((0 if half == "lo" else 4) + i) * eighth + q * depth_lanes }}u + subgroup_lane],
        {% endfor %}
    );
    {% endfor %}
    {% endfor %}
    let down_at = pair * (4u + params.chunks * params.max_rank);
    if (workgroup.y == 0u && lane == 0u) {
        down_u[down_at] = down.b;
        down_u[down_at + 1u] = b_groups;
        down_u[down_at + 2u] = storage;
        down_u[down_at + 3u] = 0u;
    }
    {
        {{ add_rows() }}
    }
    for (var round = 1u; round * {{ ahead * subgroups }}u < b_groups * 8u; round = round + 1u) {
        {{ read_rows("round") }}
        {{ add_rows() }}
    }
}
