//! Training a fixture by AdamW, and how far the weights of two correct programs may be apart after it.
//!
//! Adam divides a gradient by its own size, so a weight whose gradient is nearly zero may move by the learning rate in either
//! direction, according to rounding alone; and from the second step on those few weights change the gradients of all others, by up
//! to a hundred times their rounding. How far that reaches is measured: the same steps are taken several times in f64 with gradients
//! changed at random by what f32 rounds off, and the [`Spread`] of the results says how well each weight is determined.

use super::{Setup, floats, host};
use temper_model::Grads;
use temper_model::param::ParamId;
use temper_tensor::{AdamW, AdamWState, DType, Ops, Rng};

/// AdamW as tests/fixtures/README.md describes it.
pub struct Optimizer {
    m: Grads,
    v: Grads,
    steps: u64,
}

impl Optimizer {
    pub fn new(s: &Setup) -> Optimizer {
        Optimizer { m: s.grads(), v: s.grads(), steps: 0 }
    }

    /// One step; returns the norm before clipping.
    pub fn step(&mut self, s: &mut Setup, grads: &Grads) -> f64 {
        self.steps += 1;
        let mut squares = s.ops.zeros(DType::F64, &[1]).unwrap();
        let ids = || (0..s.model.params.len()).map(ParamId);
        for id in ids() {
            s.ops.sum_squares(squares.view_mut(), grads.get(id).unwrap()).unwrap();
        }
        let norm = s.read(&squares)[0].sqrt();
        let clip = floats(&s.ops, &[(1.0 / (norm + 1e-6)).min(1.0)], &[1], s.dtype);
        for id in ids() {
            let weight_decay = if s.model.params[id.0].decay { 0.1 } else { 0.0 };
            let constants = AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay, step: self.steps };
            let (weight, m, v) = (s.weights.get_mut(id).unwrap(), self.m.sum_into(id).unwrap().0, self.v.sum_into(id).unwrap().0);
            let state = AdamWState { weight, remainder: None, m, v };
            s.ops.adamw(state, grads.get(id).unwrap(), clip.view(), constants).unwrap();
        }
        norm
    }
}

/// How large f32 rounding makes the difference between two programs' gradients, of every parameter and relative to its largest
/// element: four times the root mean square of the difference between ours in f64 and in f32 on the same weights.
pub fn rounding(exact: &[Vec<f64>], rounded: &[Vec<f64>]) -> Vec<f64> {
    let of = |(exact, rounded): (&Vec<f64>, &Vec<f64>)| {
        let squares: f64 = exact.iter().zip(rounded).map(|(a, b)| (a - b) * (a - b)).sum();
        let largest = exact.iter().fold(f64::MIN_POSITIVE, |m, g| m.max(g.abs()));
        let touched = exact.iter().filter(|g| **g != 0.0).count().max(1);
        4.0 * (squares / touched as f64).sqrt() / largest
    };
    exact.iter().zip(rounded).map(of).collect()
}

/// Changes every gradient that is not exactly zero by a normal value of the size of `rounding`.
pub fn blur(s: &Setup, grads: &mut Grads, rounding: &[f64], rng: &Rng) {
    let mut draws = 0;
    for (i, rounding) in rounding.iter().enumerate() {
        let mut values = host(&s.ops, grads.get(ParamId(i)).unwrap());
        let size = rounding * values.iter().fold(0.0, |m: f64, g| m.max(g.abs()));
        for g in values.iter_mut().filter(|g| **g != 0.0) {
            *g += size * rng.normal_at(draws);
            draws += 1;
        }
        let blurred = floats(&s.ops, &values, &s.model.params[i].shape, s.dtype);
        s.ops.copy(grads.sum_into(ParamId(i)).unwrap().0, blurred.view()).unwrap();
    }
}

/// Of every weight the largest distance from the exact result that was seen.
pub struct Spread(Vec<Vec<f64>>);

impl Spread {
    pub fn new(s: &Setup) -> Spread {
        Spread(s.model.params.iter().map(|p| vec![0.0; p.numel()]).collect())
    }

    /// Takes another result into account.
    pub fn add(&mut self, exact: &Setup, other: &Setup) {
        for (i, spread) in self.0.iter_mut().enumerate() {
            let weights = |s: &Setup| host(&s.ops, s.weights.get(ParamId(i)).unwrap());
            for ((spread, a), b) in spread.iter_mut().zip(weights(exact)).zip(weights(other)) {
                *spread = spread.max((a - b).abs());
            }
        }
    }

    /// Of the weights of a parameter.
    pub fn of(&self, id: ParamId) -> Vec<f64> {
        self.0[id.0].clone()
    }
}
