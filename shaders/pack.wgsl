// Rows of f32 as f16, each times a power of two that keeps it within range whatever its values. The exponents lie behind
// all rows, one vec4 each, exact as integers of f16. `expert_gemm_matrix` reads both. One workgroup a row.
{% if twice %}
// Behind the values of a row lies what rounding took from them: together they have the precision of f32. The largest value always
// comes to just below 2^7, so that what is left of it keeps clear of the smallest numbers of f16.
{% endif %}
{% if blocks %}
// Beside or instead of that as blocks of 16 rows and 16 values, from which `expert_gemm_direct` reads both.
{% endif %}
enable f16;

struct PackParams {
    rows: u32,
    // K / 4.
    quads: u32,
    // Blocks in a row, and where the exponents begin behind them, in words of eight bytes.
    blocks: u32,
    block_exponents: u32,
}

@group(0) @binding(0) var<uniform> params: PackParams;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>; // [rows, K]
@group(0) @binding(2) var<storage, read_write> packed: array<vec4<f16>>; // [rows, K], exponents [rows]
{% if blocks %}
@group(0) @binding(3) var<storage, read_write> blocks: array<vec4<f16>>; // [rows / 16, K / 16, 16, 16], exponents
{% endif %}

{% include "shared/rows.wgsl" %}
{% include "shared/reduce.wgsl" %}
{% include "shared/halves.wgsl" %}
{% if blocks %}
{% include "shared/blocks.wgsl" %}
{% endif %}
{% include "shared/packed_row.wgsl" %}

@compute @workgroup_size({{ lanes }})
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = folded(workgroup);
    if (row >= params.rows) {
        return;
    }
    let begin = row * params.quads;
    var most = 0u;
    for (var q = lane; q < params.quads; q = q + {{ lanes }}u) {
        most = max(most, most_of(x[begin + q]));
    }
    let shift = shift_of(reduce_max_u32(most, lane));
    let scale = power_of_two(shift);
    var squares = 0.0;
    for (var q = lane; q < params.quads; q = q + {{ lanes }}u) {
        let v = x[begin + q] * scale;
        squares = squares + dot(v, v);
        store_packed(row, q, v);
    }
    end_packed(row, shift, reduce_sum(squares, lane), lane);
}
