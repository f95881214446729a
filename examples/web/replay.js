// Repeats recorded dispatches through WebGPU.
export function bytesOf(hex) {
  return Uint8Array.from(hex.match(/../g) ?? [], (pair) => parseInt(pair, 16));
}

// What a buffer starts with: one word over and over, or bytes.
export function contentOf({ size, fill, bytes }) {
  if (bytes !== undefined) return bytesOf(bytes);
  const word = bytesOf(fill);
  return Uint8Array.from({ length: size }, (_, i) => word[i % 4]);
}

// One shader with its pipelines and the layout of its bindings: 0 is uniform, the rest storage.
export class Shaders {
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

// The buffers and dispatches of a case, recorded and not yet submitted.
export async function record(device, shaders, recorded) {
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
  return { encoder, buffers };
}

// A device with WebGPU's default limits, since none are asked for.
export async function open() {
  const adapter = await navigator.gpu?.requestAdapter();
  if (!adapter) throw new Error('this browser offers no WebGPU adapter');
  const subgroups = adapter.features.has('subgroups');
  const device = await adapter.requestDevice({ requiredFeatures: subgroups ? ['subgroups'] : [] });
  const { vendor, architecture, description } = adapter.info;
  const name = [vendor, architecture, description].filter(Boolean).join(' ') || 'a GPU that tells no name';
  return { device, name, subgroups };
}
