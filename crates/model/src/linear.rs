//! `y = x . W^T + b`, whole or divided over the tensor axis (Shoeybi et al. 2019).
//!
//! Legend: T tokens, M input features, N output features; of a divided matrix M or N is this rank's part.

use crate::param::ParamId;
use crate::{Act, Cx, Grads, Result};
use temper_tensor::{Beta, Tensor, Trans, View};

/// Which features of a matrix are divided over the tensor axis. Of one rank both are the whole matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Divided {
    /// The outputs: takes the tokens as they are between the divided parts of a layer, gives all tokens of its outputs.
    Outputs,
    /// The inputs: takes all tokens of its inputs, gives the tokens as they are between the divided parts of a layer.
    Inputs,
}

/// A matrix with an optional bias.
pub struct Linear {
    /// `W`, [N, M].
    pub weight: ParamId,
    /// `b`, `[N]`; added once, after the sum over ranks.
    pub bias: Option<ParamId>,
    /// M.
    pub inputs: usize,
    /// N.
    pub outputs: usize,
    /// What is divided.
    pub divided: Divided,
}

/// What the weight gradient of a [`Linear`] needs.
pub(crate) struct LinearWork {
    /// The input as [`Linear::forward`] took it.
    pub x: Act,
    /// The gradient of all rows of the product.
    pub dy: Act,
}

impl Linear {
    /// `y[T, N]` from `x[T, M]`.
    pub fn forward(&self, cx: &Cx, x: View) -> Result<Tensor> {
        let mut y = match self.divided {
            Divided::Outputs => self.product(cx, cx.whole_tokens(x)?.view())?,
            Divided::Inputs => cx.sum_parts(self.product(cx, x)?)?,
        };
        if let Some(bias) = self.bias {
            cx.ops.add_bias(y.view_mut(), cx.weights.get(bias)?)?;
        }
        Ok(y)
    }

    fn product(&self, cx: &Cx, x: View) -> Result<Tensor> {
        let mut y = cx.alloc(&[x.rows(), self.outputs])?;
        cx.ops.gemm(y.view_mut(), x, Trans::No, cx.weights.get(self.weight)?, Trans::Yes, Beta::Zero)?;
        Ok(y)
    }

    /// `dx[T, M]` from `dy[T, N]`, and `dy` of all rows of the product, for the weights.
    pub fn backward_input(&self, cx: &Cx, dy: &Act) -> Result<(Tensor, Act)> {
        match self.divided {
            Divided::Outputs => Ok((cx.sum_parts(self.product_grad(cx, dy.view())?)?, dy.clone())),
            Divided::Inputs => {
                let dy = cx.whole_tokens_shared(dy)?;
                Ok((self.product_grad(cx, dy.view())?, dy))
            }
        }
    }

    fn product_grad(&self, cx: &Cx, dy: View) -> Result<Tensor> {
        let mut dx = cx.alloc(&[dy.rows(), self.inputs])?;
        cx.ops.gemm(dx.view_mut(), dy, Trans::No, cx.weights.get(self.weight)?, Trans::No, Beta::Zero)?;
        Ok(dx)
    }

    /// `dW += dy^T . x`, `db += sum_t dy`.
    pub(crate) fn backward_weight(&self, cx: &Cx, work: LinearWork, grads: &mut Grads) -> Result<()> {
        let LinearWork { x, dy } = work;
        let x = match self.divided {
            Divided::Outputs => cx.whole_tokens_shared(&x)?,
            Divided::Inputs => x,
        };
        let (dw, beta) = grads.sum_into(self.weight)?;
        cx.ops.gemm(dw, dy.view(), Trans::Yes, x.view(), Trans::No, beta)?;
        if let Some(bias) = self.bias {
            // A bias of divided outputs sees all rows; one added after the sum sees the rows it was added to.
            let rows = if self.divided == Divided::Outputs { dy.view() } else { cx.own_rows(dy.view()) };
            cx.ops.bias_grad(grads.add_to(cx.ops, bias)?, rows)?;
        }
        Ok(())
    }
}
