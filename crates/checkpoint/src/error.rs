//! One clear error per fault: which file, what was found, what to do.

use std::path::{Path, PathBuf};

/// Result of reading or writing weights.
pub type Result<T> = std::result::Result<T, Error>;

/// Why weights or a checkpoint cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system refused an operation on a file (disk full, no permission, no such file).
    #[error("cannot {action} {path}: {cause}")]
    Io {
        /// What was tried, e.g. `write`.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's error; part of the message, and so not a `source` that would be printed a second time.
        cause: std::io::Error,
    },
    /// What the caller gave cannot be used: a malformed file, a missing tensor, a folder in use.
    #[error("{path}: {message}")]
    Bad {
        /// The file or folder.
        path: PathBuf,
        /// What was found and the remedy.
        message: String,
    },
    /// A checkpoint is incomplete or damaged.
    #[error("checkpoint {path} cannot be used, it is {fault}")]
    NotWhole {
        /// Its folder.
        path: PathBuf,
        /// What is wrong with it.
        fault: crate::store::Fault,
    },
    /// A run has checkpoints but none can be used.
    #[error("{dir}: none of the {} checkpoints can be used (nothing was deleted):\n  {}", .checkpoints.len(), .checkpoints.join("\n  "))]
    NoneWhole {
        /// The folder of checkpoints.
        dir: PathBuf,
        /// Each of them and what is wrong with it.
        checkpoints: Vec<String>,
    },
    /// One of several ranks failed, and with it the work of all.
    #[error("rank {rank}: {message}")]
    OfRank {
        /// The rank of the group.
        rank: usize,
        /// Its own error.
        message: String,
        /// What kind of error it was.
        class: Class,
    },
    /// The ranks cannot be reached, so that nothing can be agreed on.
    #[error("the ranks can no longer agree on a checkpoint: {0}")]
    Comm(#[from] temper_comm::Error),
    /// A model cannot be had from the Hub.
    #[error("{id}: {message} (Hub endpoint {endpoint}). {remedy}")]
    Hub {
        /// The model's id.
        id: String,
        /// The server asked.
        endpoint: String,
        /// What happened.
        message: String,
        /// What to do.
        remedy: String,
        /// Whether the id, revision or token is at fault rather than the network.
        bad_input: bool,
    },
}

/// What matters of an error to another rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// The work itself failed.
    Failed,
    /// What the user gave is at fault.
    BadInput,
    /// A checkpoint is incomplete or damaged: an older one may do.
    NotWhole,
    /// A rank is gone or silent.
    Lost,
}

impl Error {
    /// What matters of it to another rank.
    pub fn class(&self) -> Class {
        match self {
            Error::OfRank { class, .. } => *class,
            Error::NotWhole { .. } => Class::NotWhole,
            Error::Comm(_) => Class::Lost,
            Error::Bad { .. } | Error::Hub { bad_input: true, .. } => Class::BadInput,
            Error::Io { .. } | Error::NoneWhole { .. } | Error::Hub { .. } => Class::Failed,
        }
    }

    /// An [`Error::Io`] from a system error.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
        move |cause| Error::Io { action, path: path.to_path_buf(), cause }
    }

    /// An [`Error::Bad`] about a file or folder.
    pub(crate) fn bad(path: &Path, message: impl Into<String>) -> Error {
        Error::Bad { path: path.to_path_buf(), message: message.into() }
    }

    /// Whether the fault lies in what the user gave (exit code 2) rather than in the work itself (exit code 1).
    pub fn is_bad_input(&self) -> bool {
        self.class() == Class::BadInput
    }
}

/// A few names of many: `a, b, c and 4 more`.
pub(crate) fn some_of<S: AsRef<str>>(names: &[S]) -> String {
    const SHOWN: usize = 4;
    let shown = names.iter().take(SHOWN).map(AsRef::as_ref).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}
