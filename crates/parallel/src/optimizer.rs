//! AdamW over every parameter of a model, with the gradient's norm and clipping.

use temper_model::{Grads, Weights, param::Param};
use temper_tensor::{AdamW, DType, Ops, Result, Tensor};

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

/// The L2 norm of all gradients together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradNorm(pub f64);

impl GradNorm {
    /// Factor that brings the norm down to `clip`: `min(1, clip / (norm + 1e-6))`, as torch's `clip_grad_norm_`.
    pub fn clip_factor(self, clip: f64) -> f64 {
        if clip > 0.0 { (clip / (self.0 + 1e-6)).min(1.0) } else { 1.0 }
    }
}

/// First and second moments of every parameter, in declaration order, allocated before the first step.
pub struct Optimizer {
    config: AdamWConfig,
    /// First moments.
    pub exp_avg: Vec<Tensor>,
    /// Second moments.
    pub exp_avg_sq: Vec<Tensor>,
    /// Updates done.
    pub updates: u64,
}

impl Optimizer {
    /// Zero moments for `params`.
    pub fn new(ops: &dyn Ops, params: &[Param], dtype: DType, config: AdamWConfig) -> Result<Optimizer> {
        let zeros = || params.iter().map(|p| ops.zeros(dtype, &p.shape)).collect::<Result<Vec<_>>>();
        Ok(Optimizer { config, exp_avg: zeros()?, exp_avg_sq: zeros()?, updates: 0 })
    }

    /// Norm over all gradients, accumulated in f64.
    pub fn grad_norm(&self, ops: &dyn Ops, grads: &Grads) -> Result<GradNorm> {
        let mut sum = ops.zeros(DType::F64, &[1])?;
        for grad in grads.iter() {
            ops.sum_squares(sum.view_mut(), grad.view())?;
        }
        let host = ops.to_host(sum.view())?;
        Ok(GradNorm(host.as_slice::<f64>().map_or(f64::NAN, |s| s[0].sqrt())))
    }

    /// One update of every parameter, with the gradient clipped by `norm`.
    pub fn step(&mut self, ops: &dyn Ops, params: &[Param], weights: &mut Weights, grads: &Grads, norm: GradNorm, lr: f64) -> Result<()> {
        self.updates += 1;
        let base = AdamW {
            lr,
            beta1: self.config.betas[0],
            beta2: self.config.betas[1],
            eps: self.config.eps,
            weight_decay: 0.0,
            step: self.updates,
            grad_scale: norm.clip_factor(self.config.clip),
        };
        let moments = self.exp_avg.iter_mut().zip(&mut self.exp_avg_sq);
        for (((param, weight), grad), (m, v)) in params.iter().zip(weights.iter_mut()).zip(grads.iter()).zip(moments) {
            let weight_decay = if param.decay { self.config.weight_decay } else { 0.0 };
            ops.adamw(weight.view_mut(), m.view_mut(), v.view_mut(), grad.view(), AdamW { weight_decay, ..base })?;
        }
        Ok(())
    }
}
