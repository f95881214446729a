// Which projection of the site a workgroup of an expand adds to, by its column tile, and the factor of virtual expert `label`. It
// stands in `main`; a pair without adapter, and a factor of rank 0, end there.
if (label < 0 || label >= i32(params.buckets)) {
    return;
}
var projection = 0u;
for (var i = 1u; i < params.projections; i = i + 1u) {
    projection = select(projection, i, workgroup.x >= params.tile_begin[i]);
}
let factor = index[params.index_base + u32(label) * params.projections + projection];
let rank = factor.rank_type & 0xffffu;
if (rank == 0u) {
    return;
}
let storage = storage_of(factor);
let groups = (rank + 7u) / 8u;
