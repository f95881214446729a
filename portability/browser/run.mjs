// Opens a page in headless Chromium and prints what it found: the device, and `tier stage` lines on success.
// usage: node run.mjs FOLDER PAGE [PICTURE.png]; the package `playwright-core` is looked for in $NODE_FOLDER.
import fs from 'node:fs';
import http from 'node:http';
import { createRequire } from 'node:module';
import path from 'node:path';

const require = createRequire(`${process.env.NODE_FOLDER}/`);
const { chromium } = require('playwright-core');
const [folder, name, picture] = process.argv.slice(2);

// WebGPU wants a secure context: http on this machine counts as one, a file does not.
const types = { '.html': 'text/html', '.js': 'text/javascript', '.json': 'application/json' };
const server = http.createServer((request, response) => {
  const file = path.join(folder, path.basename(new URL(request.url, 'http://localhost').pathname));
  fs.readFile(file, (error, data) => {
    response.writeHead(error ? 404 : 200, { 'content-type': types[path.extname(file)] ?? 'text/plain' });
    response.end(data);
  });
});
await new Promise((ready) => server.listen(0, '127.0.0.1', ready));

const browser = await chromium.launch({
  executablePath: '/usr/bin/chromium',
  // Playwright turns the GPU off, and Chromium has WebGPU on Linux only behind this flag.
  ignoreDefaultArgs: ['--disable-gpu'],
  args: ['--no-sandbox', '--enable-unsafe-webgpu', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync'],
});
try {
  const page = await browser.newPage();
  page.on('console', (message) => console.error(message.text()));
  await page.goto(`http://127.0.0.1:${server.address().port}/${name}`);
  const found = await page.evaluate(() => globalThis.done);
  if (picture) await page.screenshot({ path: picture, fullPage: true });
  if (found.error) throw new Error(found.error);
  console.error(`${found.results.length} cases, off by ${Math.max(...found.results.map((r) => r.off))} at most`);
  const wrong = found.results.filter((r) => !r.right);
  if (wrong.length || !found.results.length) throw new Error(`wrong: ${JSON.stringify(wrong)}`);
  console.log(`# ${found.device}`);
  for (const { tier, stages } of found.results) for (const stage of stages) console.log(`${tier} ${stage}`);
} catch (error) {
  console.error(error.message);
  process.exitCode = 1;
} finally {
  await browser.close();
  server.close();
}
