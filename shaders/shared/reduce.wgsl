// Reductions over the invocations of a workgroup; every invocation gets the result. With `subgroups` (of one known size, lane
// by lane) these reduce first and leave a word each, which everyone adds up: one barrier.
{% if subgroups is defined and subgroups > 1 %}
{% set width = lanes // subgroups %}
// Reductions take the halves in turn: who still reads one half is waited for before it is written again.
var<workgroup> word_scratch: array<u32, {{ 2 * subgroups }}>;
var<private> word_base: u32;

// Every subgroup's word, from `word_scratch[word_base]` on.
fn exchange_words(word: u32, lane: u32) {
    word_base = {{ subgroups }}u - word_base;
    if (lane % {{ width }}u == 0u) {
        word_scratch[word_base + lane / {{ width }}u] = word;
    }
    workgroupBarrier();
}
fn reduce_sum(value: f32, lane: u32) -> f32 {
    exchange_words(bitcast<u32>(subgroupAdd(value)), lane);
    var total = 0.0;
    {% for s in range(subgroups) %}
    total = total + bitcast<f32>(word_scratch[word_base + {{ s }}u]);
    {% endfor %}
    return total;
}
fn reduce_max(value: f32, lane: u32) -> f32 {
    exchange_words(bitcast<u32>(subgroupMax(value)), lane);
    var most = bitcast<f32>(word_scratch[word_base]);
    {% for s in range(1, subgroups) %}
    most = max(most, bitcast<f32>(word_scratch[word_base + {{ s }}u]));
    {% endfor %}
    return most;
}
fn reduce_max_u32(value: u32, lane: u32) -> u32 {
    exchange_words(subgroupMax(value), lane);
    var most = 0u;
    {% for s in range(subgroups) %}
    most = max(most, word_scratch[word_base + {{ s }}u]);
    {% endfor %}
    return most;
}
fn prefix_sum(value: f32, lane: u32) -> f32 {
    exchange_words(bitcast<u32>(subgroupAdd(value)), lane);
    var before = 0.0;
    {% for s in range(subgroups - 1) %}
    before = before + select(0.0, bitcast<f32>(word_scratch[word_base + {{ s }}u]), lane / {{ width }}u > {{ s }}u);
    {% endfor %}
    return before + subgroupExclusiveAdd(value);
}
{% elif one_subgroup %}
fn reduce_sum(value: f32, lane: u32) -> f32 {
    return subgroupAdd(value);
}
fn reduce_max(value: f32, lane: u32) -> f32 {
    return subgroupMax(value);
}
fn reduce_max_u32(value: u32, lane: u32) -> u32 {
    return subgroupMax(value);
}
fn reduce_min_u32(value: u32, lane: u32) -> u32 {
    return subgroupMin(value);
}
// The first lane that says so; one must.
fn first_lane(mine: bool, lane: u32) -> u32 {
    let votes = subgroupBallot(mine);
    {% for word in range((lanes + 31) // 32 - 1) %}
    if (votes[{{ word }}] != 0u) {
        return firstTrailingBit(votes[{{ word }}]) + {{ 32 * word }}u;
    }
    {% endfor %}
    return firstTrailingBit(votes[{{ (lanes + 31) // 32 - 1 }}]) + {{ (lanes + 31) // 32 * 32 - 32 }}u;
}
fn prefix_sum(value: f32, lane: u32) -> f32 {
    return subgroupExclusiveAdd(value);
}
{% else %}
var<workgroup> sum_scratch: array<f32, {{ lanes }}>;
var<workgroup> word_scratch: array<u32, {{ lanes }}>;

fn reduce_sum(value: f32, lane: u32) -> f32 {
    sum_scratch[lane] = value;
    workgroupBarrier();
    for (var s = {{ lanes }}u / 2u; s > 0u; s = s / 2u) {
        if (lane < s) {
            sum_scratch[lane] = sum_scratch[lane] + sum_scratch[lane + s];
        }
        workgroupBarrier();
    }
    let total = sum_scratch[0];
    workgroupBarrier();
    return total;
}
fn reduce_max(value: f32, lane: u32) -> f32 {
    sum_scratch[lane] = value;
    workgroupBarrier();
    for (var s = {{ lanes }}u / 2u; s > 0u; s = s / 2u) {
        if (lane < s) {
            sum_scratch[lane] = max(sum_scratch[lane], sum_scratch[lane + s]);
        }
        workgroupBarrier();
    }
    let most = sum_scratch[0];
    workgroupBarrier();
    return most;
}
fn reduce_max_u32(value: u32, lane: u32) -> u32 {
    word_scratch[lane] = value;
    workgroupBarrier();
    for (var s = {{ lanes }}u / 2u; s > 0u; s = s / 2u) {
        if (lane < s) {
            word_scratch[lane] = max(word_scratch[lane], word_scratch[lane + s]);
        }
        workgroupBarrier();
    }
    let most = word_scratch[0];
    workgroupBarrier();
    return most;
}
// Sum over the invocations before this one. Sequential, so that every device adds in the same order.
fn prefix_sum(value: f32, lane: u32) -> f32 {
    sum_scratch[lane] = value;
    workgroupBarrier();
    var before = 0.0;
    for (var i = 0u; i < lane; i = i + 1u) {
        before = before + sum_scratch[i];
    }
    workgroupBarrier();
    return before;
}
{% endif %}

{% if not one_subgroup %}
fn reduce_min_u32(value: u32, lane: u32) -> u32 {
    return ~reduce_max_u32(~value, lane);
}
// The first lane that says so; one must.
fn first_lane(mine: bool, lane: u32) -> u32 {
    return reduce_min_u32(select(0xffffffffu, lane, mine), lane);
}
{% endif %}

// A word that orders like the number: larger key, larger number. 0 stands for NaN and -inf, which nothing selects;
// +inf counts as the largest finite number, and -0 as 0. NaN is told by its bits: fast-math may drop `x != x`.
fn order_key(value: f32) -> u32 {
    // Without branches: where this is written out many times over, some compilers take for ever over them.
    let read = bitcast<u32>(value);
    let nothing = ((read & 0x7fffffffu) > 0x7f800000u) | (read == 0xff800000u);
    let finite = select(read, 0x7f7fffffu, read == 0x7f800000u);
    let bits = select(finite, 0u, finite == 0x80000000u);
    return select(select(bits | 0x80000000u, ~bits, (bits & 0x80000000u) != 0u), 0u, nothing);
}

// The number behind a key that is not 0.
fn key_value(key: u32) -> f32 {
    return bitcast<f32>(select(~key, key & 0x7fffffffu, (key & 0x80000000u) != 0u));
}
