// Second of two: writes every pair to its place. A workgroup owns a chunk of pairs and finds on its own where each bucket
// starts when every bucket is padded to whole tiles, and where the pairs of its chunk start in it: reading all counts in every
// workgroup costs less than two more dispatches that wait for each other. The first pair of a tile labels it; the first
// workgroup writes the count and the dispatch arguments of every consumer. Sentinel tiles come last: counted, but not
// dispatched.
{% set stage = "place" %}
{% include "shared/align.wgsl" %}

var<workgroup> scan_scratch: array<u32, {{ lanes }}>;

@compute @workgroup_size({{ lanes }})
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let chunk = folded(workgroup);
    if (chunk >= params.chunks) {
        return;
    }
    let width = params.buckets + 1u;
    let places = chunk * width;
    // Each invocation owns a run of neighbouring buckets, so that one scan, of the lengths of the runs, is enough. Until then places
    // count from the beginning of their run.
    let own = (width + {{ lanes - 1 }}u) / {{ lanes }}u;
    let first = min(lane * own, width);
    let last = min(first + own, width);
    var length = 0u;
    // At the end that of the run's last bucket, which of the last run is the sentinels'.
    var padded = 0u;
    for (var bucket = first; bucket < last; bucket = bucket + 1u) {
        var before = 0u;
        var total = 0u;
        // Many counts are loaded at a time, for one after the other each would be waited for.
        var c = 0u;
        for (; c + 16u <= params.chunks; c = c + 16u) {
            {% for i in range(16) %}
            let count{{ i }} = counts[(c + {{ i }}u) * width + bucket];
            {% endfor %}
            {% for i in range(16) %}
            before = before + select(0u, count{{ i }}, c + {{ i }}u < chunk);
            total = total + count{{ i }};
            {% endfor %}
        }
        for (; c < params.chunks; c = c + 1u) {
            let count = counts[c * width + bucket];
            before = before + select(0u, count, c < chunk);
            total = total + count;
        }
        work[places + bucket] = length + before;
        padded = (total + params.tile - 1u) / params.tile * params.tile;
        length = length + padded;
    }
    scan_scratch[lane] = length;
    workgroupBarrier();
    for (var step = 1u; step < {{ lanes }}u; step = step * 2u) {
        var sum = scan_scratch[lane];
        if (lane >= step) {
            sum = sum + scan_scratch[lane - step];
        }
        workgroupBarrier();
        scan_scratch[lane] = sum;
        workgroupBarrier();
    }
    let end = scan_scratch[lane];
    for (var bucket = first; bucket < last; bucket = bucket + 1u) {
        work[places + bucket] = work[places + bucket] + end - length;
    }
    if (chunk == 0u && first < last && last == width) {
        let tiles = (end - padded) / params.tile;
        aligned[64] = i32(end);
        aligned[65] = i32(tiles);
        for (var c = 0u; c < params.consumers; c = c + 1u) {
            announce(c, tiles);
        }
    }
    storageBarrier();
    workgroupBarrier();
    for (var i = lane; i < params.chunk_pairs; i = i + {{ lanes }}u) {
        let pair = chunk * params.chunk_pairs + i;
        if (pair < params.pairs) {
            let bucket = bucket_of(pair);
            let place = work[places + bucket] + counts[params.rank_base + pair];
            aligned[params.sorted_base + place] = i32(pair);
            aligned[params.places_base + pair] = i32(place);
            // Buckets begin with a tile.
            if (bucket < params.buckets && place % params.tile == 0u) {
                aligned[params.expert_base + place / params.tile] = label_of(bucket);
            }
        }
    }
}
