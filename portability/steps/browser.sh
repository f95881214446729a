#!/usr/bin/env bash
# Headless Chromium runs every stage that a kernel test runs, and a mixture-of-experts layer with two adapters, through
# WebGPU, from the same WGSL, buffers and dispatches, on SwiftShader, and gets what the tests have compared with the
# oracle. The page with the layer is examples/web.
set -euo pipefail
source portability/lib.sh

packages chromium nodejs
node_packages playwright-core@1.65.1
need_traces
rm -rf "$WORK/web"
cp -r examples/web "$WORK/web"
cp portability/browser/stages.* "$WORK/layer.json" "$WORK/web"
python3 - "$WORK/stages" >"$WORK/web/stages.json" <<'PYTHON'
import pathlib, sys
print("[" + ",".join(file.read_text() for file in sorted(pathlib.Path(sys.argv[1]).glob("*.json"))) + "]")
PYTHON

page() { NODE_FOLDER=$WORK/node node portability/browser/run.mjs "$WORK/web" "$@"; }
page index.html "$WORK/web/page.png" >"$WORK/browser.txt"
page stages.html >>"$WORK/browser.txt"
# A page that compares must find a wrong shader.
sed -i 's/sum = sum + topk_weights/sum = sum - topk_weights/g' "$WORK/web/layer.json" "$WORK/web/stages.json"
must_fail page index.html
must_fail page stages.html

device=$(sed -n 's/^# //p' "$WORK/browser.txt" | sort -u)
grep -v '^#' "$WORK/browser.txt" | sort -u >"$WORK/browser-stages.txt"
while read -r tier stage; do
    evidence webgpu "$tier" "$stage" ran "ran in Chromium on $device"
done <"$WORK/browser-stages.txt"
shown "$(wc -l <"$WORK/browser-stages.txt") stages and tiers right in $(chromium --version), on $device"
