// What happens to the projected heads before attention: RMS norm of each query and key head, rotary position (halves
// rotated, as in the transformers library), keys and values written to their place in the paged cache. One workgroup
// for each row and head; attention reads q and the cache. The table comes from the host in f64: WGSL's own sine is
// good to about 2^-11 only. With `pairs` a lane has at most that many elements of each half and keeps them: all that is read is
// on its way before anything waits.
struct RopeParams {
    rows: u32,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    block_size: u32,
    max_blocks: u32,
    eps: f32,
    pad0: u32,
}

@group(0) @binding(0) var<uniform> params: RopeParams;
@group(0) @binding(1) var<storage, read> qkv: array<f32>; // [T, (heads + 2 kv_heads) head_dim]
@group(0) @binding(2) var<storage, read> norms: array<f32>; // [2, head_dim]: query, key
@group(0) @binding(3) var<storage, read> table: array<vec2<f32>>; // [positions, head_dim / 2]: cos, sin
@group(0) @binding(4) var<storage, read> rows: array<vec4<i32>>; // [T] token, position, sequence, slot
@group(0) @binding(5) var<storage, read> blocks: array<u32>; // [sequences, max_blocks]
@group(0) @binding(6) var<storage, read_write> q: array<f32>; // [T, heads head_dim]
@group(0) @binding(7) var<storage, read_write> k_cache: array<f32>; // [blocks, block_size, kv_heads, head_dim]
@group(0) @binding(8) var<storage, read_write> v_cache: array<f32>; // as k_cache

{% include "shared/rows.wgsl" %}
{% include "shared/reduce.wgsl" %}

// Turns elements `i` of both halves of a head, and writes them to q or to the position of the cache at `cached`.
fn write_turned(row: u32, head: u32, cached: u32, i: u32, both: vec2<f32>, turn: vec2<f32>) {
    let half = params.head_dim / 2u;
    let low = both.x * turn.x - both.y * turn.y;
    let high = both.y * turn.x + both.x * turn.y;
    if (head < params.heads) {
        let at = (row * params.heads + head) * params.head_dim + i;
        q[at] = low;
        q[at + half] = high;
    } else {
        let at = cached + (head - params.heads) * params.head_dim + i;
        k_cache[at] = low;
        k_cache[at + half] = high;
    }
}

@compute @workgroup_size({{ lanes }})
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = folded(workgroup);
    if (row >= params.rows) {
        return;
    }
    let head = workgroup.x;
    let half = params.head_dim / 2u;
    let source = (row * (params.heads + 2u * params.kv_heads) + head) * params.head_dim;
    let is_query = head < params.heads;
    let weights = select(params.head_dim, 0u, is_query);
    {% for n in range(pairs) %}
    let i{{ n }} = lane + {{ n * lanes }}u;
    let at{{ n }} = min(i{{ n }}, half - 1u);
    let read{{ n }} = vec2<f32>(qkv[source + at{{ n }}], qkv[source + half + at{{ n }}]);
    let norm{{ n }} = vec2<f32>(norms[weights + at{{ n }}], norms[weights + half + at{{ n }}]);
    {% endfor %}
    let position = u32(rows[row].y);
    let sequence = u32(rows[row].z);
    let block = blocks[sequence * params.max_blocks + position / params.block_size];
    {% for n in range(pairs) %}
    let turn{{ n }} = table[position * half + at{{ n }}];
    {% endfor %}
    let cached = (block * params.block_size + position % params.block_size) * params.kv_heads * params.head_dim;

    if (head >= params.heads + params.kv_heads) {
        let target_base = cached + (head - params.heads - params.kv_heads) * params.head_dim;
        {% if pairs %}
        {% for n in range(pairs) %}
        if (i{{ n }} < half) {
            v_cache[target_base + i{{ n }}] = read{{ n }}.x;
            v_cache[target_base + half + i{{ n }}] = read{{ n }}.y;
        }
        {% endfor %}
        {% else %}
        for (var i = lane; i < params.head_dim; i = i + {{ lanes }}u) {
            v_cache[target_base + i] = qkv[source + i];
        }
        {% endif %}
        return;
    }
    var squares = 0.0;
    {% if pairs %}
    {% for n in range(pairs) %}
    squares = squares + select(0.0, dot(read{{ n }}, read{{ n }}), i{{ n }} < half);
    {% endfor %}
    {% else %}
    for (var i = lane; i < params.head_dim; i = i + {{ lanes }}u) {
        squares = squares + qkv[source + i] * qkv[source + i];
    }
    {% endif %}
    squares = reduce_sum(squares, lane);
    let factor = inverseSqrt(squares / f32(params.head_dim) + params.eps);
    {% if pairs %}
    {% for n in range(pairs) %}
    if (i{{ n }} < half) {
        write_turned(row, head, cached, i{{ n }}, read{{ n }} * factor * norm{{ n }}, turn{{ n }});
    }
    {% endfor %}
    {% else %}
    for (var i = lane; i < half; i = i + {{ lanes }}u) {
        let both = vec2<f32>(qkv[source + i], qkv[source + half + i]);
        let norm = vec2<f32>(norms[weights + i], norms[weights + half + i]);
        write_turned(row, head, cached, i, both * factor * norm, table[position * half + i]);
    }
    {% endif %}
}
