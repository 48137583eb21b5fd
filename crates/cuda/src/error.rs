//! What can go wrong between us and the GPU.

use std::path::PathBuf;
use temper_tensor::OutOfMemory;

/// Result of this crate's own functions.
pub type Result<T> = std::result::Result<T, Error>;

/// A failure of the GPU or of one of its libraries; every variant names what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Libraries that are needed were not found.
    #[error("cannot use the GPU: {}", missing.join("; "))]
    Missing {
        /// One sentence a library: what, where it was looked for, how to install it.
        missing: Vec<String>,
    },
    /// A library was found that lacks a function.
    #[error("{path}: no function {symbol}: this copy of {library} is too old; {remedy}")]
    Symbol {
        /// Name of the library.
        library: &'static str,
        /// The file opened.
        path: String,
        /// The function not in it.
        symbol: &'static str,
        /// What to install.
        remedy: &'static str,
    },
    /// The GPU, the driver or a library is not one that this program can use.
    #[error("cannot use the GPU: {0}")]
    Unsupported(String),
    /// A call failed.
    #[error("{call}: {text} (status {status})")]
    Call {
        /// The library function, with what it was called for.
        call: String,
        /// Its status code.
        status: i32,
        /// The library's own words.
        text: String,
    },
    /// A kernel source did not compile.
    #[error("kernels/{file}: NVRTC does not compile it for {arch}:\n{log}")]
    Compile {
        /// The source file.
        file: String,
        /// The architecture.
        arch: String,
        /// The compiler's messages.
        log: String,
    },
    /// The device has too little memory.
    #[error("{0}")]
    OutOfMemory(Box<OutOfMemory>),
    /// The kernel cache cannot be used.
    #[error("{path}: {source}; set TEMPER_CACHE to a writable folder")]
    Cache {
        /// File or folder.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
}

impl From<Error> for temper_tensor::Error {
    fn from(e: Error) -> temper_tensor::Error {
        match e {
            Error::OutOfMemory(found) => temper_tensor::Error::OutOfMemory(found),
            other => temper_tensor::Error::Backend(other.to_string()),
        }
    }
}
