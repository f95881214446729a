// u of the adapters as blocks of 16 rows and 16 ranks, as `expert_gemm_direct` loads them straight into matrices: for each slot that
// rows of a subgroup have, and those between, and for each 16 of its ranks a block of every 16 rows, zeros where a row has another slot. Beside them the factors of
// these slots, so that the product finds B without looking up anything. One workgroup a tile.
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
    // Entries of a tile in `factors`.
    table_stride: u32,
    pad0: u32,
}

@group(0) @binding(0) var<uniform> params: FoldBlocksParams;
@group(0) @binding(1) var<storage, read> u: array<vec4<u32>>; // f16 [P, projections, max_rank]
@group(0) @binding(2) var<storage, read> index: array<Factor>; // [slots, experts, projections] from index_base
@group(0) @binding(3) var<storage, read> ids: array<i32>; // alignment; unused when dense
@group(0) @binding(4) var<storage, read> token_lora_mapping: array<i32>; // [T]
@group(0) @binding(5) var<storage, read_write> blocks: array<vec4<u32>>; // f16 [C / 16, projections, room, 16, 16]
@group(0) @binding(6) var<storage, read_write> factors: array<Factor>; // [tiles, {{ height // width }} + slots * projections]: of groups of rows, then of slots

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
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    @builtin(subgroup_id) subgroup: u32,
) {
    // The rows of a group belong to one subgroup.
    let lane = subgroup * {{ width }}u + subgroup_lane;
    let item = folded(workgroup);
    let first_row = item * {{ height }}u;
    {% if rows == "tiles" %}
    // There are as many workgroups as tiles, and more only where z counts on.
    if (workgroup.z > 0u && item >= u32(ids[65])) {
        return;
    }
    // Asked for at once: one after the other, each would be waited for.
    let label = ids[params.expert_base + item];
    let pair0 = u32(ids[params.sorted_base + first_row + lane]);
    if (label < 0 || label >= i32(params.experts)) {
        return;
    }
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
    {% include "shared/fold_scan.wgsl" %}
    workgroupBarrier();
    {% include "shared/tile_slots.wgsl" %}
    if (lane < used_slots) {
        tile_slots[lane] = nth_slot(slots, lane);
    }
    workgroupBarrier();
    // Of every {{ width }} rows the first and the last slot, by their number among those of the tile, so that who has these rows multiplies
    // nothing between zeros: rows stand in the order of their slots where there are many.
    let table = item * params.table_stride;
    let own_slot = row_words[lane] >> 24u;
    let own = own_slot != 255u;
    let number = slots_before(slots, own_slot);
    let first_number = subgroupMin(select(used_slots, number, own));
    let end_number = subgroupMax(select(0u, number + 1u, own));
    if (subgroup_lane == 0u) {
        factors[table + subgroup] = Factor(used_slots, first_number, end_number, 0.0);
    }
    if (used_slots == 0u) {
        return;
    }
    let slot_chunks = params.max_rank / 16u;
    // All entries that there is room for: the last slot's again, so that who reads ahead finds factors.
    for (var at = lane; at < params.room / slot_chunks * params.projections; at = at + {{ height }}u) {
        let slot = tile_slots[min(at / params.projections, used_slots - 1u)];
        let entry = (slot * params.experts + u32(label)) * params.projections + at % params.projections;
        factors[table + {{ subgroups }}u + at] = index[params.index_base + entry];
    }
    // The blocks of the rows of this subgroup. Two lanes have a row of each.
    {% for b in range(width // 16) %}
    let row{{ b }} = row_words[subgroup * {{ width }}u + {{ b * 16 }}u + subgroup_lane / 2u];
    let from{{ b }} = min(row{{ b }} & 0xffffffu, params.rows - 1u) * params.projections;
    {% endfor %}
    let begin = first_number * slot_chunks;
    let own_chunks = select(0u, (end_number - first_number) * slot_chunks, end_number > first_number);
    for (var n = 0u; n < own_chunks * params.projections; n = n + 1u) {
        let chunk = begin + n / params.projections;
        let projection = n % params.projections;
        let slot = tile_slots[chunk / slot_chunks];
        let group = chunk % slot_chunks * 2u + subgroup_lane % 2u;
        let factor = index[params.index_base + (slot * params.experts + u32(label)) * params.projections + projection];
        // Nothing stands in u behind the groups of a factor.
        let held = group < ((factor.rank_type & 0xffffu) + 7u) / 8u;
        {% for b in range(width // 16) %}
        let value{{ b }} = u[(from{{ b }} + projection) * (params.max_rank / 8u) + group];
        {% endfor %}
        {% for b in range(width // 16) %}
        {
            let block = first_row / 16u + subgroup * {{ width // 16 }}u + {{ b }}u;
            let to = (block * params.projections + projection) * params.room + chunk;
            blocks[to * 32u + subgroup_lane] = select(vec4<u32>(), value{{ b }}, held && row{{ b }} >> 24u == slot);
        }
        {% endfor %}
    }
}
