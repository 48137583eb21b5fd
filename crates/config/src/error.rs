//! One clear error per fault: where, what was found, what to do.

use std::path::PathBuf;

/// Result of reading a configuration.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file's syntax is wrong.
    #[error("{origin}: {message}")]
    Syntax {
        /// The file, with line and column where known.
        origin: String,
        /// The parser's message.
        message: String,
    },
    /// A key or its value is wrong.
    #[error("{origin}: {key}: {found}. {remedy}")]
    Key {
        /// The file (or `--set`).
        origin: String,
        /// Dotted key, e.g. `optim.lr`.
        key: String,
        /// What was found.
        found: String,
        /// What to do.
        remedy: String,
    },
}
