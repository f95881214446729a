// The power of two of a row of h = act(gate) * up, known before any of it is: a row of x has a norm below 2^`norm` times 2^-`power`, and
// a row of gate or up, adapters included, one below 2^`params.reach`. So no gate or up exceeds the product of both, and no h its square,
// for no activation exceeds its argument. h comes to below 2^7, as where its largest value is known (`row_shift`).
fn gated_shift(norm: i32, power: i32) -> i32 {
    let most = norm - power + params.reach;
    {% if kind == "swiglu_clamped" %}
    // Both factors are clamped; to up 1 is added.
    let clamped = min(most, params.h_cap);
    let h = clamped + max(clamped, 0) + 1;
    {% else %}
    let h = 2 * most;
    {% endif %}
    return clamp(7 - h, -126, 80);
}
