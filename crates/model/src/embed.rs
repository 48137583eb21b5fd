//! The token embedding.
//!
//! Legend: T tokens, H hidden size, V vocabulary.

use crate::param::ParamId;
use crate::{Act, Cx, Grads, Result};
use std::sync::Arc;
use temper_tensor::View;

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
        let mut x = cx.alloc(&[cx.batch.tokens(), self.hidden])?;
        cx.ops.embedding(x.view_mut(), cx.weights.get(self.weight)?, cx.batch.ids.view())?;
        Ok(Arc::new(x))
    }

    /// Adds `dx[T, H]` to the gradient of the rows used.
    pub fn backward_weight(&self, cx: &Cx, dx: View, grads: &mut Grads) -> Result<()> {
        Ok(cx.ops.embedding_grad(grads.add_to(cx.ops, self.weight)?, dx, cx.batch.ids.view())?)
    }
}
