// Logits to the next token of each sequence. Temperature 0 takes the largest logit (lower id on ties). Otherwise the
// candidates are all logits not below the k-th largest, then the fewest of them, by descending probability, whose mass
// reaches top_p (ties at either threshold stay), and u in [0, 1) picks one by cumulative mass in id order. Thresholds
// are found by bisection on the bits of an order key, so that every device finds the same. One workgroup a row; `embed`
// reads last_ids in the next step. -1: the row had no finite logit.
struct SampleParams {
    rows: u32,
    vocab: u32,
    pad0: u32,
    pad1: u32,
}

struct Pick {
    // Row of logits, and sequence the id belongs to.
    row: u32,
    sequence: u32,
    temperature: f32,
    top_p: f32,
    // 0: off.
    top_k: u32,
    u: f32,
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<uniform> params: SampleParams;
@group(0) @binding(1) var<storage, read> logits: array<f32>; // [logit rows, vocab]
@group(0) @binding(2) var<storage, read> picks: array<Pick>; // [rows]
@group(0) @binding(3) var<storage, read_write> sampled: array<i32>; // [rows]
@group(0) @binding(4) var<storage, read_write> last_ids: array<i32>; // [sequences]

{% include "shared/rows.wgsl" %}
{% include "shared/reduce.wgsl" %}

{% include "shared/long_row.wgsl" %}
    let pick = picks[row];
    let base = pick.row * params.vocab;
    // Decided before the first loop: after a loop whose end depends on the lane, FXC takes all that the loop has read for
    // different in each lane, and refuses barriers that depend on it.
    let limited = pick.top_k > 0u && pick.top_k < params.vocab;
    var key = 0u;
    var id = 0xffffffffu;
    for (var i = lane; i < params.vocab; i = i + {{ lanes }}u) {
        let k = order_key(logits[base + i]);
        if (k > key) {
            key = k;
            id = i;
        }
    }
    let top = reduce_max_u32(key, lane);
    var chosen = reduce_min_u32(select(0xffffffffu, id, key == top && top != 0u), lane);
    if (pick.temperature > 0.0) {
        let most = key_value(max(top, 1u));
        // Largest key that at least top_k logits reach.
        var floor_key = 1u;
        if (limited) {
            var found = 0u;
            for (var bit = 0x80000000u; bit > 0u; bit = bit / 2u) {
                var count = 0.0;
                for (var i = lane; i < params.vocab; i = i + {{ lanes }}u) {
                    count = count + select(0.0, 1.0, order_key(logits[base + i]) >= (found | bit));
                }
                found = select(found, found | bit, reduce_sum(count, lane) >= f32(pick.top_k));
            }
            floor_key = max(found, 1u);
        }
        // Each invocation owns a run of ids, so that the draw below walks them in order.
        let run = (params.vocab + {{ lanes }}u - 1u) / {{ lanes }}u;
        let begin = min(lane * run, params.vocab);
        let end = min(begin + run, params.vocab);
        var mass = 0.0;
        for (var i = begin; i < end; i = i + 1u) {
            let k = order_key(logits[base + i]);
            if (k >= floor_key) {
                mass = mass + exp((key_value(k) - most) / pick.temperature);
            }
        }
        if (pick.top_p < 1.0) {
            let wanted = reduce_sum(mass, lane) * pick.top_p;
            var found = 0u;
            for (var bit = 0x80000000u; bit > 0u; bit = bit / 2u) {
                let bound = max(found | bit, floor_key);
                var part = 0.0;
                for (var i = begin; i < end; i = i + 1u) {
                    let k = order_key(logits[base + i]);
                    if (k >= bound) {
                        part = part + exp((key_value(k) - most) / pick.temperature);
                    }
                }
                found = select(found, found | bit, reduce_sum(part, lane) >= wanted);
            }
            // Rounding may ask for more than there is: the best token always stays.
            floor_key = max(min(found, top), floor_key);
            mass = 0.0;
            for (var i = begin; i < end; i = i + 1u) {
                let k = order_key(logits[base + i]);
                if (k >= floor_key) {
                    mass = mass + exp((key_value(k) - most) / pick.temperature);
                }
            }
        }
        let drawn = pick.u * reduce_sum(mass, lane);
        var sum = prefix_sum(mass, lane);
        var crossing = 0xffffffffu;
        for (var i = begin; i < end; i = i + 1u) {
            let k = order_key(logits[base + i]);
            if (k >= floor_key) {
                sum = sum + exp((key_value(k) - most) / pick.temperature);
                if (sum > drawn && crossing == 0xffffffffu) {
                    crossing = i;
                }
            }
        }
        crossing = reduce_min_u32(crossing, lane);
        if (crossing != 0xffffffffu && top != 0u) {
            chosen = crossing;
        }
    }
    if (lane == 0u) {
        let result = select(i32(chosen), -1, chosen == 0xffffffffu);
        sampled[row] = result;
        last_ids[pick.sequence] = result;
    }
}
