//! The peak of a rank at each stage of a run's life.

use super::{Memory, Purpose, Question, stage_memory, standing};
use crate::job::Account;
use crate::shard::{largest, rank_params};
use crate::stages::Stage;
use serde::Serialize;

/// A time in a run's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Weights are read.
    Load,
    /// The first step, up to its optimizer step.
    FirstStep,
    /// Every later step.
    Steady,
    /// A checkpoint is written.
    Save,
    /// A checkpoint is read.
    Resume,
    /// Answers are generated (reinforcement learning).
    Rollout,
}

impl Phase {
    /// In the order of a run.
    pub const ALL: [Phase; 6] = [Phase::Load, Phase::FirstStep, Phase::Steady, Phase::Save, Phase::Resume, Phase::Rollout];

    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Load => "load",
            Phase::FirstStep => "first_step",
            Phase::Steady => "steady",
            Phase::Save => "save",
            Phase::Resume => "resume",
            Phase::Rollout => "rollout",
        }
    }

    /// When that is, behind a peak; nothing for steps.
    pub fn while_it_is(self) -> &'static str {
        match self {
            Phase::FirstStep | Phase::Steady => "",
            Phase::Load => " while weights are read",
            Phase::Save => " while a checkpoint is written",
            Phase::Resume => " while a checkpoint is read",
            Phase::Rollout => " while answers are generated",
        }
    }
}

/// Bytes of a rank in each phase.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Phases {
    /// While weights are read.
    pub load: f64,
    /// In the first step.
    pub first_step: f64,
    /// In every later step.
    pub steady: f64,
    /// While a checkpoint is written.
    pub save: f64,
    /// While a checkpoint is read.
    pub resume: f64,
    /// While answers are generated.
    pub rollout: f64,
    /// Of that, the cache of keys and values.
    pub kv_cache: f64,
}

impl Phases {
    /// The phase of a training run that takes the most, with its bytes. Rollout is none of it.
    pub fn most(&self) -> (Phase, f64) {
        let trained = Phase::ALL.into_iter().filter(|phase| *phase != Phase::Rollout).map(|phase| (phase, self.of(phase)));
        // Of equals the steady state: it lasts.
        trained.fold((Phase::Steady, self.steady), |most, next| if next.1 > most.1 { next } else { most })
    }

    /// Bytes of a phase.
    pub fn of(&self, phase: Phase) -> f64 {
        match phase {
            Phase::Load => self.load,
            Phase::FirstStep => self.first_step,
            Phase::Steady => self.steady,
            Phase::Save => self.save,
            Phase::Resume => self.resume,
            Phase::Rollout => self.rollout,
        }
    }
}

/// Most bytes that pass to a device at once while files are read (`train/src/fill.rs`); the buffers they wait in are the host's.
const STAGE: f64 = 64.0 * 1_048_576.0;

/// Bytes that a device has for a moment beside what stands, while files are read and while a checkpoint is written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Passing {
    /// Part of a parameter in F32; with masters that other ranks update also the remainders that are not kept (`Optimizer::set_master`).
    pub read: f64,
    /// The exact weights of a segment, joined from weight and remainder in F32, on their way to the host. F32 weights go as they lie.
    pub save: f64,
}

/// What passes through a device of this stage.
pub(crate) fn passing(q: &Question, stage: &Stage) -> Passing {
    let largest = largest(q.network, q.layout, stage, q.job.account);
    let (part, masters) = ((4.0 * largest.param as f64).min(STAGE), q.job.precision.master_bytes(q.job.account) > 0);
    let unkept = if masters && q.layout.dp.saturating_mul(q.layout.cp) > 1 { 0.5 * part } else { 0.0 };
    Passing { read: part + unkept, save: if masters { 4.0 * largest.segment as f64 } else { 0.0 } }
}

/// The phases of the ranks of a stage.
///
/// temper allocates everything before step 1, so that what does not fit fails there. Megatron's Adam allocates its moments in
/// the first optimizer step: a run can pass its first forward and backward passes and fail then.
pub fn phases(q: &Question, stage: &Stage, skew: f64) -> Phases {
    let steady = stage_memory(q, stage, skew);
    let stands = standing(q, &rank_params(q.network, q.layout, stage, q.job.account));
    let (moments, between, passing) = (stands.of(Purpose::Moments), steady.between(), passing(q, stage));
    let lazy = if q.job.account == Account::Megatron { moments } else { 0.0 };
    let kv_cache = kv_bytes(q, stage);
    Phases {
        load: between - lazy + passing.read,
        first_step: steady.total() - lazy,
        steady: steady.total(),
        save: between + passing.save,
        resume: between + passing.read,
        // Gradients lend their memory to the cache while nothing is trained.
        rollout: between - stands.of(Purpose::Gradients) + kv_cache,
        kv_cache,
    }
}

/// Keys and values (and recurrent states) of the sequences that a rank generates at once, at full length.
fn kv_bytes(q: &Question, stage: &Stage) -> f64 {
    let d = super::Dims::new(q.network, q.job, q.layout);
    let sequences = q.job.rollouts as f64;
    let kinds = q.network.kinds.kinds.iter().zip(&stage.kinds);
    let layers: f64 = kinds.filter(|(kind, _)| !kind.linear).map(|(_, n)| *n as f64).sum();
    let attention = layers * 2.0 * d.kv * d.a * q.job.seq as f64;
    let state = q.network.hybrid.as_ref().map_or(0.0, |h| {
        let linear = stage.layers as f64 - layers;
        linear * d.linear.2 * (h.key_dim * h.value_dim) as f64 * 4.0
    });
    sequences * (attention + state)
}

impl Memory {
    /// What stands between steps: all but what comes and goes in one.
    pub fn between(&self) -> f64 {
        let passing = [Purpose::Activations, Purpose::Moe, Purpose::Logits, Purpose::Allocator];
        Purpose::ALL.into_iter().filter(|purpose| !passing.contains(purpose)).map(|purpose| self.of(purpose)).sum()
    }

    /// The most of this stage's steps (whose peak this is), of reading and of saving.
    pub(crate) fn most(&self, q: &Question, stage: &Stage) -> f64 {
        let passing = passing(q, stage);
        self.total().max(self.between() + passing.read.max(passing.save))
    }

    /// The same memory as it would be without one purpose.
    pub fn without(&self, purpose: Purpose) -> f64 {
        self.total() - self.of(purpose)
    }
}
