//! [`Batch`]: the tokens of one forward pass, on the backend.
//!
//! Legend: T tokens, B documents (or sequences being generated), N rows that have a target.

use crate::{Error, Result, rope::upload};
use temper_tensor::{DType, Ops, Tensor, View};

/// Target of a position that is not trained.
pub const IGNORE: i32 = -100;

/// Documents laid end to end.
pub struct Batch {
    /// Token ids, `[T]`.
    pub ids: Tensor,
    /// Position of each token within its document, `[T]`.
    pub positions: Tensor,
    /// Document boundaries from 0 to T, `[B+1]`.
    pub cu_seqlens: Tensor,
    /// Tokens of the longest document.
    pub longest: usize,
    /// What is trained, if anything.
    pub labels: Option<Labels>,
}

/// The rows of a batch that have a target.
pub struct Labels {
    /// Their row numbers in ascending order, `[N]`; absent when the head computes every row.
    pub rows: Option<Tensor>,
    /// Their targets, `[N]` (`[T]`, with [`IGNORE`], when `rows` is absent).
    pub targets: Tensor,
    /// Their loss weights in the stat dtype, as `targets`.
    pub weights: Tensor,
    /// The loss weight of every token of the batch on the host, `[T]`; 0 where there is no target.
    pub host_weights: Vec<f32>,
}

fn indices(ops: &dyn Ops, values: &[i32]) -> Result<Tensor> {
    Ok(ops.from_host(View::host(values, &[values.len()]))?)
}

impl Batch {
    /// A batch without targets. `cu_seqlens` must rise from 0 to the number of tokens.
    pub fn new(ops: &dyn Ops, ids: &[i32], positions: &[i32], cu_seqlens: &[i32]) -> Result<Batch> {
        let tokens = ids.len();
        if tokens == 0 {
            return Err(Error::Batch("no tokens".into()));
        }
        if positions.len() != tokens {
            return Err(Error::Batch(format!("{tokens} tokens but {} positions", positions.len())));
        }
        let ends = (cu_seqlens.first(), cu_seqlens.last());
        if ends != (Some(&0), Some(&(tokens as i32))) || cu_seqlens.windows(2).any(|w| w[0] >= w[1]) {
            return Err(Error::Batch(format!("cu_seqlens must rise from 0 to {tokens}, found {cu_seqlens:?}")));
        }
        let longest = cu_seqlens.windows(2).map(|w| (w[1] - w[0]) as usize).max().unwrap_or(0);
        let (ids, positions, cu_seqlens) = (indices(ops, ids)?, indices(ops, positions)?, indices(ops, cu_seqlens)?);
        Ok(Batch { ids, positions, cu_seqlens, longest, labels: None })
    }

    /// Adds targets (already shifted; [`IGNORE`] where not trained) and their loss weights, one per token.
    /// `dtype` is the type of the activations.
    pub fn with_labels(mut self, ops: &dyn Ops, dtype: DType, targets: &[i32], weights: &[f32]) -> Result<Batch> {
        let tokens = self.tokens();
        if targets.len() != tokens || weights.len() != tokens {
            let found = format!("{tokens} tokens but {} targets and {} weights", targets.len(), weights.len());
            return Err(Error::Batch(found));
        }
        let rows: Vec<usize> = (0..tokens).filter(|&t| targets[t] != IGNORE).collect();
        let mut host_weights = vec![0.0; tokens];
        for &t in &rows {
            host_weights[t] = weights[t];
        }
        // Gathering costs a copy of the rows, so it must spare at least an eighth of the head's work.
        let gather = rows.len() * 8 <= tokens * 7;
        let chosen: Vec<usize> = if gather { rows } else { (0..tokens).collect() };
        let row_ids: Vec<i32> = chosen.iter().map(|&t| t as i32).collect();
        let chosen_targets: Vec<i32> = chosen.iter().map(|&t| targets[t]).collect();
        let chosen_weights: Vec<f64> = chosen.iter().map(|&t| f64::from(host_weights[t])).collect();
        self.labels = Some(Labels {
            rows: if gather { Some(indices(ops, &row_ids)?) } else { None },
            targets: indices(ops, &chosen_targets)?,
            weights: upload(ops, &chosen_weights, &[chosen.len()], dtype.stat())?,
            host_weights,
        });
        Ok(self)
    }

    /// Number of tokens T.
    pub fn tokens(&self) -> usize {
        self.ids.numel()
    }

    /// The targets, or an error that says they are missing.
    pub fn labels(&self) -> Result<&Labels> {
        self.labels.as_ref().ok_or_else(|| Error::Batch("a loss was asked for but the batch has no targets".into()))
    }
}

impl Labels {
    /// Number of rows the head computes.
    pub fn len(&self) -> usize {
        self.targets.numel()
    }

    /// Whether the head has nothing to compute.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
