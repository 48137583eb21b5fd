//! One clear error per fault: where, what was found, what to do.

use std::io;
use std::path::{Path, PathBuf};

/// Result of reading a configuration.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read.
    #[error("{path}: {what} cannot be read: {source}. {remedy}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What it is for.
        what: &'static str,
        /// The system's error.
        source: io::Error,
        /// What to give instead.
        remedy: &'static str,
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

impl Error {
    /// The system does not let a configuration file be read.
    pub(crate) fn no_configuration(path: &Path) -> impl Fn(io::Error) -> Error {
        let remedy = "Give a TOML file; the README and examples/quickstart.toml show one";
        move |source| Error::Io { path: path.into(), what: "the configuration", source, remedy }
    }

    /// The system does not let the `config.json` of a model be read.
    pub fn no_model(path: &Path) -> impl Fn(io::Error) -> Error {
        let remedy = "Give a Hugging Face model folder: config.json, tokenizer and weights";
        move |source| Error::Io { path: path.into(), what: "the model's configuration", source, remedy }
    }
}
