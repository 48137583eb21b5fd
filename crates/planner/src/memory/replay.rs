//! The backward pass of a layer, and the loss, played through with their tensors but without their numbers: each comes to life and
//! goes as in `temper_model`'s `decoder.rs`, `attention.rs`, `context.rs`, `mlp.rs`, `linear.rs`, `head.rs`. Experts are in `experts` and
//! `megatron`.
//!
//! Legend as in `dims`.

use super::dims::Dims;
use super::layer::{DELTA_CHUNK, Layer, STAT};
use super::live::{Live, Part, Tensor};
use crate::job::{Account, Job};
use temper_model::Recompute;

/// What a pass depends on.
#[derive(Clone, Copy)]
pub struct Pass<'a> {
    /// Sizes of the rank.
    pub d: &'a Dims,
    /// The layer's tensors.
    pub layer: Layer,
    /// Whose habits.
    pub account: Account,
}

impl Pass<'_> {
    /// The backward pass of the layer: what was not kept is computed again, then gradients of inputs, then of weights. What was kept
    /// is there when it begins.
    pub fn backward(&self, recompute: Recompute, live: &mut Live) {
        let l = &self.layer;
        let arrives = live.hold(self.shared("gradient that arrives"));
        if recompute == Recompute::Full {
            self.forward(live);
        } else {
            self.complete(recompute, live);
        }
        let (feed, dh) = if l.rows.rows > 0.0 { self.experts_grad(live) } else { self.dense_grad(live) };
        // Of the second norm, and of the residual path.
        let dsum = live.hold(self.shared("gradient of the sum after attention"));
        let (mix, dmixed) = if l.linear.rows > 0.0 { self.linear_grad(dsum, live) } else { self.attention_grad(dsum, live) };
        let dx = live.hold(self.shared("gradient of the input"));
        live.free(dsum.only_if(self.d.divided)); // else it waits for the weights
        self.weights("feed-forward's input, gathered", feed, live);
        live.free_all([l.sum, l.norm2, dh]);
        self.weights("attention's input, gathered", mix, live);
        live.free_all([l.input, l.norm1, dmixed, arrives]);
        live.free(dx); // the next layer's gradient that arrives
    }

    /// Gradients of weights: the last matrix of a block first, then the first, whose input is gathered.
    fn weights(&self, name: &'static str, work: Work, live: &mut Live) {
        live.free_all(work.early);
        let whole = live.hold(self.plain(name, self.d.tokens, self.d.hidden).only_if(self.d.divided && work.gathers));
        live.free(whole);
        live.free_all(work.rest);
    }

    pub(super) fn plain(&self, name: &'static str, rows: f64, width: f64) -> Tensor {
        Tensor { name, part: Part::Plain, rows, width, each: self.d.a }
    }

    pub(super) fn row(&self, name: &'static str, rows: f64, width: f64) -> Tensor {
        Tensor { name, part: Part::Moe, rows, width, each: self.d.a }
    }

    /// `[Ts, H]`
    pub(super) fn shared(&self, name: &'static str) -> Tensor {
        self.plain(name, self.d.shared, self.d.hidden)
    }

    /// `[T, H]` of which ranks have shares, gathered; nothing where every rank has all.
    fn whole(&self, name: &'static str, live: &mut Live) -> Tensor {
        live.hold(self.plain(name, self.d.tokens, self.d.hidden).only_if(self.d.divided))
    }

    /// A product of all tokens that tensor ranks add up, and what a rank keeps of the sum.
    fn summed(&self, name: &'static str, live: &mut Live) -> Tensor {
        let whole = live.hold(self.plain(name, self.d.tokens, self.d.hidden));
        if !self.d.divided {
            return whole;
        }
        let own = live.hold(self.shared(name));
        live.free(whole);
        own
    }

    /// The whole forward pass again.
    fn forward(&self, live: &mut Live) {
        let l = &self.layer;
        live.hold(l.norm1);
        live.hold(l.mixed);
        let whole = self.whole("attention's input, gathered", live);
        live.hold(l.qkv);
        live.hold(l.linear);
        live.hold(l.linear_stats);
        live.free(whole);
        live.hold(l.heads);
        live.hold(l.heads_norm);
        let keys = self.gathered_keys(live);
        live.hold_all([l.output, l.lse, l.gated]);
        live.free_all(keys);
        let attended = self.summed("output of the mixer", live);
        live.hold_all([l.sum, l.fed, l.norm2]);
        live.free(attended);
        let whole = self.whole("feed-forward's input, gathered", live);
        live.hold(l.gate_up);
        live.hold(l.act);
        live.free(whole);
        if l.rows.rows > 0.0 {
            live.hold_all([l.probs, l.choices, l.order]);
            self.rows_again([true; 4], live);
        }
        let y = self.combined(live);
        live.free(y);
    }

    /// The output of the feed-forward.
    fn combined(&self, live: &mut Live) -> Tensor {
        match (self.layer.rows.rows > 0.0, self.account) {
            (false, _) => self.summed("output of the feed-forward", live),
            (true, Account::Temper) => self.sums_of_rows(live),
            (true, Account::Megatron) => live.hold(self.shared("output of the feed-forward")),
        }
    }

    /// Rows, gate and up, their product, and what the experts made of them, as far as `wanted`.
    fn rows_again(&self, wanted: [bool; 4], live: &mut Live) {
        match self.account {
            Account::Temper => self.experts_again(wanted[0], wanted[1], live),
            Account::Megatron => self.megatron_again(wanted, live),
        }
    }

    /// Gradients of the experts: what their weights still need, and the gradient of the feed-forward's input.
    fn experts_grad(&self, live: &mut Live) -> (Work, Tensor) {
        match self.account {
            Account::Temper => self.temper_experts_grad(live),
            Account::Megatron => self.megatron_experts_grad(live),
        }
    }

    /// What selective recomputation dropped.
    fn complete(&self, recompute: Recompute, live: &mut Live) {
        let l = &self.layer;
        if recompute == Recompute::None {
            return;
        }
        let dropped = |x: Tensor| l.listed(recompute, false).any(|other| other == x);
        let again = |x: Tensor, live: &mut Live| live.hold(x.only_if(dropped(x)));
        again(l.mixed, live);
        if dropped(l.qkv) {
            let whole = self.whole("attention's input, gathered", live);
            live.hold(l.qkv);
            live.free(whole);
        }
        again(l.heads, live);
        again(l.heads_norm, live);
        again(l.fed, live);
        if dropped(l.gate_up) {
            let whole = self.whole("feed-forward's input, gathered", live);
            live.hold(l.gate_up);
            live.free(whole);
        }
        for x in [l.act, l.probs, l.choices, l.order] {
            again(x, live);
        }
        if l.rows.rows > 0.0 {
            self.rows_again([l.rows, l.row_gate_up, l.row_act, l.home].map(dropped), live);
        }
    }

    /// Gradients of a dense feed-forward: what its weights need, and the gradient of its input.
    fn dense_grad(&self, live: &mut Live) -> (Work, Tensor) {
        let (l, d) = (&self.layer, self.d);
        let dy = self.whole("gradient that arrives, gathered", live);
        let dact = live.hold(self.plain("gradient of gate times up", d.tokens, l.act.width));
        let dgate_up = live.hold(self.plain("gradient of gate and up", d.tokens, l.gate_up.width));
        let dh = self.summed("gradient of the feed-forward's input", live);
        live.free_all([dact, l.gate_up]);
        (Work { early: [l.act, dy, NONE], gathers: true, rest: [l.fed, dgate_up, NONE, NONE, NONE, NONE] }, dh)
    }

    /// All ranks' keys and values in the order of the sequence; empty without context parallelism.
    fn gathered_keys(&self, live: &mut Live) -> [Tensor; 2] {
        let d = self.d;
        ["keys of all ranks", "values of all ranks"].map(|name| {
            let all = self.plain(name, d.tokens * d.cp, d.kv).only_if(d.cp > 1.0 && self.layer.qkv.rows > 0.0);
            let by_rank = live.hold(Tensor { name: "keys or values by rank", ..all });
            live.hold(all);
            live.free(by_rank);
            all
        })
    }

    /// Gradients of attention.
    fn attention_grad(&self, dsum: Tensor, live: &mut Live) -> (Work, Tensor) {
        let (l, d) = (&self.layer, self.d);
        let dy = self.whole("gradient of the mixer's output, gathered", live);
        let d_o = live.hold(self.plain("gradient of attention's output", d.tokens, d.q + d.gate));
        let dq = live.hold(self.plain("gradient of q", d.tokens, d.q));
        let keys = self.gathered_keys(live);
        let [dk, dv] = self.keys_grad(live);
        live.free_all(keys);
        let dqkv = live.hold(self.plain("gradient of the product q, k, v", d.tokens, l.qkv.width));
        let dmixed = self.summed("gradient of attention's input", live);
        live.free_all([d_o, dv, l.heads, l.lse]);
        let dy = if d.divided { dy } else { dsum };
        let mut rest = [l.mixed, dqkv, dq, dk, l.qkv, l.heads_norm];
        if l.heads_norm.bytes() == 0.0 {
            // Only the norm of heads reads them again.
            live.free_all([dq, dk, l.qkv]);
            rest[2..].fill(NONE);
        }
        (Work { early: [l.output, l.gated, dy], gathers: true, rest }, dmixed)
    }

    /// Gradients of this rank's keys and values; with context parallelism by way of those of all ranks.
    fn keys_grad(&self, live: &mut Live) -> [Tensor; 2] {
        let d = self.d;
        let own = ["gradient of k", "gradient of v"].map(|name| self.plain(name, d.tokens, d.kv));
        if d.cp <= 1.0 {
            return own.map(|x| live.hold(x));
        }
        let all = ["gradient of all ranks' k", "gradient of all ranks' v"].map(|name| self.plain(name, d.tokens * d.cp, d.kv));
        live.hold_all(all);
        // The later piece of a rank reads up to all keys.
        let piece = live.hold(self.plain("gradients of k and v of a piece", d.tokens * d.cp, 2.0 * d.kv));
        live.free(piece);
        for (all, own) in all.into_iter().zip(own) {
            let by_rank = live.hold(Tensor { name: "gradient by rank", ..all });
            live.hold(own);
            live.free_all([by_rank, all]);
        }
        own
    }

    /// Gradients of linear attention, whose states are computed again chunk by chunk.
    fn linear_grad(&self, dsum: Tensor, live: &mut Live) -> (Work, Tensor) {
        let (l, d) = (&self.layer, self.d);
        let (key, value, _) = d.linear;
        let dy = self.whole("gradient of the mixer's output, gathered", live);
        let inner = live.hold(self.plain("gradients of linear attention", d.tokens, 8.0 * (key + value)));
        let states = live.hold(self.plain("states of the delta rule", d.tokens / DELTA_CHUNK, d.state));
        let dmixed = self.summed("gradient of linear attention's input", live);
        live.free_all([states, l.linear, l.linear_stats]);
        let dy = if d.divided { dy } else { dsum };
        (Work { early: [dy, NONE, NONE], gathers: true, rest: [l.mixed, inner, NONE, NONE, NONE, NONE] }, dmixed)
    }
}

/// What waits for the gradients of the weights of a block.
pub(super) struct Work {
    /// Gone once the last matrix has its gradient.
    pub early: [Tensor; 3],
    /// The input of the first matrix is gathered again.
    pub gathers: bool,
    /// Gone at the end.
    pub rest: [Tensor; 6],
}

/// No tensor.
pub(super) const NONE: Tensor = Tensor { name: "", part: Part::Plain, rows: 0.0, width: 0.0, each: 0.0 };

/// The loss and its gradient, on the last stage. Megatron's cross-entropy turns all logits to f32 at once; temper's works on a chunk of
/// rows in the activations' type, in place.
pub fn head(d: &Dims, job: &Job, live: &mut Live) {
    let plain = |name, rows, width, each| Tensor { name, part: Part::Plain, rows, width, each };
    let hidden = |name| plain(name, d.tokens, d.hidden, d.a);
    let x = live.hold(plain("output of the last layer", d.shared, d.hidden, d.a));
    let gathered = live.hold(hidden("output of the last layer, gathered").only_if(d.divided));
    let h = live.hold(hidden("normed hidden states"));
    let stats = live.hold(plain("1/rms, losses and their weights", d.tokens, 3.0, STAT));
    let dh = live.hold(hidden("gradient of normed hidden states"));
    let each = if job.account == Account::Megatron { 4.0 } else { d.a };
    let logits = live.hold(Tensor { name: "logits", part: Part::Logits, rows: d.logit_rows, width: d.vocab, each });
    let shares = live.hold(plain("statistics of the vocabulary's shares", d.logit_rows * (d.tp + 1.0), 3.0, STAT).only_if(d.tp > 1.0));
    live.free_all([logits, shares]);
    let dx = live.hold(hidden("gradient of the last layer's output"));
    live.free(dh);
    let own = live.hold(plain("gradient of the last layer's output, own rows", d.shared, d.hidden, d.a).only_if(d.divided));
    live.free_all([x, gathered, h, stats, dx, own]);
}
