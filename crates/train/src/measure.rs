//! Model FLOPs and the memory of this process.

use crate::events::Step;
use crate::outcome::StepResult;
use temper_config::{Arch, Device};
use temper_data::StepBatch;
use temper_model::param::{Param, count};
use temper_tensor::Ops;

/// Counts the model FLOPs of a step (docs/NUMERICS.md, "Model FLOPs").
#[derive(Clone, Copy, Debug)]
pub struct Flops {
    per_token: f64,
    per_token_and_position: f64,
    /// The device's dense peak, where it is known.
    peak: Option<f64>,
}

impl Flops {
    /// For an architecture and its parameters on a backend of this name.
    pub fn new(arch: &Arch, params: &[Param], backend: &str) -> Flops {
        let (_, active) = count(arch, params);
        let look_up = if arch.tied { 0 } else { arch.vocab * arch.hidden };
        Flops {
            per_token: 6.0 * (active as f64 - look_up as f64),
            per_token_and_position: 6.0 * (arch.layers * arch.heads * arch.head_dim) as f64,
            peak: Device::of(backend).map(|d| d.peak()),
        }
    }

    /// Share of the device's dense bf16 peak; none where that is not known.
    pub fn mfu(&self, flops_per_s: f64) -> Option<f64> {
        self.peak.map(|peak| flops_per_s / peak)
    }

    /// FLOPs of a step, documents of every micro-batch.
    pub fn of_step(&self, batch: &StepBatch) -> f64 {
        self.of(batch.micro.iter().flat_map(|m| m.cu_seqlens.windows(2).map(|w| (w[1] - w[0]) as usize)))
    }

    /// FLOPs of forward and backward over documents of these lengths.
    pub fn of(&self, lengths: impl Iterator<Item = usize>) -> f64 {
        lengths.map(|n| n as f64 * (self.per_token + self.per_token_and_position * n as f64)).sum()
    }
}

/// The event of a step that took `wall_s` seconds.
pub fn step_event(step: usize, batch: &StepBatch, done: &StepResult, lr: f64, flops: &Flops, mem_peak_bytes: u64, wall_s: f64) -> Step {
    let flops_per_s = flops.of_step(batch) / wall_s;
    Step {
        step,
        epoch: batch.epoch,
        loss: done.loss,
        aux_loss: done.aux_loss,
        z_loss: done.z_loss,
        grad_norm: done.grad_norm,
        lr,
        tokens: batch.tokens(),
        trained_tokens: batch.trained_tokens(),
        tokens_per_s: batch.tokens() as f64 / wall_s,
        model_tflops: flops_per_s / 1e12,
        mfu: flops.mfu(flops_per_s),
        mem_peak_bytes,
        wall_s,
        skipped: !done.updated,
    }
}

/// Most memory used so far, in bytes: of the device where there is one, else of this process (0 where the system does not tell).
pub fn peak_memory(ops: &dyn Ops) -> u64 {
    if ops.on_device() {
        return ops.memory().map_or(0, |m| m.reserved as u64);
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
