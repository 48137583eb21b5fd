//! [`Cx`]: everything a layer reads besides its input.

use crate::{Batch, Ranks, Result, RopeTables, Weights};
use std::sync::Arc;
use temper_tensor::{DType, Ops, RopeTable, Tensor, View};

/// An activation (or its gradient) that several steps read: the residual path and a weight gradient, for example.
pub type Act = Arc<Tensor>;

/// What the layers of one forward and backward pass share. Cheap to copy.
#[derive(Clone, Copy)]
pub struct Cx<'a> {
    /// The backend.
    pub ops: &'a dyn Ops,
    /// All weights.
    pub weights: &'a Weights,
    /// Rotary tables, long enough for every position of the batch.
    pub rope: &'a RopeTables,
    /// The packed micro-batch.
    pub batch: &'a Batch,
    /// Those who share the model.
    pub ranks: &'a Ranks,
}

impl Cx<'_> {
    /// Type of weights and activations.
    pub fn dtype(&self) -> DType {
        self.weights.dtype()
    }

    /// An activation with unspecified contents.
    pub fn alloc(&self, shape: &[usize]) -> Result<Tensor> {
        Ok(self.ops.alloc(self.dtype(), shape)?)
    }

    /// A statistic (softmax sums, norms, router) with unspecified contents.
    pub fn alloc_stat(&self, shape: &[usize]) -> Result<Tensor> {
        Ok(self.ops.alloc(self.dtype().stat(), shape)?)
    }

    /// Indices with unspecified contents.
    pub fn alloc_index(&self, shape: &[usize]) -> Result<Tensor> {
        Ok(self.ops.alloc(DType::I32, shape)?)
    }

    /// The rotary tables as operations take them.
    pub fn rope_table(&self) -> RopeTable<'_> {
        RopeTable { cos: self.rope.cos.view(), sin: self.rope.sin.view() }
    }

    /// Position of each token within its document, `[T]`.
    pub fn positions(&self) -> View<'_> {
        self.batch.positions.view()
    }
}
