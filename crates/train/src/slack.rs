//! How far a weight may stray after AdamW steps because gradients are only known to rounding.
//!
//! Adam divides a gradient by its own size, so an error d of the gradient moves the weight by `lr * d / (sqrt(v) + eps)`,
//! however small the gradient: where the gradient itself is rounding noise, two correct programs differ by up to `lr` a step.

use crate::Result;
use crate::step::Trainer;
use temper_model::param::ParamId;
use temper_tensor::{DType, View};

/// Rounding noise of a gradient, relative to the largest of its tensor: a few roundings of the activations.
fn noise(activations: DType) -> f64 {
    match activations {
        DType::BF16 => 2e-2,
        _ => 1e-6,
    }
}

/// Constants of the optimizer that the bound needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Constants {
    pub lr: f64,
    pub beta2: f64,
    pub eps: f64,
    pub clip: f64,
}

/// The bound of every weight, grown step by step.
pub(crate) struct Slack {
    constants: Constants,
    bounds: Vec<Vec<f64>>,
}

impl Slack {
    /// No slack before the first step.
    pub fn new(trainer: &Trainer, constants: Constants) -> Slack {
        Slack { constants, bounds: trainer.model.params.iter().map(|p| vec![0.0; p.numel()]).collect() }
    }

    /// Adds what step `step` (from 1) may have added, just after it; `norm` is the gradient's before clipping.
    pub fn grow(&mut self, trainer: &Trainer, norm: f64, step: i32) -> Result<()> {
        let Constants { lr, beta2, eps, clip } = self.constants;
        let scale = (clip / (norm + 1e-6)).min(1.0);
        for (i, bounds) in self.bounds.iter_mut().enumerate() {
            let largest = host(trainer, trainer.grads.get(ParamId(i))?)?.iter().fold(0f64, |m, g| m.max(f64::from(g.abs())));
            let error = noise(trainer.weights.dtype()) * largest * scale;
            for (bound, v) in bounds.iter_mut().zip(host(trainer, trainer.optimizer.exp_avg_sq[i].view())?) {
                // A weight that never had a gradient (an embedding row outside the batch) is exact in any program.
                if v > 0.0 {
                    *bound += lr * error / ((f64::from(v) / (1.0 - beta2.powi(step))).sqrt() + eps);
                }
            }
        }
        Ok(())
    }

    /// The bounds of a parameter's weights.
    pub fn of(&self, id: ParamId) -> &[f64] {
        &self.bounds[id.0]
    }
}

/// A tensor's elements on the host, in f32.
pub(crate) fn host(trainer: &Trainer, view: View) -> Result<Vec<f32>> {
    let ops = &*trainer.ops;
    let mut single = ops.alloc(DType::F32, view.shape())?;
    ops.copy(single.view_mut(), view)?;
    let copy = ops.to_host(single.view())?;
    Ok(copy.as_slice::<f32>().unwrap_or_default().to_vec())
}

/// A parameter's exact weights on the host: its f32 master where it has one.
pub(crate) fn exact(trainer: &Trainer, id: ParamId) -> Result<Vec<f32>> {
    match trainer.optimizer.master(&*trainer.ops, &trainer.weights, &trainer.optimizer.segments()[id.0])? {
        Some(master) => host(trainer, master.view()),
        None => host(trainer, trainer.weights.get(id)?),
    }
}
