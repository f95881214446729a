// The dispatch arguments of a consumer of `items`, at the beginning of `aligned`.
fn announce(consumer: u32, items: u32) {
    aligned[consumer * 4u] = i32(params.columns[consumer / 4u][consumer % 4u]);
    aligned[consumer * 4u + 1u] = i32(min(items, 65535u));
    aligned[consumer * 4u + 2u] = i32(max((items + 65534u) / 65535u, 1u));
}
