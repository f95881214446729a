// An entry of the index of adapter factors.
struct Factor {
    // First group of A and of B in `pool`, in 16-byte words.
    a: u32,
    b: u32,
    // Rank in the low half; bits 16 and 17 the storage type (0 f32, 1 f16, 2 bf16); bit 18 a bias: the last column of B, which
    // the rank counts and A has no row for; the last byte, signed: n where A times 2^n lies in the range of f16. Rank 0: no
    // adapter here.
    rank_type: u32,
    scale: f32,
}
