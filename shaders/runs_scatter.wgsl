// Second of two, behind `align_count`, where pairs are sorted by expert and, within one, by adapter. Experts are padded to whole
// tiles, as by `align_scatter`, their adapters are not. The pairs of an expert and adapter are cut into runs of so many at most: where each
// begins and ends is written, too, so that the adapters' stages need no sorting of their own.
{% set stage = "place" %}
{% set word = "vec4<u32>" %}
{% include "shared/align.wgsl" %}

// What neighbouring buckets do to the place at which they begin: the pairs (x) up to the first end of an expert among them, if there
// is one (y), and the places behind that end (z), which is padded. And their runs (w).
var<workgroup> scan_scratch: array<vec4<u32>, {{ lanes }}>;

fn whole_tiles(places: u32) -> u32 {
    return (places + params.tile - 1u) / params.tile * params.tile;
}

// What a bucket of `total` pairs does. Those that end an expert, and that of no expert, have no adapter and no runs.
fn one_bucket(total: u32, closes: bool) -> vec4<u32> {
    return select(vec4<u32>(total, 0u, 0u, (total + params.run - 1u) / params.run), vec4<u32>(total, 1u, 0u, 0u), closes);
}

// One after the other.
fn joined(a: vec4<u32>, b: vec4<u32>) -> vec4<u32> {
    let behind = a.z + b.x;
    let ended = vec4<u32>(a.x, 1u, select(behind, whole_tiles(behind) + b.z, b.y != 0u), a.w + b.w);
    return select(vec4<u32>(a.x + b.x, b.y, b.z, a.w + b.w), ended, a.y != 0u);
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
    let eights = params.width / 8u;
    let none = params.stride - 1u;
    // For each bucket: where the pairs of this chunk begin in it, where it begins and ends, and the runs before it.
    let places = chunk * eights * 8u;
    let starts = places + eights * 2u;
    let ends = starts + eights * 2u;
    let runs = ends + eights * 2u;
    // Each invocation takes eight neighbouring buckets, whose counts are what memory hands out at once, and so all of them as many as
    // they can; behind those come the next. `all` is what buckets before do. Those past the sentinels' have nothing.
    var all = vec4<u32>();
    for (var begin = 0u; begin < eights; begin = begin + {{ lanes }}u) {
        let eight = begin + lane;
        var before0 = vec4<u32>();
        var before1 = vec4<u32>();
        var total0 = vec4<u32>();
        var total1 = vec4<u32>();
        if (eight < eights) {
            // Many counts are loaded at a time, for one after the other each would be waited for. Each workgroup begins with its own
            // chunk, so that they do not all ask for the same.
            {% set at_once = 8 %}
            for (var c = 0u; c < params.chunks; c = c + {{ at_once }}u) {
                {% for i in range(at_once) %}
                let behind{{ i }} = min(c + {{ i }}u, params.chunks - 1u) + chunk;
                let from{{ i }} = select(behind{{ i }}, behind{{ i }} - params.chunks, behind{{ i }} >= params.chunks);
                let low{{ i }} = counts[(from{{ i }} * eights + eight) * 2u];
                let high{{ i }} = counts[(from{{ i }} * eights + eight) * 2u + 1u];
                {% endfor %}
                {% for i in range(at_once) %}
                {
                    let counted = c + {{ i }}u < params.chunks;
                    let earlier = counted && from{{ i }} < chunk;
                    before0 = before0 + select(vec4<u32>(), low{{ i }}, earlier);
                    before1 = before1 + select(vec4<u32>(), high{{ i }}, earlier);
                    total0 = total0 + select(vec4<u32>(), low{{ i }}, counted);
                    total1 = total1 + select(vec4<u32>(), high{{ i }}, counted);
                }
                {% endfor %}
            }
        }
        // Buckets of an expert before this one, and what the bucket does.
        let rest0 = eight * 8u % params.stride;
        {% for b in range(8) %}
        let bucket{{ b }} = one_bucket(total{{ b // 4 }}[{{ b % 4 }}], rest{{ b }} == none || eight * 8u + {{ b }}u == params.buckets);
        let rest{{ b + 1 }} = select(rest{{ b }} + 1u, 0u, rest{{ b }} == none);
        {% endfor %}
        var mine = bucket0;
        {% for b in range(1, 8) %}
        mine = joined(mine, bucket{{ b }});
        {% endfor %}
        scan_scratch[lane] = mine;
        workgroupBarrier();
        for (var reach = 1u; reach < {{ lanes }}u; reach = reach * 2u) {
            var sum = scan_scratch[lane];
            if (lane >= reach) {
                sum = joined(scan_scratch[lane - reach], sum);
            }
            workgroupBarrier();
            scan_scratch[lane] = sum;
            workgroupBarrier();
        }
        var passed0 = all;
        if (lane > 0u) {
            passed0 = joined(all, scan_scratch[lane - 1u]);
        }
        {% for b in range(8) %}
        let start{{ b }} = end_of(passed{{ b }});
        let passed{{ b + 1 }} = joined(passed{{ b }}, bucket{{ b }});
        {% endfor %}
        if (eight < eights) {
            {% for h in range(2) %}
            {% set b = h * 4 %}
            let start_of{{ h }} = vec4<u32>(start{{ b }}, start{{ b + 1 }}, start{{ b + 2 }}, start{{ b + 3 }});
            work[places + eight * 2u + {{ h }}u] = start_of{{ h }} + before{{ h }};
            work[starts + eight * 2u + {{ h }}u] = start_of{{ h }};
            work[ends + eight * 2u + {{ h }}u] = start_of{{ h }} + total{{ h }};
            work[runs + eight * 2u + {{ h }}u] = vec4<u32>(passed{{ b }}.w, passed{{ b + 1 }}.w, passed{{ b + 2 }}.w, passed{{ b + 3 }}.w);
            {% endfor %}
        }
        // What is before the sentinels is dispatched.
        if (chunk == 0u && eight == params.buckets / 8u) {
            var start = start0;
            var total = total0.x;
            var runs_before = passed0.w;
            {% for b in range(1, 8) %}
            if (params.buckets % 8u == {{ b }}u) {
                start = start{{ b }};
                total = total{{ b // 4 }}[{{ b % 4 }}];
                runs_before = passed{{ b }}.w;
            }
            {% endfor %}
            let tiles = start / params.tile;
            aligned[64] = i32(start + whole_tiles(total));
            aligned[65] = i32(tiles);
            aligned[66] = i32(runs_before);
            for (var consumer = 0u; consumer < params.consumers; consumer = consumer + 1u) {
                announce(consumer, select(runs_before, tiles, consumer < params.tile_consumers));
            }
        }
        all = joined(all, scan_scratch[{{ lanes - 1 }}]);
        workgroupBarrier();
    }
    storageBarrier();
    workgroupBarrier();
    for (var i = lane; i < params.chunk_pairs; i = i + {{ lanes }}u) {
        let pair = chunk * params.chunk_pairs + i;
        if (pair < params.pairs) {
            let bucket = bucket_of(pair);
            let four = bucket / 4u;
            let rank_at = params.rank_base + pair;
            let place = work[places + four][bucket % 4u] + counts[rank_at / 4u][rank_at % 4u];
            aligned[params.sorted_base + place] = i32(pair);
            aligned[params.places_base + pair] = i32(place);
            let expert = bucket / params.stride;
            // Experts begin with a tile, and all its first places are pairs.
            if (bucket < params.buckets && place % params.tile == 0u) {
                aligned[params.expert_base + place / params.tile] = i32(expert);
            }
            let rank = place - work[starts + four][bucket % 4u];
            if (bucket < params.buckets && bucket - expert * params.stride != none && rank % params.run == 0u) {
                let to = params.run_base + (work[runs + four][bucket % 4u] + rank / params.run) * 4u;
                aligned[to] = token_lora_mapping[pair / params.top_k] * i32(params.experts) + i32(expert);
                aligned[to + 1u] = i32(place);
                aligned[to + 2u] = i32(min(place + params.run, work[ends + four][bucket % 4u]));
            }
        }
    }
}
