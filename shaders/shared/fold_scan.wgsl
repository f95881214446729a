// Which row of the tile has which slot, and its pair: found while the first loads are on their way, and kept in workgroup memory, where
// it takes no registers from the products. `pair0`.. are the pairs of this invocation's `scans` rows, `scan0`.., of which those past the tile
// and all but one of a row's invocations do not count (`counts0`..).
var own_slots = vec4<u32>();
{% for i in range(scans) %}
let mapped{{ i }} = token_lora_mapping[min(pair{{ i }}, params.rows - 1u) / params.top_k];
{% endfor %}
{% for i in range(scans) %}
if (counts{{ i }}) {
    var slot = 255u;
    if (pair{{ i }} < params.rows && mapped{{ i }} >= 0 && mapped{{ i }} < i32(params.slots)) {
        slot = u32(mapped{{ i }});
        own_slots[slot / 32u] = own_slots[slot / 32u] | (1u << (slot % 32u));
    }
    row_words[scan{{ i }}] = (slot << 24u) | (pair{{ i }} & 0xffffffu);
}
{% endfor %}
slot_bits[subgroup] = subgroupOr(own_slots);
