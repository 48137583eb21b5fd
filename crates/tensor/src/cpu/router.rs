//! The router of a mixture of experts: probabilities, choice, statistics, balancing loss, gradient.
//!
//! Legend: T tokens, E experts, K experts per token, L layers.

use super::{
    Cpu,
    args::Op,
    float::{self, Float},
    tasks::rows_per_task,
};
use crate::{Balance, Result, RouterGrad, View, ViewMut};

/// See [`Ops::router`](crate::Ops::router).
pub(super) fn router<T: Float>(cpu: &Cpu, probs: ViewMut, experts: ViewMut, weights: ViewMut, logits: View, normalise: bool) -> Result<()> {
    let op = Op("router");
    let ([t, e], [_, k]) = (op.dims("logits", logits.shape())?, op.dims("experts", experts.shape())?);
    op.require(k <= e, "experts", &[t, k], "no more experts per token than there are")?;
    let logits = op.read::<T>("logits", logits, &[t, e])?;
    let (probs, experts) = (op.write::<T>("probs", probs, &[t, e])?, op.write::<i32>("experts", experts, &[t, k])?);
    let weights = op.write::<T>("weights", weights, &[t, k])?;
    let rows = rows_per_task(e);
    let size = |n: usize| (rows * n).max(1);
    let chosen = experts.chunks_mut(size(k)).zip(weights.chunks_mut(size(k)));
    let tasks = probs.chunks_mut(size(e)).zip(logits.chunks(size(e))).zip(chosen);
    cpu.each(
        t * e,
        tasks,
        #[inline(always)]
        |((probs, logits), (experts, weights))| {
            let chosen = experts.chunks_mut(k).zip(weights.chunks_mut(k));
            for ((probs, logits), (experts, weights)) in probs.chunks_mut(e).zip(logits.chunks(e)).zip(chosen) {
                probs.copy_from_slice(logits);
                let mass = float::exp_shifted(probs, float::max(logits));
                float::scale(probs, T::ONE / mass);
                choose(experts, weights, probs);
                if normalise {
                    let sum = weights.iter().fold(T::ZERO, |s, &w| s + w);
                    float::scale(weights, T::ONE / sum);
                }
            }
        },
    );
    Ok(())
}

/// The largest of `probs` in descending order, equal ones by index.
fn choose<T: Float>(experts: &mut [i32], weights: &mut [T], probs: &[T]) {
    let mut filled = 0;
    for (e, &p) in probs.iter().enumerate() {
        // Insertion into the sorted list; a later expert passes only strictly smaller ones.
        let mut at = filled;
        while at > 0 && weights[at - 1] < p {
            at -= 1;
        }
        if at == experts.len() {
            continue;
        }
        filled = (filled + 1).min(experts.len());
        experts[at..filled].rotate_right(1);
        weights[at..filled].rotate_right(1);
        (experts[at], weights[at]) = (e as i32, p);
    }
}

/// See [`Ops::router_stats`](crate::Ops::router_stats).
pub(super) fn router_stats<T: Float>(
    cpu: &Cpu,
    counts: ViewMut,
    prob_sums: ViewMut,
    z_sum: ViewMut,
    probs: View,
    experts: View,
    logits: View,
) -> Result<()> {
    let op = Op("router_stats");
    let ([t, e], [_, k]) = (op.dims("probs", probs.shape())?, op.dims("experts", experts.shape())?);
    let (probs, logits) = (op.read::<T>("probs", probs, &[t, e])?, op.read::<T>("logits", logits, &[t, e])?);
    let experts = op.read::<i32>("experts", experts, &[t, k])?;
    op.indices("expert", experts, e)?;
    let (counts, prob_sums) = (op.write::<T>("counts", counts, &[e])?, op.write::<T>("prob_sums", prob_sums, &[e])?);
    let z_sum = op.write::<T>("z_sum", z_sum, &[1])?;
    for &chosen in experts {
        counts[chosen as usize] += T::ONE;
    }
    cpu.sum_rows(
        prob_sums,
        t,
        e,
        #[inline(always)]
        |first, end, sum| {
            for row in probs[first * e..end * e].chunks(e.max(1)) {
                float::accumulate(sum, row);
            }
        },
    );
    cpu.sum_rows(
        z_sum,
        t,
        e,
        #[inline(always)]
        |first, end, sum| {
            for row in logits[first * e..end * e].chunks(e.max(1)) {
                let lse = log_sum_exp(row);
                sum[0] += lse * lse;
            }
        },
    );
    Ok(())
}

#[inline(always)]
fn log_sum_exp<T: Float>(row: &[T]) -> T {
    let top = float::max(row);
    top + float::sum_exp_shifted(row, top).ln()
}

/// See [`Ops::balance_loss`](crate::Ops::balance_loss).
///
/// HF, all layers pooled: `E * sum_e (C_e / LT) (P_e / LT)` with `C_e`, `P_e` the sums of counts and probabilities over layers.
/// Megatron: `sum_l E / (K T^2) * sum_e counts_le prob_sums_le`. Both are 0 when there are no tokens.
pub(super) fn balance_loss<T: Float>(
    loss: ViewMut,
    grad: ViewMut,
    counts: View,
    prob_sums: View,
    tokens: usize,
    top_k: usize,
    kind: Balance,
    coef: f64,
) -> Result<()> {
    let op = Op("balance_loss");
    let [l, e] = op.dims("counts", counts.shape())?;
    let (counts, prob_sums) = (op.read::<T>("counts", counts, &[l, e])?, op.read::<T>("prob_sums", prob_sums, &[l, e])?);
    let (loss, grad) = (op.write::<T>("loss", loss, &[1])?, op.write::<T>("grad", grad, &[l, e])?);
    op.require(top_k > 0, "top_k", &[top_k], "at least one expert per token")?;
    if tokens == 0 || l == 0 {
        loss.fill(T::ZERO);
        grad.fill(T::ZERO);
        return Ok(());
    }
    let (layers, tokens) = (l as f64, tokens as f64);
    let column = |x: &[T], i: usize| (0..l).map(|l| x[l * e + i].f64()).sum::<f64>();
    // Both losses are sum over (layer, expert) of factor * n * P, with n the counts of that layer or pooled.
    let (factor, pooled) = match kind {
        Balance::Hf => (e as f64 / (layers * tokens).powi(2), true),
        Balance::Megatron => (e as f64 / (top_k as f64 * tokens * tokens), false),
    };
    let mut total = 0.0;
    for i in 0..e {
        let all = column(counts, i);
        for l in 0..l {
            let at = l * e + i;
            let n = if pooled { all } else { counts[at].f64() };
            total += factor * n * prob_sums[at].f64();
            grad[at] = T::of(coef * factor * n);
        }
    }
    loss[0] = T::of(total);
    Ok(())
}

/// See [`Ops::router_grad`](crate::Ops::router_grad).
///
/// With s the sum of the chosen probabilities, normalised weights `w_k = p_k / s` give `dp_k = (dw_k - sum_j dw_j w_j) / s`;
/// then `dp += balance`, `dlogits = p (dp - sum_e p_e dp_e) + 2 c / T * lse * p`.
pub(super) fn router_grad<T: Float>(
    cpu: &Cpu,
    dlogits: ViewMut,
    dweights: View,
    probs: View,
    experts: View,
    weights: View,
    logits: View,
    extra: RouterGrad,
) -> Result<()> {
    let op = Op("router_grad");
    let ([t, e], [_, k]) = (op.dims("probs", probs.shape())?, op.dims("experts", experts.shape())?);
    let (probs, logits) = (op.read::<T>("probs", probs, &[t, e])?, op.read::<T>("logits", logits, &[t, e])?);
    let (weights, dweights) = (op.read::<T>("weights", weights, &[t, k])?, op.read::<T>("dweights", dweights, &[t, k])?);
    let experts = op.read::<i32>("experts", experts, &[t, k])?;
    op.indices("expert", experts, e)?;
    let balance = extra.balance.map(|b| op.read::<T>("balance", b, &[e])).transpose()?;
    let dlogits = op.write::<T>("dlogits", dlogits, &[t, e])?;
    let z = T::of(2.0 * extra.z_coef / t.max(1) as f64);
    let rows = rows_per_task(e);
    cpu.each(
        t * e,
        dlogits.chunks_mut((rows * e).max(1)).enumerate(),
        #[inline(always)]
        |(i, dlogits)| {
            for (j, dl) in dlogits.chunks_mut(e).enumerate() {
                let t = i * rows + j;
                let (p, chosen) = (&probs[t * e..(t + 1) * e], &experts[t * k..(t + 1) * k]);
                let (w, dw) = (&weights[t * k..(t + 1) * k], &dweights[t * k..(t + 1) * k]);
                match balance {
                    Some(b) => dl.copy_from_slice(b),
                    None => dl.fill(T::ZERO),
                }
                if extra.normalised {
                    let sum = chosen.iter().fold(T::ZERO, |s, &c| s + p[c as usize]);
                    let pull = float::dot(dw, w);
                    chosen.iter().zip(dw).for_each(|(&c, &dw)| dl[c as usize] += (dw - pull) / sum);
                } else {
                    chosen.iter().zip(dw).for_each(|(&c, &dw)| dl[c as usize] += dw);
                }
                let mean = float::dot(p, dl);
                let lift = if extra.z_coef == 0.0 { T::ZERO } else { z * log_sum_exp(&logits[t * e..(t + 1) * e]) };
                for (dl, &p) in dl.iter_mut().zip(p) {
                    *dl = p * (*dl - mean + lift);
                }
            }
        },
    );
    Ok(())
}
