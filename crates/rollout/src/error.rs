//! What can go wrong in generation.

use std::path::PathBuf;

/// Result of the generation engine.
pub type Result<T> = std::result::Result<T, Error>;

/// A failed request or step.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The model or its backend failed.
    #[error(transparent)]
    Model(#[from] temper_model::Error),
    /// The engine was asked to do with settings that cannot work.
    #[error("generation engine: {0}")]
    Options(String),
    /// A request that cannot be served.
    #[error("request: {0}")]
    Request(String),
    /// A sampling setting outside its range.
    #[error("sampling: {key} is {found}; {expected}")]
    Sampling {
        /// The setting.
        key: &'static str,
        /// Its value.
        found: f64,
        /// What it may be.
        expected: &'static str,
    },
    /// The model produced logits that no token can be drawn from.
    #[error("request {request}, token {token}: {fault}; the weights are probably damaged or training diverged")]
    Logits {
        /// Number of the request.
        request: u64,
        /// Tokens generated before this one.
        token: usize,
        /// What was found.
        fault: LogitFault,
    },
    /// A JSON file of a model folder cannot be read.
    #[error("{}: {fault}", path.display())]
    ModelFile {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        fault: String,
    },
}

impl Error {
    /// Whether the user's input is at fault (exit code 2) rather than the work itself (exit code 1).
    pub fn is_bad_input(&self) -> bool {
        matches!(self, Error::Request(_) | Error::Sampling { .. } | Error::ModelFile { .. })
    }
}

/// Why no token can be drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LogitFault {
    /// A logit is NaN.
    #[error("the logit of id {0} is NaN")]
    NaN(usize),
    /// A logit is plus infinity.
    #[error("the logit of id {0} is infinite")]
    Infinite(usize),
    /// There is no logit above minus infinity.
    #[error("no id has a finite logit")]
    Nothing,
}
