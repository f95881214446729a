// Copies memory as fast as shaders can: the limit that stages are held against which wait for memory.
struct StreamParams {
    // Groups of four words.
    quads: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

@group(0) @binding(0) var<uniform> params: StreamParams;
@group(0) @binding(1) var<storage, read> source: array<vec4<u32>>; // [quads]
@group(0) @binding(2) var<storage, read_write> copy: array<vec4<u32>>; // [quads]

{% include "shared/rows.wgsl" %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let at = folded(workgroup) * 256u + lane;
    if (at < params.quads) {
        copy[at] = source[at];
    }
}
