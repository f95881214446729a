// First of four: counts the pairs of each bucket chunk by chunk, and each pair's rank among the pairs of its bucket in
// its chunk, so that the later stages can place pairs in order without atomics. Also fills the outputs with padding.
{% include "shared/align.wgsl" %}

var<workgroup> chunk_buckets: array<u32, {{ chunk }}>;

@compute @workgroup_size({{ chunk }})
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let chunk = folded(workgroup);
    if (chunk >= params.chunks) {
        return;
    }
    let stride = params.chunks * {{ chunk }}u;
    for (var i = chunk * {{ chunk }}u + lane; i < params.capacity; i = i + stride) {
        aligned[params.sorted_base + i] = i32(params.pairs);
        if (i < params.capacity / params.tile) {
            aligned[params.expert_base + i] = -1;
        }
    }
    let row = chunk * (params.buckets + 1u);
    for (var b = lane; b <= params.buckets; b = b + {{ chunk }}u) {
        work[row + b] = 0u;
    }
    let pair = chunk * {{ chunk }}u + lane;
    var bucket = 0xffffffffu;
    if (pair < params.pairs) {
        bucket = bucket_of(ids[pair]);
    }
    chunk_buckets[lane] = bucket;
    storageBarrier();
    workgroupBarrier();
    var rank = 0u;
    var later = 0u;
    for (var i = 0u; i < {{ chunk }}u; i = i + 1u) {
        if (chunk_buckets[i] == bucket) {
            rank = rank + select(0u, 1u, i < lane);
            later = later + select(0u, 1u, i > lane);
        }
    }
    if (pair < params.pairs) {
        work[params.rank_base + pair] = rank;
        // Only the last pair of a bucket writes, so no two invocations do.
        if (later == 0u) {
            work[row + bucket] = rank + 1u;
        }
    }
}
