//! What a backend tells about itself: memory by purpose, and marks in time.

use crate::{Error, Result};
use std::any::Any;
use std::time::Instant;

/// What memory is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Model weights.
    Weights,
    /// Gradients of weights.
    Gradients,
    /// Optimizer state.
    Optimizer,
    /// Activations and their gradients.
    Activations,
    /// Scratch of a single operation.
    Workspace,
    /// Buffers of communication.
    Communication,
}

impl Purpose {
    /// All purposes, in the order of [`MemoryUse`].
    pub const ALL: [Purpose; 6] =
        [Purpose::Weights, Purpose::Gradients, Purpose::Optimizer, Purpose::Activations, Purpose::Workspace, Purpose::Communication];

    /// Name for reports.
    pub fn name(self) -> &'static str {
        match self {
            Purpose::Weights => "weights",
            Purpose::Gradients => "gradients",
            Purpose::Optimizer => "optimizer",
            Purpose::Activations => "activations",
            Purpose::Workspace => "workspace",
            Purpose::Communication => "communication",
        }
    }
}

/// Bytes by purpose, in the order of [`Purpose::ALL`].
#[derive(Clone, Copy, Debug, Default)]
pub struct MemoryUse {
    /// In use now.
    pub now: [usize; 6],
    /// Most in use of each purpose since the last reset.
    pub peak: [usize; 6],
    /// Most in use altogether since the last reset.
    pub peak_total: usize,
    /// Most in use by tensors since the last reset: all but workspace and communication.
    pub peak_tensors: usize,
    /// Physical memory taken from the system or the device.
    pub reserved: usize,
    /// Times more of it was asked for.
    pub growths: usize,
    /// All memory that there is; 0 where the backend cannot tell.
    pub capacity: usize,
}

impl MemoryUse {
    /// Counts bytes that are now in use.
    pub fn take(&mut self, purpose: Purpose, bytes: usize) {
        let i = purpose as usize;
        self.now[i] += bytes;
        self.peak[i] = self.peak[i].max(self.now[i]);
        self.peak_total = self.peak_total.max(self.now.iter().sum());
        self.peak_tensors = self.peak_tensors.max(self.tensors());
    }

    fn tensors(&self) -> usize {
        let own = |p: &&Purpose| !matches!(p, Purpose::Workspace | Purpose::Communication);
        Purpose::ALL.iter().filter(own).map(|p| self.now[*p as usize]).sum()
    }

    /// Counts bytes that are no longer in use.
    pub fn give(&mut self, purpose: Purpose, bytes: usize) {
        self.now[purpose as usize] -= bytes;
    }

    /// Starts the peaks anew.
    pub fn reset_peak(&mut self) {
        self.peak = self.now;
        self.peak_total = self.now.iter().sum();
        self.peak_tensors = self.tensors();
    }
}

/// A part of an optimizer step, for timing (see [`Ops::phase`](crate::Ops::phase)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// A step begins.
    Begin,
    /// Forward up to the head, with the upload of the tokens.
    Forward,
    /// Output matrix and loss, forward and backward.
    Head,
    /// Backward, with what is recomputed for it.
    Backward,
    /// Norm of the gradient.
    Norm,
    /// The optimizer's update.
    Update,
    /// The host reads the losses.
    Report,
    /// No step is under way.
    Between,
}

impl Phase {
    /// The phases of a step in order.
    pub const ALL: [Phase; 7] = [Phase::Begin, Phase::Forward, Phase::Head, Phase::Backward, Phase::Norm, Phase::Update, Phase::Report];

    /// Name for reports.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Begin => "begin",
            Phase::Forward => "forward",
            Phase::Head => "head",
            Phase::Backward => "backward",
            Phase::Norm => "grad_norm",
            Phase::Update => "optimizer",
            Phase::Report => "report",
            Phase::Between => "between",
        }
    }
}

/// A mark in a backend's order of work (see [`Ops::stamp`](crate::Ops::stamp)).
pub trait Stamp: Send {
    /// Milliseconds of work between an earlier mark of the same backend and this one. Waits until this one is passed.
    fn ms_since(&self, earlier: &dyn Stamp) -> Result<f64>;
    /// For the backend to recognise its own marks.
    fn as_any(&self) -> &dyn Any;
}

impl Stamp for Instant {
    fn ms_since(&self, earlier: &dyn Stamp) -> Result<f64> {
        let earlier = earlier.as_any().downcast_ref::<Instant>();
        let earlier = earlier.ok_or_else(|| Error::Backend("a mark of another backend".into()))?;
        Ok(self.duration_since(*earlier).as_secs_f64() * 1e3)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
