// What a person sees.
const svg = 'http://www.w3.org/2000/svg';

export function say(text) {
  document.getElementById('device').textContent = text;
}

// A row for each case that ran.
export function tabulate({ tier, tokens, experts, tolerance, dispatches }, off, right) {
  const row = document.getElementById('cases').insertRow();
  const cells = [tier, tokens, experts, dispatches.length, off.toExponential(1), tolerance.toExponential(0)];
  for (const cell of cells) row.insertCell().textContent = cell;
  const mark = row.insertCell();
  mark.textContent = right ? '✓ equals the oracle' : '✗ differs';
  mark.className = right ? 'right' : 'wrong';
  const items = dispatches.map(({ shader, grid }) => {
    const item = document.createElement('li');
    item.textContent = `${shader} × ${Array.isArray(grid) ? grid.join(' × ') : 'as the device decides'}`;
    return item;
  });
  document.getElementById('dispatches').replaceChildren(...items);
}

// Lines from tokens to their experts, in the colour of the token's adapter.
export function draw({ tokens, topk_ids, adapters }) {
  const picture = document.getElementById('picture');
  const [width, height, n_experts] = [720, 200, 8];
  picture.setAttribute('viewBox', `0 0 ${width} ${height}`);
  const add = (name, attributes, text = '') => {
    const element = document.createElementNS(svg, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.textContent = text;
    picture.append(element);
  };
  const tokenX = (t) => ((t + 0.5) * width) / tokens;
  const expertX = (e) => ((e + 0.5) * width) / n_experts;
  topk_ids.forEach((expert, pair) => {
    const token = Math.floor((pair * tokens) / topk_ids.length);
    const colour = ['none', 'first', 'second'][adapters[token] + 1];
    add('line', { x1: tokenX(token), y1: 24, x2: expertX(expert), y2: 170, class: colour, 'stroke-width': 1.5 });
  });
  for (let t = 0; t < tokens; t++) add('text', { x: tokenX(t), y: 16, 'text-anchor': 'middle', class: 'token' }, t);
  for (let e = 0; e < n_experts; e++) {
    add('rect', { x: expertX(e) - 30, y: 170, width: 60, height: 24, rx: 4, class: 'expert' });
    add('text', { x: expertX(e), y: 186, 'text-anchor': 'middle', class: 'token' }, `expert ${e}`);
  }
}
