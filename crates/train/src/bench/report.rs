//! What a benchmark of the step tells.

use super::{Placed, Skew};
use serde::{Serialize, Serializer};
use temper_config::{Arch, Recompute};
use temper_model::{
    declare,
    param::{Param, count},
};
use temper_tensor::{MemoryUse, Purpose};

/// The model.
#[derive(Clone, Debug, Serialize)]
pub struct Shape {
    /// As the user named it.
    pub name: String,
    /// Decoder layers.
    pub layers: usize,
    /// Hidden size.
    pub hidden: usize,
    /// Rows of the embedding.
    pub vocab: usize,
    /// All parameters.
    pub params: u64,
    /// Parameters used for one token.
    pub active_params: u64,
}

impl Shape {
    pub(super) fn new(name: &str, arch: &Arch) -> Shape {
        let (all, active) = count(arch, &declare(arch));
        Shape { name: name.into(), layers: arch.layers, hidden: arch.hidden, vocab: arch.vocab, params: all, active_params: active }
    }
}

/// The rank of a layout that was measured.
#[derive(Clone, Debug, Serialize)]
pub struct RankOf {
    /// The rank.
    pub rank: usize,
    /// The layout.
    pub layout: String,
    /// The other ranks are not there.
    pub alone: bool,
    /// Parameters it holds.
    pub params: u64,
    /// How many times its balanced share of rows its experts got, where the other ranks are not there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skew: Option<Skew>,
    /// Milliseconds a step that making what the other ranks would have sent took, where they are not there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stood_in_ms: Option<Spread>,
}

impl RankOf {
    pub(super) fn new(place: &Placed, params: &[Param]) -> Option<RankOf> {
        let params = params.iter().map(|p| p.numel() as u64).sum();
        match place {
            Placed::Whole => None,
            Placed::Alone(one) => {
                Some(RankOf { rank: one.rank, layout: one.name.clone(), alone: true, params, skew: None, stood_in_ms: None })
            }
            Placed::Among { name, world, .. } => {
                Some(RankOf { rank: world.rank(), layout: name.clone(), alone: false, params, skew: None, stood_in_ms: None })
            }
        }
    }
}

/// The work of a step.
#[derive(Clone, Debug, Serialize)]
pub struct Work {
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Sequences of a micro-batch.
    pub micro_batch: usize,
    /// Micro-batches of a step.
    pub accumulate: usize,
    /// Tokens of a document.
    pub doc_len: usize,
    /// Tokens of a step.
    pub tokens: usize,
    /// What is computed again.
    pub recompute: Recompute,
    /// Type of weights and activations.
    pub dtype: &'static str,
    /// Type of gradients.
    pub grads: &'static str,
    /// Type of Adam's moments.
    pub moments: &'static str,
    /// Whether Adam's state lies in host memory.
    pub offload_optimizer: bool,
}

/// Several measurements of one thing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The one in the middle (of an even number the later).
    pub median: f64,
    /// The least.
    pub min: f64,
    /// The most.
    pub max: f64,
}

impl Spread {
    /// Of at least one value; zeros of none.
    pub fn of(mut values: Vec<f64>) -> Spread {
        values.sort_by(f64::total_cmp);
        let at = |i: usize| values.get(i).copied().unwrap_or(0.0);
        Spread { median: at(values.len() / 2), min: at(0), max: at(values.len().saturating_sub(1)) }
    }
}

/// Time of a part of the step.
#[derive(Clone, Debug, Serialize)]
pub struct PhaseTime {
    /// Its name.
    pub phase: &'static str,
    /// Milliseconds a step.
    pub ms: Spread,
}

/// Memory of the backend in bytes.
#[derive(Clone, Debug, Serialize)]
pub struct Memory {
    /// Most in use of each purpose at one time, in the timed steps.
    #[serde(serialize_with = "as_map")]
    pub peak: Vec<(&'static str, usize)>,
    /// Most in use altogether.
    pub peak_total: usize,
    /// Most in use by tensors: all but the scratch of single operations and communication.
    pub peak_tensors: usize,
    /// Taken from the device.
    pub reserved: usize,
    /// All there is; 0 where unknown.
    pub capacity: usize,
    /// Times memory was asked of the device.
    pub growths: usize,
    /// Times it was after the warm-up.
    pub growths_after_warmup: usize,
}

fn as_map<S: Serializer>(pairs: &[(&'static str, usize)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(pairs.iter().copied())
}

impl Memory {
    pub(super) fn new(use_: &MemoryUse, before: usize) -> Memory {
        Memory {
            peak: Purpose::ALL.iter().zip(use_.peak).filter(|(_, bytes)| *bytes > 0).map(|(p, bytes)| (p.name(), bytes)).collect(),
            peak_total: use_.peak_total,
            peak_tensors: use_.peak_tensors,
            reserved: use_.reserved,
            capacity: use_.capacity,
            growths: use_.growths,
            growths_after_warmup: use_.growths - before,
        }
    }
}

/// A benchmark of the step.
#[derive(Clone, Debug, Serialize)]
pub struct StepReport {
    /// What computed.
    pub backend: String,
    /// The model.
    pub model: Shape,
    /// Which rank of a layout was measured instead of the whole; speeds are then a rank's share.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<RankOf>,
    /// The work of a step (of a replica, where ranks share it).
    pub work: Work,
    /// Seconds from the start of the program until everything was allocated and drawn.
    pub startup_s: f64,
    /// Seconds from the start of the program to the end of the first step.
    pub to_first_step_s: f64,
    /// Steps before the timed ones.
    pub warmup: usize,
    /// Timed steps.
    pub steps: usize,
    /// Milliseconds of a step as the host sees it, without those in which other ranks were stood in for.
    pub step_ms: Spread,
    /// Parts of a step as the device sees them.
    pub phases: Vec<PhaseTime>,
    /// Tokens a second at the median.
    pub tokens_per_s: f64,
    /// Model TFLOP/s at the median (docs/NUMERICS.md, "Model FLOPs").
    pub model_tflops: f64,
    /// Share of the device's dense bf16 peak; absent where that is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Memory; absent where the backend keeps no account.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
    /// Loss of every step, warm-up first.
    pub losses: Vec<f64>,
    /// Updates left out, and so not measured, because something was not finite.
    pub left_out: usize,
}
