// The factor of the expert and the token's slot of `pair`, for row `row` of all projections' ranks: row `r` of `projection`. It
// opens a function without result; what has no factor gets one of rank 0. It `reports` ids and slots out of range, or leaves that
// to others.
{% if dense %}
let id = 0;
let experts = 1u;
let slot = token_lora_mapping[pair];
{% else %}
let id = {{ "expert" if ids == "chosen" else ids ~ "[pair]" }};
let experts = params.experts;
let slot = token_lora_mapping[pair / params.top_k];
{% endif %}
{% if reports %}
if (row == 0u && subgroup_lane == 0u) {
    if (slot >= i32(params.slots)) {
        atomicOr(&status[0], 2u);
    }
    if (id >= i32(experts)) {
        atomicOr(&status[0], 4u);
    }
}
{% endif %}
let projection = row / params.max_rank;
if (projection >= params.projections) {
    return;
}
let r = row % params.max_rank;
// Put together from parts: a variable of a struct with offsets is not what SPIR-V 1.6 allows, though naga writes it.
let known = (id >= 0) & (id < i32(experts)) & (slot >= 0) & (slot < i32(params.slots));
let place = (u32(slot) * experts + u32(id)) * params.projections + projection;
let found = index[params.index_base + select(0u, place, known)];
let factor = Factor(
    select(0u, found.a, known),
    select(0u, found.b, known),
    select(0u, found.rank_type, known),
    select(0.0, found.scale, known),
);
let rank = factor.rank_type & 0xffffu;
let storage = storage_of(factor);
