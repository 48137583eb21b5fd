//! The feed-forward of a mixture of experts: a router sends each token to K of E experts, each a SwiGLU.
//!
//! Legend: T tokens, H hidden size, E experts, K experts per token, I intermediate size of an expert, S = T*K routed rows.

use crate::aux::AuxGrad;
use crate::param::ParamId;
use crate::{Act, Cx, Error, Grads, Names, Parts, Result};
use std::sync::Arc;
use temper_config::Arch;
use temper_tensor::{Beta, GroupedGemm, RouterGrad, Tensor, Trans};

/// The experts of one layer and their router.
pub struct Moe {
    /// Router, [E, H].
    pub router: ParamId,
    /// gate and up of every expert, [E, 2I, H].
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

/// Where the routed rows lie once sorted by expert (see [`temper_tensor::Ops::moe_sort`]).
struct Order {
    offsets: Tensor,
    source: Tensor,
    place: Tensor,
}

/// What the backward pass needs; a part may be missing until [`Moe::complete`] computes it again.
pub struct Saved {
    x: Option<Act>,
    /// How the router decided.
    pub routing: Routing,
    order: Order,
    rows: Option<Tensor>,
    gate_up: Option<Tensor>,
    act: Option<Tensor>,
    out: Option<Tensor>,
}

impl Saved {
    /// Drops what is to be computed again.
    pub fn drop_parts(&mut self, parts: Parts) {
        if parts.norm {
            self.x = None;
        }
        if parts.moe {
            (self.rows, self.gate_up, self.out) = (None, None, None);
        }
        if parts.act || parts.moe {
            self.act = None;
        }
    }
}

/// What the weight gradients need.
pub struct Work {
    x: Act,
    dlogits: Tensor,
    offsets: Tensor,
    rows: Tensor,
    dgate_up: Tensor,
    act: Tensor,
    dout: Tensor,
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
        let routing = self.route(cx, &x)?;
        let order = self.sort(cx, &routing.experts)?;
        let rows = self.gather(cx, &x, &order)?;
        let gate_up = self.product(cx, &rows, self.gate_up, 2 * self.size, &order)?;
        let act = self.activate(cx, &gate_up)?;
        let out = self.product(cx, &act, self.down, self.hidden, &order)?;
        let mut y = cx.alloc(x.shape())?;
        cx.ops.moe_combine(y.view_mut(), out.view(), Some(routing.weights.view()), order.place.view())?;
        let (rows, gate_up, act, out) = (Some(rows), Some(gate_up), Some(act), Some(out));
        Ok((y, Saved { x: Some(Arc::new(x)), routing, order, rows, gate_up, act, out }))
    }

    /// The product of every expert's rows with its matrix, [S, outputs].
    fn product(&self, cx: &Cx, rows: &Tensor, weight: ParamId, outputs: usize, order: &Order) -> Result<Tensor> {
        let mut y = cx.alloc(&[rows.shape()[0], outputs])?;
        cx.ops.grouped_gemm(GroupedGemm::Forward, y.view_mut(), rows.view(), cx.weights.get(weight)?, order.offsets.view())?;
        Ok(y)
    }

    /// silu(gate) * up, [S, I].
    fn activate(&self, cx: &Cx, gate_up: &Tensor) -> Result<Tensor> {
        let mut act = cx.alloc(&[gate_up.shape()[0], self.size])?;
        cx.ops.swiglu(act.view_mut(), gate_up.view())?;
        Ok(act)
    }

    /// Computes what was dropped again; `x` gives the input if that was.
    pub fn complete(&self, cx: &Cx, saved: Saved, x: impl FnOnce() -> Result<Tensor>) -> Result<Saved> {
        let Saved { x: kept, routing, order, rows, gate_up, act, out } = saved;
        let x = kept.map_or_else(|| x().map(Arc::new), Ok)?;
        let rows = rows.map_or_else(|| self.gather(cx, &x, &order), Ok)?;
        let gate_up = gate_up.map_or_else(|| self.product(cx, &rows, self.gate_up, 2 * self.size, &order), Ok)?;
        let act = act.map_or_else(|| self.activate(cx, &gate_up), Ok)?;
        let out = out.map_or_else(|| self.product(cx, &act, self.down, self.hidden, &order), Ok)?;
        Ok(Saved { x: Some(x), routing, order, rows: Some(rows), gate_up: Some(gate_up), act: Some(act), out: Some(out) })
    }

    /// `dx[T, H]` from `dy[T, H]` and from the auxiliary losses.
    pub fn backward_input(&self, cx: &Cx, saved: Saved, dy: &Act, aux: &AuxGrad) -> Result<(Tensor, Work)> {
        let Saved { x: Some(x), routing, order, rows: Some(rows), gate_up: Some(gate_up), act: Some(act), out: Some(out) } = saved else {
            return Err(Error::Incomplete);
        };
        let Order { offsets, source, place } = order;
        let (w_gate_up, w_down) = (cx.weights.get(self.gate_up)?, cx.weights.get(self.down)?);
        let mut dout = cx.alloc(out.shape())?;
        let mut dweights = cx.alloc_stat(routing.weights.shape())?;
        let (weights, source, place) = (routing.weights.view(), source.view(), place.view());
        cx.ops.moe_combine_grad(dout.view_mut(), dweights.view_mut(), dy.view(), out.view(), weights, source, place)?;
        let mut dact = cx.alloc(act.shape())?;
        cx.ops.grouped_gemm(GroupedGemm::InputGrad, dact.view_mut(), dout.view(), w_down, offsets.view())?;
        let mut dgate_up = cx.alloc(gate_up.shape())?;
        cx.ops.swiglu_grad(dgate_up.view_mut(), dact.view(), gate_up.view())?;
        let mut drows = cx.alloc(rows.shape())?;
        cx.ops.grouped_gemm(GroupedGemm::InputGrad, drows.view_mut(), dgate_up.view(), w_gate_up, offsets.view())?;
        let mut dx = cx.alloc(x.shape())?;
        cx.ops.moe_combine(dx.view_mut(), drows.view(), None, place)?;
        let dlogits = self.router_backward(cx, &routing, &dweights, aux)?;
        self.add_router_input_grad(cx, &mut dx, &dlogits)?;
        Ok((dx, Work { x, dlogits, offsets, rows, dgate_up, act, dout }))
    }

    /// Adds the gradients of the router and of every expert.
    pub fn backward_weight(&self, cx: &Cx, work: Work, grads: &mut Grads) -> Result<()> {
        let Work { x, dlogits, offsets, rows, dgate_up, act, dout } = work;
        let (dw, beta) = grads.sum_into(self.down);
        cx.ops.grouped_gemm(GroupedGemm::WeightGrad(beta), dw, dout.view(), act.view(), offsets.view())?;
        let (dw, beta) = grads.sum_into(self.gate_up);
        cx.ops.grouped_gemm(GroupedGemm::WeightGrad(beta), dw, dgate_up.view(), rows.view(), offsets.view())?;
        let (dw, beta) = grads.sum_into(self.router);
        Ok(cx.ops.gemm(dw, dlogits.view(), Trans::Yes, x.view(), Trans::No, beta)?)
    }

    /// The router's decision for `x[T, H]`; its logits are never rounded below the stat dtype.
    fn route(&self, cx: &Cx, x: &Tensor) -> Result<Routing> {
        let tokens = x.shape()[0];
        let mut logits = cx.alloc_stat(&[tokens, self.experts])?;
        cx.ops.gemm(logits.view_mut(), x.view(), Trans::No, cx.weights.get(self.router)?, Trans::Yes, Beta::Zero)?;
        let mut probs = cx.alloc_stat(&[tokens, self.experts])?;
        let mut experts = cx.alloc_index(&[tokens, self.top_k])?;
        let mut weights = cx.alloc_stat(&[tokens, self.top_k])?;
        cx.ops.router(probs.view_mut(), experts.view_mut(), weights.view_mut(), logits.view(), self.normalise)?;
        Ok(Routing { logits, probs, experts, weights })
    }

    /// `dlogits[T, E]` from `dweights[T, K]` and from the auxiliary losses.
    fn router_backward(&self, cx: &Cx, r: &Routing, dweights: &Tensor, aux: &AuxGrad) -> Result<Tensor> {
        let mut dlogits = cx.alloc_stat(r.logits.shape())?;
        let extra =
            RouterGrad { balance: aux.balance.as_ref().map(|g| g.view().index(self.row)), z_coef: aux.z_coef, normalised: self.normalise };
        let (probs, experts, weights) = (r.probs.view(), r.experts.view(), r.weights.view());
        cx.ops.router_grad(dlogits.view_mut(), dweights.view(), probs, experts, weights, r.logits.view(), extra)?;
        Ok(dlogits)
    }

    /// `dx[T, H] += dlogits[T, E] . W`.
    fn add_router_input_grad(&self, cx: &Cx, dx: &mut Tensor, dlogits: &Tensor) -> Result<()> {
        let w = cx.weights.get(self.router)?;
        Ok(cx.ops.gemm(dx.view_mut(), dlogits.view(), Trans::No, w, Trans::No, Beta::One)?)
    }

    /// The order of the routed rows by expert.
    fn sort(&self, cx: &Cx, experts: &Tensor) -> Result<Order> {
        let mut offsets = cx.alloc_index(&[self.experts + 1])?;
        let mut source = cx.alloc_index(&[experts.numel()])?;
        let mut place = cx.alloc_index(experts.shape())?;
        cx.ops.moe_sort(offsets.view_mut(), source.view_mut(), place.view_mut(), experts.view())?;
        Ok(Order { offsets, source, place })
    }

    /// `[S, H]`: the row of `x[T, H]` of each routed row.
    fn gather(&self, cx: &Cx, x: &Tensor, order: &Order) -> Result<Tensor> {
        let mut rows = cx.alloc(&[order.source.numel(), self.hidden])?;
        cx.ops.moe_gather(rows.view_mut(), x.view(), order.source.view())?;
        Ok(rows)
    }
}
