//! Two kinds of fault: a row that cannot be used (counted, the file goes on) and a file that cannot be read.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// A row that is not trained, and why. Displays as `file:row:column: reason`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BadRow {
    /// The file.
    pub file: PathBuf,
    /// The row as the user sees it: physical line of JSON lines, index from 1 in a JSON array or Parquet file.
    pub row: u64,
    /// Byte column from 1, where the fault has one.
    pub column: Option<u64>,
    /// What was found and what to do.
    pub reason: String,
}

impl fmt::Display for BadRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:", self.file.display(), self.row)?;
        if let Some(column) = self.column {
            write!(f, "{column}:")?;
        }
        write!(f, " {}", self.reason)
    }
}

impl std::error::Error for BadRow {}

/// A fault of a whole file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused.
    #[error("{}: {action}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was being done.
        action: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file's contents are not what its name or its place promise.
    #[error("{}: {found}; {remedy}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What was found.
        found: String,
        /// What to do.
        remedy: String,
    },
    /// An option is out of its range.
    #[error("{option}: {found}; {remedy}")]
    Option {
        /// The option's name.
        option: &'static str,
        /// What was found.
        found: String,
        /// What to do.
        remedy: String,
    },
}

impl Error {
    /// A fault of a file: what was found and the remedy.
    pub fn file(path: &Path, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::File { path: path.to_path_buf(), found: found.into(), remedy: remedy.into() }
    }

    /// The system's refusal to do `action` with a file.
    pub fn io(path: &Path, action: &'static str, source: std::io::Error) -> Self {
        Self::Io { path: path.to_path_buf(), action, source }
    }
}
