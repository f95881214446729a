// The sum over a token's experts, four columns an invocation: `output(pair, quad)` is what an expert computed, of which nothing counts for
// pairs without one. Several at a time, so that their loads do not wait for each other.
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let at = folded(workgroup) * 64u + lane;
    let token = at / params.quads;
    let quad = at % params.quads;
    if (token >= params.tokens) {
        return;
    }
    var sum = vec4<f32>();
    for (var k = 0u; k < params.top_k; k = k + 4u) {
        {% for i in range(4) %}
        let pair{{ i }} = token * params.top_k + min(k + {{ i }}u, params.top_k - 1u);
        let output{{ i }} = topk_weights[pair{{ i }}] * output(pair{{ i }}, quad);
        let counts{{ i }} = k + {{ i }}u < params.top_k && ids[pair{{ i }}] >= 0;
        {% endfor %}
        {% for i in range(4) %}
        sum = sum + select(vec4<f32>(), output{{ i }}, counts{{ i }});
        {% endfor %}
    }
    if (params.accumulate != 0u) {
        sum = sum + out[at];
    }
    out[at] = sum;
}
