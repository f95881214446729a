// Router logits to the A best experts of each token and their weights. One workgroup a token; localise, remap and
// combine read the result. Experts are taken in descending order of (key, lower id first), so the next choice is the
// best one after the last, and no mark of what was taken is needed.
struct RouteParams {
    tokens: u32,
    experts: u32,
    top_k: u32,
    renormalise: u32,
    scale: f32,
    groups: u32,
    top_groups: u32,
    pad0: u32,
}

@group(0) @binding(0) var<uniform> params: RouteParams;
@group(0) @binding(1) var<storage, read> logits: array<f32>; // [T, E]
@group(0) @binding(2) var<storage, read> bias: array<f32>; // [E], read only with `biased`
@group(0) @binding(3) var<storage, read_write> topk_ids: array<i32>; // [T, A]
@group(0) @binding(4) var<storage, read_write> topk_weights: array<f32>; // [T, A]
@group(0) @binding(5) var<storage, read_write> status: array<atomic<u32>>; // [1]

{% include "shared/rows.wgsl" %}
{% include "shared/reduce.wgsl" %}
{% if groups %}
var<workgroup> group_keys: array<u32, 32>;
{% endif %}

// The score of an expert with finite logit `x`; `most` is the largest logit of the row.
fn score(x: f32, most: f32, total: f32) -> f32 {
    {% if score == "sigmoid" %}
    return 1.0 / (1.0 + exp(-x));
    {% else %}
    return exp(x - most) / total;
    {% endif %}
}

@compute @workgroup_size({{ lanes }})
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let token = folded(workgroup);
    if (token >= params.tokens) {
        return;
    }
    let row = token * params.experts;
    var best = 0u;
    for (var e = lane; e < params.experts; e = e + {{ lanes }}u) {
        best = max(best, order_key(logits[row + e]));
    }
    best = reduce_max_u32(best, lane);
    let most = key_value(max(best, 1u));
    var total = 0.0;
    for (var e = lane; e < params.experts; e = e + {{ lanes }}u) {
        let key = order_key(logits[row + e]);
        if (key != 0u) {
            total = total + exp(key_value(key) - most);
        }
    }
    total = reduce_sum(total, lane);

    {% if groups %}
    // A group's score is its best expert, or the sum of its two best; only the best groups are candidates.
    let group_size = params.experts / params.groups;
    for (var g = lane; g < params.groups; g = g + {{ lanes }}u) {
        var first = 0u;
        var second = 0u;
        for (var i = 0u; i < group_size; i = i + 1u) {
            let e = g * group_size + i;
            let logit = order_key(logits[row + e]);
            var key = 0u;
            if (logit != 0u) {
                key = order_key(score(key_value(logit), most, total){% if biased %} + bias[e]{% endif %});
            }
            if (key > first) {
                second = first;
                first = key;
            } else if (key > second) {
                second = key;
            }
        }
        {% if group_score == "two" %}
        var sum = first;
        if (first != 0u && second != 0u) {
            sum = order_key(key_value(first) + key_value(second));
        }
        group_keys[g] = sum;
        {% else %}
        group_keys[g] = first;
        {% endif %}
    }
    workgroupBarrier();
    var open_groups = 0u;
    for (var g = 0u; g < params.groups; g = g + 1u) {
        var better = 0u;
        for (var o = 0u; o < params.groups; o = o + 1u) {
            if (group_keys[o] > group_keys[g] || (group_keys[o] == group_keys[g] && o < g)) {
                better = better + 1u;
            }
        }
        if (better < params.top_groups) {
            open_groups = open_groups | (1u << g);
        }
    }
    {% endif %}

    var last_key = 0xffffffffu;
    var last_expert = 0u;
    var sum = 0.0;
    var missing = false;
    for (var k = 0u; k < params.top_k; k = k + 1u) {
        var key = 0u;
        var expert = 0xffffffffu;
        for (var e = lane; e < params.experts; e = e + {{ lanes }}u) {
            var candidate = order_key(logits[row + e]);
            {% if by_score %}
            if (candidate != 0u) {
                candidate = order_key(score(key_value(candidate), most, total){% if biased %} + bias[e]{% endif %});
            }
            {% endif %}
            {% if groups %}
            if ((open_groups & (1u << (e / group_size))) == 0u) {
                candidate = 0u;
            }
            {% endif %}
            let after = candidate < last_key || (candidate == last_key && e > last_expert);
            if (after && candidate > key) {
                key = candidate;
                expert = e;
            }
        }
        last_key = reduce_max_u32(key, lane);
        last_expert = reduce_min_u32(select(0xffffffffu, expert, key == last_key), lane);
        let at = token * params.top_k + k;
        if (last_key == 0u) {
            missing = true;
            if (lane == 0u) {
                topk_ids[at] = -1;
                topk_weights[at] = 0.0;
            }
        } else {
            let weight = score(key_value(order_key(logits[row + last_expert])), most, total);
            sum = sum + weight;
            if (lane == 0u) {
                topk_ids[at] = i32(last_expert);
                topk_weights[at] = weight;
            }
        }
    }
    if (lane == 0u) {
        if (missing) {
            atomicOr(&status[0], 1u);
        }
        var factor = params.scale;
        if (params.renormalise != 0u && sum > 0.0) {
            factor = factor / sum;
        }
        for (var k = 0u; k < params.top_k; k = k + 1u) {
            let at = token * params.top_k + k;
            topk_weights[at] = topk_weights[at] * factor;
        }
    }
}
