//! The token embedding, whole or with the vocabulary divided over the tensor axis.
//!
//! Legend: T tokens, M tokens whose row this rank has, H hidden size, V vocabulary (this rank's part).

use crate::param::ParamId;
use crate::{Act, Cx, Grads, Result};
use std::sync::Arc;

/// The first stage of a model.
pub struct Embedding {
    /// The table, [V, H].
    pub weight: ParamId,
    /// H.
    pub hidden: usize,
}

impl Embedding {
    /// `x[T, H]`: the row of each token of the batch.
    pub fn forward(&self, cx: &Cx) -> Result<Act> {
        let table = cx.weights.get(self.weight)?;
        let Some(vocab) = &cx.batch.vocab else {
            let mut x = cx.alloc(&[cx.batch.tokens(), self.hidden])?;
            cx.ops.embedding(x.view_mut(), table, cx.batch.ids.view())?;
            return Ok(Arc::new(x));
        };
        let mut found = cx.alloc(&[vocab.rows.numel(), self.hidden])?;
        cx.ops.embedding(found.view_mut(), table, vocab.ids.view())?;
        // Scattering is the gradient of gathering: rows that other ranks have stay zero.
        let mut x = cx.ops.zeros(cx.dtype(), &[cx.batch.tokens(), self.hidden])?;
        cx.ops.embedding_grad(x.view_mut(), found.view(), vocab.rows.view())?;
        Ok(Arc::new(cx.sum_parts(x)?))
    }

    /// Adds `dx[T, H]` to the gradient of the rows used.
    pub fn backward_weight(&self, cx: &Cx, dx: &Act, grads: &mut Grads) -> Result<()> {
        let table = |grads: &mut Grads, dy, ids| -> Result<()> { Ok(cx.ops.embedding_grad(grads.add_to(cx.ops, self.weight)?, dy, ids)?) };
        let Some(vocab) = &cx.batch.vocab else { return table(grads, dx.view(), cx.batch.ids.view()) };
        let dx = cx.whole_tokens(dx.view())?;
        let mut found = cx.alloc(&[vocab.rows.numel(), self.hidden])?;
        cx.ops.embedding(found.view_mut(), dx.view(), vocab.rows.view())?;
        table(grads, found.view(), vocab.ids.view())
    }
}
