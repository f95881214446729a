struct AlignParams {
    pairs: u32,
    buckets: u32,
    tile: u32,
    chunks: u32,
    capacity: u32,
    // Where the parts of `aligned` and `work` start, in words.
    expert_base: u32,
    sorted_base: u32,
    rank_base: u32,
    place_base: u32,
    consumers: u32,
    // Word of the places in `aligned`.
    places_base: u32,
    // 0, or ids are slot * stride + rest, and buckets count the slots that occur alone:
    stride: u32,
    // Column tiles of each consumer.
    columns: array<vec4<u32>, 4>,
    // a bit for each.
    slots: array<vec4<u32>, 4>,
}

@group(0) @binding(0) var<uniform> params: AlignParams;
@group(0) @binding(1) var<storage, read> ids: array<i32>; // [P]
// 16 x [x, y, z, 0] dispatch arguments, count, tiles, then expert_ids [C/B], sorted_token_ids [C], places [P].
@group(0) @binding(2) var<storage, read_write> aligned: array<i32>;
// Pairs of a chunk in each bucket [chunks, N+1], rank in chunk [P], place of the first of them [chunks, N+1].
@group(0) @binding(3) var<storage, read_write> work: array<u32>;

{% include "shared/rows.wgsl" %}
{% include "shared/bits.wgsl" %}

// What is no bucket goes to the sentinel bucket N, which is last.
fn bucket_of(id: i32) -> u32 {
    if (params.stride == 0u) {
        return select(u32(id), params.buckets, id < 0 || id >= i32(params.buckets));
    }
    let slot = u32(id) / params.stride;
    let bit = 1u << (slot % 32u);
    var place = 0u;
    for (var word = 0u; word < min(slot / 32u, 16u); word = word + 1u) {
        place = place + countOneBits(params.slots[word / 4u][word % 4u]);
    }
    let bits = params.slots[min(slot / 128u, 3u)][slot / 32u % 4u];
    let bucket = (place + countOneBits(bits & (bit - 1u))) * params.stride + u32(id) % params.stride;
    return select(params.buckets, bucket, id >= 0 && slot < 512u && (bits & bit) != 0u);
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
