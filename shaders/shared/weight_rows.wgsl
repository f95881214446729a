// Where the {{ w_loads }} rows of W that this invocation loads begin, `w_at0`..: the columns of y from `first_column` on.
{% set whole = fixed and fixed_out_rows % columns == 0 and columns % at_once == 0 %}
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
