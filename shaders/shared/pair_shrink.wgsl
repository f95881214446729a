// What both ways to shrink pairs one by one are given; x and u are their own. The stages of many pairs get the same from `remap`
// and `align`.
struct PairShrinkParams {
    // P.
    rows: u32,
    // Pairs that share a row of x.
    row_div: u32,
    // Row of x in words of 16 bytes.
    x_stride: u32,
    // Groups of eight in a row of A.
    groups: u32,
    // Entries of this site in `index`, projections of the site, and the rank that u has room for.
    index_base: u32,
    projections: u32,
    max_rank: u32,
    // Pairs of a token.
    top_k: u32,
    // Experts of this rank, and adapter slots.
    experts: u32,
    slots: u32,
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<uniform> params: PairShrinkParams;
@group(0) @binding(2) var<storage, read> pool: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> index: array<Factor>; // [L, E_l, projections] from index_base
@group(0) @binding(4) var<storage, read> ids: array<i32>; // [P], local; unused when dense
@group(0) @binding(5) var<storage, read> token_lora_mapping: array<i32>; // [T]
@group(0) @binding(7) var<storage, read_write> status: array<atomic<u32>>; // [1]

{% include "shared/factors.wgsl" %}
