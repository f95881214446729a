// Work items are folded over y and z, because a dispatch has at most 65,535 workgroups in one dimension.
fn folded(workgroup: vec3<u32>) -> u32 {
    return workgroup.y + workgroup.z * 65535u;
}
