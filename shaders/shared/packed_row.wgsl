// How a workgroup leaves one packed row: its values, times a power of two, and then the power, and that which the norm of the row so
// multiplied is below.
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

// The power of two of a row whose largest magnitude has these bits.
fn shift_of(most: u32) -> i32 {
    return {{ "operand_shift" if twice else "row_shift" }}(most);
}

fn store_packed(row: u32, quad: u32, v: vec4<f32>) {
    {% if twice %}
    let near = rounded(v);
    packed[row * params.quads * 2u + quad] = vec4<f16>(near);
    packed[row * params.quads * 2u + params.quads + quad] = vec4<f16>(v - near);
    {% else %}
    {% if by_row %}
    packed[row * params.quads + quad] = vec4<f16>(v);
    {% endif %}
    {% if blocks %}
    blocks[block_quad(row, quad, params.blocks)] = vec4<f16>(v);
    {% endif %}
    {% endif %}
}

// The power of two that the root of `squares` is below, rounding to f16 included.
fn norm_power(squares: f32) -> i32 {
    return (i32(bitcast<u32>(squares * 1.01) >> 23u) - 125) >> 1u;
}

// Zeros up to the end of the blocks, the exponent, and what the sum of the squares of the row, so multiplied, says of its norm.
fn end_packed(row: u32, shift: i32, squares: f32, lane: u32) {
    {% if blocks %}
    for (var quad = params.quads + lane; quad < params.blocks * 4u; quad = quad + {{ lanes }}u) {
        blocks[block_quad(row, quad, params.blocks)] = vec4<f16>();
    }
    {% endif %}
    if (lane == 0u) {
        let word = vec4<f16>(f16(shift), f16(norm_power(squares)), f16(), f16());
        {% if blocks %}
        blocks[params.block_exponents + row] = word;
        {% endif %}
        packed[params.rows * params.quads{% if twice %} * 2u{% endif %} + row] = word;
    }
}
