//! Writes that fail: told once, counted, and told again as a number when the run ends.

use std::io;
use std::path::PathBuf;

/// Watches the writes to one file.
pub(crate) struct Losses {
    path: PathBuf,
    lost: u64,
}

impl Losses {
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), lost: 0 }
    }

    /// Takes the result of a write; the first failure becomes a warning. Returns whether it went well.
    pub fn note(&mut self, result: io::Result<()>) -> bool {
        if let Err(error) = &result {
            if self.lost == 0 {
                tracing::warn!("{}: {error}. Training goes on; what cannot be written there is lost", self.path.display());
            }
            self.lost += 1;
        }
        result.is_ok()
    }

    /// Says at the end how much is missing.
    pub fn close(&mut self) {
        if self.lost > 1 {
            tracing::warn!("{}: {} writes failed", self.path.display(), self.lost);
        }
        self.lost = 0;
    }
}
