// A whole alignment in one workgroup, for few pairs: each pair counts those before it, and the tiles that are opened before its
// own. What it writes is what `align_scatter` writes; consumers cannot tell.
{% set stage = "all" %}
{% include "shared/align.wgsl" %}

// The bucket of each pair; then of those that open a tile, 0xffffffff for others.
var<workgroup> buckets: array<u32, {{ most }}>;
var<workgroup> opened: array<u32, {{ most }}>;

fn one(which: bool) -> u32 {
    return select(0u, 1u, which);
}

@compute @workgroup_size({{ lanes }})
fn main(@builtin(local_invocation_index) lane: u32) {
    for (var i = lane; i < params.capacity; i = i + {{ lanes }}u) {
        aligned[params.sorted_base + i] = i32(params.pairs);
        if (i < params.capacity / params.tile) {
            aligned[params.expert_base + i] = -1;
        }
    }
    {% for v in range(most // lanes) %}
    let pair{{ v }} = lane + {{ v * lanes }}u;
    var bucket{{ v }} = 0xffffffffu;
    if (pair{{ v }} < params.pairs) {
        bucket{{ v }} = bucket_of(pair{{ v }});
    }
    buckets[pair{{ v }}] = bucket{{ v }};
    var rank{{ v }} = 0u;
    {% endfor %}
    storageBarrier();
    workgroupBarrier();
    // Sixteen at a time: past the pairs there is no bucket.
    for (var begin = 0u; begin < params.pairs; begin = begin + 16u) {
        {% for i in range(16) %}
        let bucket_at{{ i }} = buckets[begin + {{ i }}u];
        {% endfor %}
        {% for v in range(most // lanes) %}
        {% for i in range(16) %}
        rank{{ v }} = rank{{ v }} + one((bucket_at{{ i }} == bucket{{ v }}) & (begin + {{ i }}u < pair{{ v }}));
        {% endfor %}
        {% endfor %}
    }
    {% for v in range(most // lanes) %}
    opened[pair{{ v }}] =
        select(0xffffffffu, bucket{{ v }}, pair{{ v }} < params.pairs && rank{{ v }} % params.tile == 0u);
    var before{{ v }} = 0u;
    {% endfor %}
    workgroupBarrier();
    var tiles = 0u;
    var all = 0u;
    for (var begin = 0u; begin < params.pairs; begin = begin + 16u) {
        {% for i in range(16) %}
        let opened_at{{ i }} = opened[begin + {{ i }}u];
        {% endfor %}
        {% for i in range(16) %}
        {% for v in range(most // lanes) %}
        before{{ v }} = before{{ v }} + one(opened_at{{ i }} < bucket{{ v }});
        {% endfor %}
        tiles = tiles + one(opened_at{{ i }} < params.buckets);
        all = all + one(opened_at{{ i }} != 0xffffffffu);
        {% endfor %}
    }
    {% for v in range(most // lanes) %}
    if (pair{{ v }} < params.pairs) {
        // Tiles of its own bucket are not before it: its place counts on from the first.
        let place = before{{ v }} * params.tile + rank{{ v }};
        aligned[params.sorted_base + place] = i32(pair{{ v }});
        aligned[params.places_base + pair{{ v }}] = i32(place);
        if (bucket{{ v }} < params.buckets && rank{{ v }} % params.tile == 0u) {
            aligned[params.expert_base + before{{ v }} + rank{{ v }} / params.tile] = label_of(bucket{{ v }});
        }
    }
    {% endfor %}
    if (lane != 0u) {
        return;
    }
    aligned[64] = i32(all * params.tile);
    aligned[65] = i32(tiles);
    for (var c = 0u; c < params.consumers; c = c + 1u) {
        announce(c, tiles);
    }
}
