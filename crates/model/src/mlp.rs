//! The dense feed-forward: `y = down(silu(gate(x)) * up(x))` (SwiGLU, Shazeer 2020).
//!
//! Legend: T tokens, H hidden size, I intermediate size (this rank's part).

use crate::linear::{Divided, Linear, LinearWork};
use crate::{Act, Cx, Error, Grads, Names, Parts, Result};
use std::sync::Arc;
use temper_config::Arch;
use temper_tensor::Tensor;

/// The feed-forward of one dense layer.
pub struct Mlp {
    /// gate and up in one product, [2I, H].
    pub gate_up: Linear,
    /// [H, I].
    pub down: Linear,
}

/// What the backward pass needs; a part may be missing until [`Mlp::complete`] computes it again.
pub struct Saved {
    x: Option<Act>,
    gate_up: Option<Tensor>,
    act: Option<Tensor>,
}

impl Saved {
    /// Drops what is to be computed again.
    pub fn drop_parts(&mut self, parts: Parts) {
        if parts.norm {
            self.x = None;
        }
        if parts.mlp {
            self.gate_up = None;
        }
        if parts.act || parts.mlp {
            self.act = None;
        }
    }
}

/// What the weight gradients need.
pub struct Work {
    gate_up: LinearWork,
    down: LinearWork,
}

impl Mlp {
    /// The feed-forward whose parameters are named `{at}.*`.
    pub fn new(arch: &Arch, names: &Names, at: &str) -> Result<Mlp> {
        let bias = |name: &str| arch.mlp_bias.then(|| names.id(&format!("{at}.{name}.bias"))).transpose();
        let weight = |name: &str| names.id(&format!("{at}.{name}.weight"));
        let (hidden, size) = (arch.hidden, arch.intermediate);
        Ok(Mlp {
            gate_up: Linear {
                weight: weight("gate_up_proj")?,
                bias: bias("gate_up_proj")?,
                inputs: hidden,
                outputs: 2 * size,
                divided: Divided::Outputs,
            },
            down: Linear {
                weight: weight("down_proj")?,
                bias: bias("down_proj")?,
                inputs: size,
                outputs: hidden,
                divided: Divided::Inputs,
            },
        })
    }

    /// `y[T, H]` from `x[T, H]`.
    pub fn forward(&self, cx: &Cx, x: Tensor) -> Result<(Tensor, Saved)> {
        let gate_up = self.gate_up.forward(cx, x.view())?;
        let act = self.activate(cx, &gate_up)?;
        let y = self.down.forward(cx, act.view())?;
        Ok((y, Saved { x: Some(Arc::new(x)), gate_up: Some(gate_up), act: Some(act) }))
    }

    /// silu(gate) * up, [T, I].
    fn activate(&self, cx: &Cx, gate_up: &Tensor) -> Result<Tensor> {
        let mut act = cx.alloc(&[gate_up.shape()[0], self.down.inputs])?;
        cx.ops.swiglu(act.view_mut(), gate_up.view())?;
        Ok(act)
    }

    /// Computes what was dropped again; `x` gives the input if that was.
    pub fn complete(&self, cx: &Cx, saved: Saved, x: impl FnOnce() -> Result<Tensor>) -> Result<Saved> {
        let x = saved.x.map_or_else(|| x().map(Arc::new), Ok)?;
        let gate_up = saved.gate_up.map_or_else(|| self.gate_up.forward(cx, x.view()), Ok)?;
        let act = saved.act.map_or_else(|| self.activate(cx, &gate_up), Ok)?;
        Ok(Saved { x: Some(x), gate_up: Some(gate_up), act: Some(act) })
    }

    /// `dx[T, H]` from `dy[T, H]`.
    pub fn backward_input(&self, cx: &Cx, saved: Saved, dy: &Act) -> Result<(Tensor, Work)> {
        let Saved { x: Some(x), gate_up: Some(gate_up), act: Some(act) } = saved else { return Err(Error::Incomplete) };
        let (dact, dy) = self.down.backward_input(cx, dy)?;
        let mut dgate_up = cx.alloc(gate_up.shape())?;
        cx.ops.swiglu_grad(dgate_up.view_mut(), dact.view(), gate_up.view())?;
        let (dx, dgate_up) = self.gate_up.backward_input(cx, &Arc::new(dgate_up))?;
        Ok((dx, Work { gate_up: LinearWork { x, dy: dgate_up }, down: LinearWork { x: Arc::new(act), dy } }))
    }

    /// Adds the gradients of all weights.
    pub fn backward_weight(&self, cx: &Cx, work: Work, grads: &mut Grads) -> Result<()> {
        self.down.backward_weight(cx, work.down, grads)?;
        self.gate_up.backward_weight(cx, work.gate_up, grads)
    }
}
