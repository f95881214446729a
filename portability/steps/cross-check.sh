#!/usr/bin/env bash
# The code for Metal and for DX12 type-checks: `cargo check` for macOS and Windows, by Debian's Rust, whose package brings
# the source of the standard library.
set -euo pipefail
source portability/lib.sh

packages rust-web-src rustc-web cargo-web
for target in aarch64-apple-darwin x86_64-pc-windows-msvc; do
    RUSTC_BOOTSTRAP=1 RUSTC=/usr/bin/rustc CARGO_PROFILE_DEV_DEBUG=0 CARGO_INCREMENTAL=0 ${PORTABILITY_TURN:-} /usr/bin/cargo check --locked \
        -Z build-std=std,panic_abort --target "$target" --target-dir "$WORK/cross"
    shown "cargo check --target $target"
done
rm -rf "$WORK/cross"
