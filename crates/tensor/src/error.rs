//! What can go wrong at the boundary of an operation.

use crate::Purpose;
use std::fmt;

/// Result of a tensor operation.
pub type Result<T> = std::result::Result<T, Error>;

/// A failed operation. Shape and dtype errors are programming errors of the caller and name the op.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An argument has the wrong shape.
    #[error("{op}: {what} has shape {found:?}, expected {expected}")]
    Shape {
        /// Name of the operation.
        op: &'static str,
        /// Which argument.
        what: &'static str,
        /// Its shape.
        found: Vec<usize>,
        /// The shape it should have, in words.
        expected: String,
    },
    /// An argument has a dtype the operation does not take.
    #[error("{op}: {what} has dtype {found}, expected {expected}")]
    DType {
        /// Name of the operation.
        op: &'static str,
        /// Which argument.
        what: &'static str,
        /// Its dtype.
        found: crate::DType,
        /// The dtype it should have, in words.
        expected: String,
    },
    /// An index (token id, expert, position) lies outside its table.
    #[error("{op}: {what} {index} is outside 0..{limit}")]
    Index {
        /// Name of the operation.
        op: &'static str,
        /// What the index stands for.
        what: &'static str,
        /// The index found.
        index: i64,
        /// One past the largest legal index.
        limit: usize,
    },
    /// There is no memory for a tensor or for an operation's scratch.
    #[error("{0}")]
    OutOfMemory(Box<OutOfMemory>),
    /// The backend failed (driver error).
    #[error("{0}")]
    Backend(String),
}

/// Everything known when an allocation failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    /// Whose memory: `GPU` or `host`.
    pub of: &'static str,
    /// What it was asked for.
    pub purpose: Purpose,
    /// Bytes asked for.
    pub wanted: usize,
    /// All bytes that there are; 0 where unknown.
    pub total: usize,
    /// Bytes that nobody has; absent where unknown.
    pub free: Option<usize>,
    /// Bytes held of each purpose, in the order of [`Purpose::ALL`].
    pub held: [usize; 6],
    /// Largest free block of the heap; absent where there is no heap.
    pub largest: Option<usize>,
}

impl OutOfMemory {
    /// Bytes held of all purposes.
    pub fn held_total(&self) -> usize {
        self.held.iter().sum()
    }
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OutOfMemory { of, purpose, wanted, total, free, held, largest } = self;
        write!(f, "out of {of} memory: {} for {} do not fit", gib(*wanted), purpose.name())?;
        if *total > 0 {
            write!(f, ". There are {}", gib(*total))?;
        }
        if let Some(free) = free {
            write!(f, ", of which nobody has {}", gib(*free))?;
        }
        let parts: Vec<String> =
            Purpose::ALL.iter().zip(held).filter(|x| *x.1 > 0).map(|(p, n)| format!("{} {}", p.name(), gib(*n))).collect();
        let held = if parts.is_empty() { "nothing".to_string() } else { parts.join(", ") };
        write!(f, "; this process holds {held}")?;
        if let Some(largest) = largest {
            write!(f, " (largest free block of its heap {})", gib(*largest))?;
        }
        write!(f, ". {}", remedy(*purpose))
    }
}

fn gib(bytes: usize) -> String {
    format!("{:.3} GiB", bytes as f64 / (1u64 << 30) as f64)
}

/// What makes room, by the keys of the configuration; the most telling first.
fn remedy(purpose: Purpose) -> &'static str {
    match purpose {
        Purpose::Weights => {
            "On a GPU set precision.dtype = \"bfloat16\" if it is not, else the model is too large: divide it over more ranks (parallel.tp, pp, ep) or take \
             a smaller one (or fewer layers in a benchmark)"
        }
        Purpose::Gradients | Purpose::Optimizer => {
            "This does not depend on the batch: on a GPU set precision.moments = \"bfloat16\" (saves 4 bytes a parameter), precision.grads = \"bfloat16\" \
             (saves 2) or memory.offload_optimizer = true (saves 10), divide over more ranks (parallel.dp shares the optimizer), or take a smaller model"
        }
        Purpose::Activations | Purpose::Workspace | Purpose::Communication => {
            "Lower train.micro_batch (with train.global_batch kept, the result is the same), set memory.recompute = \"selective\" or \"full\", lower \
             memory.loss_chunk or data.seq_len; on a GPU memory.offload_optimizer = true and bfloat16 in precision.grads and precision.moments make room too"
        }
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
            let held = [3 << 30, 0, 0, 1 << 20, 0, 0];
            let error = OutOfMemory { of: "GPU", purpose, wanted: 1 << 30, total: 8 << 30, free: Some(1 << 29), held, largest: Some(4096) };
            let text = error.to_string();
            for part in [key, "1.000 GiB", "8.000 GiB", "0.500 GiB", "weights 3.000 GiB", "activations 0.001 GiB", purpose.name()] {
                assert!(text.contains(part), "{part}: {text}");
            }
        }
    }
}
