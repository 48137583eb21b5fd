//! Bytes of activations of one layer for one micro-batch: what the engine's layers keep (`Saved` in `temper_model`'s
//! `attention.rs`, `mlp.rs`, `moe.rs`, `decoder.rs`) and what their backward pass needs besides.
//!
//! Under tensor parallelism the tensors between the blocks are divided by tokens (sequence parallel, Korthikanti et al. 2022),
//! those inside by heads and columns. Statistics are f32. Legend as in `dims`.

use super::dims::Dims;
use crate::job::Account;

/// Bytes of a statistic.
const STAT: f64 = 4.0;

/// Tokens of a chunk of the gated delta rule (flash-linear-attention's).
const DELTA_CHUNK: f64 = 64.0;

/// What a layer keeps from its forward to its backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Kept {
    /// Its input: all that full recomputation keeps.
    pub input: f64,
    /// From the first norm to the input of the feed-forward.
    pub mixer: f64,
    /// The feed-forward but for routed rows.
    pub feed_forward: f64,
    /// Routed rows and what the experts make of them.
    pub moe: f64,
}

impl Kept {
    /// All of it.
    pub fn all(&self) -> f64 {
        self.input + self.mixer + self.feed_forward + self.moe
    }
}

/// What a layer keeps; `skew` is how many times its balanced share of rows a rank's experts get.
pub fn kept(d: &Dims, linear: bool, experts: bool, skew: f64) -> Kept {
    let hidden = d.shared * d.hidden * d.a;
    let norms = 2.0 * d.shared * STAT;
    let mixer = if linear { linear_attention(d) } else { attention(d) };
    // Around the mixer: its normed input, the sum after it, and the normed input of the feed-forward.
    let mixer = mixer + 3.0 * hidden + norms;
    let (feed_forward, moe) = if experts { (router(d) + swiglu(d, d.shared_expert), routed(d, skew)) } else { (swiglu(d, d.dense), 0.0) };
    Kept { input: hidden, mixer, feed_forward, moe }
}

/// `qkv` before norm and rotation, q, k, v after, the output and, where it is gated, the gated output; statistics.
fn attention(d: &Dims) -> f64 {
    let rows = d.q + 2.0 * d.kv;
    let wide = (rows + d.gate) + rows + d.q + d.gate;
    let norm = if d.qk_norm { d.heads.0 + d.heads.1 } else { 0.0 };
    d.tokens * (wide * d.a + (norm + d.heads.0) * STAT)
}

/// Gated DeltaNet: projections and their convolution, z, normed q and k, the chunk's inverse (a chunk wide), output and gated output.
fn linear_attention(d: &Dims) -> f64 {
    let (key, value, heads) = d.linear;
    let qkv = 2.0 * key + value;
    d.tokens * ((2.0 * qkv + value + 2.0 * key + 2.0 * value + DELTA_CHUNK * heads) * d.a + 4.0 * heads * STAT)
}

/// gate and up together, and their product.
fn swiglu(d: &Dims, width: f64) -> f64 {
    d.tokens * 3.0 * width * d.a
}

/// Logits and probabilities of the router, and for each choice expert, weight, source and place.
fn router(d: &Dims) -> f64 {
    d.shared * (2.0 * d.experts.0 + 4.0 * d.experts.1) * STAT
}

/// Rows as the experts take them, gate and up, their product, and the rows that come back to their tokens.
fn routed(d: &Dims, skew: f64) -> f64 {
    d.routed * skew * (d.hidden + 3.0 * d.expert) * d.a + d.sent * d.hidden * d.a
}

/// What the backward pass of a layer needs besides what was kept: the most of its two halves.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Transient {
    /// Gradients and gathered inputs outside the experts.
    pub plain: f64,
    /// Gradients of routed rows.
    pub moe: f64,
}

impl Transient {
    /// All of it.
    pub fn all(&self) -> f64 {
        self.plain + self.moe
    }
}

/// The larger of the mixer's and the feed-forward's needs.
pub fn transient(d: &Dims, linear: bool, experts: bool, skew: f64, account: Account) -> Transient {
    // In the feed-forward the gradient that arrives; in the mixer also that of the second norm, which waits for its weight
    // gradient, and their sum.
    let row = d.shared * d.hidden * d.a;
    // With tp, the whole input is gathered again for the weight gradient, and the whole input gradient precedes its sum.
    let gathered = if d.tp > 1.0 { 2.0 * d.tokens * d.hidden * d.a } else { d.shared * d.hidden * d.a };
    let mixer = if linear {
        let (key, value, _) = d.linear;
        d.tokens * 2.0 * (4.0 * key + 4.0 * value) * d.a + d.state * d.tokens / DELTA_CHUNK * d.a
    } else {
        d.tokens * (d.q + d.gate + 2.0 * (d.q + 2.0 * d.kv)) * d.a
    };
    let mixer = Transient { plain: 3.0 * row + gathered + mixer, moe: 0.0 };
    let feed_forward = if experts {
        let shared = d.tokens * 3.0 * d.shared_expert * d.a;
        Transient { plain: 2.0 * row + shared, moe: routed_gradients(d, skew, account) }
    } else {
        Transient { plain: row + gathered + d.tokens * 3.0 * d.dense * d.a, moe: 0.0 }
    };
    if mixer.all() > feed_forward.all() { mixer } else { feed_forward }
}

/// Gradients of the rows, of gate and up, of their product, and of the rows' inputs; the rows before their sum where an expert
/// is divided; the rows packed for the way where experts are apart. Megatron sorts the rows once more on either side
/// (`sort_chunks_by_idxs`).
fn routed_gradients(d: &Dims, skew: f64, account: Account) -> f64 {
    let row = d.hidden * d.a;
    let divided = if d.etp > 1.0 { 1.0 } else { 0.0 };
    let sorted = if account == Account::Megatron && d.ep > 1.0 { 2.0 } else { 0.0 };
    let packed = if d.ep > 1.0 { d.sent * row } else { 0.0 };
    d.routed * skew * ((2.0 + divided + sorted) * row + 3.0 * d.expert * d.a) + packed
}
