//! Files that a command writes: whether they can be is found out before the work, and they appear whole.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::usage;

/// A file to be written, by way of another one beside it.
pub struct Target {
    option: &'static str,
    path: PathBuf,
    beside: PathBuf,
}

impl Target {
    /// Makes sure that the `path` that `option` names can be written.
    pub fn reserve(option: &'static str, path: &Path) -> anyhow::Result<Self> {
        let fail = |why: String| usage(format!("{option} `{}`: {why}", path.display()));
        // A link stays one.
        let path_of_file = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let name = path_of_file.file_name().ok_or_else(|| fail("expected the name of a file".to_owned()))?;
        if path_of_file.metadata().is_ok_and(|meta| !meta.is_file()) {
            return Err(fail("expected a regular file".to_owned()));
        }
        let beside = path_of_file.with_file_name(format!(".{}.{}", name.to_string_lossy(), std::process::id()));
        File::create(&beside).map_err(|e| fail(format!("it cannot be written: {e}")))?;
        Ok(Self { option, path: path_of_file, beside })
    }

    /// Writes the whole file, in the place of what was there.
    pub fn write(&self, text: &str) -> anyhow::Result<()> {
        let write = || -> std::io::Result<()> {
            let mut file = File::create(&self.beside)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            std::fs::rename(&self.beside, &self.path)
        };
        write().with_context(|| format!("{} `{}`", self.option, self.path.display()))
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // It is there only when nothing was written.
        let _ = std::fs::remove_file(&self.beside);
    }
}
