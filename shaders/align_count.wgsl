// First of two: counts the pairs of each bucket chunk by chunk, and each pair's rank among the pairs of its bucket in
// its chunk, so that the second stage can place pairs in order without atomics. Long chunks are counted a piece after the
// other. Also fills the outputs with padding.
{% if runs %}
// Buckets are those of `runs_scatter`, which sorts by expert and adapter; what `remap` would say of ids and slots, this leaves as well.
{% endif %}
{% include "shared/align.wgsl" %}
{% if runs %}
@group(0) @binding(5) var<storage, read_write> status: array<atomic<u32>>; // [1]
{% endif %}

{% set lanes = [chunk, 256] | min %}
var<workgroup> chunk_buckets: array<vec4<u32>, {{ chunk // 4 }}>;

@compute @workgroup_size({{ lanes }})
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let chunk = folded(workgroup);
    if (chunk >= params.chunks) {
        return;
    }
    let stride = params.chunks * {{ lanes }}u;
    for (var i = chunk * {{ lanes }}u + lane; i < params.capacity; i = i + stride) {
        aligned[params.sorted_base + i] = i32(params.pairs);
        if (i < params.capacity / params.tile) {
            aligned[params.expert_base + i] = -1;
        }
    }
    let row = chunk * (params.buckets + 1u);
    for (var b = lane; b <= params.buckets; b = b + {{ lanes }}u) {
        work[row + b] = 0u;
    }
    for (var first = 0u; first < params.chunk_pairs; first = first + {{ chunk }}u) {
        if (first > 0u) {
            // Pairs before these have been compared, and their counts written.
            storageBarrier();
            workgroupBarrier();
        }
        {% for k in range(chunk // lanes) %}
        let place{{ k }} = {{ k * lanes }}u + lane;
        let pair{{ k }} = chunk * params.chunk_pairs + first + place{{ k }};
        var bucket{{ k }} = 0xffffffffu;
        var rank{{ k }} = 0u;
        if (pair{{ k }} < params.pairs) {
            bucket{{ k }} = bucket_of(pair{{ k }});
            if (first > 0u) {
                rank{{ k }} = work[row + bucket{{ k }}];
            }
            {% if runs %}
            if (token_lora_mapping[pair{{ k }} / params.top_k] >= i32(params.all_slots)) {
                atomicOr(&status[0], 2u);
            }
            if (params.routed != 0u && ids[pair{{ k }}] >= i32(params.buckets / params.stride)) {
                atomicOr(&status[0], 4u);
            }
            {% endif %}
        }
        chunk_buckets[place{{ k }} / 4u][place{{ k }} % 4u] = bucket{{ k }};
        var later{{ k }} = 0u;
        {% endfor %}
        storageBarrier();
        workgroupBarrier();
        for (var i = 0u; i < {{ chunk }}u; i = i + 4u) {
            let others = chunk_buckets[i / 4u];
            let at = vec4<u32>(i, i + 1u, i + 2u, i + 3u);
            {% for k in range(chunk // lanes) %}
            {
                let same = others == vec4<u32>(bucket{{ k }});
                let before = select(vec4<u32>(), vec4<u32>(1u), same & (at < vec4<u32>(place{{ k }})));
                let after = select(vec4<u32>(), vec4<u32>(1u), same & (at > vec4<u32>(place{{ k }})));
                rank{{ k }} = rank{{ k }} + before.x + before.y + before.z + before.w;
                later{{ k }} = later{{ k }} + after.x + after.y + after.z + after.w;
            }
            {% endfor %}
        }
        {% for k in range(chunk // lanes) %}
        if (pair{{ k }} < params.pairs) {
            work[params.rank_base + pair{{ k }}] = rank{{ k }};
            // Only the last pair of a bucket writes, so no two invocations do.
            if (later{{ k }} == 0u) {
                work[row + bucket{{ k }}] = rank{{ k }} + 1u;
            }
        }
        {% endfor %}
    }
}
