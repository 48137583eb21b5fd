//! [`Job`]: what is trained on, and in which numbers.

use serde::Serialize;
use temper_config::{Config, FloatType};
use temper_tensor::DType;

/// Whose habits the account follows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Account {
    /// temper's: masters as a 16-bit remainder, logits in chunks, everything allocated before step 1.
    #[default]
    Temper,
    /// Megatron-LM's with Transformer Engine: f32 masters, whole f32 logits, moments allocated in the first step.
    Megatron,
}

/// Types of numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Precision {
    /// Bytes of a weight and of an activation: 2 (bf16) or 4 (f32).
    pub weight_bytes: u8,
    /// Bytes of an accumulated gradient: 4 or 2.
    pub grad_bytes: u8,
    /// Bytes of each of Adam's two moments: 4 or 2.
    pub moment_bytes: u8,
}

impl Precision {
    /// bf16 weights and activations, f32 gradients and moments.
    pub const BF16: Precision = Precision { weight_bytes: 2, grad_bytes: 4, moment_bytes: 4 };
    /// f32 throughout, as on the CPU.
    pub const F32: Precision = Precision { weight_bytes: 4, grad_bytes: 4, moment_bytes: 4 };

    /// Bytes a parameter of what completes the weight to an exact f32: a 16-bit remainder, or Megatron's f32 copy.
    pub fn master_bytes(&self, account: Account) -> u8 {
        match (self.weight_bytes, account) {
            (2, Account::Temper) => 2,
            (2, Account::Megatron) => 4,
            _ => 0,
        }
    }

    /// Bytes a parameter of both moments.
    pub fn moments_bytes(&self) -> u8 {
        2 * self.moment_bytes
    }

    /// The type of weights and activations.
    pub(crate) fn weights(&self) -> DType {
        if self.weight_bytes == 2 { DType::BF16 } else { DType::F32 }
    }
}

/// What is trained on, and in which numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Job {
    /// Longest sequence, in tokens: what memory must hold.
    pub seq: usize,
    /// Mean tokens of a sequence of the batch: what time is spent on. `seq` with packing.
    pub mean_tokens: f64,
    /// Sequences an optimizer step.
    pub global_batch: usize,
    /// Whose habits.
    pub account: Account,
    /// Types of numbers.
    pub precision: Precision,
    /// Rows routed to the busiest expert rank over the mean, for the skewed figures; 1 is balance.
    pub skew: f64,
    /// Tokens of a document where sequences are packed with several: what attention reaches. 0: a sequence is one document.
    pub document: usize,
    /// Most rows of logits that exist at once in temper's account; 0: as many as the engine takes on a GPU.
    pub loss_chunk: usize,
    /// Optimizer steps of the run, for its length in days.
    pub steps: Option<u64>,
    /// Sequences that a rank generates at once, for the account of rollouts.
    pub rollouts: usize,
    /// Bandwidth of the storage that checkpoints go to, per node, GB/s.
    pub storage_gb_s: f64,
}

impl Job {
    /// A job with the usual settings: packed sequences, bf16, f32 gradients.
    pub fn new(seq: usize, global_batch: usize) -> Job {
        Job {
            seq,
            mean_tokens: seq as f64,
            global_batch,
            account: Account::Temper,
            precision: Precision::BF16,
            skew: 2.0,
            document: 0,
            loss_chunk: 0,
            steps: None,
            rollouts: 64,
            storage_gb_s: 2.0,
        }
    }

    /// The job of a configuration on GPUs: everything in it that decides memory or time, but for the layout ([`crate::LayoutRequest::of`]).
    pub fn of(config: &Config) -> Job {
        let bytes = |float: FloatType| if float == FloatType::Float32 { 4 } else { 2 };
        let p = &config.precision;
        Job {
            precision: Precision {
                weight_bytes: p.dtype.map_or(Precision::BF16.weight_bytes, bytes),
                grad_bytes: bytes(p.grads),
                moment_bytes: bytes(p.moments),
            },
            loss_chunk: config.memory.loss_chunk,
            steps: config.train.steps.map(|n| n as u64),
            ..Job::new(config.data.seq_len, config.train.global_batch)
        }
    }

    /// Mean tokens that attention reaches over: of a document, or of a sequence.
    pub fn reach(&self) -> f64 {
        if self.document == 0 { self.mean_tokens } else { self.mean_tokens.min(self.document as f64) }
    }

    /// Tokens of the longest document: positions that rotary tables have.
    pub fn positions(&self) -> usize {
        if self.document == 0 { self.seq } else { self.document.min(self.seq) }
    }

    /// The same job under another account.
    pub fn under(&self, account: Account) -> Job {
        Job { account, ..self.clone() }
    }
}
