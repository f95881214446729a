// RMS norm: out[i] = x[r] / sqrt(mean(x[r]^2) + eps) * weight, where r = i, or gather[i] with `gathered`. One
// workgroup a row.
struct NormParams {
    rows: u32,
    // D / 4.
    quads: u32,
    eps: f32,
    // 1 / D.
    scale: f32,
}

@group(0) @binding(0) var<uniform> params: NormParams;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>; // [T, D]
@group(0) @binding(2) var<storage, read> weight: array<vec4<f32>>; // [D]
@group(0) @binding(3) var<storage, read> gather: array<u32>; // [rows]; unused unless gathered
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>; // [rows, D]

{% include "shared/rows.wgsl" %}
{% include "shared/reduce.wgsl" %}

{% include "shared/long_row.wgsl" %}
    {% if gathered %}
    let source = gather[row] * params.quads;
    {% else %}
    let source = row * params.quads;
    {% endif %}
    {% include "shared/norm_row.wgsl" %}
    {% if loads %}
    {% for n in range(loads) %}
    if (i{{ n }} < params.quads) {
        out[row * params.quads + i{{ n }}] = v{{ n }} * factor * weight{{ n }};
    }
    {% endfor %}
    {% else %}
    for (var i = lane; i < params.quads; i = i + {{ lanes }}u) {
        out[row * params.quads + i] = x[source + i] * factor * weight[i];
    }
    {% endif %}
}
