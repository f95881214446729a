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
    pad0: u32,
    // Column tiles of each consumer.
    columns: array<vec4<u32>, 4>,
}

@group(0) @binding(0) var<uniform> params: AlignParams;
@group(0) @binding(1) var<storage, read> ids: array<i32>; // [P]
// 16 x [x, y, z, 0] dispatch arguments, count, tiles, then expert_ids [C/B], sorted_token_ids [C], places [P].
@group(0) @binding(2) var<storage, read_write> aligned: array<i32>;
// Pairs of a chunk in each bucket [chunks, N+1], rank in chunk [P], place of the first of them [chunks, N+1].
@group(0) @binding(3) var<storage, read_write> work: array<u32>;

{% include "shared/rows.wgsl" %}

// What is no bucket goes to the sentinel bucket N, which is last.
fn bucket_of(id: i32) -> u32 {
    if (id < 0 || id >= i32(params.buckets)) {
        return params.buckets;
    }
    return u32(id);
}
