// Opens the `main` of a stage that gives a row, `row`, to a workgroup: of several subgroups, lanes are numbered by these, as what
// reduces over a row takes them.
{% set along = subgroups > 1 %}
@compute @workgroup_size({{ lanes }})
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    {% if along %}
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    @builtin(subgroup_id) subgroup: u32,
    {% else %}
    @builtin(local_invocation_index) lane: u32,
    {% endif %}
) {
    {% if along %}
    let lane = subgroup * {{ lanes // subgroups }}u + subgroup_lane;
    {% endif %}
    let row = folded(workgroup);
    if (row >= params.rows) {
        return;
    }
