//! What a rank found out, and what all ranks found out together.

use crate::Result;
use crate::outcome::{Done, Losses};
use crate::share::{of_this_rank, sum_over_ranks};
use crate::step::Trainer;
use std::sync::atomic::Ordering;
use temper_data::MicroBatch;
use temper_model::{Objective, loss_sum, read_floats};
use temper_parallel::{Micro, Pipeline, Stage, diagnose};

impl Trainer {
    /// Reads what the micro-batches left on the backend, and adds up what all ranks found: the one place of a step that waits for it.
    pub fn report(&self, done: &[Done]) -> Result<Losses> {
        let mesh = &self.ranks.mesh;
        let (mut loss, mut balance, mut z, mut counted, mut has_aux) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for Done { outputs, batch, loss_scale, .. } in done.iter().filter(|d| !d.filler && mesh.tp.rank() == 0) {
            let Some(outputs) = outputs else { continue };
            loss += loss_scale * loss_sum(&*self.ops, &outputs.losses, batch.labels()?)?;
            counted += if mesh.cp.rank() == 0 { 1.0 } else { 0.0 };
            if let Some(aux) = outputs.aux.as_ref().filter(|_| mesh.cp.rank() == 0) {
                has_aux = 1.0;
                balance += read_floats(&*self.ops, &aux.balance)?[0];
                z += read_floats(&*self.ops, &aux.z)?[0];
            }
        }
        let asked = f64::from(u8::from(self.stop.load(Ordering::Relaxed)));
        let found = [loss, balance, z, counted, has_aux, asked];
        let [loss, balance, z, counted, has_aux, asked] = sum_over_ranks(&*self.ops, &*mesh.world, found)?;
        let mean = |sum: f64, wanted: bool| (has_aux > 0.0 && wanted).then_some(sum / counted.max(1.0));
        let aux_loss = mean(balance, self.settings.balance.is_some());
        Ok(Losses { loss, aux_loss, z_loss: mean(z, self.settings.z_coef != 0.0), stop: asked > 0.0 })
    }

    /// What in a micro-batch is first not finite, in words, whichever rank it is found on. All ranks call this, with the same; they run it
    /// once more, slowly, and the gradients are lost.
    pub fn first_non_finite(&mut self, micro: &MicroBatch) -> Result<Option<String>> {
        let objective = Objective { loss_scale: 1.0, aux: self.aux(1.0), recompute: self.settings.recompute };
        let micro = Micro { batch: self.upload(micro)?, objective };
        let Trainer { ops, model, weights, rope, ranks, grads, .. } = self;
        let stage = Stage { ops: &**ops, model, weights, rope, ranks };
        Ok(diagnose(stage, &micro, grads)?.map(|found| found.to_string()))
    }

    /// Sum of weighted losses over micro-batches, without gradients. Every rank is given the same ones and the answer. `tell` hears after
    /// each of this rank's how many are done, and of how many.
    pub fn evaluate(&self, all: &[MicroBatch], mut tell: impl FnMut(usize, usize)) -> Result<f64> {
        let mut sum = 0.0;
        let own = of_this_rank(&self.ranks, all.len(), 1);
        for (n, index) in own.iter().enumerate() {
            let batch = self.upload(index.map_or(&MicroBatch::filler(), |i| &all[i]))?;
            let Trainer { ops, model, weights, rope, ranks, .. } = self;
            let stage = Stage { ops: &**ops, model, weights, rope, ranks };
            if let Some(out) = Pipeline::new(stage).evaluate(&batch)?.filter(|_| ranks.mesh.tp.rank() == 0) {
                sum += loss_sum(&**ops, &out.losses, batch.labels()?)?;
            }
            tell(n + 1, own.len());
        }
        Ok(sum_over_ranks(&*self.ops, &*self.ranks.mesh.world, [sum])?[0])
    }
}
