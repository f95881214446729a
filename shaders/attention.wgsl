// Causal attention of each row over the cached keys and values of its sequence, in one pass with a running maximum
// (online softmax; Milakov and Gimelshein 2018, arXiv:1805.02867). One workgroup for each row and query head. The
// output projection reads out.
struct AttentionParams {
    rows: u32,
    heads: u32,
    kv_heads: u32,
    // head_dim / 4, at most 64.
    quads: u32,
    block_size: u32,
    max_blocks: u32,
    // 1 / sqrt(head_dim).
    scale: f32,
    pad0: u32,
}

@group(0) @binding(0) var<uniform> params: AttentionParams;
@group(0) @binding(1) var<storage, read> q: array<vec4<f32>>; // [T, heads, head_dim]
@group(0) @binding(2) var<storage, read> k_cache: array<vec4<f32>>; // [blocks, block_size, kv_heads, head_dim]
@group(0) @binding(3) var<storage, read> v_cache: array<vec4<f32>>; // as k_cache
@group(0) @binding(4) var<storage, read> rows: array<vec4<i32>>; // [T] token, position, sequence, slot
@group(0) @binding(5) var<storage, read> blocks: array<u32>; // [sequences, max_blocks]
@group(0) @binding(6) var<storage, read_write> out: array<vec4<f32>>; // [T, heads, head_dim]

{% include "shared/rows.wgsl" %}
{% include "shared/reduce.wgsl" %}

// Masked scores: exp gives exactly 0, and no infinity is needed.
const MASKED: f32 = -3.0e38;

// First quad of a position's key and value.
fn cached(sequence: u32, position: u32, kv_head: u32) -> u32 {
    let block = blocks[sequence * params.max_blocks + position / params.block_size];
    return ((block * params.block_size + position % params.block_size) * params.kv_heads + kv_head) * params.quads;
}
{% if not one_subgroup %}

var<workgroup> q_tile: array<vec4<f32>, 64>;
var<workgroup> weight_tile: array<f32, {{ lanes }}>;
{% endif %}

@compute @workgroup_size({{ lanes }})
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = folded(workgroup);
    if (row >= params.rows) {
        return;
    }
    let head = workgroup.x;
    let kv_head = head / (params.heads / params.kv_heads);
    let last = u32(rows[row].y);
    let sequence = u32(rows[row].z);
    let source = (row * params.heads + head) * params.quads;
    var most = MASKED;
    var total = 0.0;
    {% if one_subgroup %}
    // Lanes lie along the head: a key and a value are each loaded once, four positions at a time hide the reduction.
    {% for j in range(slices) %}
    let quad{{ j }} = min(lane + {{ j }}u * {{ lanes }}u, params.quads - 1u);
    let held{{ j }} = lane + {{ j }}u * {{ lanes }}u < params.quads;
    let q{{ j }} = select(vec4<f32>(), q[source + quad{{ j }}] * params.scale, held{{ j }});
    var acc{{ j }} = vec4<f32>();
    {% endfor %}
    for (var position = 0u; position <= last; position = position + 4u) {
        {% for s in range(4) %}
        let at{{ s }} = cached(sequence, min(position + {{ s }}u, last), kv_head);
        var part{{ s }} = 0.0;
        {% for j in range(slices) %}
        part{{ s }} = part{{ s }} + dot(q{{ j }}, k_cache[at{{ s }} + quad{{ j }}]);
        {% endfor %}
        let score{{ s }} = select(MASKED, subgroupAdd(part{{ s }}), position + {{ s }}u <= last);
        {% endfor %}
        let next = max(max(most, max(score0, score1)), max(score2, score3));
        let keep = exp(most - next);
        {% for s in range(4) %}
        let weight{{ s }} = exp(score{{ s }} - next);
        {% endfor %}
        total = total * keep + weight0 + weight1 + weight2 + weight3;
        {% for j in range(slices) %}
        acc{{ j }} = acc{{ j }} * keep{% for s in range(4) %} + weight{{ s }} * v_cache[at{{ s }} + quad{{ j }}]{% endfor %};
        {% endfor %}
        most = next;
    }
    {% for j in range(slices) %}
    if (held{{ j }}) {
        out[source + quad{{ j }}] = acc{{ j }} / total;
    }
    {% endfor %}
    {% else %}
    // Lanes lie along the positions for the scores, then along the head for the sum.
    let held = lane < params.quads;
    if (held) {
        q_tile[lane] = q[source + lane] * params.scale;
    }
    var acc = vec4<f32>();
    workgroupBarrier();
    for (var begin = 0u; begin <= last; begin = begin + {{ lanes }}u) {
        let position = begin + lane;
        var score = MASKED;
        if (position <= last) {
            let at = cached(sequence, position, kv_head);
            score = 0.0;
            for (var i = 0u; i < params.quads; i = i + 1u) {
                score = score + dot(q_tile[i], k_cache[at + i]);
            }
        }
        let next = max(most, reduce_max(score, lane));
        let keep = exp(most - next);
        let weight = select(0.0, exp(score - next), position <= last);
        weight_tile[lane] = weight;
        total = total * keep + reduce_sum(weight, lane);
        most = next;
        workgroupBarrier();
        if (held) {
            acc = acc * keep;
            let n = min({{ lanes }}u, last + 1u - begin);
            for (var i = 0u; i < n; i = i + 1u) {
                acc = acc + weight_tile[i] * v_cache[cached(sequence, begin + i, kv_head) + lane];
            }
        }
        workgroupBarrier();
    }
    if (held) {
        out[source + lane] = acc / total;
    }
    {% endif %}
}
