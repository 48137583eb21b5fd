//! [`Job`]: what is trained on, and in which numbers.

use serde::Serialize;

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
}

impl Precision {
    /// bf16 weights and activations, f32 gradients.
    pub const BF16: Precision = Precision { weight_bytes: 2, grad_bytes: 4 };
    /// f32 throughout, as on the CPU.
    pub const F32: Precision = Precision { weight_bytes: 4, grad_bytes: 4 };

    /// Bytes a parameter of what completes the weight to an exact f32: a 16-bit remainder, or Megatron's f32 copy.
    pub fn master_bytes(&self, account: Account) -> u8 {
        match (self.weight_bytes, account) {
            (2, Account::Temper) => 2,
            (2, Account::Megatron) => 4,
            _ => 0,
        }
    }
}

/// Bytes a parameter of Adam's two f32 moments.
pub(crate) const MOMENT_BYTES: u8 = 8;

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
    /// Rows of logits that exist at once in temper's account.
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
            loss_chunk: 512,
            steps: None,
            rollouts: 64,
            storage_gb_s: 2.0,
        }
    }

    /// The same job under another account.
    pub fn under(&self, account: Account) -> Job {
        Job { account, ..self.clone() }
    }
}
