// Keys and values of some sequences as f16, a block of {{ positions }} positions of one head together, each block with the power of
// two that brings its largest magnitude near the top of f16: every tile of queries reads them, so they are converted
// once. Positions past the end are zeros. `attention_matrix` reads the result. One workgroup for each block and head.
enable f16;

struct AttentionPackParams {
    kv_heads: u32,
    block_size: u32,
    max_blocks: u32,
    // Blocks to pack: the first entries of `items`.
    count: u32,
}

@group(0) @binding(0) var<uniform> params: AttentionPackParams;
@group(0) @binding(1) var<storage, read> k_cache: array<vec4<f32>>; // [blocks, block_size, kv_heads, head_dim]
@group(0) @binding(2) var<storage, read> v_cache: array<vec4<f32>>; // as k_cache
@group(0) @binding(3) var<storage, read> items: array<vec4<i32>>; // [count] sequence, first position, end, 0
@group(0) @binding(4) var<storage, read> blocks: array<u32>; // [sequences, max_blocks]
@group(0) @binding(5) var<storage, read_write> packed: array<vec4<f16>>; // [count, kv_heads] keys, values, exponents

{% set quads = head_dim // 4 %}
{% set loads = positions * quads // lanes %}
const QUADS = {{ quads }}u;
const BLOCK = {{ positions * quads }}u;

{% include "shared/rows.wgsl" %}
{% include "shared/reduce.wgsl" %}
{% include "shared/halves.wgsl" %}

@compute @workgroup_size({{ lanes }})
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let entry = folded(workgroup);
    if (entry >= params.count) {
        return;
    }
    let head = workgroup.x;
    let item = vec4<u32>(items[entry]);
    let to = (entry * params.kv_heads + head) * (2u * BLOCK + 2u);
    var k_most = 0u;
    var v_most = 0u;
    {% for i in range(loads) %}
    let position{{ i }} = item.y + (lane + {{ i * lanes }}u) / QUADS;
    let cell{{ i }} = min(position{{ i }}, item.z - 1u);
    let block{{ i }} = blocks[item.x * params.max_blocks + cell{{ i }} / params.block_size];
    let at{{ i }} = ((block{{ i }} * params.block_size + cell{{ i }} % params.block_size) * params.kv_heads + head) * QUADS + lane % QUADS;
    let held{{ i }} = position{{ i }} < item.z;
    let k{{ i }} = select(vec4<f32>(), k_cache[at{{ i }}], held{{ i }});
    let v{{ i }} = select(vec4<f32>(), v_cache[at{{ i }}], held{{ i }});
    {% endfor %}
    {% for i in range(loads) %}
    k_most = max(k_most, most_of(k{{ i }}));
    v_most = max(v_most, most_of(v{{ i }}));
    {% endfor %}
    // Bounded above, so that the kernel that takes them off again stays within f32.
    let k_shift = min(half_shift(reduce_max_u32(k_most, lane)), {{ most_score_shift }});
    let v_shift = min(half_shift(reduce_max_u32(v_most, lane)), {{ most_value_shift }});
    {% for i in range(loads) %}
    packed[to + lane + {{ i * lanes }}u] = vec4<f16>(k{{ i }} * power_of_two(k_shift));
    packed[to + BLOCK + lane + {{ i * lanes }}u] = vec4<f16>(v{{ i }} * power_of_two(v_shift));
    {% endfor %}
    if (lane == 0u) {
        packed[to + 2u * BLOCK] = vec4<f16>(f16(k_shift), f16(v_shift), 0.0h, 0.0h);
    }
}
