//! What can go wrong between us and the GPU.

use std::path::PathBuf;
use temper_tensor::Purpose;

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

/// Everything known when an allocation failed.
#[derive(Debug)]
pub struct OutOfMemory {
    /// Purpose of the allocation.
    pub purpose: Purpose,
    /// Bytes asked for.
    pub wanted: usize,
    /// Bytes of device memory.
    pub total: usize,
    /// Bytes free on the device outside this process's heap.
    pub free: usize,
    /// Bytes held by purpose, in words.
    pub held: String,
    /// Largest free block of the heap.
    pub largest: usize,
}

impl std::fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let gib = |b: usize| b as f64 / (1u64 << 30) as f64;
        write!(
            f,
            "out of GPU memory: {:.3} GiB for {} do not fit. The device has {:.2} GiB, {:.2} GiB of it free outside this process's heap; \
             the heap holds {} (largest free block {:.3} GiB). {}",
            gib(self.wanted),
            self.purpose.name(),
            gib(self.total),
            gib(self.free),
            self.held,
            gib(self.largest),
            remedy(self.purpose)
        )
    }
}

/// What makes room, by the keys of the configuration; the most telling first.
fn remedy(purpose: Purpose) -> &'static str {
    match purpose {
        Purpose::Weights => {
            "Set precision.dtype = \"bfloat16\" if it is not, else the model is too large for this GPU: take a smaller one (or fewer layers in a benchmark)"
        }
        Purpose::Gradients | Purpose::Optimizer => {
            "This does not depend on the batch: set precision.moments = \"bfloat16\" (saves 4 bytes a parameter), precision.grads = \"bfloat16\" (saves 2) or \
             memory.offload_optimizer = true (saves 10), or take a smaller model"
        }
        Purpose::Activations | Purpose::Workspace | Purpose::Communication => {
            "Lower train.micro_batch (with train.global_batch kept, the result is the same), set memory.recompute = \"selective\" or \"full\", lower \
             memory.loss_chunk or data.seq_len; memory.offload_optimizer = true and bfloat16 in precision.grads and precision.moments make room too"
        }
    }
}

impl From<Error> for temper_tensor::Error {
    fn from(e: Error) -> temper_tensor::Error {
        temper_tensor::Error::Backend(e.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever memory was asked for, the error says which keys of the configuration make room.
    #[test]
    fn running_out_of_memory_names_what_to_change() {
        for (purpose, key) in [
            (Purpose::Weights, "precision.dtype"),
            (Purpose::Gradients, "precision.grads"),
            (Purpose::Optimizer, "precision.moments"),
            (Purpose::Activations, "train.micro_batch"),
            (Purpose::Workspace, "memory.recompute"),
        ] {
            let held = "weights 3.00 GiB".to_string();
            let error = OutOfMemory { purpose, wanted: 1 << 30, total: 8 << 30, free: 1 << 29, held, largest: 4096 };
            let text = error.to_string();
            for part in [key, "1.000 GiB", "8.00 GiB", "weights 3.00 GiB", purpose.name()] {
                assert!(text.contains(part), "{part}: {text}");
            }
        }
    }
}
