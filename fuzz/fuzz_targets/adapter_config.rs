//! See `wgmoe::fuzzing::adapter_config`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    wgmoe::fuzzing::adapter_config(bytes);
});
