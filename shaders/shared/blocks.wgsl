// Where four values of a row stand among blocks of 16 rows and 16 values, of which a row has `blocks`; in words of eight bytes.
fn block_quad(row: u32, quad: u32, blocks: u32) -> u32 {
    return (row / 16u * blocks + quad / 4u) * 64u + row % 16u * 4u + quad % 4u;
}
