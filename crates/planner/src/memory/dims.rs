//! Sizes of one rank's share of a layer's tensors.
//!
//! Legend: T tokens of a micro-batch on a rank of the context axis with those that fill them up, Ts those that a rank has between the divided parts of a layer (T / tp
//! with sequence parallelism, else T), To = T / tp those that it routes, H hidden size, Q and KV rows of queries and of keys on a rank,
//! K experts per token, R rows of a rank's experts, r = To x K rows that a rank routes, n tokens that reach a rank with experts.

use crate::job::{Account, Job};
use crate::layout::Layout;
use crate::network::Network;
use temper_model::{chunk_rows, largest_chunk};

/// A rank's sizes. Floats: they are only ever multiplied into bytes, and no input can overflow them.
#[derive(Clone, Copy, Debug)]
pub struct Dims {
    /// Bytes of an activation.
    pub a: f64,
    /// T.
    pub tokens: f64,
    /// Ts.
    pub shared: f64,
    /// To.
    pub own: f64,
    /// Ranks have different tokens between the divided parts of a layer.
    pub divided: bool,
    /// H.
    pub hidden: f64,
    /// Q: query rows.
    pub q: f64,
    /// KV: key rows (as many value rows); at least one head.
    pub kv: f64,
    /// Query and key heads of the rank.
    pub heads: (f64, f64),
    /// Rows of the attention gate, Q or 0.
    pub gate: f64,
    /// Whether heads are normed.
    pub qk_norm: bool,
    /// Width of the dense feed-forward.
    pub dense: f64,
    /// Width of the shared expert, 0 without one.
    pub shared_expert: f64,
    /// Experts E, and K.
    pub experts: (f64, f64),
    /// Width of an expert.
    pub expert: f64,
    /// r.
    pub sent: f64,
    /// R when routing is balanced.
    pub routed: f64,
    /// n when every choice of experts is as likely; as many rows leave a rank, one for each rank that works on a token.
    pub here: f64,
    /// Key rows, value rows and value heads of linear attention.
    pub linear: (f64, f64, f64),
    /// Elements of the delta rule's state.
    pub state: f64,
    /// Vocabulary of the rank.
    pub vocab: f64,
    /// Rows of logits that exist at once.
    pub logit_rows: f64,
    /// Ranks that share a layer's matrices.
    pub tp: f64,
    /// Context axis.
    pub cp: f64,
    /// Expert tensor axis.
    pub etp: f64,
    /// Expert axis.
    pub ep: f64,
    /// Ranks that hold every expert once between them.
    pub group: f64,
}

impl Dims {
    /// The sizes of every rank of a layout, for sequences of the longest length: what memory must hold.
    pub fn new(network: &Network, job: &Job, layout: &Layout) -> Dims {
        Dims::of_length(network, job, layout, job.seq as f64)
    }

    /// The sizes for sequences of `length` tokens.
    pub fn of_length(network: &Network, job: &Job, layout: &Layout, length: f64) -> Dims {
        let arch = &network.arch;
        let (tp, etp, ep) = (layout.tp as f64, layout.etp as f64, layout.ep as f64);
        let (a, dim) = (f64::from(job.precision.weight_bytes), arch.head_dim as f64);
        let tokens = layout.filled(layout.micro_batch as f64 * length) / layout.cp as f64;
        let heads = (arch.heads as f64 / tp, (arch.kv_heads as f64 / tp).max(1.0));
        let moe = arch.moe.as_ref();
        let top_k = moe.map_or(0.0, |m| m.top_k as f64);
        let hybrid = network.hybrid.as_ref();
        let linear = hybrid.map_or((0.0, 0.0, 0.0), |h| (h.key_rows() as f64 / tp, h.value_rows() as f64 / tp, h.value_heads as f64 / tp));
        let state = hybrid.map_or(0.0, |h| linear.2 * h.key_dim as f64 * h.value_dim as f64);
        let q = heads.0 * dim;
        Dims {
            a,
            tokens,
            shared: if layout.sequence { tokens / tp } else { tokens },
            own: tokens / tp,
            divided: layout.sequence && layout.tp > 1,
            hidden: arch.hidden as f64,
            q,
            kv: heads.1 * dim,
            heads,
            gate: if hybrid.is_some_and(|h| h.gated) { q } else { 0.0 },
            qk_norm: arch.qk_norm,
            dense: arch.intermediate as f64 / tp,
            shared_expert: hybrid.and_then(|h| h.shared_expert).map_or(0.0, |n| n as f64 / tp),
            experts: (moe.map_or(0.0, |m| m.experts as f64), top_k),
            expert: moe.map_or(0.0, |m| m.intermediate as f64 / etp),
            sent: tokens / tp * top_k,
            routed: tokens / tp * top_k * etp,
            here: tokens / tp * moe.map_or(1.0, |m| reached(m.experts, m.top_k, layout.ep)) * etp,
            linear,
            state,
            vocab: (arch.vocab as f64 / tp).ceil(),
            logit_rows: logit_rows(arch.vocab, job, tokens),
            tp,
            cp: layout.cp as f64,
            etp,
            ep,
            group: ep * etp,
        }
    }
}

impl Dims {
    /// n where a rank's experts get `skew` times their share: at most all tokens of the group.
    pub fn arrived(&self, skew: f64) -> f64 {
        (self.here * skew).min(self.own * self.group)
    }
}

/// Expected number of the `ep` ranks that a token goes to: those that have one of its `top_k` different experts of `experts`, each choice
/// as likely as another.
fn reached(experts: usize, top_k: usize, ep: usize) -> f64 {
    let (all, own) = (experts as f64, experts as f64 / ep as f64);
    let missed: f64 = (0..top_k).map(|i| ((all - own - i as f64) / (all - i as f64)).max(0.0)).product();
    ep as f64 * (1.0 - missed)
}

/// Rows of logits that exist at once: what the engine takes as a chunk, or all.
fn logit_rows(vocab: usize, job: &Job, tokens: f64) -> f64 {
    if job.account == Account::Megatron {
        return tokens;
    }
    let most = if job.loss_chunk == 0 { chunk_rows(vocab, job.precision.weights(), true) } else { job.loss_chunk };
    tokens.min(largest_chunk(tokens as usize, most) as f64)
}
