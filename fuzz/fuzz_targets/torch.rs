//! See `wgmoe::fuzzing::torch`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    wgmoe::fuzzing::torch(bytes);
});
