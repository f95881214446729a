// Random weights, written where they are read: word by word, eight weights an invocation. Every value is an odd multiple of
// 2^-8 of a power of two, so each storage type holds it exactly, and none is zero.
struct RandomParams {
    // Groups of eight weights.
    groups: u32,
    seed: u32,
    // A power of two: magnitudes lie below it.
    scale: f32,
    // The number of the first weight, for stacks that are cut.
    first: u32,
}

@group(0) @binding(0) var<uniform> params: RandomParams;
@group(0) @binding(1) var<storage, read_write> w: array<vec4<u32>>; // [groups]: eight weights, or two vec4 of f32

{% include "shared/rows.wgsl" %}

// A mixer of 32 bits whose every input bit reaches every output bit.
fn mixed(number: u32) -> u32 {
    var v = number;
    v = (v ^ (v >> 16u)) * 0x7feb352du;
    v = (v ^ (v >> 15u)) * 0x846ca68bu;
    return v ^ (v >> 16u);
}

fn value(at: u32) -> f32 {
    let steps = i32(mixed(at + mixed(params.seed)) >> 24u);
    return f32(2 * steps - 255) * params.scale * 0.00390625;
}

{% if dtype != "f32" %}
fn pair(at: u32) -> u32 {
    {% if dtype == "bf16" %}
    return (bitcast<u32>(value(at)) >> 16u) | (bitcast<u32>(value(at + 1u)) & 0xffff0000u);
    {% else %}
    return pack2x16float(vec2<f32>(value(at), value(at + 1u)));
    {% endif %}
}
{% endif %}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let group = folded(workgroup) * 64u + lane;
    if (group >= params.groups) {
        return;
    }
    let at = params.first + group * 8u;
    {% if dtype == "f32" %}
    w[group * 2u] = bitcast<vec4<u32>>(vec4<f32>(value(at), value(at + 1u), value(at + 2u), value(at + 3u)));
    w[group * 2u + 1u] = bitcast<vec4<u32>>(vec4<f32>(value(at + 4u), value(at + 5u), value(at + 6u), value(at + 7u)));
    {% else %}
    w[group] = vec4<u32>(pair(at), pair(at + 2u), pair(at + 4u), pair(at + 6u));
    {% endif %}
}
