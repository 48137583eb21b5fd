//! [`Batch`]: the tokens of one forward pass, on the backend, as one rank needs them.
//!
//! Legend: T tokens of this rank (all of the micro-batch, or its context rank's), B documents (or sequences being generated), N rows that
//! have a target.

use crate::context::{Segment, pieces};
use crate::{AxisRank, Error, Ranks, Result, rope::upload};
use std::ops::Range;
use temper_tensor::{DType, Ops, Tensor, View};

/// Target of a position that is not trained.
pub const IGNORE: i32 = -100;

/// Documents laid end to end.
pub struct Batch {
    /// Token ids, `[T]`.
    pub ids: Tensor,
    /// Position of each token within its document, `[T]`.
    pub positions: Tensor,
    /// Document boundaries from 0 to T, `[B+1]`; unused with `segments`.
    pub cu_seqlens: Tensor,
    /// Tokens of the longest document.
    pub longest: usize,
    /// With context parallelism, this rank's queries and the keys they read; else empty.
    pub segments: Vec<Segment>,
    /// How many of the T are tokens. The rest, at the end, fills up to [`Ranks::token_multiple`]: nothing is trained on it or counted.
    pub real: usize,
    /// Tokens of the micro-batch over all ranks, without filling.
    pub all_tokens: usize,
    /// With a vocabulary divided over ranks, where this rank's part of it occurs.
    pub(crate) vocab: Option<VocabRows>,
    /// What is trained, if anything.
    pub labels: Option<Labels>,
    /// This rank's tokens among those of the micro-batch, in order.
    local: Vec<Range<usize>>,
}

/// Tokens that this rank's part of the vocabulary has a row for.
pub(crate) struct VocabRows {
    /// Their places, `[M]`.
    pub rows: Tensor,
    /// Their ids counted from the first of the part, `[M]`.
    pub ids: Tensor,
}

/// The rows of a batch that have a target.
pub struct Labels {
    /// Their row numbers in ascending order, `[N]`; absent when the head computes every row.
    pub rows: Option<Tensor>,
    /// Their targets, `[N]` (`[T]`, with [`IGNORE`], when `rows` is absent).
    pub targets: Tensor,
    /// Their loss weights in the stat dtype, as `targets`.
    pub weights: Tensor,
    /// The loss weight of every token of this rank on the host, `[T]`; 0 where there is no target.
    pub host_weights: Vec<f32>,
}

fn indices(ops: &dyn Ops, values: &[i32]) -> Result<Tensor> {
    Ok(ops.from_host(View::host(values, &[values.len()]))?)
}

impl Batch {
    /// A batch of one rank, without targets. `cu_seqlens` must rise from 0 to the number of tokens.
    pub fn new(ops: &dyn Ops, ids: &[i32], positions: &[i32], cu_seqlens: &[i32]) -> Result<Batch> {
        Batch::divided(ops, ids, positions, cu_seqlens, Ranks::single(), 0)
    }

    /// What one of `ranks` needs of a micro-batch of a model with `vocab` classes, without targets.
    ///
    /// # Errors
    /// When the arguments contradict each other. Every rank must be given the same.
    pub fn divided(ops: &dyn Ops, ids: &[i32], positions: &[i32], cu_seqlens: &[i32], ranks: &Ranks, vocab: usize) -> Result<Batch> {
        let all_tokens = check(ids, positions, cu_seqlens)?;
        let filled = all_tokens.next_multiple_of(ranks.token_multiple());
        let (mut ids, mut positions, mut cu_seqlens) = (ids.to_vec(), positions.to_vec(), cu_seqlens.to_vec());
        if filled > all_tokens {
            ids.resize(filled, 0);
            positions.resize(filled, 0); // nothing is learnt there, and any table of positions has the first
            cu_seqlens.push(filled as i32);
        }
        let AxisRank { rank, of } = ranks.context();
        let local = if of == 1 { std::iter::once(0..filled).collect() } else { pieces(filled, rank, of).to_vec() };
        let longest = cu_seqlens.windows(2).map(|w| (w[1] - w[0]) as usize).max().unwrap_or(0);
        let of_local = |values: &[i32]| local.iter().flat_map(|r| values[r.clone()].iter().copied()).collect::<Vec<i32>>();
        let (ids, positions) = (of_local(&ids), of_local(&positions));
        Ok(Batch {
            positions: indices(ops, &positions)?,
            cu_seqlens: indices(ops, &cu_seqlens)?,
            longest,
            segments: if of == 1 { Vec::new() } else { segments(ops, &cu_seqlens, &local)? },
            real: local.iter().map(|r| r.end.min(all_tokens).saturating_sub(r.start)).sum(),
            all_tokens,
            vocab: if ranks.tensor().of == 1 { None } else { Some(vocab_rows(ops, &ids, ranks.tensor().share(vocab))?) },
            ids: indices(ops, &ids)?,
            labels: None,
            local,
        })
    }

    /// Adds targets (already shifted; [`IGNORE`] where not trained) and their loss weights, one per token of the micro-batch.
    /// `dtype` is the type of the activations.
    pub fn with_labels(mut self, ops: &dyn Ops, dtype: DType, targets: &[i32], weights: &[f32]) -> Result<Batch> {
        if targets.len() != self.all_tokens || weights.len() != self.all_tokens {
            let found = format!("{} tokens but {} targets and {} weights", self.all_tokens, targets.len(), weights.len());
            return Err(Error::Batch(found));
        }
        let places = || self.local.iter().cloned().flatten();
        let targets: Vec<i32> = places().map(|t| targets.get(t).copied().unwrap_or(IGNORE)).collect();
        let weights: Vec<f32> = places().map(|t| weights.get(t).copied().unwrap_or(0.0)).collect();
        let tokens = targets.len();
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

    /// Number of tokens T, with filling.
    pub fn tokens(&self) -> usize {
        self.ids.numel()
    }

    /// This rank's tokens among those of the micro-batch (which end at `all_tokens`), in order.
    pub fn places(&self) -> &[Range<usize>] {
        &self.local
    }

    /// The targets, or an error that says they are missing.
    pub fn labels(&self) -> Result<&Labels> {
        self.labels.as_ref().ok_or_else(|| Error::Batch("a loss was asked for but the batch has no targets".into()))
    }
}

/// The number of tokens, if the arguments agree.
fn check(ids: &[i32], positions: &[i32], cu_seqlens: &[i32]) -> Result<usize> {
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
    Ok(tokens)
}

/// The queries of each of this rank's pieces, and the keys from the start of the first document they touch up to their end.
fn segments(ops: &dyn Ops, cu: &[i32], local: &[Range<usize>]) -> Result<Vec<Segment>> {
    let mut queries_end = 0;
    let mut all = Vec::with_capacity(local.len());
    for piece in local.iter().filter(|p| !p.is_empty()) {
        let starts = cu.iter().map(|c| *c as usize).filter(|start| *start < piece.end);
        let first = starts.clone().filter(|start| *start <= piece.start).max().unwrap_or(0);
        let borders: Vec<i32> = starts.filter(|start| *start >= first).chain([piece.end]).map(|border| (border - first) as i32).collect();
        all.push(Segment {
            queries: queries_end..queries_end + piece.len(),
            keys: first..piece.end,
            longest: borders.windows(2).map(|w| (w[1] - w[0]) as usize).max().unwrap_or(0),
            cu: indices(ops, &borders)?,
        });
        queries_end += piece.len();
    }
    Ok(all)
}

fn vocab_rows(ops: &dyn Ops, ids: &[i32], part: Range<usize>) -> Result<VocabRows> {
    let first = part.start as i32;
    let own = |id: &i32| usize::try_from(*id).is_ok_and(|id| part.contains(&id));
    let rows: Vec<i32> = (0..ids.len()).filter(|&t| own(&ids[t])).map(|t| t as i32).collect();
    let ids: Vec<i32> = ids.iter().filter(|id| own(id)).map(|id| id - first).collect();
    Ok(VocabRows { rows: indices(ops, &rows)?, ids: indices(ops, &ids)? })
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
