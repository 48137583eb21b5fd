//! The backward pass of a layer, and the loss, played through with their tensors but without their numbers: each comes to life and
//! goes as in `temper_model`'s `decoder.rs`, `attention.rs`, `context.rs`, `mlp.rs`, `moe.rs`, `dispatch.rs`, `linear.rs`, `head.rs`.
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

    fn plain(&self, name: &'static str, rows: f64, width: f64) -> Tensor {
        Tensor { name, part: Part::Plain, rows, width, each: self.d.a }
    }

    fn row(&self, name: &'static str, rows: f64, width: f64) -> Tensor {
        Tensor { name, part: Part::Moe, rows, width, each: self.d.a }
    }

    /// `[Ts, H]`
    fn shared(&self, name: &'static str) -> Tensor {
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
        let y = live.hold(self.shared("output of the feed-forward"));
        live.free(y);
    }

    /// What selective recomputation dropped.
    fn complete(&self, recompute: Recompute, live: &mut Live) {
        let l = &self.layer;
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

    /// Rows, gate and up, their product, and what comes home, as far as `wanted`.
    fn rows_again(&self, [rows, gate_up, act, home]: [bool; 4], live: &mut Live) {
        let l = &self.layer;
        if rows {
            let sent = live.hold(self.row("rows sent", self.d.sent, self.d.hidden));
            self.to_experts(sent, l.rows, live);
        }
        live.hold(l.row_gate_up.only_if(gate_up));
        live.hold(l.row_act.only_if(act));
        if home {
            let out = live.hold(self.row("outputs of the experts", l.rows.rows, self.d.hidden));
            self.to_tokens(out, l.home, live);
        }
    }

    /// From rows of this rank's tokens to `sorted` rows of its experts.
    fn to_experts(&self, rows: Tensor, sorted: Tensor, live: &mut Live) {
        if self.d.group <= 1.0 {
            live.free(rows);
            live.hold(sorted);
            return;
        }
        let sent = self.for_slices(rows, live);
        let arrived = live.hold(self.row("rows that arrived", sorted.rows, sorted.width));
        live.hold(sorted);
        live.free_all([arrived, sent]);
        if self.account == Account::Megatron {
            // It sorts the rows once more on either side (`sort_chunks_by_idxs`).
            let again = live.hold(Tensor { name: "rows sorted once more", ..sorted });
            live.free(again);
        }
    }

    /// Rows once for every slice of an expert.
    fn for_slices(&self, rows: Tensor, live: &mut Live) -> Tensor {
        if self.d.etp <= 1.0 {
            return rows;
        }
        let all = live.hold(self.row("rows for every slice", rows.rows * self.d.etp, rows.width));
        live.free(rows);
        all
    }

    /// From rows of this rank's experts to those of its tokens, `home`.
    fn to_tokens(&self, sorted: Tensor, home: Tensor, live: &mut Live) {
        if self.d.group <= 1.0 {
            live.free(sorted);
            live.hold(home);
            return;
        }
        let packed = live.hold(Tensor { name: "rows packed for the way", ..sorted });
        if self.d.etp > 1.0 {
            let slices = live.hold(Tensor { name: "rows of every slice", rows: home.rows * self.d.etp, ..home });
            live.hold(home);
            live.free(slices);
        } else {
            live.hold(home);
        }
        live.free_all([packed, sorted]);
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

    /// Gradients of the experts (and of a shared one).
    fn experts_grad(&self, live: &mut Live) -> (Work, Tensor) {
        let (l, d) = (&self.layer, self.d);
        let rows = |name, width| Tensor { name, width, ..l.rows };
        let dhome = live.hold(self.row("gradient of the rows that came home", d.sent, d.hidden));
        let dweights = live.hold(Tensor { each: STAT, ..self.plain("gradient of the router's weights", d.own, d.experts.1) });
        let dout = rows("gradient of the experts' outputs", d.hidden);
        self.to_experts(dhome, dout, live);
        let dact = live.hold(rows("gradient of gate times up of rows", d.expert));
        let dgate_up = live.hold(rows("gradient of gate and up of rows", 2.0 * d.expert));
        let drows = live.hold(rows("gradient of the experts' rows", d.hidden));
        let home = self.row("gradient of the rows sent", d.sent, d.hidden);
        self.to_tokens(drows, home, live);
        let shared = live.hold(self.plain("gradients of the shared expert", d.tokens, 3.0 * d.shared_expert));
        let dx = live.hold(self.plain("gradient of the feed-forward's input", d.own, d.hidden));
        let dlogits = live.hold(Tensor { each: STAT, ..self.plain("gradient of the router's logits", d.own, d.experts.0) });
        let joined = self.plain("gradient of the feed-forward's input, joined", d.tokens, d.hidden);
        let joined = live.hold(joined.only_if(!d.divided && d.tp > 1.0));
        let dh = if joined.rows > 0.0 {
            live.free(dx);
            joined
        } else {
            dx
        };
        live.free_all([l.probs, l.choices, l.row_gate_up, l.home, l.gate_up, dweights, dact, home]);
        (Work { early: [l.act, shared, dlogits], gathers: false, rest: [l.fed, l.order, l.rows, dgate_up, l.row_act, dout] }, dh)
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
struct Work {
    /// Gone once the last matrix has its gradient.
    early: [Tensor; 3],
    /// The input of the first matrix is gathered again.
    gathers: bool,
    /// Gone at the end.
    rest: [Tensor; 6],
}

/// No tensor.
const NONE: Tensor = Tensor { name: "", part: Part::Plain, rows: 0.0, width: 0.0, each: 0.0 };

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
