// Repeats a recorded layer through WebGPU: `layer.json` comes from tests/trace.rs, see `make web`.
import { Shaders, open, record } from './replay.js';
import { draw, say, tabulate } from './show.js';

// Runs one case and gives the largest difference over the largest expected value.
async function run(device, shaders, recorded) {
  const { encoder, buffers } = await record(device, shaders, recorded);
  const bytes = recorded.expected.length * 4;
  const back = device.createBuffer({ size: bytes + 4, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
  encoder.copyBufferToBuffer(buffers[recorded.out], 0, back, 0, bytes);
  encoder.copyBufferToBuffer(buffers[recorded.status], 0, back, bytes, 4);
  device.queue.submit([encoder.finish()]);
  await back.mapAsync(GPUMapMode.READ);
  const got = new Float32Array(back.getMappedRange(0, bytes));
  const status = new Uint32Array(back.getMappedRange(bytes, 4))[0];
  if (status !== recorded.expected_status) return Infinity;
  let [off, most] = [0, 0];
  recorded.expected.forEach((expected, i) => {
    const difference = Math.abs(got[i] - expected);
    off = Number.isNaN(difference) ? Infinity : Math.max(off, difference);
    most = Math.max(most, Math.abs(expected));
  });
  return off / most;
}

async function main() {
  const answer = await fetch('layer.json');
  if (!answer.ok) throw new Error('layer.json is missing: `make web` writes it');
  const trace = await answer.json();
  const { device, name, subgroups } = await open();
  say(`Runs on ${name}, ${subgroups ? 'with' : 'without'} subgroups.`);

  const shaders = new Shaders(device, trace.shaders);
  const results = [];
  for (const recorded of trace.cases.filter((c) => c.tier === 'baseline' || subgroups)) {
    device.pushErrorScope('validation');
    const off = await run(device, shaders, recorded);
    const error = await device.popErrorScope();
    if (error) throw new Error(error.message);
    const right = off <= recorded.tolerance;
    tabulate(recorded, off, right);
    const stages = [...new Set(recorded.dispatches.map((d) => d.shader.split('[')[0]))];
    results.push({ tier: recorded.tier, tokens: recorded.tokens, off, right, stages });
  }
  draw(trace.cases.find((c) => c.tokens > 1));
  return { device: name, results };
}

// `done` is for a program that waits for the page.
globalThis.done = main().catch((error) => {
  say(`Failed: ${error.message}`);
  return { error: error.message };
});
