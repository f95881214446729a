// Second of four: turns the counts of each bucket into the pairs before each chunk, and their total. One invocation a
// bucket.
{% include "shared/align.wgsl" %}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let bucket = folded(workgroup) * 64u + lane;
    if (bucket > params.buckets) {
        return;
    }
    var before = 0u;
    for (var chunk = 0u; chunk < params.chunks; chunk = chunk + 1u) {
        let at = chunk * (params.buckets + 1u) + bucket;
        let count = work[at];
        work[at] = before;
        before = before + count;
    }
    work[params.total_base + bucket] = before;
}
