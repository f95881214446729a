// Counts the pairs of each bucket chunk by chunk, and each pair's rank among the pairs of its bucket in its chunk, so that a second
// stage can place pairs in order: atomics count, but which pair comes first they do not tell. Long chunks are counted a piece after
// the other. Also fills the outputs with padding.
{% set lanes = [chunk, 256] | min %}
var<workgroup> chunk_buckets: array<vec4<u32>, {{ chunk // 4 }}>;

@compute @workgroup_size({{ lanes }})
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let chunk = folded(workgroup);
    // Asked for before there are stores that it would wait for.
    let chunks = chunk_count();
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
    if (chunk >= chunks) {
        return;
    }
    let row = chunk * (params.buckets + 1u);
    for (var b = lane; b <= params.buckets; b = b + {{ lanes }}u) {
        atomicStore(&counts[row + b], 0u);
    }
    for (var first = 0u; first < params.chunk_pairs; first = first + {{ chunk }}u) {
        if (first > 0u) {
            // Pairs before these have been compared, and counted.
            storageBarrier();
            workgroupBarrier();
        }
        {% for k in range(chunk // lanes) %}
        let place{{ k }} = {{ k * lanes }}u + lane;
        var pair{{ k }} = params.pairs;
        if (first + place{{ k }} < params.chunk_pairs) {
            pair{{ k }} = pair_at(chunk, first + place{{ k }});
        }
        var bucket{{ k }} = 0xffffffffu;
        var rank{{ k }} = 0u;
        if (pair{{ k }} < params.pairs) {
            bucket{{ k }} = bucket_of(pair{{ k }});
            if (first > 0u) {
                rank{{ k }} = atomicLoad(&counts[row + bucket{{ k }}]);
            }
            {% if runs %}
            note_status(pair{{ k }});
            {% endif %}
        }
        chunk_buckets[place{{ k }} / 4u][place{{ k }} % 4u] = bucket{{ k }};
        {% endfor %}
        storageBarrier();
        workgroupBarrier();
        {% for k in range(chunk // lanes) %}
        if (pair{{ k }} < params.pairs) {
            // Those of its bucket before it: sixteen loads at a time, the last of which may have pairs behind it.
            for (var i = 0u; i < place{{ k }}; i = i + 16u) {
                {% for j in range(4) %}
                let others{{ j }} = chunk_buckets[i / 4u + {{ j }}u];
                {% endfor %}
                {% for j in range(4) %}
                {
                    let at = vec4<u32>(i, i + 1u, i + 2u, i + 3u) + {{ 4 * j }}u;
                    let same = (others{{ j }} == vec4<u32>(bucket{{ k }})) & (at < vec4<u32>(place{{ k }}));
                    let before = select(vec4<u32>(), vec4<u32>(1u), same);
                    rank{{ k }} = rank{{ k }} + before.x + before.y + before.z + before.w;
                }
                {% endfor %}
            }
            atomicStore(&counts[params.rank_base + pair{{ k }}], rank{{ k }});
            atomicAdd(&counts[row + bucket{{ k }}], 1u);
        }
        {% endfor %}
    }
}
