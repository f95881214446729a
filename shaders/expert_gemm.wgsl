// Grouped product y[p] = W[e(p)] x[row(p)]. An invocation, or with `depth_lanes` a subgroup, owns {{ per_lane }} output columns of
// {{ tile }} pairs and walks along the inner dimension in groups of eight, so a weight is decoded once for the whole tile.
// With `carriers` the values of x are loaded by that many lanes and broadcast: on devices where loads cost more than
// arithmetic that is the difference. With `depth_lanes` neighbouring lanes read neighbouring weights: on a GPU that is.
// The activation, combine and attention stages read y.
struct ExpertGemmParams {
    // P, or T when dense.
    rows: u32,
    // Pairs that share a row of x: A for gate and up, 1 for down.
    row_div: u32,
    // Row of x in vec4.
    x_stride: u32,
    // Groups of eight in a row of W.
    groups: u32,
    // Rows of W (columns of y) of this piece, and where they stand in y.
    out_rows: u32,
    out_begin: u32,
    y_stride: u32,
    // Matrices of this piece.
    first: u32,
    count: u32,
    // 1: add to y.
    accumulate: u32,
    // Parts of `ids` when it is an alignment.
    expert_base: u32,
    sorted_base: u32,
}

@group(0) @binding(0) var<uniform> params: ExpertGemmParams;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>; // [rows / row_div, K]
@group(0) @binding(2) var<storage, read> w: array<vec4<u32>>; // [count, out_rows, K], rows padded to eight
@group(0) @binding(3) var<storage, read> ids: array<i32>; // alignment, or ids [P]; unused when dense
@group(0) @binding(4) var<storage, read_write> y: array<f32>; // [rows, y_stride]

{% include "shared/rows.wgsl" %}
{% include "shared/weights.wgsl" %}

@compute @workgroup_size({{ lanes }})
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    {% if carriers or depth_lanes %}
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    {% endif %}
    {% if depth_lanes %}
    @builtin(subgroup_id) subgroup: u32,
    {% endif %}
) {
    {% include "shared/tiles.wgsl" %}
    if (label < i32(params.first) || label >= i32(params.first + params.count)) {
        return;
    }
    let expert = u32(label) - params.first;
    {% for j in range(per_lane) %}
    {% if depth_lanes %}
    let column{{ j }} = (workgroup.x * {{ lanes // depth_lanes }}u + subgroup) * {{ per_lane }}u + {{ j }}u;
    {% else %}
    let column{{ j }} = (workgroup.x * {{ per_lane }}u + {{ j }}u) * {{ lanes }}u + lane;
    {% endif %}
    let w_row{{ j }} = (expert * params.out_rows + min(column{{ j }}, params.out_rows - 1u)) * params.groups;
    {% for i in range(tile) %}
    var sum{{ i }}_{{ j }} = 0.0;
    {% endfor %}
    {% endfor %}

    let groups = params.groups;
    {% with input = "x", row = "x_row", load = "load_weight8(", storage = "", steps = (8 // per_lane // tile if per_lane * tile < 8 else 1), whole = true %}
    {% include "shared/walk.wgsl" %}
    {% endwith %}

    {% for j in range(per_lane) %}
    if (column{{ j }} < params.out_rows) {
        {% for i in range(tile) %}
        if (pair{{ i }} < params.rows{% if depth_lanes %} && subgroup_lane == {{ (i * per_lane + j) % depth_lanes }}u{% endif %}) {
            let at = pair{{ i }} * params.y_stride + params.out_begin + column{{ j }};
            if (params.accumulate != 0u) {
                y[at] = y[at] + sum{{ i }}_{{ j }};
            } else {
                y[at] = sum{{ i }}_{{ j }};
            }
        }
        {% endfor %}
    }
    {% endfor %}
}
