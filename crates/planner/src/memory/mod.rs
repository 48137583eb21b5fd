//! The account of memory: what one rank holds, by purpose, at each moment of a run.

mod activations;
mod dims;
mod phases;

pub use activations::{Kept, Transient, kept, transient};
pub use dims::Dims;
pub use phases::{Phase, Phases, phases};

use crate::job::{Account, Job, MOMENT_BYTES};
use crate::layout::{Axis, Layout, Offload, Recompute};
use crate::network::Network;
use crate::shard::{RankParams, rank_params};
use crate::stages::Stage;
use serde::Serialize;
use temper_parallel::schedule::in_flight;

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
    /// Activations outside the experts, and gradients of one layer.
    Activations,
    /// Rows on their way to, in and from the experts.
    Moe,
    /// Logits.
    Logits,
    /// Buffers of communicators, and the pipeline's.
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
}

impl Overheads {
    /// On a GPU.
    pub const GPU: Overheads = Overheads { context: 0.55e9, workspace: 0.1e9, communicator: 0.15e9, fragments: 0.03 };
    /// On the CPU.
    pub const NONE: Overheads = Overheads { context: 0.0, workspace: 0.0, communicator: 0.0, fragments: 0.0 };
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

/// The predicted peak of one rank in the steady state, by purpose: what `bench step --as-rank` measures.
///
/// `skew` is the share of routed rows that reach this rank's experts over its balanced share; 1 is balance.
/// `None` when the layout has no such rank.
pub fn rank_memory(question: &Question, stages: &[Stage], rank: usize, skew: f64) -> Option<Memory> {
    let (.., pp) = question.layout.coordinates(rank);
    stages.get(pp).map(|stage| stage_memory(question, stage, skew))
}

/// The peak of every rank of a stage in the steady state.
pub fn stage_memory(q: &Question, stage: &Stage, skew: f64) -> Memory {
    let params = rank_params(q.network, q.layout, stage, q.job.account);
    let mut memory = standing(q, &params);
    let dims = Dims::new(q.network, q.job, q.layout);
    let peak = peak_activations(q, &dims, stage, skew);
    memory.set(Purpose::Activations, peak.plain);
    memory.set(Purpose::Moe, peak.moe);
    memory.set(Purpose::Logits, peak.logits);
    memory.set(Purpose::Communication, communication(q, &dims));
    if q.job.account == Account::Megatron {
        memory.set(Purpose::Allocator, q.overheads.fragments * (peak.plain + peak.moe));
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
    let moments = shard * f64::from(MOMENT_BYTES);
    match q.layout.offload {
        Offload::None => {
            memory.set(Purpose::Masters, masters);
            memory.set(Purpose::Moments, moments);
        }
        Offload::Optimizer => {
            memory.host = masters + moments;
            // Two windows of at most 64 MiB: one is worked on while the other moves.
            memory.set(Purpose::Moments, memory.host.min(2.0 * 64.0 * 1_048_576.0));
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

fn communication(q: &Question, d: &Dims) -> f64 {
    // Receive buffers of the pipeline: an activation and a gradient.
    let pipeline = if q.layout.pp > 1 { 2.0 * d.shared * d.hidden * d.a } else { 0.0 };
    communicators(q.layout) as f64 * q.overheads.communicator + pipeline
}

/// Activations, routed rows and logits at the fullest moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Peak {
    /// Activations outside the experts.
    pub plain: f64,
    /// Routed rows.
    pub moe: f64,
    /// Logits.
    pub logits: f64,
    /// Whether the fullest moment is the loss rather than the backward pass of a layer.
    pub at_loss: bool,
}

/// Kept activations of all micro-batches in flight, with the fuller of two moments: the loss, or the backward pass of a layer.
pub fn peak_activations(q: &Question, d: &Dims, stage: &Stage, skew: f64) -> Peak {
    let l = q.layout;
    let chunks = in_flight(stage.index, l.pp, l.vpp, l.micro_batches(q.job.global_batch).max(1)) as f64;
    let flights = chunks / l.vpp as f64;
    let (mut plain, mut moe) = (0.0, 0.0);
    let mut busiest = Transient::default();
    for (kind, count) in q.network.kinds.kinds.iter().zip(&stage.kinds).filter(|(_, count)| **count > 0) {
        let kept = kept(d, kind.linear, kind.experts, skew);
        let mut transient = transient(d, kind.linear, kind.experts, skew, q.job.account);
        let all = *count as f64 * flights;
        plain += all * kept.input;
        if l.recompute != Recompute::Full {
            plain += all * kept.mixer;
        } else {
            transient.plain += kept.mixer;
        }
        if l.recompute == Recompute::None {
            plain += all * kept.feed_forward;
            moe += all * kept.moe;
        } else {
            transient.plain += kept.feed_forward;
            transient.moe += kept.moe;
        }
        if transient.all() > busiest.all() {
            busiest = transient;
        }
    }
    let loss = if stage.last { loss(q.job, d) } else { (0.0, 0.0) };
    match loss.0 + loss.1 > busiest.all() {
        true => Peak { plain: plain + loss.0, moe, logits: loss.1, at_loss: true },
        false => Peak { plain: plain + busiest.plain, moe: moe + busiest.moe, logits: 0.0, at_loss: false },
    }
}

/// Activations and logits of the head: its input, normed hidden states and their gradient, and rows of logits. Megatron's cross-entropy
/// turns all of them to f32 at once; temper's works on a chunk in the activations' type, in place.
fn loss(job: &Job, d: &Dims) -> (f64, f64) {
    let hidden = (d.shared + 2.0 * d.tokens) * d.hidden * d.a;
    let bytes = match job.account {
        Account::Temper => d.a,
        Account::Megatron => 4.0,
    };
    (hidden, d.logit_rows(job) * d.vocab * bytes)
}

/// Axes whose groups have more than one member, for the account of communication.
pub(crate) const AXES: [Axis; 7] = [Axis::Tp, Axis::Cp, Axis::Ep, Axis::Etp, Axis::Pp, Axis::Dp, Axis::ExpertDp];
