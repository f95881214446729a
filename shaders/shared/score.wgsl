// The score of an expert with finite logit `x`; `most` is the largest logit of the row.
fn score(x: f32, most: f32, total: f32) -> f32 {
    {% if score == "sigmoid" %}
    return 1.0 / (1.0 + exp(-x));
    {% else %}
    return exp(x - most) / total;
    {% endif %}
}
