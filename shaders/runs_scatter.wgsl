// Second of two, behind `align_count`, where pairs are sorted by expert and, within one, by adapter. Experts are padded to whole
// tiles, as by `align_scatter`, their adapters are not. The pairs of an expert and adapter are cut into runs of so many at most: where each
// begins and ends is written, too, so that the adapters' stages need no sorting of their own.
{% include "shared/align.wgsl" %}

// What neighbouring buckets do to the place at which they begin: the pairs (x) up to the first end of an expert among them, if there
// is one (y), and the places behind that end (z), which is padded. And their runs (w).
var<workgroup> scan_scratch: array<vec4<u32>, {{ lanes }}>;

fn whole_tiles(places: u32) -> u32 {
    return (places + params.tile - 1u) / params.tile * params.tile;
}

// What a bucket of `total` pairs does. Pairs without adapter are the last of an expert, those of no expert the last of all, and neither
// have runs.
fn one_bucket(bucket: u32, total: u32) -> vec4<u32> {
    let closes = bucket % params.stride == params.stride - 1u || bucket == params.buckets;
    return select(vec4<u32>(total, 0u, 0u, (total + params.run - 1u) / params.run), vec4<u32>(total, 1u, 0u, 0u), closes);
}

// One after the other.
fn joined(a: vec4<u32>, b: vec4<u32>) -> vec4<u32> {
    let runs = a.w + b.w;
    if (a.y == 0u) {
        return vec4<u32>(a.x + b.x, b.y, b.z, runs);
    }
    let behind = a.z + b.x;
    return vec4<u32>(a.x, 1u, select(behind, whole_tiles(behind) + b.z, b.y != 0u), runs);
}

// The place behind buckets that begin at the first.
fn end_of(buckets: vec4<u32>) -> u32 {
    return select(buckets.x, whole_tiles(buckets.x) + buckets.z, buckets.y != 0u);
}

@compute @workgroup_size({{ lanes }})
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let chunk = folded(workgroup);
    if (chunk >= params.chunks) {
        return;
    }
    let width = params.buckets + 1u;
    let none = params.stride - 1u;
    // For each bucket: where the pairs of this chunk begin in it, where it begins and ends, and the runs before it.
    let places = params.place_base + chunk * width;
    let starts = params.start_base + chunk * width * 3u;
    let ends = starts + width;
    let runs = ends + width;
    // Each invocation owns a run of neighbouring buckets.
    let own = (width + {{ lanes - 1 }}u) / {{ lanes }}u;
    let first = min(lane * own, width);
    let last = min(first + own, width);
    var mine = vec4<u32>();
    for (var bucket = first; bucket < last; bucket = bucket + 1u) {
        var before = 0u;
        var total = 0u;
        {% include "shared/chunk_counts.wgsl" %}
        work[places + bucket] = before;
        work[ends + bucket] = total;
        mine = joined(mine, one_bucket(bucket, total));
    }
    scan_scratch[lane] = mine;
    workgroupBarrier();
    for (var step = 1u; step < {{ lanes }}u; step = step * 2u) {
        var sum = scan_scratch[lane];
        if (lane >= step) {
            sum = joined(scan_scratch[lane - step], sum);
        }
        workgroupBarrier();
        scan_scratch[lane] = sum;
        workgroupBarrier();
    }
    var passed = vec4<u32>();
    if (lane > 0u) {
        passed = scan_scratch[lane - 1u];
    }
    for (var bucket = first; bucket < last; bucket = bucket + 1u) {
        let start = end_of(passed);
        let total = work[ends + bucket];
        work[places + bucket] = work[places + bucket] + start;
        work[starts + bucket] = start;
        work[ends + bucket] = start + total;
        work[runs + bucket] = passed.w;
        // The last bucket is the sentinels': what is before it is dispatched.
        if (chunk == 0u && bucket == params.buckets) {
            let tiles = start / params.tile;
            aligned[64] = i32(start + whole_tiles(total));
            aligned[65] = i32(tiles);
            aligned[66] = i32(passed.w);
            for (var c = 0u; c < params.consumers; c = c + 1u) {
                announce(c, select(passed.w, tiles, c < params.tile_consumers));
            }
        }
        passed = joined(passed, one_bucket(bucket, total));
    }
    storageBarrier();
    workgroupBarrier();
    for (var i = lane; i < params.chunk_pairs; i = i + {{ lanes }}u) {
        let pair = chunk * params.chunk_pairs + i;
        if (pair < params.pairs) {
            let bucket = bucket_of(pair);
            let place = work[places + bucket] + work[params.rank_base + pair];
            aligned[params.sorted_base + place] = i32(pair);
            aligned[params.places_base + pair] = i32(place);
            let expert = bucket / params.stride;
            // Experts begin with a tile, and all its first places are pairs.
            if (bucket < params.buckets && place % params.tile == 0u) {
                aligned[params.expert_base + place / params.tile] = i32(expert);
            }
            let rank = place - work[starts + bucket];
            if (bucket < params.buckets && bucket % params.stride != none && rank % params.run == 0u) {
                let to = params.run_base + (work[runs + bucket] + rank / params.run) * 4u;
                let experts = params.buckets / params.stride;
                aligned[to] = token_lora_mapping[pair / params.top_k] * i32(experts) + i32(expert);
                aligned[to + 1u] = i32(place);
                aligned[to + 2u] = i32(min(place + params.run, work[ends + bucket]));
            }
        }
    }
}
