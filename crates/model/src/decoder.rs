//! A decoder layer: `x1 = x + attention(norm(x))`, `y = x1 + feed_forward(norm(x1))`.
//!
//! Legend: T tokens, H hidden size.

use crate::aux::AuxGrad;
use crate::moe::Routing;
use crate::norm::{self, RmsNorm};
use crate::{Act, CachedStep, Cx, Grads, KvCache, Names, Parts, Result};
use crate::{attention, attention::Attention, mlp, mlp::Mlp, moe, moe::Moe};
use std::sync::Arc;
use temper_config::Arch;
use temper_tensor::Tensor;

/// The feed-forward of a layer.
pub enum FeedForward {
    /// One SwiGLU for all tokens.
    Dense(Mlp),
    /// A mixture of experts.
    Experts(Moe),
}

/// One layer.
pub struct DecoderLayer {
    /// Norm before attention.
    pub norm1: RmsNorm,
    /// Attention.
    pub attention: Attention,
    /// Norm before the feed-forward.
    pub norm2: RmsNorm,
    /// Feed-forward.
    pub feed_forward: FeedForward,
}

/// What the backward pass needs.
pub struct Saved {
    norm1: norm::Saved,
    attention: attention::Saved,
    norm2: norm::Saved,
    feed_forward: SavedFeedForward,
}

enum SavedFeedForward {
    Dense(mlp::Saved),
    Experts(Box<moe::Saved>),
}

/// What the weight gradients need.
pub struct Work {
    norm1: norm::Work,
    attention: attention::Work,
    norm2: norm::Work,
    /// Experts have added theirs.
    mlp: Option<mlp::Work>,
}

impl Saved {
    /// Itself without what is to be computed again.
    pub fn without(mut self, parts: Parts) -> Saved {
        self.attention.drop_parts(parts);
        match &mut self.feed_forward {
            SavedFeedForward::Dense(s) => s.drop_parts(parts),
            SavedFeedForward::Experts(s) => s.drop_parts(parts),
        }
        self
    }

    /// The router's decision, in a layer with experts.
    pub fn routing(&self) -> Option<&Routing> {
        match &self.feed_forward {
            SavedFeedForward::Experts(s) => Some(&s.routing),
            SavedFeedForward::Dense(_) => None,
        }
    }
}

impl DecoderLayer {
    /// Layer `layer` of an architecture.
    pub fn new(arch: &Arch, names: &Names, layer: usize) -> Result<DecoderLayer> {
        let at = |name: &str| format!("model.layers.{layer}.{name}");
        let norm = |name: &str| -> Result<RmsNorm> { Ok(RmsNorm { weight: names.id(&at(name))?, eps: arch.norm_eps }) };
        Ok(DecoderLayer {
            norm1: norm("input_layernorm.weight")?,
            attention: Attention::new(arch, names, &at("self_attn"))?,
            norm2: norm("post_attention_layernorm.weight")?,
            feed_forward: match arch.is_moe_layer(layer) {
                true => FeedForward::Experts(Moe::new(arch, names, &at("mlp"), layer)?),
                false => FeedForward::Dense(Mlp::new(arch, names, &at("mlp"))?),
            },
        })
    }

    /// Row of this layer in the auxiliary statistics, if it has experts.
    pub fn aux_row(&self) -> Option<usize> {
        match &self.feed_forward {
            FeedForward::Experts(moe) => Some(moe.row),
            FeedForward::Dense(_) => None,
        }
    }

    /// `y[T, H]` from `x[T, H]`.
    pub fn forward(&self, cx: &Cx, x: &Act) -> Result<(Act, Saved)> {
        let (h, norm1) = self.norm1.forward(cx, x)?;
        let (a, attention) = self.attention.forward(cx, h)?;
        let (x1, h, norm2) = self.norm2.forward_sum(cx, x.view(), a.view())?;
        drop(a);
        let (mut y, feed_forward) = match &self.feed_forward {
            FeedForward::Dense(mlp) => {
                let (y, saved) = mlp.forward(cx, h)?;
                (y, SavedFeedForward::Dense(saved))
            }
            FeedForward::Experts(moe) => {
                let (y, saved) = moe.forward(cx, h)?;
                (y, SavedFeedForward::Experts(Box::new(saved)))
            }
        };
        cx.ops.add_assign(y.view_mut(), x1.view())?;
        Ok((Arc::new(y), Saved { norm1, attention, norm2, feed_forward }))
    }

    /// Computes again what [`Saved::without`] dropped.
    pub fn complete(&self, cx: &Cx, saved: Saved) -> Result<Saved> {
        let Saved { norm1, attention, norm2, feed_forward } = saved;
        let attention = self.attention.complete(cx, attention, || self.norm1.again(cx, &norm1))?;
        let x = || self.norm2.again(cx, &norm2);
        let feed_forward = match (&self.feed_forward, feed_forward) {
            (FeedForward::Dense(mlp), SavedFeedForward::Dense(s)) => SavedFeedForward::Dense(mlp.complete(cx, s, x)?),
            (FeedForward::Experts(moe), SavedFeedForward::Experts(s)) => SavedFeedForward::Experts(Box::new(moe.complete(cx, *s, x)?)),
            _ => return Err(mismatch()),
        };
        Ok(Saved { norm1, attention, norm2, feed_forward })
    }

    /// `dx[T, H]` from `dy[T, H]`. Experts also take the gradient of the auxiliary losses, and add the gradients of their weights at
    /// once, while rows are on their way between ranks.
    pub fn backward_input(&self, cx: &Cx, saved: Saved, dy: &Act, aux: &AuxGrad, grads: &mut Grads) -> Result<(Act, Work)> {
        let (dh, mlp) = match (&self.feed_forward, saved.feed_forward) {
            (FeedForward::Dense(mlp), SavedFeedForward::Dense(s)) => {
                let (dh, work) = mlp.backward_input(cx, s, dy)?;
                (dh, Some(work))
            }
            (FeedForward::Experts(moe), SavedFeedForward::Experts(s)) => (moe.backward(cx, *s, dy, aux, grads)?, None),
            _ => return Err(mismatch()),
        };
        let (dx1, norm2) = self.norm2.backward_input(cx, saved.norm2, dh, Some(dy.view()))?;
        let dx1 = Arc::new(dx1);
        let (dh, attention) = self.attention.backward_input(cx, saved.attention, &dx1)?;
        let (dx, norm1) = self.norm1.backward_input(cx, saved.norm1, dh, Some(dx1.view()))?;
        Ok((Arc::new(dx), Work { norm1, attention, norm2, mlp }))
    }

    /// Adds the gradients of all weights of this layer but those of experts.
    pub fn backward_weight(&self, cx: &Cx, work: Work, grads: &mut Grads) -> Result<()> {
        if let (FeedForward::Dense(mlp), Some(work)) = (&self.feed_forward, work.mlp) {
            mlp.backward_weight(cx, work, grads)?;
        }
        self.norm2.backward_weight(cx, work.norm2, grads)?;
        self.attention.backward_weight(cx, work.attention, grads)?;
        self.norm1.backward_weight(cx, work.norm1, grads)
    }

    /// As [`DecoderLayer::forward`] for the newest tokens of sequences whose earlier keys and values lie in layer `layer` of `cache`.
    pub fn forward_cached(&self, cx: &Cx, x: &Act, step: &CachedStep, cache: &mut KvCache, layer: usize) -> Result<Act> {
        let (h, _) = self.norm1.forward(cx, x)?;
        let a = self.attention.forward_cached(cx, h.view(), step, cache, layer)?;
        let (x1, h, _) = self.norm2.forward_sum(cx, x.view(), a.view())?;
        let mut y = self.feed_forward.forward_only(cx, h)?;
        cx.ops.add_assign(y.view_mut(), x1.view())?;
        Ok(Arc::new(y))
    }
}

impl FeedForward {
    fn forward_only(&self, cx: &Cx, x: Tensor) -> Result<Tensor> {
        Ok(match self {
            FeedForward::Dense(mlp) => mlp.forward(cx, x)?.0,
            FeedForward::Experts(moe) => moe.forward(cx, x)?.0,
        })
    }
}

/// Saved activations of another layer were passed in.
fn mismatch() -> crate::Error {
    crate::Error::Arch("the saved activations belong to a layer of another kind".into())
}
