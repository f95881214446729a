// Last of four: writes every pair to its place. The first pair of a tile also labels it.
{% include "shared/align.wgsl" %}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let pair = folded(workgroup) * 64u + lane;
    if (pair >= params.pairs) {
        return;
    }
    let bucket = bucket_of(ids[pair]);
    let chunk = pair / {{ chunk }}u;
    let rank = work[chunk * (params.buckets + 1u) + bucket] + work[params.rank_base + pair];
    let place = work[params.base_base + bucket] + rank;
    aligned[params.sorted_base + place] = i32(pair);
    if (bucket < params.buckets && rank % params.tile == 0u) {
        aligned[params.expert_base + place / params.tile] = i32(bucket);
    }
}
