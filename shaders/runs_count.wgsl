// First of two, before `runs_scatter`. Chunks are of tokens that share an adapter; what `remap` would say of ids and slots, this
// leaves as well.
{% set runs = true %}
{% include "shared/align_runs.wgsl" %}
@group(0) @binding(3) var<storage, read> token_lora_mapping: array<i32>; // [T]
// 16 x [x, y, z, 0] dispatch arguments, count, tiles, runs, then expert_ids [C/B], sorted_token_ids [C], places [P], and runs: four
// words each.
@group(0) @binding(4) var<storage, read_write> aligned: array<i32>;
// Pairs of a chunk with each expert [chunks, E_l + 1], rank in its chunk [P].
@group(0) @binding(5) var<storage, read_write> counts: array<atomic<u32>>;
@group(0) @binding(6) var<storage, read_write> status: array<atomic<u32>>; // [1]

fn note_status(pair: u32) {
    if (token_lora_mapping[pair / params.top_k] >= i32(params.all_slots)) {
        atomicOr(&status[0], 2u);
    }
    if (params.routed != 0u && ids[pair] >= i32(params.buckets)) {
        atomicOr(&status[0], 4u);
    }
}

{% include "shared/count_chunks.wgsl" %}
