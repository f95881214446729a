// First of two, before `align_scatter`.
{% set stage = "count" %}
{% set runs = false %}
{% include "shared/align.wgsl" %}
{% include "shared/count_chunks.wgsl" %}
