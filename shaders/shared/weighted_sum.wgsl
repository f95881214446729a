// The sum over a token's experts, four columns an invocation: `output(pair, quad)` is what an expert computed.
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let at = folded(workgroup) * 64u + lane;
    let token = at / params.quads;
    let quad = at % params.quads;
    if (token >= params.tokens) {
        return;
    }
    var sum = vec4<f32>();
    for (var k = 0u; k < params.top_k; k = k + 1u) {
        let pair = token * params.top_k + k;
        if (ids[pair] >= 0) {
            sum = sum + topk_weights[pair] * output(pair, quad);
        }
    }
    if (params.accumulate != 0u) {
        sum = sum + out[at];
    }
    out[at] = sum;
}
