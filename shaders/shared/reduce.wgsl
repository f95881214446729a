// Reductions over the invocations of a workgroup; every invocation gets the result.
{% if one_subgroup %}
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
fn reduce_min_u32(value: u32, lane: u32) -> u32 {
    return ~reduce_max_u32(~value, lane);
}
fn first_lane(mine: bool, lane: u32) -> u32 {
    return reduce_min_u32(select(0xffffffffu, lane, mine), lane);
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

// A word that orders like the number: larger key, larger number. 0 stands for NaN and -inf, which nothing selects;
// +inf counts as the largest finite number, and -0 as 0. NaN is told by its bits: fast-math may drop `x != x`.
fn order_key(value: f32) -> u32 {
    var bits = bitcast<u32>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u || bits == 0xff800000u) {
        return 0u;
    }
    if (bits == 0x7f800000u) {
        bits = 0x7f7fffffu;
    }
    if (bits == 0x80000000u) {
        bits = 0u;
    }
    return select(bits | 0x80000000u, ~bits, (bits & 0x80000000u) != 0u);
}

// The number behind a key that is not 0.
fn key_value(key: u32) -> f32 {
    return bitcast<f32>(select(~key, key & 0x7fffffffu, (key & 0x80000000u) != 0u));
}
