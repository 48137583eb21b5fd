//! RMSNorm over the hidden dim (Zhang and Sennrich 2019): `y = w * x / sqrt(mean(x^2) + eps)`.
//!
//! Legend: T tokens, H hidden size.

use crate::param::ParamId;
use crate::{Act, Cx, Grads, Result};
use std::sync::Arc;
use temper_tensor::{Tensor, View};

/// A norm with its weight.
pub struct RmsNorm {
    /// `w`, `[H]`.
    pub weight: ParamId,
    /// Epsilon.
    pub eps: f64,
}

/// What the backward pass of a norm needs.
pub struct Saved {
    x: Act,
    rstd: Tensor,
}

/// What the weight gradient of a norm needs.
pub struct Work {
    saved: Saved,
    dy: Tensor,
}

impl RmsNorm {
    /// `y[T, H]` from `x[T, H]`.
    pub fn forward(&self, cx: &Cx, x: &Act) -> Result<(Tensor, Saved)> {
        let mut y = cx.alloc(x.shape())?;
        let mut rstd = cx.alloc_stat(&x.shape()[..1])?;
        cx.ops.rms_norm(y.view_mut(), rstd.view_mut(), x.view(), cx.weights.get(self.weight)?, self.eps)?;
        Ok((y, Saved { x: x.clone(), rstd }))
    }

    /// The output again, from what was saved of it.
    pub fn again(&self, cx: &Cx, saved: &Saved) -> Result<Tensor> {
        let mut y = cx.alloc(saved.x.shape())?;
        let mut rstd = cx.alloc_stat(saved.rstd.shape())?;
        cx.ops.rms_norm(y.view_mut(), rstd.view_mut(), saved.x.view(), cx.weights.get(self.weight)?, self.eps)?;
        Ok(y)
    }

    /// `sum = a + b` and the norm of it.
    pub fn forward_sum(&self, cx: &Cx, a: View, b: View) -> Result<(Act, Tensor, Saved)> {
        let (mut sum, mut y) = (cx.alloc(a.shape())?, cx.alloc(a.shape())?);
        let mut rstd = cx.alloc_stat(&a.shape()[..1])?;
        let w = cx.weights.get(self.weight)?;
        cx.ops.add_rms_norm(sum.view_mut(), y.view_mut(), rstd.view_mut(), a, b, w, self.eps)?;
        let sum = Arc::new(sum);
        Ok((sum.clone(), y, Saved { x: sum, rstd }))
    }

    /// `dx[T, H]` from `dy[T, H]`, plus `residual`, the gradient that passes the norm by.
    pub fn backward_input(&self, cx: &Cx, saved: Saved, dy: Tensor, residual: Option<View>) -> Result<(Tensor, Work)> {
        let mut dx = cx.alloc(saved.x.shape())?;
        let w = cx.weights.get(self.weight)?;
        cx.ops.rms_norm_grad_input(dx.view_mut(), dy.view(), saved.x.view(), w, saved.rstd.view(), residual)?;
        Ok((dx, Work { saved, dy }))
    }

    /// `dw += ...`.
    pub fn backward_weight(&self, cx: &Cx, work: Work, grads: &mut Grads) -> Result<()> {
        let Work { saved, dy } = work;
        cx.ops.rms_norm_grad_weight(grads.add_to(cx.ops, self.weight)?, dy.view(), saved.x.view(), saved.rstd.view())?;
        Ok(())
    }
}
