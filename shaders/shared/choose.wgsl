// The choice of experts inside the first product of few pairs, so that nothing waits for a stage between: each subgroup chooses for its
// own pair what `route` would, and one for each pair `writes` id and weight for the stages behind.
{% with lanes = depth_lanes, one_subgroup = true %}
{% include "shared/reduce.wgsl" %}
{% endwith %}
{% include "shared/score.wgsl" %}

// The expert of `pair`; -1 where the row has too few finite logits. `top_k` pairs share a row.
fn chosen(pair: u32, top_k: u32, lane: u32, writes: bool) -> i32 {
    let row = pair / top_k * params.experts;
    {% include "shared/logits.wgsl" %}
    {% for v in range(values) %}
    var key{{ v }} = logit{{ v }};
    {% endfor %}
    {% with top_k = "top_k" %}
    {% include "shared/places.wgsl" %}
    {% endwith %}
    let own_place = pair % top_k;
    var own = 0u;
    {% for v in range(values) %}
    own = select(own, expert{{ v }} + 1u, place{{ v }} == own_place);
    {% endfor %}
    let id = i32(reduce_max_u32(own, lane)) - 1;
    if (writes) {
        {% include "shared/logit_total.wgsl" %}
        {% include "shared/choice_weights.wgsl" %}
        var weight = 0.0;
        {% for v in range(values) %}
        weight = select(weight, weight{{ v }} * factor, place{{ v }} == own_place);
        {% endfor %}
        weight = reduce_sum(weight, lane);
        if (lane == 0u) {
            topk[pair] = bitcast<u32>(id);
            topk[params.weights_base + pair] = bitcast<u32>(weight);
        }
    }
    return id;
}
