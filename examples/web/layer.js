// Repeats a recorded layer through WebGPU: `layer.json` comes from tests/trace.rs, see `make web`.
import { draw, say, tabulate } from './show.js';

function bytesOf(hex) {
  return Uint8Array.from(hex.match(/../g) ?? [], (pair) => parseInt(pair, 16));
}

// What a buffer starts with: one word over and over, or bytes.
function contentOf({ size, fill, bytes }) {
  if (bytes !== undefined) return bytesOf(bytes);
  const word = bytesOf(fill);
  return Uint8Array.from({ length: size }, (_, i) => word[i % 4]);
}

// One shader with its pipelines and the layout of its bindings: 0 is uniform, the rest storage.
class Shaders {
  constructor(device, sources) {
    this.device = device;
    this.sources = sources;
    this.made = new Map();
  }

  async pipeline(label) {
    if (!this.made.has(label)) this.made.set(label, await this.compile(label));
    return this.made.get(label);
  }

  async compile(label) {
    const wgsl = this.sources[label];
    // The native runtime's front end takes subgroups without this line, and browsers insist on it.
    const code = /\bsubgroup[A-Z]|@builtin\(subgroup_/.test(wgsl) ? `enable subgroups;\n${wgsl}` : wgsl;
    const kinds = [...wgsl.matchAll(/@binding\((\d+)\) var<(uniform|storage, read_write|storage, read)>/g)];
    const types = { uniform: 'uniform', 'storage, read': 'read-only-storage', 'storage, read_write': 'storage' };
    const entries = kinds.map(([, binding, kind]) => ({
      binding: Number(binding),
      visibility: GPUShaderStage.COMPUTE,
      buffer: { type: types[kind] },
    }));
    const layout = this.device.createBindGroupLayout({ label, entries });
    const pipeline = await this.device.createComputePipelineAsync({
      label,
      layout: this.device.createPipelineLayout({ bindGroupLayouts: [layout] }),
      compute: { module: this.device.createShaderModule({ label, code }), entryPoint: 'main' },
    });
    return { pipeline, layout };
  }
}

// Runs one case and gives the largest difference over the largest expected value.
async function run(device, shaders, recorded) {
  const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST | GPUBufferUsage.INDIRECT;
  const buffers = recorded.buffers.map((buffer) => {
    const made = device.createBuffer({ size: Math.ceil(buffer.size / 4) * 4, usage });
    device.queue.writeBuffer(made, 0, contentOf(buffer));
    return made;
  });
  const encoder = device.createCommandEncoder();
  const pass = encoder.beginComputePass();
  for (const { shader, params, buffers: views, grid } of recorded.dispatches) {
    const { pipeline, layout } = await shaders.pipeline(shader);
    const uniform = device.createBuffer({ size: 256, usage: GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST });
    device.queue.writeBuffer(uniform, 0, bytesOf(params));
    const entries = [{ binding: 0, resource: { buffer: uniform } }];
    views.forEach(({ buffer, offset, size }, i) => {
      entries.push({ binding: i + 1, resource: { buffer: buffers[buffer], offset, size } });
    });
    pass.setPipeline(pipeline);
    pass.setBindGroup(0, device.createBindGroup({ layout, entries }));
    if (Array.isArray(grid)) pass.dispatchWorkgroups(...grid);
    else pass.dispatchWorkgroupsIndirect(buffers[grid.buffer], grid.offset);
  }
  pass.end();
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
  const adapter = await navigator.gpu?.requestAdapter();
  if (!adapter) throw new Error('this browser offers no WebGPU adapter');
  const subgroups = adapter.features.has('subgroups');
  // Limits are WebGPU's defaults, since none are asked for.
  const device = await adapter.requestDevice({ requiredFeatures: subgroups ? ['subgroups'] : [] });
  const { vendor, architecture, description } = adapter.info;
  const name = [vendor, architecture, description].filter(Boolean).join(' ') || 'a GPU that tells no name';
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
