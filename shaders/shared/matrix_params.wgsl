// Sizes of a product on cooperative matrices with one piece of the weights.
struct ExpertGemmMatrixParams {
    // P, or T when dense.
    rows: u32,
    // Pairs that share a row of x: A for gate and up, 1 for down.
    row_div: u32,
    // Groups of eight in a row of W, and of a row of x that are multiplied: as many, or twice as many with the rest of each value
    // behind all; or the blocks in a row of x, where they go straight into matrices.
    groups: u32,
    x_groups: u32,
    // Groups from a row of x to the next: rests may lie between that are not multiplied.
    x_stride: u32,
    // Rows of W (columns of y) of this piece, and where they stand in y.
    out_rows: u32,
    out_begin: u32,
    y_stride: u32,
    // Matrices of this piece.
    first: u32,
    count: u32,
    // 1: add to y.
    accumulate: u32,
    // Parts of `ids` when it is an alignment.
    expert_base: u32,
    sorted_base: u32,
    // Where the exponents of the rows begin in x, in words of eight bytes.
    exponents: u32,
    // What a weight is multiplied by when it becomes f16, and the inverse.
    w_scale: f32,
    w_unscale: f32,
    // Adapters: pairs of a token, slots and experts, entries of this site in `index`, its projections, and the rank that u
    // has room for, a multiple of 16.
    top_k: u32,
    slots: u32,
    experts: u32,
    index_base: u32,
    projections: u32,
    max_rank: u32,
    // From a column of a projection to the next in y.
    step: u32,
    // Blocks of u that a projection has room for, where they go straight into matrices.
    room: u32,
    // Steps of a part of the depth, where workgroups share that out, too.
    part_steps: u32,
    // Entries of a tile in the factors that `fold_blocks` leaves.
    table_stride: u32,
    // With the activation: groups of eight in a row of h, and blocks; the power of two that norms of rows of gate and up are below,
    // adapters included, and that of what the clamped swiglu lets pass; its slope and clamp.
    h_groups: u32,
    h_blocks: u32,
    reach: i32,
    h_cap: i32,
    alpha: f32,
    limit: f32,
    // What y is multiplied by where it is f16.
    y_scale: f32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
    // For each projection: first column in y, columns.
    span_begin: vec4<u32>,
    span_rows: vec4<u32>,
}
