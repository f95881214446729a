// Second half of an adapter: y[p] += B u[p] for a run of {{ tile }} pairs of one virtual expert, where y lies in the order of the alignment
// and keeps the powers of two of the base product, which u carries, too. An invocation owns {{ per_lane }} columns of all pairs; u passes
// through workgroup memory, {{ chunk }} ranks at a time. What is in y is loaded first, because it is farthest.
struct LoraExpandTilesParams {
    index_base: u32,
    projections: u32,
    max_rank: u32,
    buckets: u32,
    y_stride: u32,
    // Where runs and sorted pairs begin in the alignment.
    run_base: u32,
    sorted_base: u32,
    // From a column of a projection to the next in y.
    step: u32,
    // For each projection: first column tile, first column in y, columns.
    tile_begin: vec4<u32>,
    out_begin: vec4<u32>,
    out_rows: vec4<u32>,
}

@group(0) @binding(0) var<uniform> params: LoraExpandTilesParams;
@group(0) @binding(1) var<storage, read> u: array<vec4<f32>>; // [P, projections, max_rank]
@group(0) @binding(2) var<storage, read> pool: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> index: array<Factor>; // [V, projections] from index_base
@group(0) @binding(4) var<storage, read> ids: array<i32>; // alignment with runs of {{ tile }}
@group(0) @binding(5) var<storage, read_write> y: array<f32>; // [C, y_stride]

const QUADS = {{ chunk // 4 }}u;
var<workgroup> pair_tile: array<u32, {{ tile }}>;
var<workgroup> u_tile: array<vec4<f32>, {{ tile * chunk // 4 }}>;

{% include "shared/rows.wgsl" %}
{% include "shared/factors.wgsl" %}

@compute @workgroup_size({{ lanes }})
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let item = folded(workgroup);
    if (item >= u32(ids[66])) {
        return;
    }
    let label = ids[params.run_base + item * 4u];
    {% include "shared/projection.wgsl" %}

    // Past the end of a run its last pair is read again; nothing is written for it.
    let begin_place = u32(ids[params.run_base + item * 4u + 1u]);
    let last_place = u32(ids[params.run_base + item * 4u + 2u]) - 1u;
    if (lane < {{ tile }}u) {
        pair_tile[lane] = u32(ids[params.sorted_base + min(begin_place + lane, last_place)]);
    }
    workgroupBarrier();
    let columns = params.out_rows[projection];
    {% for j in range(per_lane) %}
    let column{{ j }} = (workgroup.x - params.tile_begin[projection]) * {{ lanes * per_lane }}u + {{ j * lanes }}u + lane;
    let y_column{{ j }} = params.out_begin[projection] + min(column{{ j }}, columns - 1u) * params.step;
    let w_row{{ j }} = min(column{{ j }}, columns - 1u) * groups;
    {% endfor %}
    {% for i in range(tile) %}
    let y_row{{ i }} = min(begin_place + {{ i }}u, last_place) * params.y_stride;
    {% for j in range(per_lane) %}
    var sum{{ i }}_{{ j }} = y[y_row{{ i }} + y_column{{ j }}];
    {% endfor %}
    {% endfor %}
    for (var begin = 0u; begin < groups; begin = begin + {{ chunk // 8 }}u) {
        let quads = min(groups - begin, {{ chunk // 8 }}u) * 2u;
        for (var i = lane; i < {{ tile }}u * quads; i = i + {{ lanes }}u) {
            let row = pair_tile[i / quads] * params.projections + projection;
            u_tile[i / quads * QUADS + i % quads] = u[row * params.max_rank / 4u + begin * 2u + i % quads];
        }
        workgroupBarrier();
        for (var q = 0u; q < quads; q = q + 2u) {
            {% for j in range(per_lane) %}
            let w{{ j }} = load_factor8(factor.b, w_row{{ j }} + begin + q / 2u, storage);
            {% endfor %}
            {% for i in range(tile) %}
            let lo{{ i }} = u_tile[{{ i }}u * QUADS + q];
            let hi{{ i }} = u_tile[{{ i }}u * QUADS + q + 1u];
            {% for j in range(per_lane) %}
            sum{{ i }}_{{ j }} = sum{{ i }}_{{ j }} + dot(w{{ j }}.lo, lo{{ i }}) + dot(w{{ j }}.hi, hi{{ i }});
            {% endfor %}
            {% endfor %}
        }
        workgroupBarrier();
    }
    {% for i in range(tile) %}
    if (begin_place + {{ i }}u <= last_place) {
        {% for j in range(per_lane) %}
        if (column{{ j }} < columns) {
            y[y_row{{ i }} + y_column{{ j }}] = sum{{ i }}_{{ j }};
        }
        {% endfor %}
    }
    {% endfor %}
}
