//! How far a weight may stray after AdamW steps because gradients are only known to rounding.
//!
//! Adam divides a gradient by its own size, so an error d of the gradient moves the weight by `lr * d / (sqrt(v) + eps)`,
//! however small the gradient: where the gradient itself is rounding noise, two correct programs differ by up to `lr` a step.

use super::gathered::Gathered;
use crate::Result;
use crate::share::largest_over_ranks;
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

/// The bound of every weight that a rank updates, grown step by step.
pub(crate) struct Slack {
    constants: Constants,
    /// By segment of the optimizer.
    bounds: Vec<Vec<f64>>,
    /// The parameter of the whole model that each segment is a part of.
    params: Vec<ParamId>,
    /// Parameters of the whole model.
    count: usize,
}

impl Slack {
    /// No slack before the first step.
    pub fn new(trainer: &Trainer, whole: &Gathered, constants: Constants) -> Result<Slack> {
        let segments = trainer.optimizer.segments();
        let params = segments.iter().map(|s| Ok(whole.whole(&trainer.model.params[s.param.0])?.0)).collect::<Result<_>>()?;
        Ok(Slack { constants, bounds: segments.iter().map(|s| vec![0.0; s.range.len()]).collect(), params, count: whole.params() })
    }

    /// Adds what step `step` (from 1) may have added, just after it; `norm` is the gradient's before clipping. All ranks call this.
    pub fn grow(&mut self, trainer: &Trainer, norm: f64, step: i32) -> Result<()> {
        let Constants { lr, beta2, eps, clip } = self.constants;
        let scale = (clip / (norm + 1e-6)).min(1.0);
        let mut largest = vec![0f64; self.count];
        for (segment, whole) in trainer.optimizer.segments().iter().zip(&self.params) {
            let grad = elements(trainer.grads.get(segment.param)?, segment.range.clone());
            largest[whole.0] = host(trainer, grad)?.iter().fold(largest[whole.0], |m, g| m.max(f64::from(g.abs())));
        }
        largest_over_ranks(&*trainer.ops, &*trainer.ranks.mesh.world, &mut largest)?;
        for ((segment, whole), bounds) in trainer.optimizer.segments().iter().zip(&self.params).zip(&mut self.bounds) {
            let error = noise(trainer.weights.dtype()) * largest[whole.0] * scale;
            let [_, v] = trainer.optimizer.moments(segment);
            for (bound, v) in bounds.iter_mut().zip(host(trainer, v)?) {
                // A weight that never had a gradient (an embedding row outside the batch) is exact in any program.
                if v > 0.0 {
                    *bound += lr * error / ((f64::from(v) / (1.0 - beta2.powi(step))).sqrt() + eps);
                }
            }
        }
        Ok(())
    }

    /// Gives the bounds of this rank to those of the whole model.
    pub fn put(&self, trainer: &Trainer, into: &Gathered) -> Result<()> {
        for (segment, bounds) in trainer.optimizer.segments().iter().zip(&self.bounds) {
            let bounds: Vec<f32> = bounds.iter().map(|b| *b as f32).collect();
            into.put(&trainer.model.params[segment.param.0], segment.range.clone(), &bounds)?;
        }
        Ok(())
    }
}

/// Some elements, flattened.
pub(crate) fn elements(x: View<'_>, range: std::ops::Range<usize>) -> View<'_> {
    x.reshape(&[x.numel()]).slice_rows(range)
}

/// A tensor's elements on the host, in f32.
pub(crate) fn host(trainer: &Trainer, view: View) -> Result<Vec<f32>> {
    let ops = &*trainer.ops;
    let mut single = ops.alloc(DType::F32, view.shape())?;
    ops.copy(single.view_mut(), view)?;
    let copy = ops.to_host(single.view())?;
    Ok(copy.as_slice::<f32>().unwrap_or_default().to_vec())
}
