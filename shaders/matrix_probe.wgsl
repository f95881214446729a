{% import "shared/matrices.wgsl" as m %}
// What a device does with subgroups and matrices: each invocation says how large its subgroup is, which one, and its place in it; and
// subgroups multiply two blocks of small whole numbers, one by rows and one by columns. For devices whose back end does not tell.
enable f16;
enable wgpu_cooperative_matrix;
// What a subgroup does is uniform within it, but not for the analysis.
diagnostic(off, derivative_uniformity);

struct MatrixProbeParams {
    // What the operands are multiples of: so that no compiler knows the product.
    unit: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

@group(0) @binding(0) var<uniform> params: MatrixProbeParams;
@group(0) @binding(1) var<storage, read_write> out: array<u32>; // [lanes, 3], then f32 [{{ products }}, 16, 16]

{% include "shared/matrices.wgsl" %}
var<workgroup> operands: array<f16, 512>;
var<workgroup> product: array<f32, {{ products * 256 }}>;

@compute @workgroup_size({{ lanes }})
fn main(
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_size) size: u32,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    @builtin(subgroup_id) subgroup: u32,
) {
    for (var i = lane; i < 512u; i = i + {{ lanes }}u) {
        operands[i] = f16(f32((i * 5u + i / 16u * 3u) % 11u * params.unit));
    }
    workgroupBarrier();
    {{ m.load_t("let left", "Left", "operands", "0", "16u", false) }}
    {{ m.load("let right", "Right", "operands", "256", "16u", false) }}
    {{ m.zero("sum") }}
    {{ m.multiply_add("sum", "left", "right") }}
    {{ m.hold("block", "sum") }}
    {{ m.point("place", "product", "subgroup % " ~ products ~ "u * 256u") }}
    {{ m.store_t("block", "place", "product", "16u", false) }}
    workgroupBarrier();
    out[lane * 3u] = size;
    out[lane * 3u + 1u] = subgroup;
    out[lane * 3u + 2u] = subgroup_lane;
    for (var i = lane; i < {{ products * 256 }}u; i = i + {{ lanes }}u) {
        out[{{ lanes * 3 }}u + i] = bitcast<u32>(product[i]);
    }
}
