// The {{ values }} logits of this lane in the row that begins at `row`, as words that order like them: `logit0`.. of `expert0`..
{% for v in range(values) %}
let expert{{ v }} = lane * {{ values }}u + {{ v }}u;
let at{{ v }} = row + min(expert{{ v }}, params.experts - 1u);
let read{{ v }} = {{ logit("at" ~ v) if logit is defined else "logits[at" ~ v ~ "]" }};
{% endfor %}
{% for v in range(values) %}
let logit{{ v }} = select(0u, order_key(read{{ v }}), expert{{ v }} < params.experts);
{% endfor %}
