//! The tensors of one layer for one micro-batch: what its forward pass keeps (`Saved` in `temper_model`'s `attention.rs`, `mlp.rs`,
//! `moe.rs`, `decoder.rs`), by which part of selective recomputation each is dropped, and how many bytes that is.
//!
//! Between the divided parts of a layer tensors are divided by tokens (sequence parallelism, Korthikanti et al. 2022), inside by heads
//! and columns. Statistics and indices have 4 bytes. Legend as in `dims`.

use super::dims::Dims;
use super::live::{Bytes, Part, Tensor};
use crate::job::Account;
use temper_model::{Parts, Recompute};

/// Bytes of a statistic, and of an index.
pub(super) const STAT: f64 = 4.0;
/// Tokens of a chunk of the gated delta rule (flash-linear-attention's).
pub(super) const DELTA_CHUNK: f64 = 64.0;

/// When a tensor is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Even with full recomputation.
    Input,
    /// Unless all is recomputed.
    Always,
    /// Unless one of these parts is.
    Without(Parts),
}

impl Keep {
    fn by(self, recompute: Recompute) -> bool {
        match (self, recompute) {
            (Keep::Input, _) | (_, Recompute::None) | (Keep::Always, Recompute::Selective(_)) => true,
            (Keep::Without(drop), Recompute::Selective(chosen)) => {
                let both = [(drop.norm, chosen.norm), (drop.act, chosen.act), (drop.moe, chosen.moe), (drop.mlp, chosen.mlp)];
                !(both.iter().any(|(a, b)| *a && *b) || drop.qkv && chosen.qkv)
            }
            _ => false,
        }
    }
}

/// The tensors that a layer's forward pass leaves for its backward pass; those that it does not have are empty.
#[derive(Clone, Copy, Debug)]
pub struct Layer {
    pub(super) input: Tensor,
    pub(super) norm1: Tensor,
    pub(super) mixed: Tensor,
    pub(super) qkv: Tensor,
    pub(super) heads: Tensor,
    pub(super) heads_norm: Tensor,
    pub(super) output: Tensor,
    pub(super) gated: Tensor,
    pub(super) lse: Tensor,
    pub(super) linear: Tensor,
    pub(super) linear_stats: Tensor,
    pub(super) sum: Tensor,
    pub(super) norm2: Tensor,
    pub(super) fed: Tensor,
    pub(super) gate_up: Tensor,
    pub(super) act: Tensor,
    pub(super) probs: Tensor,
    pub(super) choices: Tensor,
    pub(super) order: Tensor,
    pub(super) rows: Tensor,
    pub(super) row_gate_up: Tensor,
    pub(super) row_act: Tensor,
    pub(super) home: Tensor,
    account: Account,
}

impl Layer {
    /// A layer of a kind; `skew` is how many times its balanced share of rows the rank's experts get.
    pub fn new(d: &Dims, linear: bool, experts: bool, skew: f64, account: Account) -> Layer {
        let tensor = |name, rows, width, each| Tensor { name, part: Part::Plain, rows, width, each };
        let row = |name, rows, width| Tensor { name, part: Part::Moe, rows, width, each: d.a };
        let (t, h, a) = (d.tokens, d.hidden, d.a);
        let attends = |x: Tensor| x.only_if(!linear);
        let (key, value, heads) = d.linear;
        let delta = 2.0 * (2.0 * key + value) + 2.0 * key + 3.0 * value + DELTA_CHUNK * heads;
        let dense = if experts { d.shared_expert } else { d.dense };
        let arrived = d.routed * skew;
        let (order, weights) = order(d, skew, account);
        // temper computes activation and output of the experts again from their first product, or does without.
        let megatron = experts && account == Account::Megatron;
        Layer {
            input: tensor("input of the layer", d.shared, h, a),
            norm1: tensor("1/rms of the first norm", d.shared, 1.0, STAT),
            mixed: tensor("normed input of attention", d.shared, h, a),
            qkv: attends(tensor("q, k, v as multiplied", t, d.q + 2.0 * d.kv + d.gate, a)),
            heads: attends(tensor("q, k, v normed and rotated", t, d.q + 2.0 * d.kv, a)),
            heads_norm: attends(tensor("1/rms of heads", t, if d.qk_norm { d.heads.0 + d.heads.1 } else { 0.0 }, STAT)),
            output: attends(tensor("output of attention", t, d.q, a)),
            gated: attends(tensor("gated output", t, d.gate, a)),
            lse: attends(tensor("log-sum-exp of attention", t, d.heads.0, STAT)),
            linear: tensor("linear attention", t, delta, a).only_if(linear),
            linear_stats: tensor("statistics of linear attention", t, 4.0 * heads, STAT).only_if(linear),
            sum: tensor("sum after attention", d.shared, h, a),
            norm2: tensor("1/rms of the second norm", d.shared, 1.0, STAT),
            fed: tensor("normed input of the feed-forward", d.shared, h, a),
            gate_up: tensor("gate and up", t, 2.0 * dense, a),
            act: tensor("gate times up", t, dense, a),
            probs: tensor("router: logits and probabilities", d.own, 2.0 * d.experts.0, STAT).only_if(experts),
            choices: tensor("router: experts and their weights", d.own, 2.0 * d.experts.1, STAT).only_if(experts),
            order: tensor("order of the rows", order + weights, 1.0, STAT).only_if(experts),
            rows: row("rows of the experts", arrived, h).only_if(experts),
            row_gate_up: row("gate and up of rows", arrived, 2.0 * d.expert).only_if(experts),
            row_act: row("gate times up of rows", arrived, d.expert).only_if(megatron),
            home: row("rows that came home", d.sent, h).only_if(megatron),
            account,
        }
    }

    /// Every tensor, and when it is kept. Megatron computes the router and the shared expert again with the experts
    /// (`--moe-layer-recompute`).
    pub fn tensors(&self) -> [(Tensor, Keep); 23] {
        let megatron = self.account == Account::Megatron;
        let without = |chosen: Parts| Keep::Without(chosen);
        let part = Parts::default();
        let act = Parts { act: true, ..part };
        let routed = if megatron { without(Parts { moe: true, ..part }) } else { Keep::Always };
        let shared = Parts { moe: megatron, mlp: true, ..part };
        [
            (self.input, Keep::Input),
            (self.norm1, Keep::Always),
            (self.mixed, without(Parts { norm: true, ..part })),
            (self.qkv, without(Parts { qkv: true, ..part })),
            (self.heads, without(Parts { qkv: true, ..act })),
            (self.heads_norm, without(Parts { qkv: true, ..act })),
            (self.output, Keep::Always),
            (self.gated, Keep::Always),
            (self.lse, Keep::Always),
            (self.linear, Keep::Always),
            (self.linear_stats, Keep::Always),
            (self.sum, Keep::Always),
            (self.norm2, Keep::Always),
            (self.fed, without(Parts { norm: true, ..part })),
            (self.gate_up, without(shared)),
            (self.act, without(Parts { act: true, ..shared })),
            (self.probs, routed),
            (self.choices, routed),
            (self.order, routed),
            (self.rows, without(Parts { moe: true, ..part })),
            (self.row_gate_up, without(Parts { moe: true, ..part })),
            (self.row_act, without(Parts { moe: true, ..act })),
            (self.home, without(Parts { moe: true, ..part })),
        ]
    }

    /// The tensors that are kept, or those that are not.
    pub(crate) fn listed(&self, recompute: Recompute, kept: bool) -> impl Iterator<Item = Tensor> {
        let wanted = move |(x, keep): (Tensor, Keep)| (x.bytes() > 0.0 && keep.by(recompute) == kept).then_some(x);
        self.tensors().into_iter().filter_map(wanted)
    }

    /// Bytes that are kept from the forward to the backward pass.
    pub fn kept(&self, recompute: Recompute) -> Bytes {
        let mut bytes = Bytes::default();
        self.listed(recompute, true).for_each(|x| bytes.add(x.part, x.bytes()));
        bytes
    }
}

/// Indices of the order of routed rows, and weights that travel with the tokens.
///
/// temper: where each row of a token lies by expert, and the borders between experts; where experts are apart also the row that each
/// token sends to each rank. Megatron: source and place of every row, and where experts are apart those of the rows that arrive.
fn order(d: &Dims, skew: f64, account: Account) -> (f64, f64) {
    let (experts, k) = d.experts;
    let apart = d.group > 1.0;
    match account {
        Account::Temper if apart => {
            let here = d.arrived(skew) * k;
            (here + experts / d.ep + 1.0 + d.own * d.group, here)
        }
        Account::Temper => (d.own * k + experts + 1.0, 0.0),
        Account::Megatron => (2.0 * d.sent + experts + 1.0 + if apart { 2.0 * d.routed * skew + experts + 1.0 } else { 0.0 }, 0.0),
    }
}
