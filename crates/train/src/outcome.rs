//! What a step leaves: on the backend while it is under way, and as numbers once it is done.

use temper_model::{Batch, Outputs};

/// A micro-batch of this rank whose forward and backward passes are under way.
pub struct Done {
    /// What it leaves on the backend; on the last stage of a pipeline.
    pub outputs: Option<Outputs>,
    /// Its tokens.
    pub batch: Batch,
    /// Factor on its sum of weighted token losses.
    pub loss_scale: f64,
    /// It only keeps this rank in step with others, which have one micro-batch more.
    pub filler: bool,
}

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepResult {
    /// Mean cross-entropy (see [`temper_config::LossReduction`]).
    pub loss: f64,
    /// Load-balancing loss without coefficient, mean over micro-batches.
    pub aux_loss: Option<f64>,
    /// Router z-loss without coefficient, mean over micro-batches.
    pub z_loss: Option<f64>,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// False when the loss or the gradient was not finite and the update was left out.
    pub updated: bool,
    /// Some rank was asked to end the run.
    pub stop: bool,
}

/// What ranks tell each other of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Losses {
    /// Mean cross-entropy.
    pub loss: f64,
    /// Load-balancing loss without coefficient, mean over micro-batches.
    pub aux_loss: Option<f64>,
    /// Router z-loss, likewise.
    pub z_loss: Option<f64>,
    /// Some rank was asked to end the run.
    pub stop: bool,
}
