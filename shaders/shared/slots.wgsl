{% include "shared/bits.wgsl" %}

// The slot number `n`, counted from 0, of those whose bits are set.
fn nth_slot(bits: vec4<u32>, n: u32) -> u32 {
    var rest = n;
    for (var word = 0u; word < 4u; word = word + 1u) {
        let count = countOneBits(bits[word]);
        if (rest < count) {
            return word * 32u + nth_bit(bits[word], rest);
        }
        rest = rest - count;
    }
    return 0u;
}
