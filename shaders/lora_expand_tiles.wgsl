// Second half of an adapter: y[p] += B u[p] for {{ tile }} pairs of one virtual expert, where y lies in the order of the tiles of the
// base product (`places`) and keeps its powers of two, which u carries, too. An invocation owns {{ per_lane }} columns of all pairs; u passes
// through workgroup memory, {{ chunk }} ranks at a time. What is in y is loaded first, because it is farthest.
struct LoraExpandTilesParams {
    rows: u32,
    index_base: u32,
    projections: u32,
    max_rank: u32,
    buckets: u32,
    y_stride: u32,
    expert_base: u32,
    sorted_base: u32,
    // Where the places of the pairs begin in `places`.
    places_base: u32,
    // From a column of a projection to the next in y.
    step: u32,
    pad0: u32,
    pad1: u32,
    // For each projection: first column tile, first column in y, columns.
    tile_begin: vec4<u32>,
    out_begin: vec4<u32>,
    out_rows: vec4<u32>,
}

@group(0) @binding(0) var<uniform> params: LoraExpandTilesParams;
@group(0) @binding(1) var<storage, read> u: array<vec4<f32>>; // [P, projections, max_rank]
@group(0) @binding(2) var<storage, read> pool: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> index: array<Factor>; // [V, projections] from index_base
@group(0) @binding(4) var<storage, read> ids: array<i32>; // alignment over V buckets
@group(0) @binding(5) var<storage, read> places: array<i32>; // alignment that y is in the order of
@group(0) @binding(6) var<storage, read_write> y: array<f32>; // [C, y_stride]

const QUADS = {{ chunk // 4 }}u;
var<workgroup> pair_tile: array<u32, {{ tile }}>;
var<workgroup> place_tile: array<u32, {{ tile }}>;
var<workgroup> u_tile: array<vec4<f32>, {{ tile * chunk // 4 }}>;

{% include "shared/rows.wgsl" %}
{% include "shared/factors.wgsl" %}

@compute @workgroup_size({{ lanes }})
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let item = folded(workgroup);
    if (item >= u32(ids[65])) {
        return;
    }
    let label = ids[params.expert_base + item];
    {% include "shared/projection.wgsl" %}

    // The first row of a tile is a real pair, which rows of padding repeat; nothing is written for them.
    let first_pair = u32(ids[params.sorted_base + item * {{ tile }}u]);
    if (lane < {{ tile }}u) {
        let pair = u32(ids[params.sorted_base + item * {{ tile }}u + lane]);
        let real_pair = select(first_pair, pair, pair < params.rows);
        pair_tile[lane] = pair;
        place_tile[lane] = u32(places[params.places_base + real_pair]);
    }
    workgroupBarrier();
    let columns = params.out_rows[projection];
    {% for j in range(per_lane) %}
    let column{{ j }} = (workgroup.x - params.tile_begin[projection]) * {{ lanes * per_lane }}u + {{ j * lanes }}u + lane;
    let y_column{{ j }} = params.out_begin[projection] + min(column{{ j }}, columns - 1u) * params.step;
    let w_row{{ j }} = min(column{{ j }}, columns - 1u) * groups;
    {% endfor %}
    {% for i in range(tile) %}
    let y_row{{ i }} = place_tile[{{ i }}] * params.y_stride;
    {% for j in range(per_lane) %}
    var sum{{ i }}_{{ j }} = y[y_row{{ i }} + y_column{{ j }}];
    {% endfor %}
    {% endfor %}
    for (var begin = 0u; begin < groups; begin = begin + {{ chunk // 8 }}u) {
        let quads = min(groups - begin, {{ chunk // 8 }}u) * 2u;
        for (var i = lane; i < {{ tile }}u * quads; i = i + {{ lanes }}u) {
            let pair = pair_tile[i / quads];
            let row = select(first_pair, pair, pair < params.rows) * params.projections + projection;
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
    if (pair_tile[{{ i }}] < params.rows) {
        {% for j in range(per_lane) %}
        if (column{{ j }} < columns) {
            y[y_row{{ i }} + y_column{{ j }}] = sum{{ i }}_{{ j }};
        }
        {% endfor %}
    }
    {% endfor %}
}
