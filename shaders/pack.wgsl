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

{% if twice %}
// Rounded to the digits of f16 by their bits: a compiler may take a conversion there and back for nothing. What is no finite
// number stays what it is.
fn rounded(v: vec4<f32>) -> vec4<f32> {
    let bits = bitcast<vec4<u32>>(v);
    let up = bits + 0xfffu + ((bits >> vec4<u32>(13u)) & vec4<u32>(1u));
    let finite = (bits & vec4<u32>(0x7f800000u)) != vec4<u32>(0x7f800000u);
    return bitcast<vec4<f32>>(select(bits, up & vec4<u32>(0xffffe000u), finite));
}
{% endif %}

@compute @workgroup_size({{ lanes }})
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = folded(workgroup);
    if (row >= params.rows) {
        return;
    }
    let begin = row * params.quads;
    let to = begin{% if twice %} * 2u{% endif %};
    var most = 0u;
    for (var q = lane; q < params.quads; q = q + {{ lanes }}u) {
        let v = bitcast<vec4<u32>>(abs(x[begin + q]));
        most = max(most, max(max(v.x, v.y), max(v.z, v.w)));
    }
    let shift = {{ "operand_shift" if twice else "row_shift" }}(reduce_max_u32(most, lane));
    let scale = power_of_two(shift);
    for (var q = lane; q < params.quads; q = q + {{ lanes }}u) {
        let v = x[begin + q] * scale;
        {% if twice %}
        let near = rounded(v);
        packed[to + q] = vec4<f16>(near);
        packed[to + params.quads + q] = vec4<f16>(v - near);
        {% else %}
        {% if by_row %}
        packed[to + q] = vec4<f16>(v);
        {% endif %}
        {% if blocks %}
        blocks[block_quad(row, q, params.blocks)] = vec4<f16>(v);
        {% endif %}
        {% endif %}
    }
    {% if blocks %}
    for (var q = params.quads + lane; q < params.blocks * 4u; q = q + {{ lanes }}u) {
        blocks[block_quad(row, q, params.blocks)] = vec4<f16>();
    }
    if (lane == 0u) {
        blocks[params.block_exponents + row] = vec4<f16>(f16(shift));
    }
    {% endif %}
    if (lane == 0u) {
        packed[params.rows * params.quads{% if twice %} * 2u{% endif %} + row] = vec4<f16>(f16(shift));
    }
}
