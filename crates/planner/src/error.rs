//! One clear error per fault.

/// Result of planning.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a plan cannot be made from what was given.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The model's `config.json` cannot be used.
    #[error(transparent)]
    Config(#[from] temper_config::Error),
    /// A key of a hybrid model's `config.json` or of a layout.
    #[error("{origin}: {key}: {found}. {remedy}")]
    Key {
        /// The file or argument.
        origin: String,
        /// The key.
        key: String,
        /// What was found.
        found: String,
        /// What to do.
        remedy: String,
    },
}

impl Error {
    /// An error about one key.
    pub(crate) fn key(origin: &str, key: &str, found: impl Into<String>, remedy: impl Into<String>) -> Error {
        Error::Key { origin: origin.to_string(), key: key.to_string(), found: found.into(), remedy: remedy.into() }
    }
}
