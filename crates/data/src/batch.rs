//! What training reads: batches of packed token streams. No padding exists anywhere.

use serde::Serialize;

/// Target of a position that is not trained.
pub const IGNORE: i32 = -100;

/// Names a sample for messages and for the NaN guard: file and row as the user sees them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SampleId {
    /// Index of the source in the configuration.
    pub source: u32,
    /// Row of the file, from 1 (physical line for JSONL).
    pub row: u64,
    /// Piece of a split sample, from 0.
    pub piece: u32,
}

/// The sequences of one forward pass, laid end to end. T tokens, B documents.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MicroBatch {
    /// Token ids, `[T]`.
    pub ids: Vec<i32>,
    /// The next token of the same document where it is trained, else [`IGNORE`]; already shifted, `[T]`.
    pub targets: Vec<i32>,
    /// Loss weight of each target (0 where ignored), `[T]`.
    pub weights: Vec<f32>,
    /// Position within the document, `[T]`.
    pub positions: Vec<i32>,
    /// Document boundaries, from 0 to T, [B+1].
    pub cu_seqlens: Vec<i32>,
    /// The samples, one per document, `[B]`.
    pub samples: Vec<SampleId>,
}

impl MicroBatch {
    /// One token and nothing to train on.
    pub fn filler() -> MicroBatch {
        MicroBatch {
            ids: vec![0],
            targets: vec![IGNORE],
            weights: vec![0.0],
            positions: vec![0],
            cu_seqlens: vec![0, 1],
            samples: Vec::new(),
        }
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.ids.len()
    }

    /// Number of targets with a weight above zero.
    pub fn trained_tokens(&self) -> usize {
        self.weights.iter().filter(|w| **w > 0.0).count()
    }

    /// Sum of the weights: what a token-mean loss is divided by.
    pub fn weight_sum(&self) -> f64 {
        self.weights.iter().map(|w| f64::from(*w)).sum()
    }
}

/// Everything one optimizer step trains on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepBatch {
    /// Forward passes, in order.
    pub micro: Vec<MicroBatch>,
    /// Epoch of the last sample, from 0, with the share passed.
    pub epoch: f64,
}

impl StepBatch {
    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.micro.iter().map(MicroBatch::tokens).sum()
    }

    /// Number of trained tokens.
    pub fn trained_tokens(&self) -> usize {
        self.micro.iter().map(MicroBatch::trained_tokens).sum()
    }
}
