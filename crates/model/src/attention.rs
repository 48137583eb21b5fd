//! Causal self-attention with grouped key/value heads, rotary positions and, in Qwen3, a norm on the heads of q and k.
//!
//! Legend: T tokens, H hidden size, D head size, Nq query heads, Nk key/value heads (this rank's).

use crate::context::{attend, attend_grad};
use crate::linear::{Divided, Linear, LinearWork};
use crate::param::ParamId;
use crate::{Act, CachedStep, Cx, Error, Grads, KvCache, Names, Parts, Result};
use std::sync::Arc;
use temper_config::Arch;
use temper_tensor::{Tensor, View};

/// The attention of one layer.
pub struct Attention {
    /// q, k and v in one product, [(Nq+2Nk)*D, H].
    pub qkv: Linear,
    /// Output projection, [H, Nq*D].
    pub out: Linear,
    /// Norm weights of q and k, each `[D]`.
    pub qk_norm: Option<(ParamId, ParamId)>,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    eps: f64,
}

/// What the backward pass needs; a part may be missing until [`Attention::complete`] computes it again.
pub struct Saved {
    x: Option<Act>,
    qkv: Option<Tensor>,
    heads: Option<Heads>,
    o: Tensor,
    lse: Tensor,
}

impl Saved {
    /// Drops what is to be computed again.
    pub fn drop_parts(&mut self, parts: Parts) {
        if parts.norm {
            self.x = None;
        }
        if parts.qkv {
            self.qkv = None;
        }
        if parts.act || parts.qkv {
            self.heads = None;
        }
    }
}

/// What the weight gradients need.
pub struct Work {
    qkv: LinearWork,
    out: LinearWork,
    norm: Option<NormWork>,
}

struct NormWork {
    qkv: Tensor,
    rstd: Tensor,
    dq: Tensor,
    dk: Tensor,
}

/// q [T, Nq, D], k and v [T, Nk, D] after norm and rotation, and 1/rms of each head [T, Nq+Nk].
struct Heads {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rstd: Option<Tensor>,
}

impl Attention {
    /// The attention whose parameters are named `{at}.*`.
    pub fn new(arch: &Arch, names: &Names, at: &str) -> Result<Attention> {
        let bias = |on: bool, name: &str| on.then(|| names.id(&format!("{at}.{name}.bias"))).transpose();
        let q_width = arch.heads * arch.head_dim;
        Ok(Attention {
            qkv: Linear {
                weight: names.id(&format!("{at}.qkv_proj.weight"))?,
                bias: bias(arch.qkv_bias, "qkv_proj")?,
                inputs: arch.hidden,
                outputs: q_width + 2 * arch.kv_heads * arch.head_dim,
                divided: Divided::Outputs,
            },
            out: Linear {
                weight: names.id(&format!("{at}.o_proj.weight"))?,
                bias: bias(arch.out_bias, "o_proj")?,
                inputs: q_width,
                outputs: arch.hidden,
                divided: Divided::Inputs,
            },
            qk_norm: match arch.qk_norm {
                true => Some((names.id(&format!("{at}.q_norm.weight"))?, names.id(&format!("{at}.k_norm.weight"))?)),
                false => None,
            },
            heads: arch.heads,
            kv_heads: arch.kv_heads,
            head_dim: arch.head_dim,
            eps: arch.norm_eps,
        })
    }

    fn scale(&self) -> f64 {
        (self.head_dim as f64).powf(-0.5)
    }

    /// `y[T, H]` from `x[T, H]`, each token attending to its own document up to itself.
    pub fn forward(&self, cx: &Cx, x: Tensor) -> Result<(Tensor, Saved)> {
        let qkv = self.qkv.forward(cx, x.view())?;
        let heads = self.prepare(cx, qkv.view())?;
        let Heads { q, k, v, .. } = &heads;
        let (o, lse) = attend(cx, q, k, v, self.scale())?;
        let y = self.out.forward(cx, self.flat(&o))?;
        Ok((y, Saved { x: Some(Arc::new(x)), qkv: Some(qkv), heads: Some(heads), o, lse }))
    }

    /// Computes what was dropped again; `x` gives the input if that was.
    pub fn complete(&self, cx: &Cx, saved: Saved, x: impl FnOnce() -> Result<Tensor>) -> Result<Saved> {
        let x = saved.x.map_or_else(|| x().map(Arc::new), Ok)?;
        let qkv = saved.qkv.map_or_else(|| self.qkv.forward(cx, x.view()), Ok)?;
        let heads = saved.heads.map_or_else(|| self.prepare(cx, qkv.view()), Ok)?;
        Ok(Saved { x: Some(x), qkv: Some(qkv), heads: Some(heads), ..saved })
    }

    /// `dx[T, H]` from `dy[T, H]`.
    pub fn backward_input(&self, cx: &Cx, saved: Saved, dy: &Act) -> Result<(Tensor, Work)> {
        let Saved { x: Some(x), qkv: Some(qkv), heads: Some(heads), o, lse } = saved else { return Err(Error::Incomplete) };
        let Heads { q, k, v, rstd } = heads;
        let (d_o, dy) = self.out.backward_input(cx, dy)?;
        let d_o = d_o.reshape(o.shape());
        let [dq, dk, dv] = attend_grad(cx, &d_o, &o, &lse, [&q, &k, &v], self.scale())?;
        let mut dqkv = cx.alloc(qkv.shape())?;
        let norm = match (self.qk_norm, &rstd) {
            (Some((wq, wk)), Some(rstd)) => Some((cx.weights.get(wq)?, cx.weights.get(wk)?, rstd.view())),
            _ => None,
        };
        let (rope, positions) = (cx.rope_table(), cx.positions());
        cx.ops.qkv_prepare_grad_input(dqkv.view_mut(), dq.view(), dk.view(), dv.view(), qkv.view(), norm, rope, positions)?;
        let (dx, dqkv) = self.qkv.backward_input(cx, &Arc::new(dqkv))?;
        let o = o.reshape(&[dy.shape()[0], self.heads * self.head_dim]);
        let work = Work {
            qkv: LinearWork { x, dy: dqkv },
            out: LinearWork { x: Arc::new(o), dy },
            norm: rstd.map(|rstd| NormWork { qkv, rstd, dq, dk }),
        };
        Ok((dx, work))
    }

    /// Adds the gradients of all weights of this attention.
    pub fn backward_weight(&self, cx: &Cx, work: Work, grads: &mut Grads) -> Result<()> {
        self.out.backward_weight(cx, work.out, grads)?;
        self.qkv.backward_weight(cx, work.qkv, grads)?;
        if let (Some((wq, wk)), Some(w)) = (self.qk_norm, work.norm) {
            let (dwq, dwk) = grads.add_to_pair(cx.ops, wq, wk)?;
            let (rope, positions) = (cx.rope_table(), cx.positions());
            cx.ops.qk_norm_grad_weight(dwq, dwk, w.dq.view(), w.dk.view(), w.qkv.view(), w.rstd.view(), rope, positions)?;
        }
        Ok(())
    }

    /// As [`Attention::forward`] for the newest tokens of sequences whose earlier keys and values lie in layer `layer` of `cache`;
    /// theirs are added to it.
    pub fn forward_cached(&self, cx: &Cx, x: View, step: &CachedStep, cache: &mut KvCache, layer: usize) -> Result<Tensor> {
        let qkv = self.qkv.forward(cx, x)?;
        let Heads { q, k, v, .. } = self.prepare(cx, qkv.view())?;
        let (cache_k, cache_v) = cache.layer_mut(layer)?;
        cx.ops.kv_cache_write(cache_k.view_mut(), cache_v.view_mut(), k.view(), v.view(), step.slots.view())?;
        let mut o = cx.alloc(q.shape())?;
        cx.ops.paged_attention(o.view_mut(), q.view(), cache_k.view(), cache_v.view(), step.seqs(), self.scale())?;
        self.out.forward(cx, self.flat(&o))
    }

    /// Splits the product of q, k and v into heads, normalised and rotated.
    fn prepare(&self, cx: &Cx, qkv: View) -> Result<Heads> {
        let (tokens, nq, nk, d) = (qkv.rows(), self.heads, self.kv_heads, self.head_dim);
        let (mut q, mut k, mut v) = (cx.alloc(&[tokens, nq, d])?, cx.alloc(&[tokens, nk, d])?, cx.alloc(&[tokens, nk, d])?);
        let norm = match self.qk_norm {
            Some((wq, wk)) => Some((cx.weights.get(wq)?, cx.weights.get(wk)?, self.eps)),
            None => None,
        };
        let mut rstd = norm.is_some().then(|| cx.alloc_stat(&[tokens, nq + nk])).transpose()?;
        cx.ops.qkv_prepare(
            q.view_mut(),
            k.view_mut(),
            v.view_mut(),
            rstd.as_mut().map(Tensor::view_mut),
            qkv,
            norm,
            cx.rope_table(),
            cx.positions(),
        )?;
        Ok(Heads { q, k, v, rstd })
    }

    /// `o[T, Nq, D]` as rows of Nq*D.
    fn flat<'t>(&self, o: &'t Tensor) -> View<'t> {
        o.view().reshape(&[o.shape()[0], self.heads * self.head_dim])
    }
}
