//! Seconds of one layer for one micro-batch on one rank: compute by kind of operation, and communication inside the layer.
//!
//! Legend as in `memory::dims`.

use super::rates::{RATES, all_to_all, filled, gemm, ring, send, stream};
use crate::cluster::Cluster;
use crate::job::Account;
use crate::layout::{Axis, Layout};
use crate::memory::Dims;
use serde::Serialize;
use temper_model::{Parts, Recompute};

/// A kind of operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// Products around attention: q, k, v and out.
    Projections,
    /// Attention over earlier tokens.
    Attention,
    /// Gated delta rule.
    Recurrence,
    /// Products of dense feed-forwards and shared experts.
    FeedForward,
    /// Products of routed experts, and their router.
    Experts,
    /// Norms, rotation, activation functions, gather and scatter of rows.
    Elementwise,
    /// Output matrix and cross-entropy.
    Head,
}

impl Op {
    /// All kinds.
    pub const ALL: [Op; 7] = [Op::Projections, Op::Attention, Op::Recurrence, Op::FeedForward, Op::Experts, Op::Elementwise, Op::Head];

    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Op::Projections => "projections",
            Op::Attention => "attention",
            Op::Recurrence => "recurrence",
            Op::FeedForward => "feed_forward",
            Op::Experts => "experts",
            Op::Elementwise => "elementwise",
            Op::Head => "head",
        }
    }
}

/// Seconds by kind of operation.
pub type Compute = [f64; Op::ALL.len()];
/// Seconds by axis, in the order of [`Axis`].
pub type Comm = [f64; 7];

/// One pass through (a part of) a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pass {
    /// Seconds by kind of operation.
    pub compute: Compute,
    /// Seconds of communication that nothing hides.
    pub comm: Comm,
}

impl Pass {
    /// Seconds in all.
    pub fn total(&self) -> f64 {
        self.compute.iter().sum::<f64>() + self.comm.iter().sum::<f64>()
    }

    /// Adds `times` another pass.
    pub fn add(&mut self, other: &Pass, times: f64) {
        for (mine, theirs) in self.compute.iter_mut().zip(&other.compute) {
            *mine += times * theirs;
        }
        for (mine, theirs) in self.comm.iter_mut().zip(&other.comm) {
            *mine += times * theirs;
        }
    }

    fn op(&mut self, op: Op, seconds: f64) {
        self.compute[op as usize] += seconds;
    }

    fn talk(&mut self, axis: Axis, seconds: f64) {
        self.comm[axis as usize] += seconds;
    }
}

/// A layer's passes.
#[derive(Clone, Copy, Debug, Default)]
pub struct LayerTime {
    /// Forward from the input to the input of the feed-forward.
    pub mixer: Pass,
    /// Forward of the feed-forward.
    pub feed_forward: Pass,
    /// Backward of all.
    pub backward: Pass,
    /// What selective recomputation may do again.
    again: Again,
}

/// Seconds of the parts of a forward pass that selective recomputation may do again, communication included.
#[derive(Clone, Copy, Debug, Default)]
struct Again {
    /// Both norms.
    norm: f64,
    /// The product of q, k and v.
    qkv: f64,
    /// Their norm and rotation.
    heads: f64,
    /// The first product of a dense feed-forward.
    mlp: f64,
    /// Its activation.
    act: f64,
    /// Rows to the experts, their products, and rows back.
    moe: f64,
    /// Their activation.
    row_act: f64,
}

impl LayerTime {
    /// Seconds of what a setting computes again.
    pub fn again(&self, recompute: Recompute) -> f64 {
        let Recompute::Selective(Parts { norm, act, moe, mlp, qkv }) = recompute else {
            return if recompute == Recompute::Full { self.mixer.total() + self.feed_forward.total() } else { 0.0 };
        };
        let a = &self.again;
        let chosen =
            [(norm, a.norm), (qkv, a.qkv), (act || qkv, a.heads), (mlp, a.mlp), (act || mlp, a.act), (moe, a.moe), (act || moe, a.row_act)];
        chosen.iter().filter(|(on, _)| *on).map(|(_, seconds)| seconds).sum()
    }
}

/// What the times of layers depend on.
#[derive(Clone, Copy)]
pub struct Setting<'a> {
    /// The devices.
    pub cluster: &'a Cluster,
    /// Where.
    pub layout: &'a Layout,
    /// Sizes of a rank for a sequence of mean length.
    pub dims: &'a Dims,
    /// Mean tokens of a document: how far attention reaches.
    pub length: f64,
    /// Bytes of an accumulated gradient.
    pub grad: f64,
    /// Whose habits.
    pub account: Account,
}

impl Setting<'_> {
    /// The passes of a layer of a kind.
    pub fn layer(&self, linear: bool, experts: bool) -> LayerTime {
        let mut t = LayerTime::default();
        if linear {
            self.linear_attention(&mut t)
        } else {
            self.attention(&mut t)
        }
        if experts {
            self.experts(&mut t);
            if self.dims.shared_expert > 0.0 {
                self.dense(&mut t, self.dims.shared_expert);
            }
        } else {
            self.dense(&mut t, self.dims.dense);
        }
        let d = self.dims;
        // Norm and sum around the mixer, and the sum after the feed-forward: 6 and 3 passes over the hidden states.
        let row = d.shared * d.hidden * d.a;
        self.elementwise(&mut t, 6.0 * row, 3.0 * row);
        // Two norms, the heads' norm and rotation, the activation; backward each has two gradients, one with a second stage.
        self.operations(&mut t, 4.0, 11.0);
        t.again.norm = stream(&self.cluster.device, 4.0 * row);
        t
    }

    /// A product forward, and its two backward; `share` of the peak, `groups` alike. Returns the seconds of the forward one.
    fn product(&self, t: &mut LayerTime, part: Part, op: Op, share: f64, groups: f64, m: f64, n: f64, k: f64) -> f64 {
        let (device, a) = (&self.cluster.device, self.dims.a);
        let forward = groups * gemm(device, share, m, n, k, a, 0.0);
        match part {
            Part::Mixer => t.mixer.op(op, forward),
            Part::FeedForward => t.feed_forward.op(op, forward),
        }
        // The weight gradient is read and written where it accumulates, not just written.
        let weight = match op {
            // Experts have few rows: while a block writes its result, nothing is multiplied; what it adds to is read meanwhile.
            Op::Experts => gemm(device, share, n, k, m, a, n * k * (self.grad - a)) + stream(device, n * k * self.grad),
            _ => gemm(device, share, n, k, m, a, n * k * (2.0 * self.grad - a)),
        };
        t.backward.op(op, groups * (gemm(device, share, m, k, n, a, 0.0) + weight));
        forward
    }

    /// Operations on so little data that their number is what counts.
    fn operations(&self, t: &mut LayerTime, forward: f64, backward: f64) {
        t.feed_forward.op(Op::Elementwise, forward * RATES.operation);
        t.backward.op(Op::Elementwise, backward * RATES.operation);
    }

    /// Bytes moved by elementwise kernels forward; backward moves twice as much.
    fn elementwise(&self, t: &mut LayerTime, mixer: f64, feed_forward: f64) {
        let device = &self.cluster.device;
        t.mixer.op(Op::Elementwise, stream(device, mixer));
        t.feed_forward.op(Op::Elementwise, stream(device, feed_forward));
        t.backward.op(Op::Elementwise, 2.0 * stream(device, mixer + feed_forward));
    }

    fn attention(&self, t: &mut LayerTime) {
        let (d, peak) = (self.dims, self.cluster.device.peak());
        let rows = d.q + d.gate + 2.0 * d.kv;
        t.again.qkv = self.product(t, Part::Mixer, Op::Projections, RATES.gemm, 1.0, d.tokens, rows, d.hidden) + self.gather();
        self.product(t, Part::Mixer, Op::Projections, RATES.gemm, 1.0, d.tokens, d.hidden, d.q);
        // Two products of length x head size for each query, half of them causal; five in the backward pass.
        let flops = 2.0 * d.tokens * self.length * d.q;
        let peak = peak * filled(d.heads.0, d.tokens);
        let (forward, backward) = (flops / (peak * RATES.attention), 2.5 * flops / (peak * RATES.attention_grad));
        t.mixer.op(Op::Attention, forward);
        t.backward.op(Op::Attention, backward);
        let prepared = 2.0 * d.tokens * (rows + d.gate) * d.a;
        self.elementwise(t, prepared, 0.0);
        t.again.heads = stream(&self.cluster.device, prepared);
        self.gathers(t, Part::Mixer);
        self.context(t, forward, backward);
    }

    fn linear_attention(&self, t: &mut LayerTime) {
        let (d, peak) = (self.dims, self.cluster.device.peak());
        let (key, value, heads) = d.linear;
        let rows = 2.0 * key + 2.0 * value + 2.0 * heads;
        self.product(t, Part::Mixer, Op::Projections, RATES.gemm, 1.0, d.tokens, rows, d.hidden);
        self.product(t, Part::Mixer, Op::Projections, RATES.gemm, 1.0, d.tokens, d.hidden, value);
        // In chunks of 64: the state's four products and about as much again inside the chunk.
        let flops = 14.0 * d.tokens * d.state;
        t.mixer.op(Op::Recurrence, flops / (peak * RATES.recurrence));
        t.backward.op(Op::Recurrence, 2.5 * flops / (peak * RATES.recurrence));
        self.elementwise(t, d.tokens * (4.0 * key + 6.0 * value) * d.a, 0.0);
        self.gathers(t, Part::Mixer);
    }

    fn dense(&self, t: &mut LayerTime, width: f64) {
        let d = self.dims;
        t.again.mlp = self.product(t, Part::FeedForward, Op::FeedForward, RATES.gemm, 1.0, d.tokens, 2.0 * width, d.hidden) + self.gather();
        self.product(t, Part::FeedForward, Op::FeedForward, RATES.gemm, 1.0, d.tokens, d.hidden, width);
        let activated = 3.0 * d.tokens * width * d.a;
        self.elementwise(t, 0.0, activated);
        t.again.act = stream(&self.cluster.device, activated);
        self.gathers(t, Part::FeedForward);
    }

    /// Router, dispatch, experts, combine.
    fn experts(&self, t: &mut LayerTime) {
        let d = self.dims;
        let groups = (d.experts.0 / d.ep).max(1.0);
        let rows = d.routed / groups;
        let first = self.product(t, Part::FeedForward, Op::Experts, RATES.grouped, groups, rows, 2.0 * d.expert, d.hidden);
        let second = self.product(t, Part::FeedForward, Op::Experts, RATES.grouped, groups, rows, d.hidden, d.expert);
        let activated = 3.0 * d.routed * d.expert * d.a;
        let gathered = match self.account {
            Account::Temper => self.dispatched(t, activated),
            Account::Megatron => {
                let gathered = 2.0 * d.routed * d.hidden * d.a;
                self.elementwise(t, 0.0, gathered + activated + 2.0 * d.sent * d.hidden * d.a);
                gathered
            }
        };
        let moved = stream(&self.cluster.device, gathered);
        match self.account {
            Account::Temper => {
                // A token's row goes once to each rank that works on it and comes back as a sum; backward, the gradients of the experts'
                // weights are computed while the second exchange is under way.
                let there = all_to_all(self.cluster, self.layout.experts_group(self.cluster), d.here * d.hidden * d.a);
                t.feed_forward.talk(Axis::Ep, 2.0 * there);
                t.backward.talk(Axis::Ep, there + (there - (first + second)).max(0.0));
                t.again.moe = first + moved + there;
            }
            Account::Megatron => {
                let (ep, etp) = (self.layout.group(Axis::Ep, self.cluster), self.layout.group(Axis::Etp, self.cluster));
                let there = all_to_all(self.cluster, ep, d.sent * d.hidden * d.a);
                let gather = ring(self.cluster, etp, d.routed * d.hidden * d.a);
                t.again.moe = first + second + moved + 2.0 * (there + gather);
                t.again.row_act = stream(&self.cluster.device, activated);
                // There and back, forward and backward.
                for pass in [&mut t.feed_forward, &mut t.backward] {
                    pass.talk(Axis::Ep, 2.0 * there);
                    pass.talk(Axis::Etp, 2.0 * gather);
                }
            }
        }
    }

    /// temper's passes over the rows of experts, whose activation moves `activated` bytes; returns the bytes of bringing the rows there.
    ///
    /// Where experts are divided, a row for each rank is made of each token's, and rows of the experts of those that arrive; back likewise. The
    /// gradient of the activation moves twice as much as the activation.
    fn dispatched(&self, t: &mut LayerTime, activated: f64) -> f64 {
        let d = self.dims;
        let (road, exchanged) = if d.group > 1.0 { (2.0 * d.here, 1.0) } else { (0.0, 0.0) };
        let there = (d.own + road + d.routed) * d.hidden * d.a;
        let device = &self.cluster.device;
        t.feed_forward.op(Op::Elementwise, stream(device, 2.0 * there + activated));
        t.backward.op(Op::Elementwise, stream(device, 2.0 * there + 2.0 * activated));
        // The router's three products in two types, its choice, the sort (three passes); the sort of the ranks' rows, choices and weights on
        // the road, and the host, which waits for the numbers of rows (as long as five operations).
        self.operations(t, 7.0 + 16.0 * exchanged, 8.0 + 5.0 * exchanged);
        there
    }

    /// Sequence parallelism: an all-gather before and a reduce-scatter after a block; in the backward pass the same, and another
    /// gather of the input that hides behind the input gradient.
    fn gathers(&self, t: &mut LayerTime, part: Part) {
        let seconds = 2.0 * self.gather();
        match part {
            Part::Mixer => t.mixer.talk(Axis::Tp, seconds),
            Part::FeedForward => t.feed_forward.talk(Axis::Tp, seconds),
        }
        t.backward.talk(Axis::Tp, seconds);
    }

    /// Seconds of one all-gather (or reduce-scatter) of all tokens over the tensor ranks.
    fn gather(&self) -> f64 {
        let d = self.dims;
        ring(self.cluster, self.layout.group(Axis::Tp, self.cluster), d.tokens * d.hidden * d.a)
    }

    /// Context parallelism. temper gathers the keys and values of all ranks, in the backward pass again, and scatters the sums of their
    /// gradients; in Megatron's ring they pass by, behind attention as far as it lasts.
    fn context(&self, t: &mut LayerTime, forward: f64, backward: f64) {
        let (d, cp) = (self.dims, self.layout.group(Axis::Cp, self.cluster));
        let bytes = 2.0 * d.tokens * d.kv * d.a;
        if self.account == Account::Temper {
            let gather = ring(self.cluster, cp, bytes * d.cp);
            t.mixer.talk(Axis::Cp, gather);
            t.backward.talk(Axis::Cp, 2.0 * gather);
            return;
        }
        let hops = cp.size.saturating_sub(1) as f64;
        let hop = send(self.cluster, cp, bytes);
        t.mixer.talk(Axis::Cp, (hops * hop - forward).max(0.0));
        t.backward.talk(Axis::Cp, (2.0 * hops * hop - backward).max(0.0));
    }

    /// Forward and backward of the output matrix and the loss.
    pub fn head(&self) -> LayerTime {
        let (d, mut t) = (self.dims, LayerTime::default());
        self.product(&mut t, Part::FeedForward, Op::Head, RATES.gemm, 1.0, d.tokens, d.vocab, d.hidden);
        t.feed_forward.op(Op::Head, stream(&self.cluster.device, 2.0 * d.tokens * d.vocab * d.a));
        self.gathers(&mut t, Part::FeedForward);
        t
    }
}

#[derive(Clone, Copy)]
enum Part {
    Mixer,
    FeedForward,
}
