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
    /// Physical memory taken from the system or the device.
    pub reserved: usize,
    /// Times more of it was asked for.
    pub growths: usize,
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
