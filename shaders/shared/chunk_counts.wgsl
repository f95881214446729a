// Adds to `before` and `total` what chunks have of `bucket`: those before this one, and all. Many counts are loaded at a time, for one after
// the other each would be waited for.
var c = 0u;
for (; c + 16u <= params.chunks; c = c + 16u) {
    {% for i in range(16) %}
    let count{{ i }} = work[(c + {{ i }}u) * width + bucket];
    {% endfor %}
    {% for i in range(16) %}
    before = before + select(0u, count{{ i }}, c + {{ i }}u < chunk);
    total = total + count{{ i }};
    {% endfor %}
}
for (; c < params.chunks; c = c + 1u) {
    let count = work[c * width + bucket];
    before = before + select(0u, count, c < chunk);
    total = total + count;
}
