//! The first failure of a world, which all later calls repeat.

use std::sync::OnceLock;
use temper_comm::{Error, Result};

/// Where the first failure is kept.
#[derive(Default)]
pub(super) struct Failure(OnceLock<Error>);

impl Failure {
    /// The failure, if there was one.
    pub fn check(&self) -> Result<()> {
        self.0.get().map_or(Ok(()), |e| Err(e.clone()))
    }

    /// Keeps a failure; false when there was one before.
    pub fn set(&self, error: Error) -> bool {
        self.0.set(error).is_ok()
    }
}
