#!/usr/bin/env bash
# Headless Chromium runs a mixture-of-experts layer with two adapters through WebGPU, from the same WGSL, buffers and
# dispatches, on SwiftShader, and gets the oracle's numbers. The page is examples/web.
set -euo pipefail
source portability/lib.sh

packages chromium nodejs
node_packages playwright-core@1.65.1
[ -s "$WORK/layer.json" ] || WGMOE_TRACE=$WORK/layer.json "${cargo[@]}" test --locked --test trace
rm -rf "$WORK/web"
cp -r examples/web "$WORK/web"
cp "$WORK/layer.json" "$WORK/web"

page() { NODE_FOLDER=$WORK/node node portability/browser/run.mjs "$WORK/web" "$@"; }
page "$WORK/web/page.png" >"$WORK/browser.txt"
# A page that compares must find a wrong shader.
sed -i 's/sum = sum + topk_weights/sum = sum - topk_weights/' "$WORK/web/layer.json"
must_fail page

device=$(sed -n 's/^# //p' "$WORK/browser.txt")
grep -v '^#' "$WORK/browser.txt" | sort -u >"$WORK/browser-stages.txt"
while read -r tier stage; do
    evidence webgpu "$tier" "$stage" "ran in Chromium on $device"
done <"$WORK/browser-stages.txt"
shown "$(wc -l <"$WORK/browser-stages.txt") stages and tiers right in $(chromium --version), on $device"
