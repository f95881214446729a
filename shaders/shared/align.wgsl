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
    // 0, or ids are slot * stride + rest, and buckets count the slots that occur alone.
    stride: u32,
    // Pairs of a chunk, once or several times as many as are counted at once.
    chunk_pairs: u32,
    // Column tiles of each consumer.
    columns: array<vec4<u32>, 4>,
    // A bit for each slot that occurs.
    slots: array<vec4<u32>, 4>,
}

@group(0) @binding(0) var<uniform> params: AlignParams;
@group(0) @binding(1) var<storage, read> ids: array<i32>; // [P]
{% set next = 2 %}
{% if stage == "place" %}
{% set next = 3 %}
// What the first of two stages has left: pairs of a chunk in each bucket [chunks, N + 1], rank in its chunk [P].
@group(0) @binding(2) var<storage, read> counts: array<u32>;
{% endif %}
// 16 x [x, y, z, 0] dispatch arguments, count, tiles, then expert_ids [C/B], sorted_token_ids [C], places [P].
@group(0) @binding({{ next }}) var<storage, read_write> aligned: array<i32>;
{% if stage == "count" %}
// Pairs of a chunk in each bucket [chunks, N + 1], rank in its chunk [P].
@group(0) @binding(3) var<storage, read_write> counts: array<atomic<u32>>;
{% elif stage == "place" %}
// Where the pairs of a chunk begin in each bucket [chunks, N + 1].
@group(0) @binding(4) var<storage, read_write> work: array<u32>;
{% endif %}

{% include "shared/rows.wgsl" %}
{% include "shared/bits.wgsl" %}
{% include "shared/announce.wgsl" %}

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
    let id = ids[pair];
    if (params.stride == 0u) {
        return select(u32(id), params.buckets, id < 0 || id >= i32(params.buckets));
    }
    let place = place_of(u32(id) / params.stride);
    return select(params.buckets, place.before * params.stride + u32(id) % params.stride, id >= 0 && place.occurs);
}

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

{% if stage == "count" %}
fn chunk_count() -> u32 {
    return params.chunks;
}

// The pair at a place of a chunk, P or more for none.
fn pair_at(chunk: u32, place: u32) -> u32 {
    return chunk * params.chunk_pairs + place;
}
{% endif %}
