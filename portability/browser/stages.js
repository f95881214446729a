// Repeats the runs of stages that tests/common/traced.rs has left, from `stages.json`, and compares every buffer with what
// the device of the tests held afterwards.
import { Shaders, contentOf, open, record } from './replay.js';

// As the tests' own for the tiers without matrices.
const TOLERANCE = 1e-4;
// Values below this are as good as zero.
const TINY = 1e-20;

// Zero or a float of full precision: no id, no count, nothing that was left unwritten.
function isNumber(bits) {
  const exponent = (bits >>> 23) & 0xff;
  return (bits & 0x7fffffff) === 0 || (exponent > 0 && exponent < 0xff);
}

// A float so small that some devices take it for zero. Ids in these runs are smaller still.
function isTiny(bits) {
  const magnitude = bits & 0x7fffffff;
  return magnitude === 0 || (magnitude > 0xfff && magnitude < 0x800000);
}

// Largest difference over the largest value: words are equal, or both are floats, whose differences count.
function difference(expected, got) {
  const [words, gotWords] = [new Uint32Array(expected), new Uint32Array(got)];
  const [floats, gotFloats] = [new Float32Array(expected), new Float32Array(got)];
  let [off, most] = [0, TINY];
  for (let i = 0; i < words.length; i++) {
    const [word, gotWord] = [words[i], gotWords[i]];
    if (word !== gotWord && isTiny(word) && isTiny(gotWord)) continue;
    const both = isNumber(word) && isNumber(gotWord);
    if (word !== gotWord && !both) return Infinity;
    if (both) [off, most] = [Math.max(off, Math.abs(floats[i] - gotFloats[i])), Math.max(most, Math.abs(floats[i]))];
  }
  return off / most;
}

async function run(device, shaders, recorded) {
  const { encoder, buffers } = await record(device, shaders, recorded);
  const usage = GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST;
  const back = buffers.map((buffer) => {
    const made = device.createBuffer({ size: buffer.size, usage });
    encoder.copyBufferToBuffer(buffer, 0, made, 0, buffer.size);
    return made;
  });
  device.queue.submit([encoder.finish()]);
  let worst = 0;
  for (const [i, buffer] of back.entries()) {
    await buffer.mapAsync(GPUMapMode.READ);
    const expected = contentOf(recorded.after[i]);
    const words = Math.floor(expected.length / 4) * 4;
    worst = Math.max(worst, difference(expected.buffer.slice(0, words), buffer.getMappedRange().slice(0, words)));
  }
  for (const buffer of [...buffers, ...back]) buffer.destroy();
  return worst;
}

async function main() {
  const cases = await (await fetch('stages.json')).json();
  const { device, name, subgroups } = await open();
  const shaders = new Shaders(device, Object.assign({}, ...cases.map((c) => c.shaders)));
  const results = [];
  for (const recorded of cases.filter((c) => c.tier === 'baseline' || subgroups)) {
    device.pushErrorScope('validation');
    const off = await run(device, shaders, recorded);
    const error = await device.popErrorScope();
    if (error) throw new Error(error.message);
    const stages = [...new Set(recorded.dispatches.map((d) => d.shader.split('[')[0]))];
    results.push({ tier: recorded.tier, off, right: off <= TOLERANCE, stages });
  }
  return { device: name, results };
}

globalThis.done = main().catch((error) => ({ error: error.message }));
