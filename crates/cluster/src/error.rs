//! What keeps a job from starting.

use std::{io, path::PathBuf};

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What keeps a job from starting or a process from taking part in it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The environment contradicts itself.
    #[error(transparent)]
    Environment(#[from] crate::env::Error),
    /// Arguments, files or variables are at fault; the text says which, and what to do.
    #[error("{0}")]
    Input(String),
    /// A line of a hostfile.
    #[error("{path}:{line}: {what}")]
    Hostfile {
        /// The file.
        path: PathBuf,
        /// Its line, from 1.
        line: usize,
        /// What is wrong, and what to write.
        what: String,
    },
    /// The system refuses something.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// The system's error.
        source: io::Error,
    },
    /// The supervisor ended or did not answer.
    #[error("{0}")]
    Supervisor(String),
}

impl Error {
    /// Whether the user's input is at fault (exit code 2) rather than the job (exit code 1).
    pub fn is_bad_input(&self) -> bool {
        matches!(self, Error::Environment(_) | Error::Input(_) | Error::Hostfile { .. })
    }
}

/// Says what was tried when the system refuses it.
pub(crate) fn doing(what: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
    let what = what.into();
    move |source| Error::Io { what, source }
}
