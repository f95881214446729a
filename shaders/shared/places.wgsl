// The places of this lane's experts among the {{ top_k }} with the largest keys, `place0`.., and how many were `found`: each is taken by the
// lane that has it, of equal keys the lowest id first. A key of 0 is no candidate.
{% for v in range(values) %}
var place{{ v }} = 0xffffffffu;
{% endfor %}
var found = 0u;
for (var k = 0u; k < {{ top_k }}; k = k + 1u) {
    var own = 0u;
    {% for v in range(values) %}
    own = max(own, key{{ v }});
    {% endfor %}
    let key = reduce_max_u32(own, lane);
    // Lanes hold experts in order, so the first lane that has the key has the lowest id.
    var taken = (first_lane(own == key, lane) != lane) | (key == 0u);
    found = found + select(0u, 1u, key != 0u);
    {% for v in range(values) %}
    let mine{{ v }} = !taken & (key{{ v }} == key);
    key{{ v }} = select(key{{ v }}, 0u, mine{{ v }});
    place{{ v }} = select(place{{ v }}, k, mine{{ v }});
    taken = taken | mine{{ v }};
    {% endfor %}
}
