// Validates WGSL with Dawn, Chromium's WebGPU, on its null back end: front end, uniformity, pipeline and limits. Nothing
// runs. usage: node check.mjs NO_FEATURES|subgroups FILE... ; the package `webgpu` is looked for in $NODE_FOLDER.
import fs from 'node:fs';
import { createRequire } from 'node:module';

const require = createRequire(`${process.env.NODE_FOLDER}/`);
const { create, globals } = await import(require.resolve('webgpu'));
Object.assign(globalThis, globals);

const [feature, ...files] = process.argv.slice(2);
// Limits are those of WebGPU's defaults, since none are asked for.
// `gpu` must outlive the device: Dawn ends the process otherwise.
const gpu = create(['backend=null']);
const adapter = await gpu.requestAdapter();
const device = await adapter.requestDevice({ requiredFeatures: feature === 'NO_FEATURES' ? [] : [feature] });

let failed = 0;
for (const file of files) {
  device.pushErrorScope('validation');
  const module = device.createShaderModule({ code: fs.readFileSync(file, 'utf8') });
  let why = null;
  try {
    await device.createComputePipelineAsync({ layout: 'auto', compute: { module, entryPoint: 'main' } });
  } catch (error) {
    why = error.message;
  }
  const error = await device.popErrorScope();
  why ??= error?.message;
  if (why) {
    failed++;
    console.log(`${file}: ${why}`);
  }
}
console.log(`${files.length - failed} of ${files.length} accepted`);
process.exit(failed ? 1 : 0);
