//! The router: `kernels/router.cu`. Everything is f32. T tokens, E experts, K experts a token, L layers.
#![allow(unsafe_code)] // clears scratch memory

use super::reduce::{ColumnSum, chunks, column_sum};
use super::{Op, elementwise};
use crate::Cuda;
use crate::kernels::{Grid, Variant, args};
use temper_tensor::{Balance, DType, Result, RouterGrad, View, ViewMut};

const FILE: &str = "router.cu";

/// The kernel for E experts out of those for 1, 2, 4, 8 and 16 experts a lane.
fn by_size(op: Op, logits: View, experts: usize, names: [&'static str; 5]) -> Result<&'static str> {
    match experts.div_ceil(32).next_power_of_two() {
        n @ (1 | 2 | 4 | 8 | 16) if experts > 0 => Ok(names[n.trailing_zeros() as usize]),
        _ => op.wrong("logits", logits, "[T, E] with E in 1..=512"),
    }
}

pub fn router(c: &Cuda, probs: ViewMut, experts: ViewMut, weights: ViewMut, logits: View, normalise: bool) -> Result<()> {
    let op = Op("router");
    let [t, e] = op.dims("logits", logits)?;
    let [_, k] = op.dims("experts", experts.as_view())?;
    if k == 0 || k > e.min(32) {
        return op.wrong("experts", experts.as_view(), format!("[T, K] with K in 1..={}", e.min(32)));
    }
    let kernel = by_size(op, logits, e, ["router_1", "router_2", "router_4", "router_8", "router_16"])?;
    let x = op.input("logits", logits, DType::F32, &[t, e])?;
    let (p, i) = (op.output("probs", &probs, DType::F32, &[t, e])?, op.output("experts", &experts, DType::I32, &[t, k])?);
    let w = op.output("weights", &weights, DType::F32, &[t, k])?;
    Ok(c.kernels.launch(FILE, Variant::PLAIN, kernel, Grid::line(t.div_ceil(4), 128), args![p, i, w, x, t, e, k, normalise])?)
}

pub fn stats(c: &Cuda, counts: ViewMut, prob_sums: ViewMut, z_sum: ViewMut, probs: View, experts: View, logits: View) -> Result<()> {
    let op = Op("router_stats");
    let [t, e] = op.dims("logits", logits)?;
    let [_, k] = op.dims("experts", experts)?;
    let x = op.input("logits", logits, DType::F32, &[t, e])?;
    let p = op.input("probs", probs, DType::F32, &[t, e])?;
    let i = op.input("experts", experts, DType::I32, &[t, k])?;
    let (n, s) = (op.output("counts", &counts, DType::F32, &[e])?, op.output("prob_sums", &prob_sums, DType::F32, &[e])?);
    let z = op.output("z_sum", &z_sum, DType::F32, &[1])?;
    if t == 0 {
        return Ok(());
    }
    column_sum(c, s, DType::F32, p, DType::F32, t, e, ColumnSum::Plain)?;

    let tally = c.scratch(e * 4)?;
    // SAFETY: our own scratch.
    unsafe { c.device.memset(tally.address(), 0, e * 4)? };
    let grid = Grid::line((t * k).div_ceil(1024).min(c.device.multiprocessors * 2), 256).shared(e * 4);
    c.kernels.launch(FILE, Variant::PLAIN, "router_counts", grid, args![tally.address(), i, t * k, e])?;
    c.kernels.launch(FILE, Variant::PLAIN, "add_counts", Grid::line(e.div_ceil(128), 128), args![n, tally.address(), e])?;

    let kernel = by_size(op, logits, e, ["router_z_1", "router_z_2", "router_z_4", "router_z_8", "router_z_16"])?;
    let (parts, per_block) = chunks(c, t, 2);
    let partial = c.scratch(parts * 4)?;
    c.kernels.launch(FILE, Variant::PLAIN, kernel, Grid::line(parts, 256), args![partial.address(), x, t, per_block, e])?;
    column_sum(c, z, DType::F32, partial.address(), DType::F32, parts, 1, ColumnSum::Plain)
}

pub fn balance_loss(
    c: &Cuda,
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
    let [l, e] = op.dims("counts", counts)?;
    let (n, p) = (op.input("counts", counts, DType::F32, &[l, e])?, op.input("prob_sums", prob_sums, DType::F32, &[l, e])?);
    let (o, g) = (op.output("loss", &loss, DType::F32, &[1])?, op.output("grad", &grad, DType::F32, &[l, e])?);
    if top_k == 0 {
        return op.wrong("counts", counts, "those of at least one expert per token");
    }
    if tokens == 0 || l == 0 {
        elementwise::fill(c, loss, 0.0)?;
        return elementwise::fill(c, grad, 0.0);
    }
    let a = args![o, g, n, p, l, e, tokens as f32, top_k, kind == Balance::Megatron, coef as f32];
    Ok(c.kernels.launch(FILE, Variant::PLAIN, "balance_loss", Grid::line(1, 256), a)?)
}

pub fn backward(
    c: &Cuda,
    dlogits: ViewMut,
    dweights: View,
    probs: View,
    experts: View,
    weights: View,
    logits: View,
    extra: RouterGrad,
) -> Result<()> {
    let op = Op("router_grad");
    let [t, e] = op.dims("logits", logits)?;
    let [_, k] = op.dims("experts", experts)?;
    if k == 0 || k > 32 {
        return op.wrong("experts", experts, "[T, K] with K in 1..=32");
    }
    let kernel = by_size(op, logits, e, ["router_grad_1", "router_grad_2", "router_grad_4", "router_grad_8", "router_grad_16"])?;
    let (d, x) = (op.output("dlogits", &dlogits, DType::F32, &[t, e])?, op.input("logits", logits, DType::F32, &[t, e])?);
    let (dw, w) = (op.input("dweights", dweights, DType::F32, &[t, k])?, op.input("weights", weights, DType::F32, &[t, k])?);
    let (p, i) = (op.input("probs", probs, DType::F32, &[t, e])?, op.input("experts", experts, DType::I32, &[t, k])?);
    let b = extra.balance.map(|b| op.input("balance", b, DType::F32, &[e])).transpose()?.unwrap_or(0);
    let a = args![d, dw, p, i, w, x, b, t, e, k, extra.z_coef as f32, extra.normalised];
    Ok(c.kernels.launch(FILE, Variant::PLAIN, kernel, Grid::line(t.div_ceil(4), 128), a)?)
}
