//! What of a step a rank has, and what ranks found out together.
//!
//! Legend: M micro-batches of the step over all ranks.

use crate::Result;
use crate::events::Loading;
use crate::step::Trainer;
use temper_checkpoint::Traffic;
use temper_comm::{Comm, Reduce};
use temper_config::LossReduction;
use temper_data::{MicroBatch, StepBatch};
use temper_model::Ranks;
use temper_parallel::schedule::Turns;
use temper_tensor::{Ops, View};

/// The micro-batches of this rank's replica: every dp-th of `count`. All replicas have as many, and interleaved pipelines (`chunks` above
/// one) a multiple of their stages: `None` stands for a filler.
pub(crate) fn of_this_rank(ranks: &Ranks, count: usize, chunks: usize) -> Vec<Option<usize>> {
    let (dp, pp) = (ranks.mesh.axes.dp, ranks.mesh.axes.pp);
    (0..Turns::new(count, dp, pp, chunks).all).map(|i| Some(i * dp + ranks.mesh.replica()).filter(|i| *i < count)).collect()
}

/// Factor on the sum of weighted token losses of each micro-batch.
pub(crate) fn loss_scales(batch: &StepBatch, reduction: LossReduction) -> Vec<f64> {
    let sums: Vec<f64> = batch.micro.iter().map(MicroBatch::weight_sum).collect();
    let total: f64 = sums.iter().sum();
    match reduction {
        LossReduction::Token => vec![if total > 0.0 { 1.0 / total } else { 0.0 }; sums.len()],
        LossReduction::Microbatch => sums.iter().map(|s| if *s > 0.0 { 1.0 / (s * sums.len() as f64) } else { 0.0 }).collect(),
    }
}

/// The sum of every rank's numbers.
pub(crate) fn sum_over_ranks<const N: usize>(ops: &dyn Ops, world: &dyn Comm, mut numbers: [f64; N]) -> Result<[f64; N]> {
    over_ranks(ops, world, Reduce::Sum, &mut numbers)?;
    Ok(numbers)
}

/// Of each number the largest that a rank has, on all ranks.
pub(crate) fn largest_over_ranks(ops: &dyn Ops, world: &dyn Comm, numbers: &mut [f64]) -> Result<()> {
    over_ranks(ops, world, Reduce::Max, numbers)
}

fn over_ranks(ops: &dyn Ops, world: &dyn Comm, reduce: Reduce, numbers: &mut [f64]) -> Result<()> {
    if world.size() == 1 || numbers.is_empty() {
        return Ok(());
    }
    let mut there = ops.from_host(View::host(numbers, &[numbers.len()]))?;
    world.all_reduce(there.view_mut(), reduce).map_err(temper_model::Error::Comm)?.wait().map_err(temper_model::Error::Comm)?;
    let back = ops.to_host(there.view())?;
    numbers.copy_from_slice(back.as_slice().unwrap_or(&vec![f64::NAN; numbers.len()]));
    Ok(())
}

/// What all ranks read, from what this one did. Every rank calls this.
pub(crate) fn loading(own: Traffic, trainer: &Trainer) -> Result<Loading> {
    let (ops, world) = (&*trainer.ops, &*trainer.ranks.mesh.world);
    let [all] = sum_over_ranks(ops, world, [own.read as f64])?;
    let mut slowest = [own.took.as_secs_f64()];
    largest_over_ranks(ops, world, &mut slowest)?;
    let gb_per_s = |bytes: f64, seconds: f64| bytes / 1e9 / seconds.max(1e-9);
    Ok(Loading {
        bytes: own.read,
        wanted_bytes: own.wanted,
        wall_s: own.took.as_secs_f64(),
        gb_per_s: gb_per_s(own.read as f64, own.took.as_secs_f64()),
        ranks: world.size(),
        all_bytes: all as u64,
        all_gb_per_s: gb_per_s(all, slowest[0]),
    })
}
