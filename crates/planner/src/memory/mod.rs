//! The account of memory: what one rank holds, by purpose, at each moment of a run.

mod dims;
mod experts;
mod layer;
mod live;
mod megatron;
mod peak;
mod phases;
mod replay;
mod routed;

pub use dims::Dims;
pub use layer::{Keep, Layer};
pub use live::{Bytes, Live, Part, Tensor};
use peak::Needs;
pub use peak::{Moment, Peak, moment_tensors, peak_activations};
pub(crate) use phases::{Passing, passing};
pub use phases::{Phase, Phases, phases};
pub use replay::{Pass, head};
pub use routed::routed_memory;

use crate::job::{Account, Job};
use crate::layout::{Axis, Layout, Offload};
use crate::network::Network;
use crate::shard::{RankParams, rank_params};
use crate::stages::Stage;
use serde::Serialize;
use temper_config::RESERVE;

/// What memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// Weights.
    Weights,
    /// Accumulated gradients.
    Gradients,
    /// What completes weights to exact f32.
    Masters,
    /// Adam's moments.
    Moments,
    /// Activations outside the experts, gradients of one layer, and the inputs of the step.
    Activations,
    /// Rows on their way to, in and from the experts.
    Moe,
    /// Logits.
    Logits,
    /// Buffers of communicators.
    Communication,
    /// CUDA context and library workspaces.
    Libraries,
    /// What an allocator of variable blocks cannot use.
    Allocator,
}

impl Purpose {
    /// All purposes, from the bottom of the stack.
    pub const ALL: [Purpose; 10] = [
        Purpose::Weights,
        Purpose::Gradients,
        Purpose::Masters,
        Purpose::Moments,
        Purpose::Activations,
        Purpose::Moe,
        Purpose::Logits,
        Purpose::Communication,
        Purpose::Libraries,
        Purpose::Allocator,
    ];

    /// Its name in JSON and for `--explain`.
    pub fn name(self) -> &'static str {
        match self {
            Purpose::Weights => "weights",
            Purpose::Gradients => "gradients",
            Purpose::Masters => "masters",
            Purpose::Moments => "moments",
            Purpose::Activations => "activations",
            Purpose::Moe => "moe",
            Purpose::Logits => "logits",
            Purpose::Communication => "communication",
            Purpose::Libraries => "libraries",
            Purpose::Allocator => "allocator",
        }
    }
}

/// Bytes by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Memory {
    bytes: [f64; Purpose::ALL.len()],
    /// Bytes on the host instead (off-loaded).
    pub host: f64,
}

impl Memory {
    /// Bytes for one purpose.
    pub fn of(&self, purpose: Purpose) -> f64 {
        self.bytes[purpose as usize]
    }

    /// Bytes for all purposes.
    pub fn total(&self) -> f64 {
        self.bytes.iter().sum()
    }

    /// Purposes with their bytes, without those that need none.
    pub fn parts(&self) -> impl Iterator<Item = (Purpose, f64)> + '_ {
        Purpose::ALL.into_iter().map(|p| (p, self.of(p))).filter(|(_, bytes)| *bytes > 0.0)
    }

    pub(crate) fn set(&mut self, purpose: Purpose, bytes: f64) {
        self.bytes[purpose as usize] = bytes;
    }
}

impl Serialize for Memory {
    /// `{purpose: bytes}`, in whole bytes.
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(Purpose::ALL.map(|p| (p.name(), self.of(p).round() as u64)))
    }
}

/// What the libraries of a device take. Figures of an H200 with driver 580; on the CPU nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Overheads {
    /// CUDA context with loaded modules.
    pub context: f64,
    /// cuBLASLt and cuDNN workspaces (NVIDIA recommends 32 MiB for Hopper's cuBLAS).
    pub workspace: f64,
    /// NCCL's buffers of one communicator.
    pub communicator: f64,
    /// Share of activations and routed rows lost to fragments by PyTorch's caching allocator.
    pub fragments: f64,
    /// Share of the device's memory that a chosen layout leaves free.
    pub reserve: f64,
}

impl Overheads {
    /// On a GPU.
    pub const GPU: Overheads = Overheads { context: 0.55e9, workspace: 0.1e9, communicator: 0.15e9, fragments: 0.03, reserve: RESERVE };
    /// On the CPU.
    pub const NONE: Overheads = Overheads { context: 0.0, workspace: 0.0, communicator: 0.0, fragments: 0.0, reserve: RESERVE };
}

/// Everything that the memory of the ranks of a layout depends on.
#[derive(Clone, Copy)]
pub struct Question<'a> {
    /// The model.
    pub network: &'a Network,
    /// What is trained on.
    pub job: &'a Job,
    /// Where.
    pub layout: &'a Layout,
    /// What libraries take.
    pub overheads: Overheads,
}

/// The predicted peak of one rank in the steady state, by purpose; `skew` is how many times its balanced share of rows its experts get. `None`
/// when the layout has no such rank.
pub fn rank_memory(question: &Question, stages: &[Stage], rank: usize, skew: f64) -> Option<Memory> {
    let (.., pp) = question.layout.coordinates(rank);
    stages.get(pp).map(|stage| stage_memory(question, stage, skew))
}

/// The peak of every rank of a stage in the steady state.
pub fn stage_memory(q: &Question, stage: &Stage, skew: f64) -> Memory {
    stages_memory(q, std::slice::from_ref(stage), skew).pop().unwrap_or_default()
}

/// The same of several stages.
pub fn stages_memory(q: &Question, stages: &[Stage], skew: f64) -> Vec<Memory> {
    let dims = Dims::new(q.network, q.job, q.layout);
    let needs = Needs::new(q, &dims, skew);
    stages.iter().map(|stage| with_activations(q, stage, needs.peak(q, &dims, stage).bytes())).collect()
}

/// What stands between steps, with activations, routed rows and logits at the fullest moment.
fn with_activations(q: &Question, stage: &Stage, bytes: Bytes) -> Memory {
    let mut memory = standing(q, &rank_params(q.network, q.layout, stage, q.job.account));
    memory.set(Purpose::Activations, bytes.plain);
    memory.set(Purpose::Moe, bytes.moe);
    memory.set(Purpose::Logits, bytes.logits);
    memory.set(Purpose::Communication, communicators(q.layout) as f64 * q.overheads.communicator);
    if q.job.account == Account::Megatron {
        memory.set(Purpose::Allocator, q.overheads.fragments * (bytes.plain + bytes.moe));
    }
    memory
}

/// What stands between steps: weights, gradients, optimizer state, libraries.
pub(crate) fn standing(q: &Question, params: &RankParams) -> Memory {
    let (precision, account) = (q.job.precision, q.job.account);
    let held = params.total() as f64;
    let shard = params.optimizer_shard(q.layout) as f64;
    let mut memory = Memory::default();
    memory.set(Purpose::Weights, held * f64::from(precision.weight_bytes));
    memory.set(Purpose::Gradients, held * f64::from(precision.grad_bytes));
    let masters = shard * f64::from(precision.master_bytes(account));
    let moments = shard * f64::from(precision.moments_bytes());
    match q.layout.offload {
        Offload::None => {
            memory.set(Purpose::Masters, masters);
            memory.set(Purpose::Moments, moments);
        }
        Offload::Optimizer => {
            // The update reads and writes it where it lies.
            memory.host = masters + moments;
        }
    }
    memory.set(Purpose::Libraries, q.overheads.context + q.overheads.workspace);
    memory
}

/// Communicators of this layout, the world's included.
pub(crate) fn communicators(layout: &Layout) -> usize {
    let sizes = [layout.tp, layout.cp, layout.dp.saturating_mul(layout.cp), layout.pp, layout.ep, layout.expert_dp()];
    let folded = layout.etp > 1 && layout.etp != layout.tp;
    let world = usize::from(layout.world() > 1);
    world + sizes.iter().filter(|n| **n > 1).count() + usize::from(folded)
}

/// Axes whose groups have more than one member, for the account of communication.
pub(crate) const AXES: [Axis; 7] = [Axis::Tp, Axis::Cp, Axis::Ep, Axis::Etp, Axis::Pp, Axis::Dp, Axis::ExpertDp];
