// Causal attention of single rows over a long context: a workgroup takes {{ heads }} query heads that share a key head and a run of
// positions, so that each key and value is read once, by as many workgroups as keep the device busy. Keys go through
// workgroup memory, {{ positions }} positions at a time, and meet the queries there; values go straight to the lanes that sum them.
// The next positions are loaded meanwhile. Scores are in base 2.
{% if whole %}
// One run holds the whole context: the output projection reads out.
{% else %}
// `attention_combine` joins the runs.
{% endif %}
struct AttentionSplitParams {
    heads: u32,
    kv_heads: u32,
    block_size: u32,
    max_blocks: u32,
    // First row in `items`, and their number.
    base: u32,
    count: u32,
    // Positions of a run, and runs of a row.
    chunk: u32,
    splits: u32,
    // log2(e) / sqrt(head_dim).
    scale: f32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

@group(0) @binding(0) var<uniform> params: AttentionSplitParams;
@group(0) @binding(1) var<storage, read> q: array<vec4<f32>>; // [T, heads, head_dim]
@group(0) @binding(2) var<storage, read> k_cache: array<vec4<f32>>; // [blocks, block_size, kv_heads, head_dim]
@group(0) @binding(3) var<storage, read> v_cache: array<vec4<f32>>; // as k_cache
@group(0) @binding(4) var<storage, read> items: array<vec4<i32>>; // from base on: row, position, sequence, 0
@group(0) @binding(5) var<storage, read> blocks: array<u32>; // [sequences, max_blocks]
{% if whole %}
@group(0) @binding(6) var<storage, read_write> out: array<vec4<f32>>; // [T, heads, head_dim]
{% else %}
@group(0) @binding(6) var<storage, read_write> out: array<vec4<f32>>; // [count, heads, splits]: sums [head_dim]; maximum, weight
{% endif %}

{% set quads = head_dim // 4 %}
{% set parts = lanes // quads %}
{% set loads = (positions * quads + lanes - 1) // lanes %}
{% set values = (positions + parts - 1) // parts %}
{# Rows in workgroup memory are longer, so that lanes meet different banks. #}
{% set row = quads + 2 %}
{% set pair = 2 if heads % 2 == 0 else 1 %}
{% set tiles = positions // 2 * (heads // pair) %}
{% set room = [positions * row, parts * quads] | max %}
{% set round = [[room // (parts * quads), 1] | max, heads] | min %}
const QUADS = {{ quads }}u;
const MASKED: f32 = -3.0e38;

var<workgroup> q_tile: array<vec4<f32>, {{ heads * row }}>;
var<workgroup> k_tile: array<vec4<f32>, {{ room }}>;
var<workgroup> slice_tile: array<f32, {{ slices * positions * heads }}>;
var<workgroup> score_tile: array<f32, {{ positions * heads }}>;
var<workgroup> weight_tile: array<f32, {{ positions * heads }}>;
var<workgroup> keep_tile: array<f32, {{ heads }}>;

{% include "shared/rows.wgsl" %}

{% if not aligned %}
// First quad of a position's key and value.
fn cached(sequence: u32, position: u32, kv_head: u32) -> u32 {
    let block = blocks[sequence * params.max_blocks + position / params.block_size];
    return ((block * params.block_size + position % params.block_size) * params.kv_heads + kv_head) * QUADS;
}

{% endif %}
@compute @workgroup_size({{ lanes }})
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let entry = folded(workgroup);
    if (entry >= params.count) {
        return;
    }
    let item = vec4<u32>(items[params.base + entry]);
    let row = item.x;
    let split = workgroup.x % params.splits;
    let first_head = workgroup.x / params.splits * {{ heads }}u;
    let kv_head = first_head / (params.heads / params.kv_heads);
    let sequence = item.z;
    let begin = split * params.chunk;
    if (begin > item.y) {
        return;
    }
    let end = min(begin + params.chunk, item.y + 1u);

    {# Past the end the last position is loaded again: it is in the cache, and its weight is 0. #}
    {% macro fetch_keys() %}
    {% for i in range(loads) %}
    {% if aligned %}
    k{{ i }} = k_cache[first + min(k_position{{ i }}, rest) * cell + k_quad{{ i }}];
    {% else %}
    k{{ i }} = k_cache[cached(sequence, next + min(k_position{{ i }}, rest), kv_head) + k_quad{{ i }}];
    {% endif %}
    {% endfor %}
    {% endmacro %}
    {% macro fetch_values() %}
    {% for j in range(values) %}
    {% if aligned %}
    v{{ j }} = v_cache[first + min(part + {{ j * parts }}u, rest) * cell + quad];
    {% else %}
    v{{ j }} = v_cache[cached(sequence, next + min(part + {{ j * parts }}u, rest), kv_head) + quad];
    {% endif %}
    {% endfor %}
    {% endmacro %}
    // What is loaded next begins at this position; of the run's last positions there may be fewer.
    let last_begin = begin + (end - 1u - begin) / {{ positions }}u * {{ positions }}u;
    var next = begin;
    var rest = end - 1u - next;
    {% if aligned %}
    // A block of the cache holds all of them. Blocks are looked up one step ahead of that.
    let cell = params.kv_heads * QUADS;
    let table = sequence * params.max_blocks;
    var first = (blocks[table + next / params.block_size] * params.block_size + next % params.block_size) * cell + kv_head * QUADS;
    var block_ahead = blocks[table + min(begin + {{ positions }}u, last_begin) / params.block_size];
    {% endif %}
    // Keys that this lane brings, the values that it sums, and its score.
    {% for i in range(loads) %}
    let k_index{{ i }} = min(lane + {{ i * lanes }}u, {{ positions * quads - 1 }}u);
    let k_position{{ i }} = k_index{{ i }} / QUADS;
    let k_quad{{ i }} = k_index{{ i }} % QUADS;
    var k{{ i }} = vec4<f32>();
    {% endfor %}
    let part = lane / QUADS;
    let quad = lane % QUADS;
    {% for j in range(values) %}
    var v{{ j }} = vec4<f32>();
    {% endfor %}
    let scores = lane < {{ positions * heads }}u;
    let score_position = lane / {{ heads }}u;
    let score_head = lane % {{ heads }}u;
    // The products that this lane sums: two positions times {{ pair }} of the heads, over a slice of the head.
    let slice = lane % {{ slices }}u;
    let tile = lane / {{ slices }}u;
    let tile_position = tile / {{ heads // pair }}u * 2u;
    let tile_head = tile % {{ heads // pair }}u * {{ pair }}u;
    {{ fetch_keys() }}
    {{ fetch_values() }}
    let source = (row * params.heads + first_head) * QUADS;
    for (var i = lane; i < {{ heads * quads }}u; i = i + {{ lanes }}u) {
        q_tile[i / QUADS * {{ row }}u + i % QUADS] = q[source + i] * params.scale;
    }
    {% for h in range(heads) %}
    var sum{{ h }} = vec4<f32>();
    {% endfor %}
    // Of the scores of this lane's head; of this lane's weights.
    var most = MASKED;
    var total = 0.0;
    for (var start = begin; start < end; start = start + {{ positions }}u) {
        {% for i in range(loads) %}
        k_tile[k_position{{ i }} * {{ row }}u + k_quad{{ i }}] = k{{ i }};
        {% endfor %}
        workgroupBarrier();
        next = min(start + {{ positions }}u, last_begin);
        rest = end - 1u - next;
        {% if aligned %}
        first = (block_ahead * params.block_size + next % params.block_size) * cell + kv_head * QUADS;
        block_ahead = blocks[table + min(start + {{ 2 * positions }}u, last_begin) / params.block_size];
        {% endif %}
        {{ fetch_keys() }}
        if (tile < {{ tiles }}u) {
            {% for a in range(2) %}
            {% for b in range(pair) %}
            var product{{ a }}_{{ b }} = vec4<f32>();
            {% endfor %}
            {% endfor %}
            let k_begin = tile_position * {{ row }}u + slice;
            let q_begin = tile_head * {{ row }}u + slice;
            {% for c in range(quads // slices) %}
            {
                {% for b in range(pair) %}
                let q{{ b }} = q_tile[q_begin + {{ b * row + c * slices }}u];
                {% endfor %}
                {% for a in range(2) %}
                let key{{ a }} = k_tile[k_begin + {{ a * row + c * slices }}u];
                {% for b in range(pair) %}
                product{{ a }}_{{ b }} = fma(key{{ a }}, q{{ b }}, product{{ a }}_{{ b }});
                {% endfor %}
                {% endfor %}
            }
            {% endfor %}
            let to = slice * {{ positions * heads }}u + tile_position * {{ heads }}u + tile_head;
            {% for a in range(2) %}
            {% for b in range(pair) %}
            slice_tile[to + {{ a * heads + b }}u] = product{{ a }}_{{ b }}.x + product{{ a }}_{{ b }}.y + product{{ a }}_{{ b }}.z + product{{ a }}_{{ b }}.w;
            {% endfor %}
            {% endfor %}
        }
        workgroupBarrier();
        var score = MASKED;
        if (scores) {
            if (start + score_position < end) {
                score = slice_tile[lane]{% for i in range(1, slices) %} + slice_tile[lane + {{ i * positions * heads }}u]{% endfor %};
            }
            score_tile[lane] = score;
        }
        workgroupBarrier();
        if (scores) {
            var peak = most;
            {% for p in range(positions) %}
            peak = max(peak, score_tile[score_head + {{ p * heads }}u]);
            {% endfor %}
            let keep = exp2(most - peak);
            let weight = exp2(score - peak);
            most = peak;
            total = total * keep + weight;
            weight_tile[lane] = weight;
            if (score_position == 0u) {
                keep_tile[score_head] = keep;
            }
        }
        workgroupBarrier();
        {% for h in range(heads) %}
        sum{{ h }} = sum{{ h }} * keep_tile[{{ h }}];
        {% endfor %}
        {% for j in range(values) %}
        {% if (j + 1) * parts > positions %}
        if (part < {{ positions - j * parts }}u) {
        {% else %}
        {
        {% endif %}
            let weights = (part + {{ j * parts }}u) * {{ heads }}u;
            {% for h in range(heads) %}
            sum{{ h }} = fma(vec4<f32>(weight_tile[weights + {{ h }}u]), v{{ j }}, sum{{ h }});
            {% endfor %}
        }
        {% endfor %}
        {{ fetch_values() }}
    }

    // Together: the weights of a head, and the sums of the parts, {{ round }} heads at a time.
    workgroupBarrier();
    if (scores) {
        score_tile[lane] = total;
        if (score_position == 0u) {
            keep_tile[score_head] = most;
        }
    }
    {% for first in range(0, heads, round) %}
    {% set count = [round, heads - first] | min %}
    workgroupBarrier();
    if (part < {{ parts }}u) {
        {% for h in range(count) %}
        k_tile[lane + {{ h * parts * quads }}u] = sum{{ first + h }};
        {% endfor %}
    }
    workgroupBarrier();
    for (var i = lane; i < {{ count * quads }}u; i = i + {{ lanes }}u) {
        let head = i / QUADS;
        let at = head * {{ parts * quads }}u + i % QUADS;
        var sum = vec4<f32>();
        {% for p in range(parts) %}
        sum = sum + k_tile[at + {{ p * quads }}u];
        {% endfor %}
        var weight = 0.0;
        {% for p in range(positions) %}
        weight = weight + score_tile[head + {{ first + p * heads }}u];
        {% endfor %}
        {% if whole %}
        out[source + {{ first * quads }}u + i] = sum / weight;
        {% else %}
        let to = ((entry * params.heads + first_head + head + {{ first }}u) * params.splits + split) * (QUADS + 1u);
        out[to + i % QUADS] = sum;
        if (i % QUADS == 0u) {
            out[to + QUADS] = vec4<f32>(keep_tile[head + {{ first }}u], weight, 0.0, 0.0);
        }
        {% endif %}
    }
    {% endfor %}
}
