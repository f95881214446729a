//! See `wgmoe::fuzzing::safetensors`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    wgmoe::fuzzing::safetensors(bytes);
});
