//! `y = x . W^T + b`.
//!
//! Legend: T tokens, M input features, N output features.

use crate::param::ParamId;
use crate::{Act, Cx, Grads, Result};
use temper_tensor::{Beta, Tensor, Trans, View};

/// A matrix with an optional bias.
pub struct Linear {
    /// `W`, [N, M].
    pub weight: ParamId,
    /// `b`, `[N]`.
    pub bias: Option<ParamId>,
    /// M.
    pub inputs: usize,
    /// N.
    pub outputs: usize,
}

impl Linear {
    /// `y[T, N]` from `x[T, M]`.
    pub fn forward(&self, cx: &Cx, x: View) -> Result<Tensor> {
        let mut y = cx.alloc(&[x.rows(), self.outputs])?;
        let w = cx.weights.get(self.weight)?;
        cx.ops.gemm(y.view_mut(), x, Trans::No, w, Trans::Yes, Beta::Zero)?;
        if let Some(bias) = self.bias {
            cx.ops.add_bias(y.view_mut(), cx.weights.get(bias)?)?;
        }
        Ok(y)
    }

    /// `dx[T, M]` from `dy[T, N]`.
    pub fn backward_input(&self, cx: &Cx, dy: View) -> Result<Tensor> {
        let mut dx = cx.alloc(&[dy.rows(), self.inputs])?;
        let w = cx.weights.get(self.weight)?;
        cx.ops.gemm(dx.view_mut(), dy, Trans::No, w, Trans::No, Beta::Zero)?;
        Ok(dx)
    }

    /// `dW += dy^T . x`, `db += sum_t dy`.
    pub fn backward_weight(&self, cx: &Cx, x: View, dy: View, grads: &mut Grads) -> Result<()> {
        let (dw, beta) = grads.sum_into(self.weight);
        cx.ops.gemm(dw, dy, Trans::Yes, x, Trans::No, beta)?;
        if let Some(bias) = self.bias {
            cx.ops.bias_grad(grads.add_to(cx.ops, bias)?, dy)?;
        }
        Ok(())
    }
}

/// What the weight gradient of a [`Linear`] needs.
pub(crate) struct LinearWork {
    pub x: Act,
    pub dy: Act,
}

impl LinearWork {
    pub fn run(&self, linear: &Linear, cx: &Cx, grads: &mut Grads) -> Result<()> {
        linear.backward_weight(cx, self.x.view(), self.dy.view(), grads)
    }
}
