//! The seeds of the fuzz targets, through the functions that the targets call.

use std::path::Path;

use wgmoe::fuzzing::{adapter_config, safetensors, torch};

/// Takes a whole file; true when it is accepted.
type Reader = fn(&[u8]) -> bool;

#[test]
fn no_seed_breaks_its_reader() {
    let targets: [(&str, Reader); 3] =
        [("safetensors", safetensors), ("torch", torch), ("adapter_config", adapter_config)];
    let mut wrong = Vec::new();
    for (target, read) in targets {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds").join(target);
        let mut accepted = [0, 0];
        for entry in std::fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            let got = read(&std::fs::read(&path).unwrap());
            accepted[usize::from(got)] += 1;
            // The name says what the reader must think of it.
            let want = path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("good"));
            if got != want {
                wrong.push(path);
            }
        }
        assert!(accepted.iter().all(|n| *n > 0), "{target}: {accepted:?} refused and accepted");
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}
