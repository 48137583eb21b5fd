//! One optimizer step, from a batch to updated weights, as one rank does it.
//!
//! Legend: M micro-batches of the step over all ranks; a micro-batch has T tokens, of which N have a target.

use crate::outcome::{Done, Losses, StepResult};
use crate::share::{loss_scales, of_this_rank};
use crate::{Error, Result};
use std::sync::{Arc, atomic::AtomicBool};
use temper_config::LossReduction;
use temper_data::{MicroBatch, StepBatch};
use temper_model::{AuxSettings, Batch, Grads, Model, Objective, Ranks, Recompute, RopeTables, Weights};
use temper_parallel::{Micro, Optimizer, Pipeline, Settled, Stage, schedule::schedule};
use temper_tensor::{Balance, Ops, Phase};

/// Everything a step reads and changes. All of it is allocated before the first step.
pub struct Trainer {
    /// The backend.
    pub ops: Arc<dyn Ops>,
    /// The ranks that train together.
    pub ranks: Ranks,
    /// The network, or this rank's part of it.
    pub model: Model,
    /// Its weights.
    pub weights: Weights,
    /// Gradients of the step.
    pub grads: Grads,
    /// Moments.
    pub optimizer: Optimizer,
    /// Rotary tables as long as the longest document.
    pub rope: RopeTables,
    /// What is minimised.
    pub settings: Settings,
    /// Set from outside to have the run end; every rank learns of it with the losses of a step.
    pub stop: Arc<AtomicBool>,
}

/// What is minimised, fixed for the run.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Divisor of the token losses.
    pub reduction: LossReduction,
    /// Load-balancing loss and its coefficient.
    pub balance: Option<(Balance, f64)>,
    /// Coefficient of the router z-loss.
    pub z_coef: f64,
    /// What the forward pass keeps.
    pub recompute: Recompute,
}

impl Trainer {
    /// One optimizer step at learning rate `lr`. Without an update when something is not finite. Every rank is given the same batch.
    pub fn step(&mut self, batch: &StepBatch, lr: f64) -> Result<StepResult> {
        let ops = self.ops.clone();
        let done = self.gradients(batch)?;
        let losses = done.iter().flat_map(|d| &d.outputs).map(|o| o.losses.view());
        self.optimizer.measure(&*ops, &self.grads, losses)?;
        ops.phase(Phase::Update)?;
        self.optimizer.step(&*ops, &mut self.weights, &self.grads, lr)?;
        ops.phase(Phase::Report)?;
        let Losses { loss, aux_loss, z_loss, stop } = self.report(&done)?;
        let Settled { grad_norm, updated } = self.optimizer.settle(&*ops)?;
        ops.phase(Phase::Between)?;
        Ok(StepResult { loss, aux_loss, z_loss, grad_norm, updated, stop })
    }

    /// The gradients of a step as they are updated with: of its segments each rank has the sum over all ranks.
    pub(crate) fn gradients(&mut self, batch: &StepBatch) -> Result<Vec<Done>> {
        let ops = self.ops.clone();
        let done = self.passes(batch, true)?;
        ops.phase(Phase::Norm)?;
        self.optimizer.reduce(&*ops, &mut self.grads)?;
        Ok(done)
    }

    /// Adds the gradients of this rank's micro-batches up, and leaves it at that.
    pub fn accumulate(&mut self, batch: &StepBatch) -> Result<Vec<Done>> {
        self.passes(batch, false)
    }

    /// Runs this rank's micro-batches forward and backward; nothing waits for the backend. With `reduce` the sums over ranks begin as
    /// soon as the gradients of a block are complete.
    fn passes(&mut self, batch: &StepBatch, reduce: bool) -> Result<Vec<Done>> {
        self.ops.phase(Phase::Begin)?;
        self.grads.begin();
        let (pp, chunks) = (self.ranks.mesh.axes.pp, self.model.chunks.len());
        let own = of_this_rank(&self.ranks, batch.micro.len(), chunks);
        let scales = loss_scales(batch, self.settings.reduction);
        let objective = |index: Option<usize>| Objective {
            loss_scale: index.map_or(0.0, |i| scales[i]),
            aux: self.aux(index.map_or(0.0, |_| 1.0 / batch.micro.len() as f64)),
            recompute: self.settings.recompute,
        };
        let filler = MicroBatch::filler();
        let upload = |index: &Option<usize>| -> Result<Micro> {
            let tokens = index.map_or(&filler, |i| &batch.micro[i]);
            Ok(Micro { batch: self.upload(tokens)?, objective: objective(*index) })
        };
        let micro = own.iter().map(upload).collect::<Result<Vec<_>>>()?;
        let steps = schedule(self.ranks.mesh.stage(), pp, chunks, micro.len()).map_err(|r| Error::Input(r.to_string()))?;
        let Trainer { ops, model, weights, rope, ranks, grads, optimizer, .. } = self;
        let stage = Stage { ops: &**ops, model, weights, rope, ranks };
        let outputs = Pipeline::new(stage).train(&steps, &micro, grads, &mut |block, grads| match reduce {
            true => optimizer.ready(&**ops, grads, block),
            false => Ok(()),
        })?;
        if !reduce {
            grads.settle(&**ops)?;
        }
        let done = micro.into_iter().zip(outputs).zip(own);
        Ok(done
            .map(|((m, outputs), index)| Done { outputs, batch: m.batch, loss_scale: m.objective.loss_scale, filler: index.is_none() })
            .collect())
    }

    /// The auxiliary losses of a micro-batch that is this share of the step.
    pub(crate) fn aux(&self, scale: f64) -> Option<AuxSettings> {
        let (kind, coef) = self.settings.balance.unwrap_or((Balance::Hf, 0.0));
        let wanted = self.settings.balance.is_some() || self.settings.z_coef != 0.0;
        wanted.then_some(AuxSettings { kind, coef, z_coef: self.settings.z_coef, scale })
    }

    /// A micro-batch as this rank needs it.
    pub(crate) fn upload(&self, micro: &MicroBatch) -> Result<Batch> {
        let (ops, ranks, vocab) = (&*self.ops, &self.ranks, self.model.arch.vocab);
        let batch = Batch::divided(ops, &micro.ids, &micro.positions, &micro.cu_seqlens, ranks, vocab).map_err(Error::Model)?;
        Ok(batch.with_labels(ops, self.weights.dtype(), &micro.targets, &micro.weights)?)
    }
}
