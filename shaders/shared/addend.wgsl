// What an adapter adds to one column by eight of its ranks: a group of eight values of B, and those of u that meet them. All of it is
// read without a branch, since what is read in one is waited for at its end: where a row has no such group, the front of `pool` and of
// u is read and adds nothing. `head` is what stands before u, as `pair_shrink` leaves it: first group of B, groups of a row of B,
// storage type. u is `u`, or words of the buffer `words_of_u`.

// Eight values of B as they were read.
struct Group {
    words: vec4<u32>,
    // The second half of a group in f32.
    more: vec4<u32>,
    storage: u32,
    present: bool,
}

// Where `pool` has group `part` of column `column`.
fn group_at(head: vec4<u32>, column: u32, part: u32) -> u32 {
    let group = column * head.y + part;
    return select(0u, head.x + select(group, 2u * group, head.z == 0u), part < head.y);
}

// Group `part` of column `column`.
fn read_group(head: vec4<u32>, column: u32, part: u32) -> Group {
    let present = part < head.y;
    let at = group_at(head, column, part);
    return Group(pool[at], pool[select(at, at + 1u, (head.z == 0u) & present)], head.z, present);
}

// Vec4 `at` of u.
fn four_of_u(at: u32) -> vec4<f32> {
    {% if words_of_u is defined %}
    let word = 4u * at;
    return bitcast<vec4<f32>>(vec4<u32>(
        {% for i in range(4) %}
        {{ words_of_u }}[word + {{ i }}u],
        {% endfor %}
    ));
    {% else %}
    return bitcast<vec4<f32>>(u[at]);
    {% endif %}
}

// The values of u that meet group `part`, of those that begin at vec4 `begin`.
fn read_u(head: vec4<u32>, begin: u32, part: u32) -> Eight {
    let at = begin + 2u * select(0u, part, part < head.y);
    return Eight(four_of_u(at), four_of_u(at + 1u));
}

fn product_of(group: Group, of_u: Eight) -> f32 {
    let b = decode_factor8(group.words, group.more, group.storage);
    return select(0.0, dot(b.lo, of_u.lo) + dot(b.hi, of_u.hi), group.present);
}
