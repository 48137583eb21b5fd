//! The peak of a rank whose routing is known, layer by layer and micro-batch by micro-batch: the schedule of its step is played through.
//!
//! A plan takes one skew for all layers. What a benchmark measured had another in every layer: each keeps by its own, and the fullest moment is
//! in the layer where what is kept and what comes and goes are the most together.

use super::dims::Dims;
use super::layer::Layer;
use super::live::{Bytes, Live, Part};
use super::peak::standing;
use super::replay::{Pass, head};
use super::{Memory, Question, with_activations};
use crate::stages::Stage;
use std::collections::BTreeMap;
use temper_model::Recompute;
use temper_parallel::schedule::{Step, schedule};

/// The peak of a rank in a step in which its experts got `skews` times their balanced share of rows, in the order in which layers routed (with
/// full recomputation they do so again in the backward pass). `None` when the layout has no such rank or schedule.
pub fn routed_memory(q: &Question, stages: &[Stage], rank: usize, skews: &[f64]) -> Option<Memory> {
    let (l, (.., pp)) = (q.layout, q.layout.coordinates(rank));
    let stage = stages.get(pp)?;
    let turns = l.turns(q.job.global_batch);
    let dims = Dims::new(q.network, q.job, l);
    let mut play = Play {
        q,
        d: &dims,
        stage,
        real: turns.real,
        skews: skews.iter(),
        kept: BTreeMap::new(),
        held: Bytes::default(),
        peak: Bytes::default(),
    };
    for step in schedule(pp, l.pp, l.vpp, turns.all).ok()? {
        match step {
            Step::Forward { micro, chunk } => play.forward(micro, chunk),
            Step::Backward { micro, chunk } => play.backward(micro, chunk),
        }
    }
    let mut bytes = play.peak;
    bytes.add(Part::Plain, standing(q, &dims, stage, turns));
    Some(with_activations(q, stage, bytes))
}

/// A layer whose forward pass has run: its kind, and how it routed.
type Ran = (usize, f64);

struct Play<'a> {
    q: &'a Question<'a>,
    d: &'a Dims,
    stage: &'a Stage,
    real: usize,
    skews: std::slice::Iter<'a, f64>,
    /// Of each micro-batch in a chunk the layers that wait for their backward pass.
    kept: BTreeMap<(usize, usize), Vec<Ran>>,
    held: Bytes,
    peak: Bytes,
}

impl Play<'_> {
    fn forward(&mut self, micro: usize, chunk: usize) {
        let kinds = self.stage.chunks.get(chunk).map_or(&[][..], Vec::as_slice);
        let ran: Vec<Ran> = kinds.iter().map(|kind| (*kind, self.skew(*kind))).collect();
        if micro >= self.real {
            return; // a filler
        }
        for one in &ran {
            self.change(self.kept(*one), 1.0);
        }
        self.kept.insert((micro, chunk), ran);
        if self.stage.last && chunk + 1 == self.stage.chunks.len() {
            self.moment(Live::peak(|live| head(self.d, self.q.job, live)));
        }
    }

    fn backward(&mut self, micro: usize, chunk: usize) {
        let recompute = self.q.layout.recompute;
        for one in self.kept.remove(&(micro, chunk)).unwrap_or_default().into_iter().rev() {
            if recompute == Recompute::Full {
                self.skew(one.0); // it routes again, alike
            }
            let pass = Pass { d: self.d, layer: self.layer(one), account: self.q.job.account };
            self.moment(Live::peak(|live| pass.backward(recompute, live)));
            self.change(self.kept(one), -1.0);
        }
    }

    /// How a layer of a kind routed: the next of those that did.
    fn skew(&mut self, kind: usize) -> f64 {
        let routes = self.q.network.kinds.kinds.get(kind).is_some_and(|kind| kind.experts);
        if routes { self.skews.next().copied().unwrap_or(1.0) } else { 1.0 }
    }

    fn layer(&self, (kind, skew): Ran) -> Layer {
        let (linear, experts) = self.q.network.kinds.kinds.get(kind).map_or((false, false), |kind| (kind.linear, kind.experts));
        Layer::new(self.d, linear, experts, skew, self.q.job.account)
    }

    fn kept(&self, ran: Ran) -> Bytes {
        self.layer(ran).kept(self.q.layout.recompute)
    }

    fn change(&mut self, bytes: Bytes, times: f64) {
        self.held.add(Part::Plain, times * bytes.plain);
        self.held.add(Part::Moe, times * bytes.moe);
    }

    /// What is held, and what comes and goes on top of it.
    fn moment(&mut self, moving: Bytes) {
        let (held, mut all) = (self.held, moving);
        all.add(Part::Plain, held.plain);
        all.add(Part::Moe, held.moe);
        if all.all() > self.peak.all() {
            self.peak = all;
        }
    }
}
