// The place of the bit number `n`, counted from 0, among those of a word that are set.
fn nth_bit(bits: u32, n: u32) -> u32 {
    var left = bits;
    for (var i = 0u; i < n; i = i + 1u) {
        left = left & (left - 1u);
    }
    return firstTrailingBit(left);
}
