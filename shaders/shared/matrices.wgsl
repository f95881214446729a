{# What shaders say of matrices, in blocks of 16 x 16 whatever the device multiplies: one matrix where its own have that `edge`, else two
   by two of 8 x 8, named by row and column. A block stands in memory row by row (`_t`, as in WGSL) or column by column, and
   `stride` leads to the next. Offsets and strides count what the array holds: numbers, or quads, which are four of them.
   `m` is the name of this file in others. #}
{# Blocks of 16 x 16 as pairs of row and column of their matrices. #}
{% set parts = [[0, 0], [0, 1], [1, 0], [1, 1]] %}
{# Where in an array a matrix of a block begins: `across` strides, and `along` them. #}
{% macro part_at(at, stride, across, along, quads) -%}
{{ at }}{% if across %} + 8u * {{ stride }}{% endif %}{% if along %} + {{ 2 if quads else 8 }}u{% endif %}
{%- endmacro %}
{% macro load_as(function, to, kind, array, at, stride, quads) -%}
{% if edge == 16 -%}
{{ to }} = {{ function }}<{{ kind }}>(&{{ array }}[{{ at }}], {{ stride }});
{%- else -%}
{% for r, c in parts -%}
{% set place = part_at(at, stride, r, c, quads) if function == "coopLoadT" else part_at(at, stride, c, r, quads) -%}
{{ to }}_{{ r }}{{ c }} = {{ function }}<{{ kind }}>(&{{ array }}[{{ place }}]{{ ".x" if quads }}, {{ stride }}{{ " * 4u" if quads }});
{% endfor %}
{%- endif %}
{%- endmacro %}
{# Declares or sets `to`, as in `let left`, a block of a `kind`: Left, Right or Sum. #}
{% macro load_t(to, kind, array, at, stride, quads=true) %}{{ load_as("coopLoadT", to, kind, array, at, stride, quads) }}{% endmacro %}
{% macro load(to, kind, array, at, stride, quads=true) %}{{ load_as("coopLoad", to, kind, array, at, stride, quads) }}{% endmacro %}
{# A block of a `kind` that is 0, or that is loaded later. #}
{% macro empty(name, kind) -%}
{% if edge == 16 -%}
var {{ name }} = {{ kind }}();
{%- else -%}
{% for r, c in parts %}var {{ name }}_{{ r }}{{ c }} = {{ kind }}(); {% endfor %}
{%- endif %}
{%- endmacro %}
{# A sum of nothing so far. #}
{% macro zero(name) %}{{ empty(name, "Sum") }}{% endmacro %}
{% macro multiply_add(sum, left, right) -%}
{% if edge == 16 -%}
{{ sum }} = coopMultiplyAdd({{ left }}, {{ right }}, {{ sum }});
{%- else -%}
{% for k in range(2) %}
{% for r, c in parts %}
{{ sum }}_{{ r }}{{ c }} = coopMultiplyAdd({{ left }}_{{ r }}{{ k }}, {{ right }}_{{ k }}{{ c }}, {{ sum }}_{{ r }}{{ c }});
{% endfor %}
{% endfor %}
{%- endif %}
{%- endmacro %}
{# The same with a right block that is loaded for it. #}
{% macro multiply_add_loaded(sum, left, array, at, stride, by_row) -%}
{% set function = "coopLoadT" if by_row else "coopLoad" -%}
{% if edge == 16 -%}
{{ sum }} = coopMultiplyAdd({{ left }}, {{ function }}<Right>(&{{ array }}[{{ at }}], {{ stride }}), {{ sum }});
{%- else -%}
{
{{ load_as(function, "let loaded", "Right", array, at, stride, true) }}{{ multiply_add(sum, left, "loaded") }}}
{%- endif %}
{%- endmacro %}
{# Before a block is stored: its value, and where. naga 30 wants neither to be an expression. #}
{% macro hold(name, block) -%}
{% if edge == 16 -%}
let {{ name }} = {{ block }};
{%- else -%}
{% for r, c in parts %}let {{ name }}_{{ r }}{{ c }} = {{ block }}_{{ r }}{{ c }}; {% endfor %}
{%- endif %}
{%- endmacro %}
{% macro point(name, array, at) -%}
let {{ name }} = {% if edge == 16 %}&{{ array }}[{{ at }}]{% else %}{{ at }}{% endif %};
{%- endmacro %}
{% macro store_parts(function, block, array, at, stride, quads) -%}
{% for r, c in parts -%}
{% set place = part_at(at, stride, r, c, quads) if function == "coopStoreT" else part_at(at, stride, c, r, quads) -%}
{
    let part = {{ block }}_{{ r }}{{ c }};
    let to = &{{ array }}[{{ place }}]{{ ".x" if quads }};
    let step = {{ stride }}{{ " * 4u" if quads }};
    {{ function }}(part, to, step);
}
{% endfor %}
{%- endmacro %}
{# Stores what `hold` and `point` have named, into the array that was pointed to. #}
{% macro store_t(block, place, array, stride, quads) -%}
{% if edge == 16 -%}
coopStoreT({{ block }}, {{ place }}, {{ stride }});
{%- else -%}
{{ store_parts("coopStoreT", block, array, place, stride, quads) }}
{%- endif %}
{%- endmacro %}
{% macro store(block, array, at, stride) -%}
{% if edge == 16 -%}
coopStore({{ block }}, &{{ array }}[{{ at }}], {{ stride }});
{%- else -%}
{{ store_parts("coopStore", block, array, at, stride, false) }}
{%- endif %}
{%- endmacro %}
{# Four numbers of an array that matrices are loaded from, to them and back: vectors, or where matrices are loaded by the address of one
   number, as in Metal, structs. #}
{% macro quad(type) %}{% if edge == 16 %}vec4<{{ type }}>{% else %}Quad_{{ type }}{% endif %}{% endmacro %}
{% macro to_quad(type, vector) %}{% if edge == 16 %}{{ vector }}{% else %}quad_{{ type }}({{ vector }}){% endif %}{% endmacro %}
{% macro of_quad(quad) %}{% if edge == 16 %}{{ quad }}{% else %}vector_f32({{ quad }}){% endif %}{% endmacro %}
// The matrices that a device of this tier multiplies: operands of f16, sums of f32.
alias Left = coop_mat{{ edge }}x{{ edge }}<f16, A>;
alias Right = coop_mat{{ edge }}x{{ edge }}<f16, B>;
alias Sum = coop_mat{{ edge }}x{{ edge }}<f32, C>;
{%- if edge == 8 %}


// Four numbers by name: a vector has no addresses within.
{% for type in ["f16", "f32"] %}
struct Quad_{{ type }} {
    x: {{ type }},
    y: {{ type }},
    z: {{ type }},
    w: {{ type }},
}

fn quad_{{ type }}(v: vec4<{{ type }}>) -> Quad_{{ type }} {
    return Quad_{{ type }}(v.x, v.y, v.z, v.w);
}

{% endfor %}
fn vector_f32(q: Quad_f32) -> vec4<f32> {
    return vec4<f32>(q.x, q.y, q.z, q.w);
}
{% endif %}
