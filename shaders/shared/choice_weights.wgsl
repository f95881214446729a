// Weights of the experts that have a place, to be multiplied by `factor`.
var sum = 0.0;
{% for v in range(values) %}
let weight{{ v }} = score(key_value(max(logit{{ v }}, 1u)), most, total);
sum = sum + select(0.0, weight{{ v }}, place{{ v }} != 0xffffffffu);
{% endfor %}
sum = reduce_sum(sum, lane);
var factor = params.scale;
if (params.renormalise != 0u && sum > 0.0) {
    factor = factor / sum;
}
