//! The last stage: final norm, output matrix, cross-entropy.
//!
//! The loss is computed in chunks of rows and each chunk's gradients at once, so the logits never exist whole. Rows without a
//! target are not computed.
//!
//! Divided over the tensor axis, every rank has some classes: it computes their logits for all tokens, and the ranks exchange three
//! numbers a row ([`temper_tensor::Ops::vocab_stats`]).
//!
//! Legend: T tokens, N rows with a target, H hidden size, V vocabulary (this rank's part), P tensor ranks.

use crate::norm::RmsNorm;
use crate::param::ParamId;
use crate::{Act, AxisRank, Cx, Grads, Labels, Names, Result};
use std::{ops::Range, sync::Arc};
use temper_config::Arch;
use temper_tensor::{Beta, DType, Tensor, Trans, View, ViewMut};

/// Final norm and output matrix.
pub struct Head {
    /// Final norm.
    pub norm: RmsNorm,
    /// Output matrix, [V, H]; the embedding's when tied.
    pub weight: ParamId,
    /// H.
    pub hidden: usize,
    /// The classes of this rank, V of them.
    pub vocab: Range<usize>,
    /// Rows whose logits exist at once. More rows need more memory and fewer passes over the gradient of the matrix.
    pub chunk_rows: usize,
}

/// Rows of a tile of matrix products on GPUs.
const TILE: usize = 256;
/// Default of [`Head::chunk_rows`].
pub const CHUNK_ROWS: usize = 512;

/// Rows of logits over `vocab` classes that exist at once unless the user says: each chunk reads and writes the gradient of the whole
/// output matrix, so a GPU takes as many as fit 1.25 GiB. On a CPU 512 are enough to hide that, and leave its memory alone.
pub fn chunk_rows(vocab: usize, dtype: DType, on_device: bool) -> usize {
    let fit = (5usize << 28) / (vocab * dtype.size()).max(1);
    if on_device { (fit / 256 * 256).clamp(512, 8192) } else { CHUNK_ROWS }
}

/// Rows of the largest of the nearly equal parts of at most `chunk` that `rows` rows are cut into: whole tiles of products where that
/// makes no more parts.
pub fn largest_chunk(rows: usize, chunk: usize) -> usize {
    let parts = rows.div_ceil(chunk.max(1)).max(1);
    let size = rows.div_ceil(parts).max(1);
    let tiles = size.next_multiple_of(TILE);
    if tiles <= chunk { tiles } else { size }
}

impl Head {
    /// The head of an architecture, with `tp`'s share of the classes.
    pub fn new(arch: &Arch, names: &Names, tp: AxisRank) -> Result<Head> {
        let matrix = if arch.tied { "model.embed_tokens.weight" } else { "lm_head.weight" };
        Ok(Head {
            norm: RmsNorm { weight: names.id("model.norm.weight")?, eps: arch.norm_eps },
            weight: names.id(matrix)?,
            hidden: arch.hidden,
            vocab: tp.share(arch.vocab),
            chunk_rows: CHUNK_ROWS,
        })
    }

    /// Cross-entropy of every token, `[T]` in the stat dtype: minus the log-probability of its target, 0 where it has none.
    pub fn forward(&self, cx: &Cx, x: &Act) -> Result<Tensor> {
        let labels = cx.batch.labels()?;
        let x = cx.whole_tokens_shared(x)?;
        let (h, _) = self.norm.forward(cx, &self.select(cx, &x, labels)?)?;
        let mut losses = cx.alloc_stat(&[labels.len()])?;
        for rows in self.chunks(labels.len()) {
            let mut logits = self.logits(cx, h.view().slice_rows(rows.clone()))?;
            let targets = labels.targets.view().slice_rows(rows.clone());
            self.cross_entropy(cx, losses.view_mut().slice_rows(rows), &mut logits, targets, None)?;
        }
        self.spread_losses(cx, losses, labels)
    }

    /// Losses as [`Head::forward`], and `dx[T, H]` of `scale * sum_t weight_t * loss_t`. Adds the gradients of norm and matrix.
    pub fn forward_backward(&self, cx: &Cx, x: &Act, scale: f64, grads: &mut Grads) -> Result<(Tensor, Act)> {
        let labels = cx.batch.labels()?;
        let x = cx.whole_tokens_shared(x)?;
        let selected = self.select(cx, &x, labels)?;
        let (h, saved) = self.norm.forward(cx, &selected)?;
        let mut losses = cx.alloc_stat(&[labels.len()])?;
        let mut dh = cx.alloc(h.shape())?;
        let mut weights = cx.alloc_stat(&[labels.len()])?;
        cx.ops.copy(weights.view_mut(), labels.weights.view())?;
        cx.ops.scale(weights.view_mut(), scale)?;
        let w = cx.weights.get(self.weight)?;
        for rows in self.chunks(labels.len()) {
            let h = h.view().slice_rows(rows.clone());
            let mut logits = self.logits(cx, h)?;
            let targets = labels.targets.view().slice_rows(rows.clone());
            let weights = weights.view().slice_rows(rows.clone());
            let losses = losses.view_mut().slice_rows(rows.clone());
            self.cross_entropy(cx, losses, &mut logits, targets, Some(weights))?;
            let dlogits = logits.view();
            cx.ops.gemm(dh.view_mut().slice_rows(rows), dlogits, Trans::No, w, Trans::No, Beta::Zero)?;
            let (dw, beta) = grads.sum_into(self.weight)?;
            cx.ops.gemm(dw, dlogits, Trans::Yes, h, Trans::No, beta)?;
        }
        let (dselected, work) = self.norm.backward_input(cx, saved, dh, None)?;
        self.norm.backward_weight(cx, work, grads)?;
        let dx = self.spread(cx, dselected, labels, &[cx.batch.tokens(), self.hidden])?;
        // Everything from the norm on is linear in what the classes of each rank gave, so one sum at the end is enough.
        Ok((self.spread_losses(cx, losses, labels)?, Arc::new(cx.sum_parts(dx)?)))
    }

    /// Cross-entropy of a chunk of rows; with weights, its gradient takes the logits' place.
    fn cross_entropy(&self, cx: &Cx, losses: ViewMut, logits: &mut Tensor, targets: View, weights: Option<View>) -> Result<()> {
        let tp = &*cx.ranks.mesh.tp;
        if tp.size() == 1 {
            return Ok(cx.ops.cross_entropy(losses, logits.view_mut(), targets, weights)?);
        }
        let rows = targets.numel();
        let (mut own, mut all) = (cx.alloc_stat(&[rows, 3])?, cx.alloc_stat(&[tp.size(), rows, 3])?);
        cx.ops.vocab_stats(own.view_mut(), logits.view(), targets, self.vocab.start)?;
        tp.all_gather(all.view_mut(), own.view())?.wait()?;
        Ok(cx.ops.cross_entropy_divided(losses, logits.view_mut(), targets, self.vocab.start, all.view(), weights)?)
    }

    /// Logits `[N, V]` of the given rows of `x[T, H]`, or of all; only this rank's classes.
    pub fn forward_logits(&self, cx: &Cx, x: &Act, rows: Option<View>) -> Result<Tensor> {
        let chosen = match rows {
            Some(rows) => self.gather(cx, &cx.whole_tokens_shared(x)?, rows)?,
            None => cx.whole_tokens_shared(x)?,
        };
        let (h, _) = self.norm.forward(cx, &chosen)?;
        self.logits(cx, h.view())
    }

    fn logits(&self, cx: &Cx, h: View) -> Result<Tensor> {
        let mut logits = cx.alloc(&[h.rows(), self.vocab.len()])?;
        cx.ops.gemm(logits.view_mut(), h, Trans::No, cx.weights.get(self.weight)?, Trans::Yes, Beta::Zero)?;
        Ok(logits)
    }

    /// `0..rows` in parts of [`largest_chunk`] rows.
    fn chunks(&self, rows: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let size = largest_chunk(rows, self.chunk_rows);
        (0..rows).step_by(size).map(move |start| start..(start + size).min(rows))
    }

    /// The rows that have a target. An embedding look-up with `x` as the table is just that gather.
    fn select(&self, cx: &Cx, x: &Act, labels: &Labels) -> Result<Act> {
        match &labels.rows {
            Some(rows) => self.gather(cx, x, rows.view()),
            None => Ok(x.clone()),
        }
    }

    fn gather(&self, cx: &Cx, x: &Act, rows: View) -> Result<Act> {
        let mut chosen = cx.alloc(&[rows.numel(), self.hidden])?;
        cx.ops.embedding(chosen.view_mut(), x.view(), rows)?;
        Ok(Arc::new(chosen))
    }

    /// The inverse of [`Head::select`]: rows back to their places, zeros elsewhere.
    fn spread(&self, cx: &Cx, values: Tensor, labels: &Labels, shape: &[usize]) -> Result<Tensor> {
        let Some(rows) = &labels.rows else { return Ok(values) };
        let mut whole = cx.ops.zeros(values.dtype(), shape)?;
        cx.ops.embedding_grad(whole.view_mut(), values.view(), rows.view())?;
        Ok(whole)
    }

    fn spread_losses(&self, cx: &Cx, losses: Tensor, labels: &Labels) -> Result<Tensor> {
        let n = losses.numel();
        let tokens = cx.batch.tokens();
        Ok(self.spread(cx, losses.reshape(&[n, 1]), labels, &[tokens, 1])?.reshape(&[tokens]))
    }
}
