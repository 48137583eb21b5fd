//! The paged KV cache of generation and the tokens of one step against it.
//!
//! Legend: T query tokens of the step, B sequences, Nk key/value heads, D head size.

use crate::{Batch, Error, Result};
use temper_config::Arch;
use temper_tensor::{DType, Ops, PagedSeqs, Tensor, View};

/// Keys and values of every layer, each `[blocks, block_size, Nk, D]`. Which blocks belong to which sequence is the
/// caller's business: a token at position p of a sequence lies in slot `block_of(p / block_size) * block_size + p % block_size`.
pub struct KvCache {
    /// Keys per layer.
    pub k: Vec<Tensor>,
    /// Values per layer.
    pub v: Vec<Tensor>,
    /// Tokens per block.
    pub block_size: usize,
    /// Number of blocks.
    pub blocks: usize,
}

impl KvCache {
    /// A cache of `blocks` blocks for all layers.
    pub fn new(ops: &dyn Ops, arch: &Arch, dtype: DType, blocks: usize, block_size: usize) -> Result<KvCache> {
        let shape = [blocks, block_size, arch.kv_heads, arch.head_dim];
        let make = || (0..arch.layers).map(|_| ops.zeros(dtype, &shape)).collect::<temper_tensor::Result<Vec<_>>>();
        Ok(KvCache { k: make()?, v: make()?, block_size, blocks })
    }

    /// Keys and values of one layer.
    pub(crate) fn layer_mut(&mut self, layer: usize) -> Result<(&mut Tensor, &mut Tensor)> {
        match (self.k.get_mut(layer), self.v.get_mut(layer)) {
            (Some(k), Some(v)) => Ok((k, v)),
            _ => Err(Error::Batch(format!("the KV cache has no layer {layer}"))),
        }
    }

    /// Bytes of one block over all layers, keys and values.
    pub fn block_bytes(arch: &Arch, dtype: DType, block_size: usize) -> usize {
        2 * arch.layers * block_size * arch.kv_heads * arch.head_dim * dtype.size()
    }
}

/// Host description of a step of generation; prefill and decode may mix.
#[derive(Clone, Debug, Default)]
pub struct StepTokens {
    /// The new tokens of all sequences end to end, `[T]`.
    pub tokens: Vec<i32>,
    /// Position of each within its sequence, `[T]`.
    pub positions: Vec<i32>,
    /// Cache slot of each, `[T]`.
    pub slots: Vec<i32>,
    /// First new token of each sequence, from 0 to T, `[B+1]`.
    pub cu_q: Vec<i32>,
    /// Tokens of each sequence in the cache once this step's are written, `[B]`.
    pub context: Vec<i32>,
    /// Blocks of each sequence in order, [B, max_blocks], unused entries -1.
    pub blocks: Vec<i32>,
}

/// [`StepTokens`] on the backend.
pub struct CachedStep {
    /// Tokens, positions and `cu_q`.
    pub batch: Batch,
    /// Cache slots, `[T]`.
    pub slots: Tensor,
    /// Context lengths, `[B]`.
    pub context: Tensor,
    /// Block tables, [B, max_blocks].
    pub blocks: Tensor,
    /// Row of the last token of each sequence, `[B]`.
    pub last: Tensor,
}

impl CachedStep {
    /// Uploads a step after checking that its parts agree.
    pub fn new(ops: &dyn Ops, step: &StepTokens) -> Result<CachedStep> {
        let batch = Batch::new(ops, &step.tokens, &step.positions, &step.cu_q)?;
        let sequences = step.cu_q.len() - 1;
        let bad = |what: &str| Err(Error::Batch(format!("generation step: {what}")));
        if step.slots.len() != step.tokens.len() {
            return bad(&format!("{} tokens but {} slots", step.tokens.len(), step.slots.len()));
        }
        if step.context.len() != sequences || step.blocks.is_empty() || !step.blocks.len().is_multiple_of(sequences) {
            let (c, b) = (step.context.len(), step.blocks.len());
            return bad(&format!("{sequences} sequences but {c} context lengths and {b} block entries"));
        }
        let last: Vec<i32> = step.cu_q[1..].iter().map(|end| end - 1).collect();
        let upload = |x: &[i32], shape: &[usize]| ops.from_host(View::host(x, shape));
        Ok(CachedStep {
            batch,
            slots: upload(&step.slots, &[step.slots.len()])?,
            context: upload(&step.context, &[sequences])?,
            blocks: upload(&step.blocks, &[sequences, step.blocks.len() / sequences])?,
            last: upload(&last, &[sequences])?,
        })
    }

    /// As [`Ops::paged_attention`] takes it.
    pub fn seqs(&self) -> PagedSeqs<'_> {
        PagedSeqs { cu_q: self.batch.cu_seqlens.view(), context: self.context.view(), blocks: self.blocks.view() }
    }
}
