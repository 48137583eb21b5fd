//! Experts as Megatron-Core's all-to-all dispatcher has them: a row for every expert of a token travels, to every slice of the expert, and
//! rows are sorted on either side of the exchange.
//!
//! Legend as in `dims`.

use super::layer::STAT;
use super::live::{Live, Tensor};
use super::replay::{Pass, Work};

impl Pass<'_> {
    /// Rows, gate and up, their product, and what comes home, as far as wanted.
    pub(super) fn megatron_again(&self, [rows, gate_up, act, home]: [bool; 4], live: &mut Live) {
        let l = &self.layer;
        if rows {
            let sent = live.hold(self.row("rows sent", self.d.sent, self.d.hidden));
            self.at_experts(sent, l.rows, live);
        }
        live.hold(l.row_gate_up.only_if(gate_up));
        live.hold(l.row_act.only_if(act));
        if home {
            let out = live.hold(self.row("outputs of the experts", l.rows.rows, self.d.hidden));
            self.at_tokens(out, l.home, live);
        }
    }

    /// From rows of this rank's tokens to `sorted` rows of its experts.
    fn at_experts(&self, rows: Tensor, sorted: Tensor, live: &mut Live) {
        if self.d.group <= 1.0 {
            live.free(rows);
            live.hold(sorted);
            return;
        }
        let sent = self.for_slices(rows, live);
        let arrived = live.hold(self.row("rows that arrived", sorted.rows, sorted.width));
        live.hold(sorted);
        live.free_all([arrived, sent]);
        // Once more on either side (`sort_chunks_by_idxs`).
        let again = live.hold(Tensor { name: "rows sorted once more", ..sorted });
        live.free(again);
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
    fn at_tokens(&self, sorted: Tensor, home: Tensor, live: &mut Live) {
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

    /// Gradients of the experts (and of a shared one).
    pub(super) fn megatron_experts_grad(&self, live: &mut Live) -> (Work, Tensor) {
        let (l, d) = (&self.layer, self.d);
        let rows = |name, width| Tensor { name, width, ..l.rows };
        let dhome = live.hold(self.row("gradient of the rows that came home", d.sent, d.hidden));
        let dweights = live.hold(Tensor { each: STAT, ..self.plain("gradient of the router's weights", d.own, d.experts.1) });
        let dout = rows("gradient of the experts' outputs", d.hidden);
        self.at_experts(dhome, dout, live);
        let dact = live.hold(rows("gradient of gate times up of rows", d.expert));
        let dgate_up = live.hold(rows("gradient of gate and up of rows", 2.0 * d.expert));
        let drows = live.hold(rows("gradient of the experts' rows", d.hidden));
        let home = self.row("gradient of the rows sent", d.sent, d.hidden);
        self.at_tokens(drows, home, live);
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
}
