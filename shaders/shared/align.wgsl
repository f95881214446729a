struct AlignParams {
    pairs: u32,
    buckets: u32,
    tile: u32,
    chunks: u32,
    capacity: u32,
    // Where the parts of `aligned` start, in words, and where ranks stand behind the counts.
    expert_base: u32,
    sorted_base: u32,
    rank_base: u32,
    consumers: u32,
    // Word of the places in `aligned`.
    places_base: u32,
    // 0, or ids are slot * stride + rest, and buckets count the slots that occur alone. Of runs: buckets of an expert, one for each
    // of these slots and one for pairs without adapter.
    stride: u32,
    // The rest is of runs. Pairs of a token, slots in all, and whether `ids` are theirs: else all pairs have expert 0.
    top_k: u32,
    all_slots: u32,
    routed: u32,
    // Most pairs of a run, and where runs begin in `aligned`.
    run: u32,
    run_base: u32,
    // Consumers of tiles, which come first.
    tile_consumers: u32,
    // 1: each slot counts as one that occurs.
    every_slot: u32,
    // Of all, again: pairs of a chunk, once or several times as many as are counted at once.
    chunk_pairs: u32,
    // Counts from a chunk to the next, a multiple of eight: one for each bucket.
    width: u32,
    // Of runs: experts.
    experts: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
    // Column tiles of each consumer.
    columns: array<vec4<u32>, 4>,
    // A bit for each slot that occurs.
    slots: array<vec4<u32>, 4>,
}

@group(0) @binding(0) var<uniform> params: AlignParams;
@group(0) @binding(1) var<storage, read> ids: array<i32>; // [P]
{% if runs %}
@group(0) @binding(2) var<storage, read> token_lora_mapping: array<i32>; // [T]
{% endif %}
{% set next = 3 if runs else 2 %}
{% if stage == "place" %}
{% set next = next + 1 %}
// What the first of two stages has left: pairs of a chunk in each bucket [chunks, width], rank in its chunk [P].
@group(0) @binding({{ next - 1 }}) var<storage, read> counts: array<{{ word }}>;
{% endif %}
// 16 x [x, y, z, 0] dispatch arguments, count, tiles, runs, then expert_ids [C/B], sorted_token_ids [C], places [P], and runs: four
// words each.
@group(0) @binding({{ next }}) var<storage, read_write> aligned: array<i32>;
{% if stage == "count" %}
// Pairs of a chunk in each bucket [chunks, width], rank in its chunk [P].
@group(0) @binding({{ next + 1 }}) var<storage, read_write> counts: array<atomic<u32>>;
{% elif stage == "place" %}
// Where the pairs of a chunk begin in each bucket [chunks, width]; of runs also where each bucket begins and ends, and the runs before it
// [chunks, 4, width].
@group(0) @binding({{ next + 1 }}) var<storage, read_write> work: array<{{ word }}>;
{% endif %}

{% include "shared/rows.wgsl" %}
{% include "shared/bits.wgsl" %}

// The dispatch arguments of a consumer of `items`.
fn announce(consumer: u32, items: u32) {
    aligned[consumer * 4u] = i32(params.columns[consumer / 4u][consumer % 4u]);
    aligned[consumer * 4u + 1u] = i32(min(items, 65535u));
    aligned[consumer * 4u + 2u] = i32(max((items + 65534u) / 65535u, 1u));
}

// Slots that occur before `slot`, below 512, and whether it does.
struct Place {
    before: u32,
    occurs: bool,
}

fn place_of(slot: u32) -> Place {
    let bit = 1u << (slot % 32u);
    var before = 0u;
    for (var word = 0u; word < min(slot / 32u, 16u); word = word + 1u) {
        before = before + countOneBits(params.slots[word / 4u][word % 4u]);
    }
    let bits = params.slots[min(slot / 128u, 3u)][slot / 32u % 4u];
    return Place(before + countOneBits(bits & (bit - 1u)), slot < 512u && (bits & bit) != 0u);
}

// The bucket of a pair: what has none goes to the sentinel bucket N, which is last.
fn bucket_of(pair: u32) -> u32 {
    {% if runs %}
    let id = select(0, ids[pair], params.routed != 0u);
    let slot = token_lora_mapping[pair / params.top_k];
    let none = params.stride - 1u;
    var own = none;
    if (slot >= 0 && slot < i32(params.all_slots)) {
        let place = place_of(u32(slot));
        own = select(select(none, place.before, place.occurs), u32(slot), params.every_slot != 0u);
    }
    return select(u32(id) * params.stride + own, params.buckets, id < 0 || id >= i32(params.experts));
    {% else %}
    let id = ids[pair];
    if (params.stride == 0u) {
        return select(u32(id), params.buckets, id < 0 || id >= i32(params.buckets));
    }
    let place = place_of(u32(id) / params.stride);
    return select(params.buckets, place.before * params.stride + u32(id) % params.stride, id >= 0 && place.occurs);
    {% endif %}
}
{% if not runs %}

// The id of the pairs of a bucket.
fn label_of(bucket: u32) -> i32 {
    if (params.stride == 0u) {
        return i32(bucket);
    }
    var rest = bucket / params.stride;
    var slot = 0u;
    for (var word = 0u; word < 16u; word = word + 1u) {
        let bits = params.slots[word / 4u][word % 4u];
        let count = countOneBits(bits);
        if (rest < count) {
            slot = word * 32u + nth_bit(bits, rest);
            break;
        }
        rest = rest - count;
    }
    return i32(slot * params.stride + bucket % params.stride);
}
{% endif %}
