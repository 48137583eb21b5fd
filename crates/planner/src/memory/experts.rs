//! Experts as `temper_model`'s `moe.rs` and `dispatch.rs` have them: the row of a token travels once to each rank that has an expert of it,
//! and comes back as one sum.
//!
//! Legend as in `dims`.

use super::layer::STAT;
use super::live::{Live, Tensor};
use super::replay::{NONE, Pass, Work};

impl Pass<'_> {
    /// Experts are divided over ranks.
    fn apart(&self) -> bool {
        self.d.group > 1.0
    }

    /// `x[t, width]` at the ranks that work on it: what arrives here; nothing where every expert is here.
    fn spread(&self, width: f64, each: f64, live: &mut Live) -> Tensor {
        let rows = |name, rows| Tensor { each, ..self.row(name, rows, width) }.only_if(self.apart());
        let sent = live.hold(rows("rows sent to the ranks", self.d.here));
        let arrived = live.hold(rows("tokens that arrived", self.arrived()));
        live.free(sent);
        arrived
    }

    /// Sums of rows `x[n, width]` on their way back: `[t, width]`. `meanwhile` is done while they travel.
    fn collect(&self, x: Tensor, name: &'static str, live: &mut Live, meanwhile: impl FnOnce(&mut Live)) -> Tensor {
        if !self.apart() {
            meanwhile(live);
            return x;
        }
        let back = live.hold(Tensor { name: "sums that came back", rows: self.d.here, ..x });
        meanwhile(live);
        let sums = live.hold(Tensor { each: x.each, ..self.plain(name, self.d.own, x.width) });
        live.free_all([back, x]);
        sums
    }

    /// n.
    fn arrived(&self) -> f64 {
        let skew = self.layer.rows.rows / self.d.routed.max(f64::MIN_POSITIVE);
        if self.apart() { self.d.arrived(skew) } else { self.d.own }
    }

    /// `[T, H]` of a tensor rank's share of the tokens, where all have them all.
    fn joined(&self, share: Tensor, live: &mut Live) -> Tensor {
        if self.d.divided || self.d.tp <= 1.0 {
            return share;
        }
        let whole = live.hold(Tensor { rows: self.d.tokens, ..share });
        live.free(share);
        whole
    }

    /// Activation and output of the experts, and the weighted sums of the latter for every token.
    pub(super) fn sums_of_rows(&self, live: &mut Live) -> Tensor {
        let (name, rows) = ("output of the feed-forward", self.layer.rows.rows);
        let act = live.hold(self.row("gate times up of rows", rows, self.d.expert));
        let out = live.hold(self.row("outputs of the experts", rows, self.d.hidden));
        let sums = live.hold(self.plain(name, self.arrived(), self.d.hidden));
        let own = self.collect(sums, name, live, |_| ());
        let joined = self.joined(own, live);
        live.free_all([act, out]);
        joined
    }

    /// Rows, and gate and up, as far as wanted.
    pub(super) fn experts_again(&self, rows: bool, gate_up: bool, live: &mut Live) {
        let l = &self.layer;
        if rows {
            self.gathered_rows(l.rows, live);
        }
        live.hold(l.row_gate_up.only_if(gate_up));
    }

    /// Rows of tokens that come from the ranks.
    fn gathered_rows(&self, rows: Tensor, live: &mut Live) -> Tensor {
        let arrived = self.spread(self.d.hidden, self.d.a, live);
        let rows = live.hold(rows);
        live.free(arrived);
        rows
    }

    /// Gradients of the experts, those of their weights computed while rows travel, and of a shared expert.
    pub(super) fn temper_experts_grad(&self, live: &mut Live) -> (Work, Tensor) {
        let (l, d) = (&self.layer, self.d);
        let rows = |name, width| Tensor { name, width, ..l.rows };
        let dout = self.gathered_rows(rows("gradient of the experts' outputs", d.hidden), live);
        let dact = live.hold(rows("gradient of gate times up of rows", d.expert));
        let dgate_up = live.hold(rows("gradient of gate and up of rows", 2.0 * d.expert));
        let act = live.hold(rows("gate times up of rows, weighted", d.expert));
        let name = "gradient of the router's weights";
        let dweights = live.hold(Tensor { each: STAT, ..self.plain(name, self.arrived(), d.experts.1) });
        let dweights = self.collect(dweights, name, live, |_| ());
        live.free_all([dact, l.row_gate_up]);
        let drows = live.hold(rows("gradient of the experts' rows", d.hidden));
        let name = "gradient of the feed-forward's input";
        let dx = live.hold(self.plain(name, self.arrived(), d.hidden));
        live.free(drows);
        let dlogits = live.hold(Tensor { each: STAT, ..self.plain("gradient of the router's logits", d.own, d.experts.0) });
        let dx = self.collect(dx, name, live, |live| live.free_all([dout, act, dgate_up, l.rows]));
        let dh = self.joined(dx, live);
        let shared = live.hold(self.plain("gradients of the shared expert", d.tokens, 3.0 * d.shared_expert));
        live.free_all([shared, l.gate_up, l.act, l.fed, l.probs, l.choices, l.order, dweights, dlogits]);
        (Work { early: [NONE; 3], gathers: false, rest: [NONE; 6] }, dh)
    }
}
