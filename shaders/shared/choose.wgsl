// The choice of experts inside the first product of few pairs, so that nothing waits for a stage between: each subgroup finds the expert
// of its own pair, and a workgroup for each token leaves for the stages behind what `route` would.
{% with lanes = depth_lanes, one_subgroup = true %}
{% include "shared/reduce.wgsl" %}
{% endwith %}
{% include "shared/score.wgsl" %}

// What the subgroups of a workgroup agree on: read in a way that says so, since they do subgroup operations only where all do.
var<workgroup> agreed: i32;

// The expert of `pair`, -1 where the row has too few finite logits: that of the largest logit, after as many larger ones as pairs of the
// row stand before. `top_k` pairs share a row. Lanes hold experts in order, so the first lane that has a logit has the lowest id.
fn chosen(pair: u32, top_k: u32, lane: u32, subgroup: u32) -> i32 {
    let row = pair / top_k * params.experts;
    {% include "shared/logits.wgsl" %}
    {% for v in range(values) %}
    var key{{ v }} = logit{{ v }};
    {% endfor %}
    var expert = -1;
    for (var k = 0u; k <= pair % top_k; k = k + 1u) {
        var own = 0u;
        {% for v in range(values) %}
        own = max(own, key{{ v }});
        {% endfor %}
        let key = reduce_max_u32(own, lane);
        let first = first_lane(own == key, lane);
        var which = 0u;
        {% for v in range(values - 1, -1, -1) %}
        which = select(which, {{ v }}u, key{{ v }} == key);
        {% endfor %}
        {% for v in range(values) %}
        key{{ v }} = select(key{{ v }}, 0u, (lane == first) & (which == {{ v }}u));
        {% endfor %}
        expert = select(-1, i32(first * {{ values }}u + subgroupShuffle(which, first)), key != 0u);
    }
    if (subgroup == 0u && lane == 0u) {
        agreed = expert;
    }
    return workgroupUniformLoad(&agreed);
}

// Leaves ids and weights of `token` if it `writes`, and returns how many of its places found an expert.
fn leave_choice(token: u32, top_k: u32, lane: u32, writes: bool) -> u32 {
    let row = token * params.experts;
    {% include "shared/logits.wgsl" %}
    {% include "shared/logit_total.wgsl" %}
    {% for v in range(values) %}
    var key{{ v }} = logit{{ v }};
    {% endfor %}
    {% with top_k = "top_k" %}
    {% include "shared/places.wgsl" %}
    {% endwith %}
    {% include "shared/choice_weights.wgsl" %}
    let at = token * top_k;
    {% for v in range(values) %}
    if (writes && place{{ v }} != 0xffffffffu) {
        topk[at + place{{ v }}] = expert{{ v }};
        topk[params.weights_base + at + place{{ v }}] = bitcast<u32>(weight{{ v }} * factor);
    }
    {% endfor %}
    for (var k = select(top_k, found + lane, writes); k < top_k; k = k + {{ depth_lanes }}u) {
        topk[at + k] = 0xffffffffu;
        topk[params.weights_base + at + k] = 0u;
    }
    return found;
}
