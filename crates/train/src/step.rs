//! One optimizer step, from a batch to updated weights.
//!
//! Legend: M micro-batches of the step; a micro-batch has T tokens, of which N have a target.

use crate::outcome::{Done, Losses, StepResult};
use crate::{Error, Result};
use std::sync::Arc;
use temper_config::LossReduction;
use temper_data::{MicroBatch, StepBatch};
use temper_model::{
    AuxSettings, Batch, Cx, Grads, Model, Objective, Recompute, RopeTables, Weights, diagnose::diagnose, loss_sum, read_floats,
};
use temper_parallel::{Optimizer, Settled};
use temper_tensor::{Balance, DType, Ops, Phase};

/// Everything a step reads and changes. All of it is allocated before the first step.
pub struct Trainer {
    /// The backend.
    pub ops: Arc<dyn Ops>,
    /// The network.
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
    /// One optimizer step at learning rate `lr`. Without an update when something is not finite.
    pub fn step(&mut self, batch: &StepBatch, lr: f64) -> Result<StepResult> {
        let ops = self.ops.clone();
        let done = self.accumulate(batch)?;
        ops.phase(Phase::Norm)?;
        self.optimizer.reduce(&*ops, &mut self.grads)?;
        self.optimizer.measure(&*ops, &self.grads, done.iter().map(|d| d.outputs.losses.view()))?;
        ops.phase(Phase::Update)?;
        self.optimizer.step(&*ops, &mut self.weights, &self.grads, lr)?;
        ops.phase(Phase::Report)?;
        let Losses { loss, aux_loss, z_loss } = self.report(&done)?;
        let Settled { grad_norm, updated } = self.optimizer.settle(&*ops)?;
        ops.phase(Phase::Between)?;
        Ok(StepResult { loss, aux_loss, z_loss, grad_norm, updated })
    }

    /// Adds the gradients of a global batch up; nothing waits for the backend.
    pub fn accumulate(&mut self, batch: &StepBatch) -> Result<Vec<Done>> {
        let ops = self.ops.clone();
        ops.phase(Phase::Begin)?;
        self.grads.begin();
        let scales = loss_scales(batch, self.settings.reduction);
        let mut done = Vec::with_capacity(batch.micro.len());
        for (micro, loss_scale) in batch.micro.iter().zip(scales) {
            ops.phase(Phase::Forward)?;
            let tokens = upload(&*ops, micro, self.weights.dtype())?;
            let objective = Objective { loss_scale, aux: self.aux(batch.micro.len()), recompute: self.settings.recompute };
            let cx = Cx { ops: &*ops, weights: &self.weights, rope: &self.rope, batch: &tokens, ranks: temper_model::Ranks::single() };
            let outputs = self.model.forward_backward(&cx, &mut self.grads, &objective)?;
            done.push(Done { outputs, batch: tokens, loss_scale });
        }
        self.grads.settle(&*ops)?;
        Ok(done)
    }

    fn aux(&self, micro_batches: usize) -> Option<AuxSettings> {
        let (kind, coef) = self.settings.balance.unwrap_or((Balance::Hf, 0.0));
        let wanted = self.settings.balance.is_some() || self.settings.z_coef != 0.0;
        wanted.then_some(AuxSettings { kind, coef, z_coef: self.settings.z_coef, scale: 1.0 / micro_batches as f64 })
    }

    /// Reads what the micro-batches left on the backend: the one place of a step that waits for it.
    pub fn report(&self, done: &[Done]) -> Result<Losses> {
        let (mut loss, mut balance, mut z) = (0.0, 0.0, 0.0);
        let share = 1.0 / done.len().max(1) as f64;
        let mut has_aux = false;
        for Done { outputs, batch, loss_scale } in done {
            loss += loss_scale * loss_sum(&*self.ops, &outputs.losses, batch.labels()?)?;
            if let Some(aux) = &outputs.aux {
                has_aux = true;
                balance += share * read_floats(&*self.ops, &aux.balance)?[0];
                z += share * read_floats(&*self.ops, &aux.z)?[0];
            }
        }
        let aux_loss = (has_aux && self.settings.balance.is_some()).then_some(balance);
        Ok(Losses { loss, aux_loss, z_loss: (has_aux && self.settings.z_coef != 0.0).then_some(z) })
    }

    /// What in a micro-batch is first not finite, in words. Runs it once more, slowly; the gradients are lost.
    pub fn first_non_finite(&mut self, micro: &MicroBatch) -> Result<Option<String>> {
        let ops = self.ops.clone();
        let batch = upload(&*ops, micro, self.weights.dtype())?;
        let objective = Objective { loss_scale: 1.0, aux: self.aux(1), recompute: self.settings.recompute };
        let cx = Cx { ops: &*ops, weights: &self.weights, rope: &self.rope, batch: &batch, ranks: temper_model::Ranks::single() };
        Ok(diagnose(&self.model, &cx, &mut self.grads, &objective)?.map(|found| found.to_string()))
    }

    /// Sum of weighted losses and sum of weights of one micro-batch, without gradients.
    pub fn evaluate(&self, micro: &MicroBatch) -> Result<(f64, f64)> {
        let batch = upload(&*self.ops, micro, self.weights.dtype())?;
        let cx = Cx { ops: &*self.ops, weights: &self.weights, rope: &self.rope, batch: &batch, ranks: temper_model::Ranks::single() };
        let out = self.model.forward_loss(&cx, &None)?;
        Ok((loss_sum(&*self.ops, &out.losses, batch.labels()?)?, micro.weight_sum()))
    }
}

/// Factor on the sum of weighted token losses of each micro-batch.
fn loss_scales(batch: &StepBatch, reduction: LossReduction) -> Vec<f64> {
    let sums: Vec<f64> = batch.micro.iter().map(MicroBatch::weight_sum).collect();
    let total: f64 = sums.iter().sum();
    match reduction {
        LossReduction::Token => vec![if total > 0.0 { 1.0 / total } else { 0.0 }; sums.len()],
        LossReduction::Microbatch => sums.iter().map(|s| if *s > 0.0 { 1.0 / (s * sums.len() as f64) } else { 0.0 }).collect(),
    }
}

fn upload(ops: &dyn Ops, micro: &MicroBatch, dtype: DType) -> Result<Batch> {
    let batch = Batch::new(ops, &micro.ids, &micro.positions, &micro.cu_seqlens).map_err(Error::Model)?;
    Ok(batch.with_labels(ops, dtype, &micro.targets, &micro.weights)?)
}
