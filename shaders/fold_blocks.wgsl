// u of the adapters as blocks of 16 rows and 16 ranks, as `expert_gemm_direct` loads them straight into matrices: for each slot that
// a tile has and for each 16 of its ranks a block of every 16 rows, zeros where a row has another slot. One workgroup a tile.
struct FoldBlocksParams {
    // P, or T when dense.
    rows: u32,
    // Pairs of a token, slots and experts.
    top_k: u32,
    slots: u32,
    experts: u32,
    // Entries of the site in `index`, its projections, and the rank that u has room for, a multiple of 16.
    index_base: u32,
    projections: u32,
    max_rank: u32,
    // Blocks that a projection has room for.
    room: u32,
    expert_base: u32,
    sorted_base: u32,
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<uniform> params: FoldBlocksParams;
@group(0) @binding(1) var<storage, read> u: array<vec4<u32>>; // f16 [P, projections, max_rank]
@group(0) @binding(2) var<storage, read> index: array<Factor>; // [slots, experts, projections] from index_base
@group(0) @binding(3) var<storage, read> ids: array<i32>; // alignment; unused when dense
@group(0) @binding(4) var<storage, read> token_lora_mapping: array<i32>; // [T]
@group(0) @binding(5) var<storage, read_write> blocks: array<vec4<u32>>; // f16 [C / 16, projections, room, 16, 16]

{% set subgroups = height // width %}
var<workgroup> slot_bits: array<vec4<u32>, {{ subgroups }}>;
// The slot of each row in the upper byte, 255 for none, and its pair.
var<workgroup> row_words: array<u32, {{ height }}>;
var<workgroup> tile_slots: array<u32, 128>;

{% include "shared/rows.wgsl" %}
{% include "shared/factor.wgsl" %}
{% include "shared/slots.wgsl" %}

@compute @workgroup_size({{ height }})
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_id) subgroup: u32,
) {
    let item = folded(workgroup);
    let first_row = item * {{ height }}u;
    {% if rows == "tiles" %}
    if (item >= u32(ids[65])) {
        return;
    }
    let label = ids[params.expert_base + item];
    if (label < 0 || label >= i32(params.experts)) {
        return;
    }
    let pair0 = u32(ids[params.sorted_base + first_row + lane]);
    {% else %}
    if (first_row >= params.rows) {
        return;
    }
    let label = 0;
    let pair0 = first_row + lane;
    {% endif %}
    let scan0 = lane;
    let counts0 = true;
    {% set scans = 1 %}
    {% set keeps_rows = true %}
    {% include "shared/fold_scan.wgsl" %}
    workgroupBarrier();
    {% include "shared/tile_slots.wgsl" %}
    if (lane < used_slots) {
        tile_slots[lane] = nth_slot(slots, lane);
    }
    workgroupBarrier();
    let slot_chunks = params.max_rank / 16u;
    let chunks = used_slots * slot_chunks;
    for (var word = lane; word < chunks * params.projections * {{ height * 2 }}u; word = word + {{ height }}u) {
        let at = word % 32u;
        let chunk = word / 32u % chunks;
        let rest = word / 32u / chunks;
        let projection = rest % params.projections;
        let block = rest / params.projections;
        let slot = tile_slots[chunk / slot_chunks];
        let group = chunk % slot_chunks * 2u + at % 2u;
        let row = row_words[block * 16u + at / 2u];
        let factor = index[params.index_base + (slot * params.experts + u32(label)) * params.projections + projection];
        // Nothing stands in u behind the groups of a factor.
        let held = row >> 24u == slot && group < ((factor.rank_type & 0xffffu) + 7u) / 8u;
        let pair = min(row & 0xffffffu, params.rows - 1u);
        let value = u[(pair * params.projections + projection) * (params.max_rank / 8u) + group];
        let to = ((first_row / 16u + block) * params.projections + projection) * params.room + chunk;
        blocks[to * 32u + at] = select(vec4<u32>(), value, held);
    }
}
