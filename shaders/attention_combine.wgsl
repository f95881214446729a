// Joins the runs into which `attention_split` cut the context of a row, in the order of the runs. One workgroup for each
// row and head. The output projection reads out.
struct AttentionCombineParams {
    heads: u32,
    // First row in `items`, and their number.
    base: u32,
    count: u32,
    // Positions of a run, and runs of a row.
    chunk: u32,
    splits: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

@group(0) @binding(0) var<uniform> params: AttentionCombineParams;
@group(0) @binding(1) var<storage, read> runs: array<vec4<f32>>; // [count, heads, splits]: sums [head_dim]; maximum, weight
@group(0) @binding(2) var<storage, read> items: array<vec4<i32>>; // from base on: row, position, sequence, 0
@group(0) @binding(3) var<storage, read_write> out: array<vec4<f32>>; // [T, heads, head_dim]

{% set quads = head_dim // 4 %}
{% set parts = lanes // quads %}
const QUADS = {{ quads }}u;
const MASKED: f32 = -3.0e38;

var<workgroup> most_tile: array<f32, {{ splits }}>;
var<workgroup> weight_tile: array<f32, {{ splits }}>;
var<workgroup> total_tile: array<f32, {{ splits }}>;
var<workgroup> sum_tile: array<vec4<f32>, {{ parts * quads }}>;

{% include "shared/rows.wgsl" %}

@compute @workgroup_size({{ lanes }})
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let entry = folded(workgroup);
    if (entry >= params.count) {
        return;
    }
    let head = workgroup.x;
    let item = vec4<u32>(items[params.base + entry]);
    let row = item.x;
    let n = item.y / params.chunk + 1u;
    let begin = (entry * params.heads + head) * params.splits * (QUADS + 1u);
    var own = vec4<f32>(MASKED, 0.0, 0.0, 0.0);
    if (lane < {{ splits }}u) {
        if (lane < n) {
            own = runs[begin + lane * (QUADS + 1u) + QUADS];
        }
        most_tile[lane] = own.x;
    }
    let part = lane / QUADS;
    let quad = lane % QUADS;
    workgroupBarrier();
    if (lane < {{ splits }}u) {
        var most = MASKED;
        for (var i = 0u; i < {{ splits }}u; i = i + 8u) {
            {% for j in range(8) %}
            most = max(most, most_tile[i + {{ j }}u]);
            {% endfor %}
        }
        // Runs that are none weigh nothing.
        weight_tile[lane] = select(0.0, exp2(own.x - most), lane < n);
        total_tile[lane] = weight_tile[lane] * own.y;
    }
    workgroupBarrier();
    var sum = vec4<f32>();
    for (var i = part; i < n; i = i + {{ 8 * parts }}u) {
        {% for j in range(8) %}
        let run{{ j }} = min(i + {{ j * parts }}u, n - 1u);
        let sum{{ j }} = runs[begin + run{{ j }} * (QUADS + 1u) + quad];
        {% endfor %}
        {% for j in range(8) %}
        sum = sum + select(0.0, weight_tile[run{{ j }}], i + {{ j * parts }}u < n) * sum{{ j }};
        {% endfor %}
    }
    if (part < {{ parts }}u) {
        sum_tile[lane] = sum;
    }
    workgroupBarrier();
    if (lane < QUADS) {
        var joined = vec4<f32>();
        {% for p in range(parts) %}
        joined = joined + sum_tile[lane + {{ p * quads }}u];
        {% endfor %}
        var total = 0.0;
        for (var i = 0u; i < {{ splits }}u; i = i + 8u) {
            {% for j in range(8) %}
            total = total + total_tile[i + {{ j }}u];
            {% endfor %}
        }
        out[(row * params.heads + head) * QUADS + lane] = joined / total;
    }
}
