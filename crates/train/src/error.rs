//! Why a run stopped.

use std::path::PathBuf;
use temper_tensor::OutOfMemory;

/// Result of a training call.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a run stopped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration or the model's config.json.
    #[error(transparent)]
    Config(#[from] temper_config::Error),
    /// The data.
    #[error(transparent)]
    Data(#[from] temper_data::Error),
    /// Weights or checkpoints.
    #[error(transparent)]
    Checkpoint(#[from] temper_checkpoint::Error),
    /// The network.
    #[error(transparent)]
    Model(#[from] temper_model::Error),
    /// The backend.
    #[error(transparent)]
    Tensor(#[from] temper_tensor::Error),
    /// Parts of the input do not fit each other; the message says which and what to do.
    #[error("{0}")]
    Input(String),
    /// A file of the run folder cannot be written or read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The user or the system asked the run to stop; what it did until then is saved.
    #[error("interrupted after step {step}, which is saved in {path}. --resume goes on from there")]
    Interrupted {
        /// The last step done.
        step: usize,
        /// Folder of the checkpoints.
        path: PathBuf,
    },
    /// A loss or gradient is NaN or infinite, or the loss is far beyond where it began.
    #[error("{0}")]
    Diverged(String),
}

impl Error {
    /// What was missing, where the run failed for want of memory.
    pub fn out_of_memory(&self) -> Option<&OutOfMemory> {
        match self {
            Error::Tensor(temper_tensor::Error::OutOfMemory(found)) => Some(found),
            Error::Model(temper_model::Error::Tensor(temper_tensor::Error::OutOfMemory(found))) => Some(found),
            _ => None,
        }
    }

    /// Whether the user's input is at fault (exit code 2) rather than the run (exit code 1).
    pub fn is_bad_input(&self) -> bool {
        match self {
            Error::Config(_) | Error::Data(_) | Error::Input(_) => true,
            Error::Checkpoint(e) => e.is_bad_input(),
            Error::Model(_) | Error::Tensor(_) | Error::Io { .. } | Error::Diverged(_) | Error::Interrupted { .. } => false,
        }
    }
}
