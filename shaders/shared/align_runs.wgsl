struct AlignRunsParams {
    pairs: u32,
    // E_l.
    buckets: u32,
    tile: u32,
    // Most chunks that there may be.
    chunks: u32,
    capacity: u32,
    // Where the parts of `aligned` start, in words, and where ranks stand behind the counts.
    expert_base: u32,
    sorted_base: u32,
    rank_base: u32,
    consumers: u32,
    places_base: u32,
    // Pairs of a chunk, those of its tokens.
    chunk_pairs: u32,
    chunk_tokens: u32,
    // Where the slots of chunks and their tokens start in `chunked`.
    slot_base: u32,
    token_base: u32,
    // Pairs of a token, slots in all, and whether `ids` are theirs: else all pairs have expert 0.
    top_k: u32,
    all_slots: u32,
    routed: u32,
    // Most pairs of a run, and where runs begin in `aligned`.
    run: u32,
    run_base: u32,
    // Consumers of tiles, which come first.
    tile_consumers: u32,
    // Chunks that a workgroup of the second stage places.
    each: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
    // Column tiles of each consumer.
    columns: array<vec4<u32>, 4>,
}

@group(0) @binding(0) var<uniform> params: AlignRunsParams;
@group(0) @binding(1) var<storage, read> ids: array<i32>; // [P]
// Tokens sorted by slot, each slot in tiles of its own, as an alignment leaves them: tiles are the chunks.
@group(0) @binding(2) var<storage, read> chunked: array<i32>;

{% include "shared/rows.wgsl" %}

// Chunks that there are.
fn chunk_count() -> u32 {
    return min(u32(chunked[64]) / params.chunk_tokens, params.chunks);
}

// The pair at a place of a chunk, P or more for none.
fn pair_at(chunk: u32, place: u32) -> u32 {
    let row = place / params.top_k;
    let token = u32(chunked[params.token_base + chunk * params.chunk_tokens + row]);
    return token * params.top_k + place - row * params.top_k;
}

// The expert of a pair, E_l for none.
fn bucket_of(pair: u32) -> u32 {
    let id = select(0, ids[pair], params.routed != 0u);
    return select(u32(id), params.buckets, id < 0 || id >= i32(params.buckets));
}
