//! The fullest moment of a step: what is kept for the micro-batches in flight, and on top of it the loss or the backward pass of a layer.

use super::Question;
use super::dims::Dims;
use super::layer::{Layer, STAT};
use super::live::{Bytes, Live, Part, Tensor};
use super::replay::{Pass, head};
use crate::shard::Kind;
use crate::stages::Stage;
use temper_parallel::schedule::{Turns, in_flight};

/// When the peak is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// In the loss.
    Loss,
    /// In the backward pass of a layer of this kind of the network.
    Layer(usize),
}

/// Activations, routed rows and logits at the fullest moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peak {
    /// When it is.
    pub moment: Moment,
    /// Micro-batches in flight: passes through chunks over chunks.
    pub flights: f64,
    /// Kept by layers for the micro-batches in flight, as far as their backward passes are not over.
    pub kept: Bytes,
    /// What comes and goes at that moment.
    pub moving: Bytes,
    /// Inputs of all micro-batches of the step, rotary tables, losses, and messages on their way.
    pub standing: f64,
}

impl Peak {
    /// All of it.
    pub fn bytes(&self) -> Bytes {
        let (k, m) = (self.kept, self.moving);
        Bytes { plain: k.plain + m.plain + self.standing, moe: k.moe + m.moe, logits: k.logits + m.logits }
    }

    /// Whether it is at the loss.
    pub fn at_loss(&self) -> bool {
        self.moment == Moment::Loss
    }
}

/// What a layer of one kind takes.
#[derive(Clone, Copy)]
struct OfKind {
    /// Kept.
    kept: Bytes,
    /// Comes and goes in the backward pass.
    moving: Bytes,
}

/// What layers and the loss take on every rank of a layout: worked out once for all its stages.
pub(super) struct Needs {
    kinds: Vec<OfKind>,
    head: Bytes,
}

impl Needs {
    pub fn new(q: &Question, d: &Dims, skew: f64) -> Needs {
        let (recompute, account) = (q.layout.recompute, q.job.account);
        let of = |kind: &Kind| {
            let pass = Pass { d, layer: Layer::new(d, kind.linear, kind.experts, skew, account), account };
            OfKind { kept: pass.layer.kept(recompute), moving: Live::peak(|live| pass.backward(recompute, live)) }
        };
        Needs { kinds: q.network.kinds.kinds.iter().map(of).collect(), head: Live::peak(|live| head(d, q.job, live)) }
    }

    /// Kept by all layers of a stage for `flights` micro-batches, but for `gone` layers of one.
    fn kept(&self, stage: &Stage, flights: f64, gone: &[usize]) -> Bytes {
        let mut all = Bytes::default();
        for (i, (kind, count)) in self.kinds.iter().zip(&stage.kinds).enumerate() {
            let layers = *count as f64 * flights - gone.get(i).map_or(0.0, |n| *n as f64);
            all.add(Part::Plain, layers * kind.kept.plain);
            all.add(Part::Moe, layers * kind.kept.moe);
        }
        all
    }

    /// The fullest moment of a stage.
    pub fn peak(&self, q: &Question, d: &Dims, stage: &Stage) -> Peak {
        let l = q.layout;
        let turns = l.turns(q.job.global_batch);
        // Fillers are not worth counting.
        let flights = turns.in_flight(stage.index, l.pp, l.vpp) as f64 / l.vpp as f64;
        let standing = standing(q, d, stage, turns);
        let moving = if stage.last { self.head } else { Bytes::default() };
        let mut best = Peak { moment: Moment::Loss, flights, kept: self.kept(stage, flights, &[]), moving, standing };
        for (i, (kind, _)) in self.kinds.iter().zip(&stage.kinds).enumerate().filter(|(_, (_, count))| **count > 0) {
            let kept = self.kept(stage, flights, stage.after.get(i).map_or(&[][..], Vec::as_slice));
            let peak = Peak { moment: Moment::Layer(i), flights, kept, moving: kind.moving, standing };
            if peak.bytes().all() > best.bytes().all() {
                best = peak;
            }
        }
        best
    }
}

/// The fullest moment of a stage.
pub fn peak_activations(q: &Question, d: &Dims, stage: &Stage, skew: f64) -> Peak {
    Needs::new(q, d, skew).peak(q, d, stage)
}

/// The tensors that come and go at the fullest moment; those that it is over with have negative rows.
pub fn moment_tensors(q: &Question, d: &Dims, peak: &Peak) -> Vec<Tensor> {
    let account = q.job.account;
    match peak.moment {
        Moment::Loss => Live::at_peak(|live| head(d, q.job, live)),
        Moment::Layer(i) => q.network.kinds.kinds.get(i).map_or_else(Vec::new, |kind| {
            let pass = Pass { d, layer: Layer::new(d, kind.linear, kind.experts, 1.0, account), account };
            Live::at_peak(|live| pass.backward(q.layout.recompute, live))
        }),
    }
}

/// Inputs of all micro-batches of the step (ids, positions, targets, weights; with a divided vocabulary where its part occurs), rotary
/// tables, losses that wait for the end of the step, and tensors that are kept until a neighbouring stage has them.
pub(super) fn standing(q: &Question, d: &Dims, stage: &Stage, turns: Turns) -> f64 {
    let l = q.layout;
    let chunks = in_flight(stage.index, l.pp, l.vpp, turns.all);
    let vocab = if d.tp > 1.0 { 2.0 * d.own } else { 0.0 };
    let inputs = turns.real as f64 * (4.0 * d.tokens + vocab) * STAT;
    let rope = q.job.positions() as f64 * q.network.arch.head_dim as f64 * STAT;
    let losses = if stage.last { turns.real as f64 * d.tokens * STAT } else { 0.0 };
    // The last output and the last gradient handed on; in the first backward pass no gradient was.
    let forward = f64::from(u8::from(l.pp > 1 && !(stage.last && l.vpp == 1)));
    let backward = f64::from(u8::from(l.pp > 1 && !(stage.first && l.vpp == 1) && turns.all * l.vpp > chunks));
    inputs + rope + losses + (forward + backward) * d.shared * d.hidden * d.a
}
