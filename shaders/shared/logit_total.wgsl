// The largest logit of the row and the sum of its softmax: `most` and `total`.
var best = 0u;
{% for v in range(values) %}
best = max(best, logit{{ v }});
{% endfor %}
best = reduce_max_u32(best, lane);
let most = key_value(max(best, 1u));
var total = 0.0;
{% for v in range(values) %}
total = total + select(0.0, exp(key_value(max(logit{{ v }}, 1u)) - most), logit{{ v }} != 0u);
{% endfor %}
total = reduce_sum(total, lane);
