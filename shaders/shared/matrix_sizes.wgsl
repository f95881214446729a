{# Sizes of a product on cooperative matrices, as shaders write them: numbers where a pipeline is made for each shape (`fixed`), since
   addresses that a compiler can work out beforehand cost neither registers nor instructions; else what `params` says. `size` is the name
   of this file in others. #}
{% set groups = fixed_groups ~ "u" if fixed else "params.groups" %}
{% set x_groups = fixed_x_groups ~ "u" if fixed else "params.x_groups" %}
{% set x_stride = fixed_x_stride ~ "u" if fixed else "params.x_stride" %}
{% set out_rows = fixed_out_rows ~ "u" if fixed else "params.out_rows" %}
{% set y_stride = fixed_y_stride ~ "u" if fixed else "params.y_stride" %}
