// What happens to the projected heads before attention: RMS norm of each query and key head, rotary position (halves
// rotated, as in the transformers library), keys and values written to their place in the paged cache. One workgroup
// for each row and head, or for some heads of many rows; attention reads q and the cache. The table comes from the host in f64: WGSL's own sine is
// good to about 2^-11 only. With `pairs` a lane has at most that many elements of each half and keeps them: all that is read is
// on its way before anything waits. With several `parts` the heads are their sum. With `lora` the heads still lack what adapters add, B u, and q stands in one buffer with them.
struct RopeParams {
    rows: u32,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    block_size: u32,
    max_blocks: u32,
    eps: f32,
    // With lora: rank that u has room for, and where u and q begin in `work`.
    max_rank: u32,
    u_base: u32,
    q_base: u32,
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<uniform> params: RopeParams;
{% set at = 0 if lora else 1 %}
{% if lora %}
@group(0) @binding(5) var<storage, read> pool: array<vec4<u32>>;
// f32 [T, (heads + 2 kv_heads) head_dim]; from u_base on u [T, 3, 4 + max_rank], as `pair_shrink` has it; from q_base on q.
@group(0) @binding(6) var<storage, read_write> work: array<u32>;
{% else %}
@group(0) @binding(1) var<storage, read> qkv: array<f32>; // [{{ parts ~ ", " if parts > 1 }}T, (heads + 2 kv_heads) head_dim]
@group(0) @binding(6) var<storage, read_write> q: array<f32>; // [T, heads head_dim]
{% endif %}
@group(0) @binding({{ at + 1 }}) var<storage, read> norms: array<f32>; // [2, head_dim]: query, key
@group(0) @binding({{ at + 2 }}) var<storage, read> table: array<vec2<f32>>; // [positions, head_dim / 2]: cos, sin
@group(0) @binding({{ at + 3 }}) var<storage, read> rows: array<vec4<i32>>; // [T] token, position, sequence, slot
@group(0) @binding({{ at + 4 }}) var<storage, read> blocks: array<u32>; // [sequences, max_blocks]
@group(0) @binding(7) var<storage, read_write> k_cache: array<f32>; // [blocks, block_size, kv_heads, head_dim]
@group(0) @binding(8) var<storage, read_write> v_cache: array<f32>; // as k_cache

{% include "shared/rows.wgsl" %}
{% include "shared/reduce.wgsl" %}

{% if lora %}
{% include "shared/factors.wgsl" %}
{% with words_of_u = "work" %}
{% include "shared/addend.wgsl" %}
{% endwith %}

fn load_qkv(at: u32) -> f32 {
    return bitcast<f32>(work[at]);
}

fn write_q(at: u32, value: f32) {
    work[params.q_base + at] = bitcast<u32>(value);
}
{% else %}
fn load_qkv(at: u32) -> f32 {
    {% if parts > 1 %}
    let part = params.rows * (params.heads + 2u * params.kv_heads) * params.head_dim;
    {% endif %}
    return {% for p in range(parts) %}{{ " + " if p > 0 }}qkv[at{% if p > 0 %} + {{ p }}u * part{% endif %}]{% endfor %};
}

fn write_q(at: u32, value: f32) {
    q[at] = value;
}
{% endif %}

// Turns elements `i` of both halves of a head, and writes them to q or to the position of the cache at `cached`.
fn write_turned(row: u32, head: u32, cached: u32, i: u32, both: vec2<f32>, turn: vec2<f32>) {
    let half = params.head_dim / 2u;
    let low = both.x * turn.x - both.y * turn.y;
    let high = both.y * turn.x + both.x * turn.y;
    if (head < params.heads) {
        let at = (row * params.heads + head) * params.head_dim + i;
        write_q(at, low);
        write_q(at + half, high);
    } else {
        let at = cached + (head - params.heads) * params.head_dim + i;
        k_cache[at] = low;
        k_cache[at + half] = high;
    }
}

@compute @workgroup_size({{ lanes * heads_at_once }})
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    {% if heads_at_once > 1 %}
    @builtin(subgroup_invocation_id) lane: u32,
    @builtin(subgroup_id) subgroup: u32,
    {% else %}
    @builtin(local_invocation_index) lane: u32,
    {% endif %}
) {
    let row = folded(workgroup);
    {% if heads_at_once > 1 %}
    // Many small workgroups would take longer to start than to work: each subgroup has a head.
    let head = workgroup.x * {{ heads_at_once }}u + subgroup;
    if (row >= params.rows || head >= params.heads + 2u * params.kv_heads) {
        return;
    }
    {% else %}
    let head = workgroup.x;
    if (row >= params.rows) {
        return;
    }
    {% endif %}
    let half = params.head_dim / 2u;
    let source = (row * (params.heads + 2u * params.kv_heads) + head) * params.head_dim;
    let is_query = head < params.heads;
    let weights = select(params.head_dim, 0u, is_query);
    {% if lora %}
    let projection = u32(head >= params.heads) + u32(head >= params.heads + params.kv_heads);
    let of_projection = head - select(0u, params.heads, projection > 0u) - select(0u, params.kv_heads, projection > 1u);
    let head_at = params.u_base + (row * 3u + projection) * (params.max_rank + 4u);
    let adapter = vec4<u32>(work[head_at], work[head_at + 1u], work[head_at + 2u], 0u);
    let u_at = head_at / 4u + 1u;
    let first_column = of_projection * params.head_dim;
    {% endif %}
    {% for n in range(pairs) %}
    let i{{ n }} = lane + {{ n * lanes }}u;
    let at{{ n }} = min(i{{ n }}, half - 1u);
    {{ "var" if lora else "let" }} read{{ n }} = vec2<f32>(load_qkv(source + at{{ n }}), load_qkv(source + half + at{{ n }}));
    let norm{{ n }} = vec2<f32>(norms[weights + at{{ n }}], norms[weights + half + at{{ n }}]);
    {% endfor %}
    let position = u32(rows[row].y);
    let sequence = u32(rows[row].z);
    let block = blocks[sequence * params.max_blocks + position / params.block_size];
    {% for n in range(pairs) %}
    let turn{{ n }} = table[position * half + at{{ n }}];
    {% endfor %}
    {% if lora %}
    {% macro add(part) %}
    {
        let of_u = read_u(adapter, u_at, {{ part }});
        {% for n in range(pairs) %}
        let low{{ n }} = read_group(adapter, first_column + at{{ n }}, {{ part }});
        let high{{ n }} = read_group(adapter, first_column + half + at{{ n }}, {{ part }});
        {% endfor %}
        {% for n in range(pairs) %}
        read{{ n }} = read{{ n }} + vec2<f32>(product_of(low{{ n }}, of_u), product_of(high{{ n }}, of_u));
        {% endfor %}
    }
    {% endmacro %}
    // A rank of 16 is read at once.
    {{ add("0u") }}
    {{ add("1u") }}
    for (var part = 2u; part < adapter.y; part = part + 1u) {
        {{ add("part") }}
    }
    {% endif %}
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
            v_cache[target_base + i] = load_qkv(source + i);
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
        squares = squares + load_qkv(source + i) * load_qkv(source + i);
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
        let both = vec2<f32>(load_qkv(source + i), load_qkv(source + half + i));
        let norm = vec2<f32>(norms[weights + i], norms[weights + half + i]);
        write_turned(row, head, cached, i, both * factor * norm, table[position * half + i]);
    }
    {% endif %}
}
