// Rows of packed x in the order of the tiles, cut into blocks of 16 rows and 16 values that lie together: as cooperative matrices
// load them straight from memory (`expert_gemm_direct`). Behind the end of a row stand zeros up to a whole step of the product,
// and rows of padding are zeros where a block has any other. Behind all blocks stands for each row what stands behind those of x. One
// workgroup a block of rows.

struct TileRowsParams {
    // P.
    rows: u32,
    // Pairs that share a row of x.
    row_div: u32,
    // Groups of eight in a row of x, and blocks in a row of the result.
    groups: u32,
    blocks: u32,
    sorted_base: u32,
    // Groups from a row of x to the next: more may lie between.
    x_stride: u32,
    // Where exponents begin in x, and behind the blocks, in words of eight bytes.
    exponents: u32,
    block_exponents: u32,
}

@group(0) @binding(0) var<uniform> params: TileRowsParams;
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>; // f16 [P / row_div, K], exponents [P / row_div]
@group(0) @binding(2) var<storage, read> ids: array<i32>; // alignment
@group(0) @binding(3) var<storage, read_write> tiles: array<vec4<u32>>; // f16 [C / 16, K / 16, 16, 16], K padded

{% include "shared/rows.wgsl" %}

// The word behind the rows of x that belongs to the row of sorted place `place`.
fn word_of(place: u32) -> vec2<u32> {
    let pair = u32(ids[params.sorted_base + place]);
    let at = params.exponents + select(0u, pair, pair < params.rows) / params.row_div;
    let words = x[at / 2u];
    return select(words.xy, words.zw, at % 2u == 1u);
}

@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let tile = folded(workgroup);
    // Eight lanes read a row of 64 values, which are four blocks.
    let row = lane / 8u;
    let group = lane % 8u;
    let rows_begin = tile * {{ height }}u + workgroup.x * 16u;
    // There are as many workgroups as tiles, and more only where z counts on.
    if (workgroup.z > 0u && tile >= u32(ids[65])) {
        return;
    }
    // Asked for at once: one after the other, each would be waited for.
    let first = u32(ids[params.sorted_base + rows_begin]);
    let pair = u32(ids[params.sorted_base + rows_begin + row]);
    if (first >= params.rows) {
        return;
    }
    let real = pair < params.rows;
    let source = select(0u, pair, real) / params.row_div * params.x_stride;
    let to = rows_begin / 16u * params.blocks * 32u + row * 2u + group % 2u;
    for (var at = group; at < params.blocks * 2u; at = at + 8u) {
        let value = x[source + min(at, params.groups - 1u)];
        tiles[to + at / 2u * 32u] = select(vec4<u32>(), value, real && at < params.groups);
    }
    if (lane < 8u) {
        let first = rows_begin + lane * 2u;
        tiles[(params.block_exponents + first) / 2u] = vec4<u32>(word_of(first), word_of(first + 1u));
    }
}
