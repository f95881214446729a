// What happens to the projected heads before attention: RMS norm of each query and key head, rotary position (halves
// rotated, as in the transformers library), keys and values written to their place in the paged cache. One workgroup
// for each row and head; attention reads q and the cache. The table comes from the host in f64: WGSL's own sine is
// good to about 2^-11 only.
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

@compute @workgroup_size({{ lanes }})
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = folded(workgroup);
    if (row >= params.rows) {
        return;
    }
    let head = workgroup.x;
    let half = params.head_dim / 2u;
    let source = (row * (params.heads + 2u * params.kv_heads) + head) * params.head_dim;
    let position = u32(rows[row].y);
    let sequence = u32(rows[row].z);
    let block = blocks[sequence * params.max_blocks + position / params.block_size];
    let cached = (block * params.block_size + position % params.block_size) * params.kv_heads * params.head_dim;

    if (head >= params.heads + params.kv_heads) {
        let target_base = cached + (head - params.heads - params.kv_heads) * params.head_dim;
        for (var i = lane; i < params.head_dim; i = i + {{ lanes }}u) {
            v_cache[target_base + i] = qkv[source + i];
        }
        return;
    }
    var squares = 0.0;
    for (var i = lane; i < params.head_dim; i = i + {{ lanes }}u) {
        squares = squares + qkv[source + i] * qkv[source + i];
    }
    squares = reduce_sum(squares, lane);
    let factor = inverseSqrt(squares / f32(params.head_dim) + params.eps);
    let is_query = head < params.heads;
    let weights = select(params.head_dim, 0u, is_query);
    for (var i = lane; i < half; i = i + {{ lanes }}u) {
        let turn = table[position * half + i];
        let first = qkv[source + i] * factor * norms[weights + i];
        let second = qkv[source + half + i] * factor * norms[weights + half + i];
        let low = first * turn.x - second * turn.y;
        let high = second * turn.x + first * turn.y;
        if (is_query) {
            let at = (row * params.heads + head) * params.head_dim + i;
            q[at] = low;
            q[at + half] = high;
        } else {
            let at = cached + (head - params.heads) * params.head_dim + i;
            k_cache[at] = low;
            k_cache[at + half] = high;
        }
    }
}
