// How many multiply-accumulates a second the device does when nothing has to be loaded: the limit that products are held
// against. Eight independent sums a subgroup (matrix) or an invocation (f32), so that latency does not count.
{% if matrix %}
{% import "shared/matrices.wgsl" as m %}
enable f16;
enable wgpu_cooperative_matrix;
diagnostic(off, derivative_uniformity);

{% endif %}
struct RateParams {
    rounds: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

@group(0) @binding(0) var<uniform> params: RateParams;
@group(0) @binding(1) var<storage, read_write> out: array<f32>; // what keeps the compiler from leaving the work out

{% if matrix %}
{% include "shared/matrices.wgsl" %}
var<workgroup> operand: array<f16, 512>;
var<workgroup> result: array<f32, {{ subgroups * 256 }}>;

@compute @workgroup_size({{ lanes }})
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_id) subgroup: u32,
) {
    for (var i = lane; i < 512u; i += {{ lanes }}u) {
        operand[i] = f16(f32(i % 7u) * 0.0625 - 0.1875);
    }
    for (var i = lane; i < {{ subgroups * 256 }}u; i += {{ lanes }}u) {
        result[i] = 0.0;
    }
    workgroupBarrier();
    {{ m.load("let left", "Left", "operand", "0", "16u", false) }}
    {{ m.load("let right", "Right", "operand", "256", "16u", false) }}
    {% for i in range(8) %}
    {{ m.load("var sum" ~ i, "Sum", "result", "subgroup * 256u", "16u", false) }}
    {% endfor %}
    for (var round = 0u; round < params.rounds; round += 1u) {
        {% for _ in range(4) %}
        {% for i in range(8) %}
        {{ m.multiply_add("sum" ~ i, "left", "right") }}
        {% endfor %}
        {% endfor %}
    }
    {% for i in range(8) %}
    {{ m.store("sum" ~ i, "result", "subgroup * 256u", "16u") }}
    workgroupBarrier();
    out[workgroup.x * {{ lanes }}u + lane] += result[lane];
    workgroupBarrier();
    {% endfor %}
}
{% else %}
@compute @workgroup_size({{ lanes }})
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let x = vec4<f32>(f32(lane % 7u) * 0.0625 - 0.1875);
    {% for i in range(8) %}
    var sum{{ i }} = x + {{ i }}.0;
    {% endfor %}
    for (var round = 0u; round < params.rounds; round += 1u) {
        {% for _ in range(4) %}
        {% for i in range(8) %}
        sum{{ i }} = fma(sum{{ i }}, x, x);
        {% endfor %}
        {% endfor %}
    }
    let total = sum0 + sum1 + sum2 + sum3 + sum4 + sum5 + sum6 + sum7;
    out[workgroup.x * {{ lanes }}u + lane] = total.x + total.y + total.z + total.w;
}
{% endif %}
