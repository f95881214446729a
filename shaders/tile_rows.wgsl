// Rows of packed x in the order of the tiles, cut into blocks of 16 rows and 16 values that lie together: as cooperative matrices
// load them straight from memory (`expert_gemm_direct`). Behind the end of a row stand zeros up to a whole step of the product,
// and rows of padding are zeros where a block has any other. One workgroup a block of rows.

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
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<uniform> params: TileRowsParams;
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>; // f16 [P / row_div, K], exponents [P / row_div]
@group(0) @binding(2) var<storage, read> ids: array<i32>; // alignment
@group(0) @binding(3) var<storage, read_write> tiles: array<vec4<u32>>; // f16 [C / 16, K / 16, 16, 16], K padded

{% include "shared/rows.wgsl" %}

@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let tile = folded(workgroup);
    if (tile >= u32(ids[65])) {
        return;
    }
    // Eight lanes read a row of 64 values, which are four blocks.
    let row = lane / 8u;
    let group = lane % 8u;
    let rows_begin = tile * {{ height }}u + workgroup.x * 16u;
    if (u32(ids[params.sorted_base + rows_begin]) >= params.rows) {
        return;
    }
    let pair = u32(ids[params.sorted_base + rows_begin + row]);
    let real = pair < params.rows;
    let source = select(0u, pair, real) / params.row_div * params.x_stride;
    let to = rows_begin / 16u * params.blocks * 32u + row * 2u + group % 2u;
    for (var at = group; at < params.blocks * 2u; at = at + 8u) {
        let value = x[source + min(at, params.groups - 1u)];
        tiles[to + at / 2u * 32u] = select(vec4<u32>(), value, real && at < params.groups);
    }
}
