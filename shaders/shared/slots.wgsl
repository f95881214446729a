{% include "shared/bits.wgsl" %}

// How many of the slots whose bits are set come before `slot`.
fn slots_before(bits: vec4<u32>, slot: u32) -> u32 {
    var count = 0u;
    for (var word = 0u; word < 4u; word = word + 1u) {
        let below = clamp(i32(slot) - i32(32u * word), 0, 32);
        count = count + countOneBits(extractBits(bits[word], 0u, u32(below)));
    }
    return count;
}

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
