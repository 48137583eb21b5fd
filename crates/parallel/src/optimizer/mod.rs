//! AdamW over the parameters of a model, divided over the ranks that hold the same ones, with the gradient's norm and clipping.
//!
//! A step: [`Optimizer::ready`] as the last backward pass goes, [`Optimizer::reduce`], [`Optimizer::measure`], [`Optimizer::step`],
//! [`Optimizer::settle`]. All ranks call them alike. Nothing here waits for the backend but the last.

mod reduce;

use crate::buckets::{Buckets, Segment};
use std::ops::Range;
use temper_comm::Reduce;
use temper_model::param::ParamId;
use temper_model::{Grads, Result, Weights};
use temper_tensor::{AdamW, AdamWState, DType, Ops, Tensor, View, ViewMut};

/// Constants that do not change from step to step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Decay of the first and the second moment.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled decay of the parameters that decay ([`temper_model::param::Param::decay`]).
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

/// The moments of what this rank updates, allocated before the first step.
pub struct Optimizer {
    config: AdamWConfig,
    buckets: Buckets,
    /// First moments of this rank's part of each bucket.
    pub exp_avg: Vec<Tensor>,
    /// Second moments.
    pub exp_avg_sq: Vec<Tensor>,
    /// With bf16 weights, what makes them exact f32 masters ([`AdamWState::remainder`]); else empty.
    remainders: Vec<Tensor>,
    /// Whether the sum over ranks of a bucket's gradients was begun in this step.
    begun: Vec<bool>,
    /// Sum of squares of all gradients, and of the losses, which is not finite when one of them is not; F64 `[2]`.
    squares: Tensor,
    /// Factor on the gradients, `[1]` in the stat dtype.
    clip: Tensor,
    /// Updates done.
    pub updates: u64,
}

impl Optimizer {
    /// Zero moments of type `moments` for weights of type `weights`. Remainders start as zero: see [`Optimizer::set_master`].
    /// With `offload` they all lie in host memory.
    pub fn new(ops: &dyn Ops, buckets: Buckets, weights: DType, moments: DType, offload: bool, config: AdamWConfig) -> Result<Optimizer> {
        let zero = |dtype, shape: &[usize]| if offload { ops.zeros_on_host(dtype, shape) } else { ops.zeros(dtype, shape) };
        let count = buckets.list.len();
        let zeros = |dtype: DType| (0..count).map(|b| zero(dtype, &buckets.state_shape(b))).collect::<temper_tensor::Result<Vec<_>>>();
        Ok(Optimizer {
            config,
            exp_avg: zeros(moments)?,
            exp_avg_sq: zeros(moments)?,
            remainders: if weights == DType::BF16 { zeros(DType::F16)? } else { Vec::new() },
            begun: vec![false; count],
            squares: ops.zeros(DType::F64, &[2])?,
            clip: ops.zeros(weights.stat(), &[1])?,
            updates: 0,
            buckets,
        })
    }

    /// What this rank updates.
    pub fn segments(&self) -> &[Segment] {
        self.buckets.segments()
    }

    /// Norm over all gradients of all ranks and the clip factor that follows. `losses` (of the tokens that are here) only guard: where
    /// one is not finite, no rank updates.
    pub fn measure<'a>(&mut self, ops: &dyn Ops, grads: &Grads, losses: impl Iterator<Item = View<'a>>) -> Result<()> {
        ops.fill(self.squares.view_mut(), 0.0)?;
        for (param, range) in self.buckets.counted() {
            ops.sum_squares(self.squares.view_mut().slice_rows(0..1), elements(grads.get(*param)?, range))?;
        }
        for loss in losses {
            ops.sum_squares(self.squares.view_mut().slice_rows(1..2), loss)?;
        }
        self.buckets.mesh.world.all_reduce(self.squares.view_mut(), Reduce::Sum)?.wait()?;
        let squares = self.squares.view();
        Ok(ops.clip_factor(self.clip.view_mut(), squares.slice_rows(0..1), squares.slice_rows(1..2), self.config.clip)?)
    }

    /// One update of this rank's part of every parameter with the gradient as [`Optimizer::measure`] clipped it. The ranks begin to
    /// gather each other's parts: who uses a weight waits for it.
    pub fn step(&mut self, ops: &dyn Ops, weights: &mut Weights, grads: &Grads, lr: f64) -> Result<()> {
        let [beta1, beta2] = self.config.betas;
        let base = AdamW { lr, beta1, beta2, eps: self.config.eps, weight_decay: 0.0, step: self.updates + 1 };
        let Buckets { mesh, list, .. } = &self.buckets;
        let mut segments = self.buckets.segments().iter().peekable();
        for (bucket, plan) in list.iter().enumerate() {
            while let Some(Segment { param, range, state, .. }) = segments.next_if(|s| s.bucket == bucket) {
                let update = AdamWState {
                    weight: elements_mut(weights.get_mut(*param)?, range),
                    remainder: self.remainders.get_mut(bucket).map(|r| elements_mut(r.view_mut(), state)),
                    m: elements_mut(self.exp_avg[bucket].view_mut(), state),
                    v: elements_mut(self.exp_avg_sq[bucket].view_mut(), state),
                };
                let weight_decay = if self.buckets.decays(*param) { self.config.weight_decay } else { 0.0 };
                ops.adamw(update, elements(grads.get(*param)?, range), self.clip.view(), AdamW { weight_decay, ..base })?;
            }
            let group = plan.group(mesh);
            if group.size() > 1 {
                weights.exchange(bucket, |x| group.all_gather_in_place(x))?;
            }
        }
        Ok(())
    }

    /// Waits for the update and counts it if it took place.
    pub fn settle(&mut self, ops: &dyn Ops) -> Result<Settled> {
        let read = ops.to_host(self.squares.view())?;
        let (squares, guard) = match read.as_slice::<f64>() {
            Some([squares, guard]) => (*squares, *guard),
            _ => (f64::NAN, f64::NAN),
        };
        let updated = squares.is_finite() && guard.is_finite();
        self.updates += u64::from(updated);
        Ok(Settled { grad_norm: squares.sqrt(), updated })
    }

    /// Whether weights are rounded and their exact values are masters, which [`Optimizer::set_master`] sets.
    pub fn has_masters(&self) -> bool {
        !self.remainders.is_empty()
    }

    /// Sets elements `range` of what this rank holds of a parameter, weights and remainders, to as many F32 values that lie on the
    /// backend.
    pub fn set_master(&mut self, ops: &dyn Ops, weights: &mut Weights, param: ParamId, range: &Range<usize>, values: View) -> Result<()> {
        let values = values.reshape(&[values.numel()]);
        if self.remainders.is_empty() {
            return Ok(ops.copy(elements_mut(weights.get_mut(param)?, range), values)?);
        }
        let own = |s: &&Segment| s.param == param && s.range.start < range.end && range.start < s.range.end;
        let own: Vec<&Segment> = self.buckets.segments().iter().filter(own).collect();
        if !matches!(own[..], [segment] if segment.range.start <= range.start && range.end <= segment.range.end) {
            // The weights that other ranks update are rounded as they round them.
            let mut unused = ops.alloc(DType::F16, values.shape())?;
            ops.master_split(elements_mut(weights.get_mut(param)?, range), unused.view_mut(), values)?;
        }
        for segment in own {
            let here = segment.range.start.max(range.start)..segment.range.end.min(range.end);
            let state = segment.state_of(&here);
            let (weight, remainder) = (weights.get_mut(param)?, self.remainders[segment.bucket].view_mut());
            let values = values.slice_rows(here.start - range.start..here.end - range.start);
            ops.master_split(elements_mut(weight, &here), elements_mut(remainder, &state), values)?;
        }
        Ok(())
    }

    /// The exact values of a segment in F32, where they differ from the weights: `None` says that the weights themselves are exact.
    pub fn master(&self, ops: &dyn Ops, weights: &Weights, segment: &Segment) -> Result<Option<Tensor>> {
        let Some(remainder) = self.remainders.get(segment.bucket) else { return Ok(None) };
        let mut values = ops.alloc(DType::F32, &[segment.range.len()])?;
        let weight = elements(weights.get(segment.param)?, &segment.range);
        ops.master_join(values.view_mut(), weight, elements(remainder.view(), &segment.state))?;
        Ok(Some(values))
    }

    /// Some of the first or second moments of a segment, given as elements of its parameter.
    pub fn moment_mut(&mut self, segment: usize, second: bool, range: &Range<usize>) -> ViewMut<'_> {
        let segment = &self.buckets.segments()[segment];
        let all = if second { &mut self.exp_avg_sq } else { &mut self.exp_avg };
        elements_mut(all[segment.bucket].view_mut(), &segment.state_of(range))
    }

    /// First and second moments of every segment, flat, to be filled from files.
    pub fn all_moments_mut(&mut self) -> Vec<[ViewMut<'_>; 2]> {
        let mut segments = self.buckets.segments().iter().peekable();
        let mut all = Vec::with_capacity(self.buckets.segments().len());
        for (bucket, (m, v)) in self.exp_avg.iter_mut().zip(&mut self.exp_avg_sq).enumerate() {
            let (len, mut at) = (m.numel(), 0);
            let mut rest = [m, v].map(|t| t.view_mut().reshape(&[len]));
            while let Some(Segment { state, .. }) = segments.next_if(|s| s.bucket == bucket) {
                let [(m, m_rest), (v, v_rest)] = rest.map(|x| x.split_rows(state.start - at).1.split_rows(state.len()));
                all.push([m, v]);
                (rest, at) = ([m_rest, v_rest], state.end);
            }
        }
        all
    }

    /// First and second moments of a segment, flat.
    pub fn moments(&self, segment: &Segment) -> [View<'_>; 2] {
        [&self.exp_avg, &self.exp_avg_sq].map(|all| elements(all[segment.bucket].view(), &segment.state))
    }
}

/// Some elements, in order.
fn elements<'a>(x: View<'a>, range: &Range<usize>) -> View<'a> {
    x.reshape(&[x.numel()]).slice_rows(range.clone())
}

/// Some elements to write, in order.
fn elements_mut<'a>(x: ViewMut<'a>, range: &Range<usize>) -> ViewMut<'a> {
    let len = x.numel();
    x.reshape(&[len]).slice_rows(range.clone())
}
