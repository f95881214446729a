// Which pairs of each copied expert are this rank's, by their number among the pairs of that expert. Every rank sees all
// pairs and computes the same, so they agree without a word. A rank's load is the number of its pairs. At first holders have
// equal shares of an expert. Then each copied expert, in the order of ids, is shared out anew: its pairs fill up the least
// loaded of its holders, as water would, the lowest rank first where they are level. That lowers the largest load, or
// leaves it. One workgroup; `localise_copies` reads the result.
struct LocaliseQuotasParams {
    valid_pairs: u32,
    experts: u32,
    ranks: u32,
    rank: u32,
    // Words of the list of copied experts.
    list_words: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

@group(0) @binding(0) var<uniform> params: LocaliseQuotasParams;
@group(0) @binding(1) var<storage, read> topk_ids: array<i32>; // [P], global
// The holder of each expert, or for a copied one 0x80000000 + its place in the list [E]. Then the list: for each copied one
// its id, the number of its holders, and these.
@group(0) @binding(2) var<storage, read> holders: array<u32>;
@group(0) @binding(3) var<storage, read_write> quotas: array<vec2<u32>>; // [E]: first, number; of copied experts held here

var<workgroup> expert_pairs: array<atomic<u32>, {{ experts }}>;
var<workgroup> loads: array<atomic<u32>, {{ ranks }}>;
var<workgroup> list_tile: array<u32, {{ listed }}>;

// A word of the list: from workgroup memory as far as that goes.
fn listed(at: u32) -> u32 {
    if (at < {{ listed }}u) {
        return list_tile[at];
    }
    return holders[params.experts + at];
}

// An equal share: that of the holder `i` of `copies`.
fn share(pairs: u32, copies: u32, i: u32) -> u32 {
    return pairs / copies + select(0u, 1u, i < pairs % copies);
}

// Divides the pairs of the expert that stands at `at` in the list.
fn divide(at: u32) {
    let expert = listed(at);
    let copies = listed(at + 1u);
    let pairs = atomicLoad(&expert_pairs[expert]);
    // The level to which the pairs fill the holders below it. A holder above the level of a round stays out of the next, so
    // the level sinks; it stands when no more leave.
    var level = 0xffffffffu;
    var rest = 0u;
    var below = 0u;
    for (var round = 0u; round <= copies; round = round + 1u) {
        var sum = pairs;
        var n = 0u;
        for (var i = 0u; i < copies; i = i + 1u) {
            let load = atomicLoad(&loads[listed(at + 2u + i)]) - share(pairs, copies, i);
            if (load <= level) {
                sum = sum + load;
                n = n + 1u;
            }
        }
        if (n == below) {
            break;
        }
        below = n;
        level = sum / n;
        rest = sum - level * n;
    }
    var first = 0u;
    for (var i = 0u; i < copies; i = i + 1u) {
        let holder = listed(at + 2u + i);
        let load = atomicLoad(&loads[holder]) - share(pairs, copies, i);
        var quota = 0u;
        if (load <= level) {
            quota = level - load;
            if (rest > 0u) {
                quota = quota + 1u;
                rest = rest - 1u;
            }
        }
        atomicStore(&loads[holder], load + quota);
        if (holder == params.rank) {
            quotas[expert] = vec2<u32>(first, quota);
        }
        first = first + quota;
    }
}

@compute @workgroup_size({{ lanes }})
fn main(@builtin(local_invocation_index) lane: u32) {
    for (var e = lane; e < params.experts; e = e + {{ lanes }}u) {
        atomicStore(&expert_pairs[e], 0u);
    }
    for (var r = lane; r < params.ranks; r = r + {{ lanes }}u) {
        atomicStore(&loads[r], 0u);
    }
    for (var i = lane; i < min(params.list_words, {{ listed }}u); i = i + {{ lanes }}u) {
        list_tile[i] = holders[params.experts + i];
    }
    workgroupBarrier();
    for (var pair = lane; pair < params.valid_pairs; pair = pair + {{ lanes }}u) {
        let id = topk_ids[pair];
        if (id >= 0 && id < i32(params.experts)) {
            atomicAdd(&expert_pairs[id], 1u);
        }
    }
    workgroupBarrier();
    for (var e = lane; e < params.experts; e = e + {{ lanes }}u) {
        let holder = holders[e];
        let pairs = atomicLoad(&expert_pairs[e]);
        if (holder < 0x80000000u) {
            atomicAdd(&loads[holder], pairs);
            continue;
        }
        let at = holder - 0x80000000u;
        let copies = listed(at + 1u);
        for (var i = 0u; i < copies; i = i + 1u) {
            atomicAdd(&loads[listed(at + 2u + i)], share(pairs, copies, i));
        }
    }
    workgroupBarrier();
    if (lane != 0u) {
        return;
    }
    // Each expert depends on the loads that those before it leave.
    for (var at = 0u; at < params.list_words; at = at + 2u + listed(at + 1u)) {
        divide(at);
    }
}
