//! Auxiliary losses of the router: load balancing (Hugging Face's or Megatron's) and the z-loss.
//!
//! The forward pass counts, per sparse layer, how many rows each expert received and the sum of its probabilities. After
//! the last layer these give the loss, and per layer one gradient row that is the same for every token.
//! Layers never count by themselves, so that a recomputed forward counts nothing twice.
//!
//! Legend: L sparse layers, E experts, T tokens.

use crate::moe::Routing;
use crate::{Cx, Result};
use temper_comm::{Comm, Reduce};
use temper_config::Arch;
use temper_tensor::{Balance, Ops, Tensor};

/// Which auxiliary losses to train on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AuxSettings {
    /// Formula of the load-balancing loss.
    pub kind: Balance,
    /// Its coefficient; at 0 it is only reported.
    pub coef: f64,
    /// Coefficient of the z-loss `mean_t(logsumexp(logits_t)^2)`, summed over layers.
    pub z_coef: f64,
    /// Share of this micro-batch in the step, 1 / number of micro-batches. Multiplies both coefficients.
    pub scale: f64,
}

/// Statistics of the routers of one micro-batch.
pub struct AuxStats {
    counts: Tensor,
    prob_sums: Tensor,
    z_sum: Tensor,
    top_k: usize,
}

/// Values of the auxiliary losses without coefficients, each `[1]` on the backend.
pub struct AuxLoss {
    /// Load-balancing loss: over all layers pooled (`Balance::Hf`) or the sum over layers (`Balance::Megatron`).
    pub balance: Tensor,
    /// z-loss, the sum over layers.
    pub z: Tensor,
    /// Number of sparse layers L, for a mean over layers.
    pub layers: usize,
}

/// What the auxiliary losses add to the gradient of the router's logits.
#[derive(Default)]
pub struct AuxGrad {
    /// Gradient with respect to every token's probabilities, [L, E]; absent when the balancing loss is off.
    pub balance: Option<Tensor>,
    /// Coefficient of the z-loss times the scale.
    pub z_coef: f64,
}

/// Sparse layers and experts; `None` for a model without experts.
fn shape(arch: &Arch) -> Option<[usize; 2]> {
    let layers = (0..arch.layers).filter(|&i| arch.is_moe_layer(i)).count();
    arch.moe.as_ref().filter(|_| layers > 0).map(|moe| [layers, moe.experts])
}

impl AuxGrad {
    /// What [`AuxStats::finish`] gives on another rank, its values not yet known.
    pub fn expected(cx: &Cx, arch: &Arch, s: &AuxSettings) -> Result<AuxGrad> {
        let Some(shape) = shape(arch) else { return Ok(AuxGrad::default()) };
        let balance = (s.coef != 0.0).then(|| cx.alloc_stat(&shape)).transpose()?;
        Ok(AuxGrad { balance, z_coef: s.z_coef * s.scale })
    }
}

impl AuxStats {
    /// Zeros; `None` for a model without experts.
    pub fn new(cx: &Cx, arch: &Arch) -> Result<Option<AuxStats>> {
        let (Some(shape), Some(moe)) = (shape(arch), &arch.moe) else { return Ok(None) };
        let zeros = |shape: &[usize]| cx.ops.zeros(cx.dtype().stat(), shape);
        Ok(Some(AuxStats { counts: zeros(&shape)?, prob_sums: zeros(&shape)?, z_sum: zeros(&[1])?, top_k: moe.top_k }))
    }

    /// Counts the decision of sparse layer `row` on the first `tokens` rows.
    pub fn count(&mut self, ops: &dyn Ops, row: usize, r: &Routing, tokens: usize) -> Result<()> {
        let (counts, prob_sums) = (self.counts.view_mut().index(row), self.prob_sums.view_mut().index(row));
        let [probs, experts, logits] = [&r.probs, &r.experts, &r.logits].map(|x| x.view().slice_rows(0..tokens));
        ops.router_stats(counts, prob_sums, self.z_sum.view_mut(), probs, experts, logits)?;
        Ok(())
    }

    /// Adds what the other ranks of the micro-batch counted.
    pub fn sum(&mut self, comm: &dyn Comm) -> Result<()> {
        for x in self.tensors_mut() {
            comm.all_reduce(x.view_mut(), Reduce::Sum)?.wait()?;
        }
        Ok(())
    }

    /// What it consists of, for a pipeline that hands it on.
    pub fn tensors_mut(&mut self) -> [&mut Tensor; 3] {
        [&mut self.counts, &mut self.prob_sums, &mut self.z_sum]
    }

    /// As [`AuxStats::tensors_mut`], taken out.
    pub fn into_tensors(self) -> [Tensor; 3] {
        [self.counts, self.prob_sums, self.z_sum]
    }

    /// The losses over `tokens` tokens a layer, and what they add to the gradients.
    pub fn finish(mut self, ops: &dyn Ops, tokens: usize, s: &AuxSettings) -> Result<(AuxLoss, AuxGrad)> {
        let tokens = tokens.max(1);
        let stat = self.counts.dtype();
        let mut balance = ops.alloc(stat, &[1])?;
        let mut grad = ops.alloc(stat, self.counts.shape())?;
        let (counts, prob_sums) = (self.counts.view(), self.prob_sums.view());
        ops.balance_loss(balance.view_mut(), grad.view_mut(), counts, prob_sums, tokens, self.top_k, s.kind, s.coef * s.scale)?;
        ops.scale(self.z_sum.view_mut(), 1.0 / tokens as f64)?;
        let aux_grad = AuxGrad { balance: (s.coef != 0.0).then_some(grad), z_coef: s.z_coef * s.scale };
        Ok((AuxLoss { balance, z: self.z_sum, layers: self.counts.shape()[0] }, aux_grad))
    }
}
