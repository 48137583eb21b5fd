//! The feed-forward of a mixture of experts: a router sends each token to K of E experts, each a SwiGLU.
//!
//! Experts may be divided over ranks: see `dispatch`. Then every rank routes its share of the tokens and works on the tokens that all
//! ranks sent to its experts.
//!
//! Legend: T tokens of this rank, t its share of them, n tokens that its experts work on (t when they are not divided), H hidden size,
//! E experts, K experts per token, R rows of this rank's experts (t*K when they are not divided), I intermediate size of an expert (this
//! rank's part).

use crate::aux::AuxGrad;
use crate::dispatch::Dispatch;
use crate::param::ParamId;
use crate::{Act, Cx, Error, Grads, Names, Parts, Result};
use std::sync::Arc;
use temper_config::Arch;
use temper_tensor::{Beta, GroupedGemm, RouterGrad, Tensor, Trans, View};

/// The experts of one layer and their router.
pub struct Moe {
    /// Router, [E, H].
    pub router: ParamId,
    /// gate and up of every expert here, [E, 2I, H].
    pub gate_up: ParamId,
    /// [E, H, I].
    pub down: ParamId,
    /// Which of the sparse layers this is, from 0: its row in the auxiliary statistics.
    pub row: usize,
    hidden: usize,
    size: usize,
    experts: usize,
    top_k: usize,
    normalise: bool,
}

/// How the router decided. All in the stat dtype but for the experts.
pub struct Routing {
    /// [T, E].
    pub logits: Tensor,
    /// Softmax of the logits, [T, E].
    pub probs: Tensor,
    /// Experts of each token, best first, [T, K].
    pub experts: Tensor,
    /// Their weights, [T, K].
    pub weights: Tensor,
}

/// What the backward pass needs; a part may be missing until [`Moe::complete`] computes it again.
pub struct Saved {
    x: Option<Act>,
    /// How the router decided.
    pub routing: Routing,
    dispatch: Dispatch,
    /// [R, H].
    rows: Option<Tensor>,
    /// [R, 2I].
    gate_up: Option<Tensor>,
}

impl Saved {
    /// Drops what is to be computed again.
    pub fn drop_parts(&mut self, parts: Parts) {
        if parts.norm {
            self.x = None;
        }
        if parts.moe {
            (self.rows, self.gate_up) = (None, None);
        }
    }
}

impl Moe {
    /// The experts of layer `layer`, whose parameters are named `{at}.*`.
    pub fn new(arch: &Arch, names: &Names, at: &str, layer: usize) -> Result<Moe> {
        let moe = arch.moe.as_ref().ok_or_else(|| Error::Arch(format!("{at} has experts but the architecture has none")))?;
        Ok(Moe {
            router: names.id(&format!("{at}.gate.weight"))?,
            gate_up: names.id(&format!("{at}.experts.gate_up_proj"))?,
            down: names.id(&format!("{at}.experts.down_proj"))?,
            row: (0..layer).filter(|&i| arch.is_moe_layer(i)).count(),
            hidden: arch.hidden,
            size: moe.intermediate,
            experts: moe.experts,
            top_k: moe.top_k,
            normalise: moe.normalise,
        })
    }

    /// `y[T, H]` from `x[T, H]`.
    pub fn forward(&self, cx: &Cx, x: Tensor) -> Result<(Tensor, Saved)> {
        let routing = self.route(cx, cx.own_share(x.view()))?;
        let dispatch = Dispatch::new(cx, &routing, self.experts)?;
        let rows = self.gather(cx, &x, &dispatch)?;
        let gate_up = self.product(cx, &rows, self.gate_up, 2 * self.size, &dispatch)?;
        let act = self.activate(cx, &gate_up)?;
        let out = self.product(cx, &act, self.down, self.hidden, &dispatch)?;
        let y = self.combine(cx, &out, Some(dispatch.weights(&routing)), &dispatch)?;
        let y = dispatch.collect(cx, y, || Ok(()))?;
        Ok((cx.join_shares(y)?, Saved { x: Some(Arc::new(x)), routing, dispatch, rows: Some(rows), gate_up: Some(gate_up) }))
    }

    /// The rows of this rank's experts, [R, H].
    fn gather(&self, cx: &Cx, x: &Tensor, dispatch: &Dispatch) -> Result<Tensor> {
        let tokens = dispatch.spread(cx, cx.own_share(x.view()))?;
        let mut rows = cx.alloc(&[dispatch.rows, self.hidden])?;
        cx.ops.moe_gather(rows.view_mut(), tokens.view(), dispatch.place.view())?;
        Ok(rows)
    }

    /// The sums of each token's rows among `rows[R, H]`, [n, H].
    fn combine(&self, cx: &Cx, rows: &Tensor, weights: Option<View>, dispatch: &Dispatch) -> Result<Tensor> {
        let mut sums = cx.alloc(&[dispatch.place.shape()[0], self.hidden])?;
        cx.ops.moe_combine(sums.view_mut(), rows.view(), weights, dispatch.place.view())?;
        Ok(sums)
    }

    /// The product of every expert's rows with its matrix, [R, outputs].
    fn product(&self, cx: &Cx, rows: &Tensor, weight: ParamId, outputs: usize, dispatch: &Dispatch) -> Result<Tensor> {
        let mut y = cx.alloc(&[rows.shape()[0], outputs])?;
        cx.ops.grouped_gemm(GroupedGemm::Forward, y.view_mut(), rows.view(), cx.weights.get(weight)?, dispatch.offsets.view())?;
        Ok(y)
    }

    /// silu(gate) * up, [R, I].
    fn activate(&self, cx: &Cx, gate_up: &Tensor) -> Result<Tensor> {
        let mut act = cx.alloc(&[gate_up.shape()[0], self.size])?;
        cx.ops.swiglu(act.view_mut(), gate_up.view())?;
        Ok(act)
    }

    /// Computes what was dropped again; `x` gives the input if that was.
    pub fn complete(&self, cx: &Cx, saved: Saved, x: impl FnOnce() -> Result<Tensor>) -> Result<Saved> {
        let Saved { x: kept, routing, dispatch, rows, gate_up } = saved;
        let x = kept.map_or_else(|| x().map(Arc::new), Ok)?;
        let rows = rows.map_or_else(|| self.gather(cx, &x, &dispatch), Ok)?;
        let gate_up = gate_up.map_or_else(|| self.product(cx, &rows, self.gate_up, 2 * self.size, &dispatch), Ok)?;
        Ok(Saved { x: Some(x), routing, dispatch, rows: Some(rows), gate_up: Some(gate_up) })
    }

    /// `dx[T, H]` from `dy[T, H]` and from the auxiliary losses; adds the gradients of the router and of every expert, which are
    /// computed while the rows of `dx` are on their way between ranks.
    ///
    /// The weights of a token's experts enter at the activation instead of the output: `w * (act . W) = (w * act) . W`, so that neither
    /// activation nor output need be kept (their gradients are [`temper_tensor::Ops::moe_act_grad`]'s).
    pub fn backward(&self, cx: &Cx, saved: Saved, dy: &Act, aux: &AuxGrad, grads: &mut Grads) -> Result<Tensor> {
        let Saved { x: Some(x), routing, dispatch, rows: Some(rows), gate_up: Some(gate_up) } = saved else {
            return Err(Error::Incomplete);
        };
        let offsets = dispatch.offsets.view();
        let dout = self.gather(cx, dy, &dispatch)?;
        let (dgate_up, act, dweights) = self.activation_grad(cx, &routing, &dispatch, &dout, gate_up)?;
        let mut drows = cx.alloc(rows.shape())?;
        cx.ops.grouped_gemm(GroupedGemm::InputGrad, drows.view_mut(), dgate_up.view(), cx.weights.get(self.gate_up)?, offsets)?;
        let dx = self.combine(cx, &drows, None, &dispatch)?;
        drop(drows);
        let dlogits = self.router_backward(cx, &routing, &dweights, aux)?;
        let mut dx = dispatch.collect(cx, dx, || {
            let mut expert_grad = |weight, dy: Tensor, x: Tensor| -> Result<()> {
                let (dw, beta) = grads.sum_into(weight)?;
                Ok(cx.ops.grouped_gemm(GroupedGemm::WeightGrad(beta), dw, dy.view(), x.view(), offsets)?)
            };
            expert_grad(self.down, dout, act)?;
            expert_grad(self.gate_up, dgate_up, rows)?;
            let (dw, beta) = grads.sum_into(self.router)?;
            Ok(cx.ops.gemm(dw, dlogits.view(), Trans::Yes, cx.own_share(x.view()), Trans::No, beta)?)
        })?;
        self.add_router_input_grad(cx, &mut dx, &dlogits)?;
        cx.join_shares(dx)
    }

    /// From `dout[R, H]`, the gradient of what the experts made before it is weighted: `dgate_up[R, 2I]`, the weighted activation [R, I]
    /// and `dweights[t, K]`.
    fn activation_grad(
        &self,
        cx: &Cx,
        routing: &Routing,
        dispatch: &Dispatch,
        dout: &Tensor,
        gate_up: Tensor,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let weights = dispatch.weights(routing);
        let mut dact = cx.alloc(&[dispatch.rows, self.size])?;
        cx.ops.grouped_gemm(GroupedGemm::InputGrad, dact.view_mut(), dout.view(), cx.weights.get(self.down)?, dispatch.offsets.view())?;
        let (mut dgate_up, mut act) = (cx.alloc(gate_up.shape())?, cx.alloc(dact.shape())?);
        let mut dweights = cx.alloc_stat(weights.shape())?;
        let outs = (dgate_up.view_mut(), act.view_mut(), dweights.view_mut());
        cx.ops.moe_act_grad(outs.0, outs.1, outs.2, dact.view(), gate_up.view(), weights, dispatch.place.view())?;
        Ok((dgate_up, act, dispatch.collect(cx, dweights, || Ok(()))?))
    }

    /// The router's decision for `x[t, H]`; its logits are never rounded below the stat dtype.
    fn route(&self, cx: &Cx, x: View) -> Result<Routing> {
        let tokens = x.rows();
        let mut logits = cx.alloc_stat(&[tokens, self.experts])?;
        cx.ops.gemm(logits.view_mut(), x, Trans::No, cx.weights.get(self.router)?, Trans::Yes, Beta::Zero)?;
        let mut probs = cx.alloc_stat(&[tokens, self.experts])?;
        let mut experts = cx.alloc_index(&[tokens, self.top_k])?;
        let mut weights = cx.alloc_stat(&[tokens, self.top_k])?;
        cx.ops.router(probs.view_mut(), experts.view_mut(), weights.view_mut(), logits.view(), self.normalise)?;
        Ok(Routing { logits, probs, experts, weights })
    }

    /// `dlogits[t, E]` from `dweights[t, K]` and from the auxiliary losses; 0 for rows that are no tokens.
    fn router_backward(&self, cx: &Cx, r: &Routing, dweights: &Tensor, aux: &AuxGrad) -> Result<Tensor> {
        let mut dlogits = cx.alloc_stat(r.logits.shape())?;
        let (rows, real) = (dlogits.shape()[0], cx.real_rows());
        // The operation takes the mean over the rows it is given; the loss is the mean over the tokens of all ranks.
        let z_coef = aux.z_coef * real as f64 / cx.batch.all_tokens.max(1) as f64;
        let extra = RouterGrad { balance: aux.balance.as_ref().map(|g| g.view().index(self.row)), z_coef, normalised: self.normalise };
        let [dweights, probs, experts, weights, logits] =
            [dweights, &r.probs, &r.experts, &r.weights, &r.logits].map(|x| x.view().slice_rows(0..real));
        cx.ops.router_grad(dlogits.view_mut().slice_rows(0..real), dweights, probs, experts, weights, logits, extra)?;
        if real < rows {
            cx.ops.fill(dlogits.view_mut().slice_rows(real..rows), 0.0)?;
        }
        Ok(dlogits)
    }

    /// `dx[T, H] += dlogits[T, E] . W`.
    fn add_router_input_grad(&self, cx: &Cx, dx: &mut Tensor, dlogits: &Tensor) -> Result<()> {
        let w = cx.weights.get(self.router)?;
        Ok(cx.ops.gemm(dx.view_mut(), dlogits.view(), Trans::No, w, Trans::No, Beta::One)?)
    }
}
