// Second of two, behind `runs_count`, where pairs are sorted by expert and, within one, by adapter. Since chunks follow each other in
// the order of their adapters, to place pairs by expert alone keeps that order: experts are padded to whole tiles, as by
// `align_scatter`, their adapters are not. The pairs of an expert and adapter are cut into runs of so many at most: where each begins
// and ends is written, too, so that the adapters' stages need no sorting of their own. A workgroup places the pairs of
// {{ "a chunk" if held else "some neighbouring chunks" }}, and finds on its own where they begin, as those of `align_scatter` do.
{% include "shared/align_runs.wgsl" %}
// What the first stage has left: pairs of a chunk with each expert [chunks, E_l + 1], rank in its chunk [P].
@group(0) @binding(3) var<storage, read> counts: array<u32>;
// 16 x [x, y, z, 0] dispatch arguments, count, tiles, runs, then expert_ids [C/B], sorted_token_ids [C], places [P], and runs: four
// words each.
@group(0) @binding(4) var<storage, read_write> aligned: array<i32>;
// Of the pairs of a chunk with an expert: where they begin, where those of its adapter begin and end, and the runs before these.
// Places and runs count from the first expert of an invocation.
{% if held %}
var<workgroup> work: array<vec4<u32>, {{ held }}>; // [E_l + 1]
{% else %}
@group(0) @binding(5) var<storage, read_write> work: array<vec4<u32>>; // [chunks, E_l + 1]
{% endif %}
{% macro of_chunk(chunk) %}{% if not held %}{{ chunk }} * width + {% endif %}{% endmacro %}

{% include "shared/announce.wgsl" %}

// Places and runs of the experts of each invocation; at last those before them.
var<workgroup> scan_scratch: array<vec2<u32>, {{ lanes }}>;

// A pair, P for none, with what is known of it before its place is.
struct Pair {
    pair: u32,
    bucket: u32,
    rank: u32,
    chunk: u32,
    slot: i32,
}

// Number `i` of the `all` of neighbouring chunks.
fn load_pair(first_chunk: u32, i: u32, all: u32) -> Pair {
    var got = Pair(params.pairs, 0u, 0u, first_chunk, -1);
    if (i < all) {
        {% if held %}
        got.pair = pair_at(first_chunk, i);
        {% else %}
        let chunk = i / params.chunk_pairs;
        got.chunk = first_chunk + chunk;
        got.pair = pair_at(got.chunk, i - chunk * params.chunk_pairs);
        {% endif %}
        if (got.pair < params.pairs) {
            got.bucket = bucket_of(got.pair);
            got.rank = counts[params.rank_base + got.pair];
            got.slot = chunked[params.slot_base + got.chunk];
        }
    }
    return got;
}

fn runs_of(places: u32) -> u32 {
    return (places + params.run - 1u) / params.run;
}

@compute @workgroup_size({{ lanes }})
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let group = folded(workgroup);
    let chunks = chunk_count();
    let begin = {{ "group" if held else "group * params.each" }};
    if (group > 0u && begin >= chunks) {
        return;
    }
    let behind = min(begin + {{ "1u" if held else "params.each" }}, chunks);
    let pairs = select(0u, (behind - begin) * params.chunk_pairs, behind > begin);
    // Asked for before there is so much to wait for.
    var next = load_pair(begin, lane, pairs);
    let width = params.buckets + 1u;
    // Each invocation owns a run of neighbouring experts, so that one scan is enough.
    let own = (width + {{ lanes - 1 }}u) / {{ lanes }}u;
    let first = min(lane * own, width);
    let last = min(first + own, width);
    // Places and runs of the experts so far, and places of the last of them, padded.
    var taken = vec2<u32>();
    var padded = 0u;
    for (var bucket = first; bucket < last; bucket = bucket + 1u) {
        // Pairs and runs of the expert so far.
        var total = 0u;
        var runs = 0u;
        // The adapter, where its pairs begin, and the first chunk that does not know where they end.
        var slot = -1;
        var start = 0u;
        var open = begin;
        // Many counts are loaded at a time, for one after the other each would be waited for.
        {% set at_once = 16 %}
        for (var c = 0u; c < chunks; c = c + {{ at_once }}u) {
            {% for i in range(at_once) %}
            let at{{ i }} = min(c + {{ i }}u, chunks - 1u);
            let slot{{ i }} = chunked[params.slot_base + at{{ i }}];
            let count{{ i }} = select(0u, counts[at{{ i }} * width + bucket], c + {{ i }}u < chunks);
            {% endfor %}
            {% for i in range(0, at_once, 4) %}
            // Slots ascend, so what lies between two of the same is the same.
            if (slot{{ i }} == slot && slot{{ i + 3 }} == slot && (behind <= c + {{ i }}u || begin >= c + {{ i + 4 }}u)) {
                total = total + count{{ i }} + count{{ i + 1 }} + count{{ i + 2 }} + count{{ i + 3 }};
            } else {
                {% for j in range(i, i + 4) %}
                if (slot{{ j }} != slot) {
                    runs = runs + select(0u, runs_of(total - start), slot >= 0);
                    for (; open < min(c + {{ j }}u, behind); open = open + 1u) {
                        work[{{ of_chunk("open") }}bucket].z = taken.x + total;
                    }
                    slot = slot{{ j }};
                    start = total;
                }
                if (c + {{ j }}u >= begin && c + {{ j }}u < behind) {
                    work[{{ of_chunk("(c + " ~ j ~ "u)") }}bucket] = vec4<u32>(taken.x + total, taken.x + start, 0u, taken.y + runs);
                }
                total = total + count{{ j }};
                {% endfor %}
            }
            {% endfor %}
        }
        for (; open < behind; open = open + 1u) {
            work[{{ of_chunk("open") }}bucket].z = taken.x + total;
        }
        runs = runs + select(0u, runs_of(total - start), slot >= 0);
        padded = (total + params.tile - 1u) / params.tile * params.tile;
        taken = taken + vec2<u32>(padded, select(0u, runs, bucket < params.buckets));
    }
    scan_scratch[lane] = taken;
    workgroupBarrier();
    for (var reach = 1u; reach < {{ lanes }}u; reach = reach * 2u) {
        var sum = scan_scratch[lane];
        if (lane >= reach) {
            sum = sum + scan_scratch[lane - reach];
        }
        workgroupBarrier();
        scan_scratch[lane] = sum;
        workgroupBarrier();
    }
    let end = scan_scratch[lane];
    scan_scratch[lane] = end - taken;
    // What is before the sentinels is dispatched.
    if (group == 0u && first < last && last == width) {
        let tiles = (end.x - padded) / params.tile;
        aligned[64] = i32(end.x);
        aligned[65] = i32(tiles);
        aligned[66] = i32(end.y);
        for (var consumer = 0u; consumer < params.consumers; consumer = consumer + 1u) {
            announce(consumer, select(end.y, tiles, consumer < params.tile_consumers));
        }
    }
    {% if not held %}
    storageBarrier();
    {% endif %}
    workgroupBarrier();
    for (var i = lane; i < pairs; i = i + {{ lanes }}u) {
        let now = next;
        next = load_pair(begin, i + {{ lanes }}u, pairs);
        if (now.pair >= params.pairs) {
            continue;
        }
        let before = scan_scratch[now.bucket / own];
        let known = work[{{ of_chunk("now.chunk") }}now.bucket];
        let place = before.x + known.x + now.rank;
        aligned[params.sorted_base + place] = i32(now.pair);
        aligned[params.places_base + now.pair] = i32(place);
        if (now.bucket == params.buckets) {
            continue;
        }
        // Experts begin with a tile, and all its first places are pairs.
        if (place % params.tile == 0u) {
            aligned[params.expert_base + place / params.tile] = i32(now.bucket);
        }
        let rank = place - before.x - known.y;
        if (now.slot >= 0 && rank % params.run == 0u) {
            let word = params.run_base + (before.y + known.w + rank / params.run) * 4u;
            aligned[word] = now.slot * i32(params.buckets) + i32(now.bucket);
            aligned[word + 1u] = i32(place);
            aligned[word + 2u] = i32(min(place + params.run, before.x + known.z));
        }
    }
}
