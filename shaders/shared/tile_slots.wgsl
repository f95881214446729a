// The slots that the rows of the tile have, as bits, and how many. A barrier lies between `fold_scan` and this.
var slots = slot_bits[0];
{% for s in range(1, subgroups) %}
slots = slots | slot_bits[{{ s }}];
{% endfor %}
let counts = countOneBits(slots);
let used_slots = counts.x + counts.y + counts.z + counts.w;
