// Third of four: where each bucket starts when every bucket is padded to whole tiles; the count; and the dispatch
// arguments of every consumer. One workgroup. Sentinel tiles come last: counted, but not dispatched.
{% include "shared/align.wgsl" %}

var<workgroup> scan_scratch: array<u32, {{ lanes }}>;

@compute @workgroup_size({{ lanes }})
fn main(@builtin(local_invocation_index) lane: u32) {
    var carry = 0u;
    var sentinel_base = 0u;
    for (var block = 0u; block <= params.buckets; block = block + {{ lanes }}u) {
        let bucket = block + lane;
        var padded = 0u;
        if (bucket <= params.buckets) {
            let total = work[params.total_base + bucket];
            padded = (total + params.tile - 1u) / params.tile * params.tile;
        }
        scan_scratch[lane] = padded;
        workgroupBarrier();
        for (var step = 1u; step < {{ lanes }}u; step = step * 2u) {
            var sum = scan_scratch[lane];
            if (lane >= step) {
                sum = sum + scan_scratch[lane - step];
            }
            workgroupBarrier();
            scan_scratch[lane] = sum;
            workgroupBarrier();
        }
        if (bucket <= params.buckets) {
            work[params.base_base + bucket] = carry + scan_scratch[lane] - padded;
        }
        if (params.buckets >= block && params.buckets < block + {{ lanes }}u) {
            let at = params.buckets - block;
            sentinel_base = carry;
            if (at > 0u) {
                sentinel_base = carry + scan_scratch[at - 1u];
            }
        }
        carry = carry + scan_scratch[{{ lanes }}u - 1u];
        workgroupBarrier();
    }
    if (lane != 0u) {
        return;
    }
    let tiles = sentinel_base / params.tile;
    aligned[64] = i32(carry);
    aligned[65] = i32(tiles);
    for (var c = 0u; c < params.consumers; c = c + 1u) {
        aligned[c * 4u] = i32(params.columns[c / 4u][c % 4u]);
        aligned[c * 4u + 1u] = i32(min(tiles, 65535u));
        aligned[c * 4u + 2u] = i32(max((tiles + 65534u) / 65535u, 1u));
    }
}
