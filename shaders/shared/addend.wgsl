// What an adapter adds to a sum by one group of eight columns of B, for products that `pair_shrink` precedes. It is read
// before the weights and worth something only afterwards, so that nothing is waited for in between. `u` holds what the
// shrink left.
struct Addend {
    // Which of the sums; the caller's number.
    sum: u32,
    storage: u32,
    b: vec4<u32>,
    // The second half of a group in f32.
    b_more: vec4<u32>,
    u_lo: vec4<f32>,
    u_hi: vec4<f32>,
}

// An addend of 0.
fn no_addend(sum: u32) -> Addend {
    return Addend(sum, 0u, vec4<u32>(), vec4<u32>(), vec4<f32>(), vec4<f32>());
}

// Group `part` of row `column` of B, for the pair and projection whose part of `u` begins at `at`.
fn read_group(sum: u32, at: u32, column: u32, part: u32) -> Addend {
    var addend = no_addend(sum);
    let factor = u[at];
    if (part < factor.y) {
        let group = column * factor.y + part;
        let wide = factor.z == 0u;
        let b_at = factor.x + select(group, 2u * group, wide);
        addend.storage = factor.z;
        addend.b = pool[b_at];
        addend.b_more = pool[select(b_at, b_at + 1u, wide)];
        addend.u_lo = bitcast<vec4<f32>>(u[at + 1u + 2u * part]);
        addend.u_hi = bitcast<vec4<f32>>(u[at + 2u + 2u * part]);
    }
    return addend;
}

fn value_of(addend: Addend) -> f32 {
    let wide = addend.storage == 0u;
    let lo = select(decode_factor4(addend.b.xy, addend.storage), bitcast<vec4<f32>>(addend.b), wide);
    let hi = select(decode_factor4(addend.b.zw, addend.storage), bitcast<vec4<f32>>(addend.b_more), wide);
    return dot(lo, addend.u_lo) + dot(hi, addend.u_hi);
}
