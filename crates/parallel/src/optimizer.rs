//! AdamW over every parameter of a model, with the gradient's norm and clipping. Nothing here waits for the backend but [`Optimizer::settle`].

use temper_model::{Grads, Weights, param::Param};
use temper_tensor::{AdamW, AdamWState, DType, Ops, Result, Tensor, View};

/// Constants that do not change from step to step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Decay of the first and the second moment.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled decay of the parameters that decay ([`Param::decay`]).
    pub weight_decay: f64,
    /// Largest gradient norm; 0 switches clipping off.
    pub clip: f64,
}

/// What became of an update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settled {
    /// L2 norm of all gradients together, before clipping.
    pub grad_norm: f64,
    /// False when a loss or gradient was not finite, and nothing was changed.
    pub updated: bool,
}

/// First and second moments of every parameter, in declaration order, allocated before the first step.
pub struct Optimizer {
    config: AdamWConfig,
    /// First moments.
    pub exp_avg: Vec<Tensor>,
    /// Second moments.
    pub exp_avg_sq: Vec<Tensor>,
    /// With bf16 weights, what makes them exact f32 masters ([`AdamWState::remainder`]); else empty.
    remainders: Vec<Tensor>,
    /// Sum of squares of all gradients, F64 `[1]`.
    squares: Tensor,
    /// Sum of squares of the losses, F64 `[1]`: not finite when one of them is not.
    guard: Tensor,
    /// Factor on the gradients, `[1]` in the stat dtype.
    clip: Tensor,
    /// Updates done.
    pub updates: u64,
}

impl Optimizer {
    /// Zero moments of type `moments` for `params` with weights of type `weights`. Remainders start as zero:
    /// see [`Optimizer::set_master`]. With `offload` they all lie in host memory.
    pub fn new(ops: &dyn Ops, params: &[Param], weights: DType, moments: DType, offload: bool, config: AdamWConfig) -> Result<Optimizer> {
        let zero = |dtype, shape: &[usize]| if offload { ops.zeros_on_host(dtype, shape) } else { ops.zeros(dtype, shape) };
        let zeros = |dtype: DType| params.iter().map(|p| zero(dtype, &p.shape)).collect::<Result<Vec<_>>>();
        Ok(Optimizer {
            config,
            exp_avg: zeros(moments)?,
            exp_avg_sq: zeros(moments)?,
            remainders: if weights == DType::BF16 { zeros(DType::F16)? } else { Vec::new() },
            squares: ops.zeros(DType::F64, &[1])?,
            guard: ops.zeros(DType::F64, &[1])?,
            clip: ops.zeros(weights.stat(), &[1])?,
            updates: 0,
        })
    }

    /// Norm over all gradients and the clip factor that follows. `losses` only guard: where one is not finite, there is no update.
    pub fn measure<'a>(&mut self, ops: &dyn Ops, grads: &Grads, losses: impl Iterator<Item = View<'a>>) -> Result<()> {
        ops.fill(self.squares.view_mut(), 0.0)?;
        ops.fill(self.guard.view_mut(), 0.0)?;
        for grad in grads.iter() {
            ops.sum_squares(self.squares.view_mut(), grad.view())?;
        }
        for loss in losses {
            ops.sum_squares(self.guard.view_mut(), loss)?;
        }
        ops.clip_factor(self.clip.view_mut(), self.squares.view(), self.guard.view(), self.config.clip)
    }

    /// One update of every parameter with the gradient as [`Optimizer::measure`] clipped it.
    pub fn step(&mut self, ops: &dyn Ops, params: &[Param], weights: &mut Weights, grads: &Grads, lr: f64) -> Result<()> {
        let [beta1, beta2] = self.config.betas;
        let base = AdamW { lr, beta1, beta2, eps: self.config.eps, weight_decay: 0.0, step: self.updates + 1 };
        let moments = self.exp_avg.iter_mut().zip(&mut self.exp_avg_sq);
        let mut remainders = self.remainders.iter_mut();
        for (((param, weight), grad), (m, v)) in params.iter().zip(weights.iter_mut()).zip(grads.iter()).zip(moments) {
            let weight_decay = if param.decay { self.config.weight_decay } else { 0.0 };
            let remainder = remainders.next().map(Tensor::view_mut);
            let state = AdamWState { weight: weight.view_mut(), remainder, m: m.view_mut(), v: v.view_mut() };
            ops.adamw(state, grad.view(), self.clip.view(), AdamW { weight_decay, ..base })?;
        }
        Ok(())
    }

    /// Waits for the update and counts it if it took place.
    pub fn settle(&mut self, ops: &dyn Ops) -> Result<Settled> {
        let read = |x: &Tensor| -> Result<f64> { Ok(ops.to_host(x.view())?.as_slice::<f64>().map_or(f64::NAN, |s| s[0])) };
        let squares = read(&self.squares)?;
        let updated = squares.is_finite() && read(&self.guard)?.is_finite();
        self.updates += u64::from(updated);
        Ok(Settled { grad_norm: squares.sqrt(), updated })
    }

    /// Sets weights and remainders to F32 values that lie on the backend, one tensor per parameter.
    pub fn set_master(&mut self, ops: &dyn Ops, index: usize, weight: &mut Tensor, values: View) -> Result<()> {
        match self.remainders.get_mut(index) {
            Some(remainder) => ops.master_split(weight.view_mut(), remainder.view_mut(), values),
            None => ops.copy(weight.view_mut(), values),
        }
    }

    /// The exact value of a parameter in F32, where it differs from the weight: `None` says that the weight itself is exact.
    pub fn master(&self, ops: &dyn Ops, index: usize, weight: View) -> Result<Option<Tensor>> {
        let Some(remainder) = self.remainders.get(index) else { return Ok(None) };
        let mut values = ops.alloc(DType::F32, weight.shape())?;
        ops.master_join(values.view_mut(), weight, remainder.view())?;
        Ok(Some(values))
    }
}
