// Where the {{ w_loads }} rows of W that this invocation loads begin, `w_at0`..: the columns of y from `first_column` on.
{% set whole = fixed and fixed_out_rows % columns == 0 and columns % at_once == 0 %}
{% if gated is defined and gated %}
// Those of gate and of up take turns, 16 by 16, so that a subgroup has both of a column.
{% for i in range(w_loads) %}
let h_column{{ i }} = first_column + row{{ i }} / 32u * 16u + row{{ i }} % 16u;
let up_row{{ i }} = row{{ i }} / 16u % 2u;
{% if whole %}
let h_held{{ i }} = h_column{{ i }};
{% else %}
let h_held{{ i }} = min(h_column{{ i }}, {{ size.out_rows }} / 2u - 1u);
{% endif %}
{% if kind == "swiglu_clamped" %}
let w_at{{ i }} = (expert * {{ size.out_rows }} + h_held{{ i }} * 2u + up_row{{ i }}) * {{ size.groups }};
{% else %}
let w_at{{ i }} = (expert * {{ size.out_rows }} + h_held{{ i }} + up_row{{ i }} * ({{ size.out_rows }} / 2u)) * {{ size.groups }};
{% endif %}
{% endfor %}
{% else %}
{% if whole %}
let w_at0 = (expert * {{ size.out_rows }} + first_column + row0) * {{ size.groups }};
{% endif %}
{% for i in range(w_loads) %}
{% if not whole %}
let w_at{{ i }} = (expert * {{ size.out_rows }} + min(first_column + row{{ i }}, {{ size.out_rows }} - 1u)) * {{ size.groups }};
{% elif i > 0 %}
let w_at{{ i }} = w_at0 + {{ i * at_once * fixed_groups }}u;
{% endif %}
{% endfor %}
{% endif %}
