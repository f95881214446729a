// The norm of rows as `norm` computes it, packed as `pack` packs it: for products on matrices, which then have nothing to read and pack
// before them. One workgroup a row.
{% if plain %}
// Beside that stands the norm in f32, for who reads it.
{% endif %}
{% if parts %}
// A product in parts of its depth is added to x first.
{% endif %}
enable f16;

struct NormPackParams {
    rows: u32,
    // D / 4.
    quads: u32,
    eps: f32,
    // 1 / D.
    scale: f32,
    // Blocks in a row, and where the exponents begin behind them, in words of eight bytes.
    blocks: u32,
    block_exponents: u32,
    // 1: row i is made of row gather[i] of x, else of row i.
    gathered: u32,
    pad0: u32,
}

@group(0) @binding(0) var<uniform> params: NormPackParams;
{# In parts one is read less, and x is written, which comes last. #}
{% set first = 3 if parts else 4 %}
{% set last = first + 1 + (1 if blocks else 0) + (1 if plain else 0) %}
@group(0) @binding({{ last if parts else 1 }}) var<storage, {{ "read_write" if parts else "read" }}> x: array<vec4<f32>>; // [T, D]
@group(0) @binding({{ 1 if parts else 2 }}) var<storage, read> weight: array<vec4<f32>>; // [D]
{% if parts %}
@group(0) @binding(2) var<storage, read> added: array<vec4<f32>>; // [{{ parts }}, T, D]
{% else %}
@group(0) @binding(3) var<storage, read> gather: array<u32>; // [rows]; unused unless gathered
{% endif %}
@group(0) @binding({{ first }}) var<storage, read_write> packed: array<vec4<f16>>; // [rows, D], exponents [rows]
{% if blocks %}
@group(0) @binding({{ first + 1 }}) var<storage, read_write> blocks: array<vec4<f16>>; // [rows / 16, D / 16, 16, 16], exponents
{% endif %}
{% if plain %}
@group(0) @binding({{ first + 2 if blocks else first + 1 }}) var<storage, read_write> out: array<vec4<f32>>; // [rows, D]
{% endif %}

{% include "shared/rows.wgsl" %}
{% include "shared/reduce.wgsl" %}
{% include "shared/halves.wgsl" %}
{% if blocks %}
{% include "shared/blocks.wgsl" %}
{% endif %}
{% include "shared/packed_row.wgsl" %}

{% include "shared/long_row.wgsl" %}
    // One variant for both: rows are many.
    var source = row * params.quads;
    {% if not parts %}
    if (params.gathered != 0u) {
        source = gather[row] * params.quads;
    }
    {% endif %}
    {% include "shared/norm_row.wgsl" %}
    var most = 0u;
    {% if loads %}
    {% for n in range(loads) %}
    let y{{ n }} = v{{ n }} * factor * weight{{ n }};
    most = max(most, most_of(y{{ n }}));
    {% endfor %}
    {% else %}
    // Computed again rather than kept: a row has any width.
    for (var i = lane; i < params.quads; i = i + {{ lanes }}u) {
        most = max(most, most_of(x[source + i] * factor * weight[i]));
    }
    {% endif %}
    let shift = shift_of(reduce_max_u32(most, lane));
    let to_halves = power_of_two(shift);
    var packed_squares = 0.0;
    {% macro store(i, y) %}
        let half_values = {{ y }} * to_halves;
        packed_squares = packed_squares + dot(half_values, half_values);
        store_packed(row, {{ i }}, half_values);
        {% if plain %}
        out[row * params.quads + {{ i }}] = {{ y }};
        {% endif %}
    {% endmacro %}
    {% if loads %}
    {% for n in range(loads) %}
    if (i{{ n }} < params.quads) {
        {{ store("i" ~ n, "y" ~ n) }}
    }
    {% endfor %}
    {% else %}
    for (var i = lane; i < params.quads; i = i + {{ lanes }}u) {
        let y = x[source + i] * factor * weight[i];
        {{ store("i", "y") }}
    }
    {% endif %}
    end_packed(row, shift, reduce_sum(packed_squares, lane), lane);
}
