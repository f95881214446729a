// The factor of expert `id` and the slot of the token of `pair`, for row `row` of all projections' ranks: row `r` of `projection`.
// It stands in `main`; what has no factor gets one of rank 0.
let slot = token_lora_mapping[pair / params.top_k];
if (row == 0u && subgroup_lane == 0u) {
    if (slot >= i32(params.slots)) {
        atomicOr(&status[0], 2u);
    }
    if (id >= i32(params.experts)) {
        atomicOr(&status[0], 4u);
    }
}
let projection = row / params.max_rank;
if (projection >= params.projections) {
    return;
}
let r = row % params.max_rank;
var factor = Factor(0u, 0u, 0u, 0.0);
if (id >= 0 && id < i32(params.experts) && slot >= 0 && slot < i32(params.slots)) {
    factor = index[params.index_base + (u32(slot) * params.experts + u32(id)) * params.projections + projection];
}
let rank = factor.rank_type & 0xffffu;
let storage = storage_of(factor);
