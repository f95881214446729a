// Takes back the pairs that `localise` gave this rank but that another copy of their expert computes: those whose number
// among the pairs of the expert is outside the rank's quota. One workgroup for each copied expert that is held here.
struct LocaliseCopiesParams {
    valid_pairs: u32,
    // Copied experts held here, and the word where their list starts.
    held: u32,
    held_base: u32,
    pad0: u32,
}

@group(0) @binding(0) var<uniform> params: LocaliseCopiesParams;
@group(0) @binding(1) var<storage, read> topk_ids: array<i32>; // [P], global
@group(0) @binding(2) var<storage, read> holders: array<u32>; // from held_base: [held] experts
@group(0) @binding(3) var<storage, read> quotas: array<vec2<u32>>; // [E]: first, number
@group(0) @binding(4) var<storage, read_write> local_ids: array<i32>; // [P]

var<workgroup> count_scratch: array<u32, {{ lanes }}>;

{% include "shared/rows.wgsl" %}

@compute @workgroup_size({{ lanes }})
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let place = folded(workgroup);
    if (place >= params.held) {
        return;
    }
    let expert = holders[params.held_base + place];
    // A lane has consecutive pairs, so that a sum over lanes numbers them in order.
    let chunk = (params.valid_pairs + {{ lanes }}u - 1u) / {{ lanes }}u;
    let begin = min(lane * chunk, params.valid_pairs);
    let end = min(begin + chunk, params.valid_pairs);
    var count = 0u;
    for (var pair = begin; pair < end; pair = pair + 1u) {
        count = count + select(0u, 1u, topk_ids[pair] == i32(expert));
    }
    count_scratch[lane] = count;
    workgroupBarrier();
    for (var step = 1u; step < {{ lanes }}u; step = step * 2u) {
        var sum = count_scratch[lane];
        if (lane >= step) {
            sum = sum + count_scratch[lane - step];
        }
        workgroupBarrier();
        count_scratch[lane] = sum;
        workgroupBarrier();
    }
    var number = count_scratch[lane] - count;
    let quota = quotas[expert];
    for (var pair = begin; pair < end; pair = pair + 1u) {
        if (topk_ids[pair] == i32(expert)) {
            if (number < quota.x || number >= quota.x + quota.y) {
                local_ids[pair] = -1;
            }
            number = number + 1u;
        }
    }
}
