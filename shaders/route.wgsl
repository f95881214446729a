// Router logits to the A best experts of each token and their weights. One workgroup a token; localise, remap and
// combine read the result. A lane keeps the {{ values }} logits that are its own in registers. Experts are taken in descending
// order of (key, lower id first), each by the lane that has it, and only then written: nothing waits for memory in between.
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
@group(0) @binding(1) var<storage, read> logits: array<f32>; // {{ "[" ~ parts ~ ", T, E], to be added up" if parts > 1 else "[T, E]" }}
@group(0) @binding(2) var<storage, read> bias: array<f32>; // [E], read only with `biased`
@group(0) @binding(3) var<storage, read_write> topk_ids: array<i32>; // [T, A]
@group(0) @binding(4) var<storage, read_write> topk_weights: array<f32>; // [T, A]
@group(0) @binding(5) var<storage, read_write> status: array<atomic<u32>>; // [1]

{% include "shared/rows.wgsl" %}
{% include "shared/reduce.wgsl" %}
{% if groups %}
var<workgroup> group_keys: array<u32, 32>;
{% endif %}

{% include "shared/score.wgsl" %}

@compute @workgroup_size({{ lanes }})
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let token = folded(workgroup);
    if (token >= params.tokens) {
        return;
    }
    let row = token * params.experts;
    {# The logit at `at` of the first part. #}
    {% macro logit(at) -%}
    {% for p in range(parts) %}{{ " + " if p > 0 }}logits[{{ at }}{% if p > 0 %} + {{ p }}u * params.tokens * params.experts{% endif %}]{% endfor %}
    {%- endmacro %}
    {% include "shared/logits.wgsl" %}
    {% include "shared/logit_total.wgsl" %}

    {% if groups %}
    // A group's score is its best expert, or the sum of its two best; only the best groups are candidates.
    let group_size = params.experts / params.groups;
    for (var g = lane; g < params.groups; g = g + {{ lanes }}u) {
        var first = 0u;
        var second = 0u;
        for (var i = 0u; i < group_size; i = i + 1u) {
            let e = g * group_size + i;
            let logit = order_key({{ logit("row + e") }});
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

    {% for v in range(values) %}
    {% if by_score %}
    let score{{ v }} = score(key_value(max(logit{{ v }}, 1u)), most, total){% if biased %} + bias[min(expert{{ v }}, params.experts - 1u)]{% endif %};
    let open{{ v }} = (logit{{ v }} != 0u){% if groups %} & ((open_groups & (1u << (expert{{ v }} / group_size % 32u))) != 0u){% endif %};
    var key{{ v }} = select(0u, order_key(score{{ v }}), open{{ v }});
    {% else %}
    var key{{ v }} = logit{{ v }};
    {% endif %}
    {% endfor %}
    {% with top_k = "params.top_k" %}
    {% include "shared/places.wgsl" %}
    {% endwith %}

    let at = token * params.top_k;
    {% include "shared/choice_weights.wgsl" %}
    {% for v in range(values) %}
    if (place{{ v }} != 0xffffffffu) {
        topk_ids[at + place{{ v }}] = i32(expert{{ v }});
        topk_weights[at + place{{ v }}] = weight{{ v }} * factor;
    }
    {% endfor %}
    for (var k = found + lane; k < params.top_k; k = k + {{ lanes }}u) {
        topk_ids[at + k] = -1;
        topk_weights[at + k] = 0.0;
    }
    if (lane == 0u && found < params.top_k) {
        atomicOr(&status[0], 1u);
    }
}
