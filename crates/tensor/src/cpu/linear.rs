//! Dense and per-expert matrix products, and the bias.
//!
//! Legend: T tokens, N output features, M input features, E experts, S routed rows.

use super::{
    Cpu,
    args::Op,
    float::{Float, accumulate},
    matmul::{Mat, MatMut, product},
    memory,
    tasks::{rows_per_task, split_lengths},
};
use crate::{Beta, DType, Error, GroupedGemm, Result, Tensor, Trans, View, ViewMut};
use std::ops::Range;

/// Rows of one task of a grouped product; above 64, so that `gemm` blocks k alike in every task.
const GROUP_ROWS: usize = 256;

/// See [`Ops::gemm`](crate::Ops::gemm).
pub(super) fn gemm<T: Float>(cpu: &Cpu, c: ViewMut, a: View, ta: Trans, b: View, tb: Trans, beta: Beta) -> Result<()> {
    let op = Op("gemm");
    let [a0, a1] = op.dims("a", a.shape())?;
    let [b0, b1] = op.dims("b", b.shape())?;
    let (m, k) = if ta == Trans::No { (a0, a1) } else { (a1, a0) };
    let (kb, n) = if tb == Trans::No { (b0, b1) } else { (b1, b0) };
    if kb != k {
        let expected = format!("{k} along the summed dim, as a {:?} ({ta:?} transposed) has", a.shape());
        return Err(op.misshapen("b", b.shape(), expected));
    }
    let (a, b) = (op.read::<T>("a", a, &[a0, a1])?, op.read::<T>("b", b, &[b0, b1])?);
    let c = op.write::<T>("c", c, &[m, n])?;
    let view = |x, rows, cols, t| if t == Trans::No { Mat::new(x, rows, cols) } else { Mat::new(x, rows, cols).t() };
    cpu.matmul(c, view(a, a0, a1, ta), view(b, b0, b1, tb), beta);
    Ok(())
}

/// [`Ops::gemm`](crate::Ops::gemm) with a bf16 `b`, computed in f32.
pub(super) fn gemm_mixed(cpu: &Cpu, c: ViewMut, a: View, ta: Trans, b: View, tb: Trans, beta: Beta) -> Result<()> {
    for (what, found) in [("a", a.dtype()), ("c", c.dtype())] {
        if ![DType::F32, DType::BF16].contains(&found) {
            return Err(Error::DType { op: "gemm", what, found, expected: "float32 or bfloat16, beside a bfloat16 b".into() });
        }
    }
    let wide = |x: View| -> Result<Tensor> {
        let mut y = cpu.pooled(DType::F32, x.shape())?;
        memory::copy(cpu, y.view_mut(), x)?;
        Ok(y)
    };
    let (a, b) = (wide(a)?, wide(b)?);
    if c.dtype() == DType::F32 {
        return gemm::<f32>(cpu, c, a.view(), ta, b.view(), tb, beta);
    }
    let mut exact = wide(c.as_view())?;
    gemm::<f32>(cpu, exact.view_mut(), a.view(), ta, b.view(), tb, beta)?;
    memory::copy(cpu, c, exact.view())
}

/// See [`Ops::add_bias`](crate::Ops::add_bias).
pub(super) fn add_bias<T: Float>(cpu: &Cpu, y: ViewMut, bias: View) -> Result<()> {
    let op = Op("add_bias");
    let [t, n] = op.dims("y", y.shape())?;
    let (y, bias) = (op.write::<T>("y", y, &[t, n])?, op.read::<T>("bias", bias, &[n])?);
    cpu.each(
        y.len(),
        y.chunks_mut((rows_per_task(n) * n).max(1)),
        #[inline(always)]
        |rows| {
            for row in rows.chunks_mut(n) {
                accumulate(row, bias);
            }
        },
    );
    Ok(())
}

/// See [`Ops::bias_grad`](crate::Ops::bias_grad).
pub(super) fn bias_grad<T: Float>(cpu: &Cpu, dbias: ViewMut, dy: View) -> Result<()> {
    let op = Op("bias_grad");
    let [t, n] = op.dims("dy", dy.shape())?;
    let (dy, dbias) = (op.read::<T>("dy", dy, &[t, n])?, op.write::<T>("dbias", dbias, &[n])?);
    cpu.sum_rows(
        dbias,
        t,
        n,
        #[inline(always)]
        |first, end, sum| {
            for row in dy[first * n..end * n].chunks(n.max(1)) {
                accumulate(sum, row);
            }
        },
    );
    Ok(())
}

/// See [`Ops::grouped_gemm`](crate::Ops::grouped_gemm).
pub(super) fn grouped_gemm<T: Float>(cpu: &Cpu, kind: GroupedGemm, c: ViewMut, a: View, b: View, offsets: View) -> Result<()> {
    let op = Op("grouped_gemm");
    let [e1] = op.dims("offsets", offsets.shape())?;
    let experts = e1.checked_sub(1).ok_or_else(|| op.misshapen("offsets", &[0], "[E+1]".into()))?;
    let offsets = op.read::<i32>("offsets", offsets, &[e1])?;
    let [s, a1] = op.dims("a", a.shape())?;
    op.bounds("offsets", offsets, s)?;
    let weights_shape = if matches!(kind, GroupedGemm::WeightGrad(_)) { c.shape() } else { b.shape() };
    let [we, n, m] = op.dims("weights [E, N, M]", weights_shape)?;
    op.require(we == experts, "weights [E, N, M]", &[we, n, m], "E as in offsets [E+1]")?;
    let (a_width, c_shape, b_shape): (_, &[usize], &[usize]) = match kind {
        GroupedGemm::Forward => (m, &[s, n], &[experts, n, m]),
        GroupedGemm::InputGrad => (n, &[s, m], &[experts, n, m]),
        GroupedGemm::WeightGrad(_) => (n, &[experts, n, m], &[s, m]),
    };
    op.require(a1 == a_width, "a", &[s, a1], "one row per routed row, as wide as the weights demand")?;
    let (a, b, c) = (op.read::<T>("a", a, &[s, a1])?, op.read::<T>("b", b, b_shape)?, op.write::<T>("c", c, c_shape)?);
    let groups: Vec<Range<usize>> = offsets.windows(2).map(|w| w[0] as usize..w[1] as usize).collect();
    let work = s.saturating_mul(n).saturating_mul(m);
    if let GroupedGemm::WeightGrad(beta) = kind {
        grouped_weight_grad(cpu, c, a, b, &groups, [n, m], work, beta);
    } else {
        grouped_rows(cpu, kind, c, a, b, &groups, [n, m], work);
    }
    Ok(())
}

/// Forward and input gradient: tasks are runs of rows of one expert.
fn grouped_rows<T: Float>(
    cpu: &Cpu,
    kind: GroupedGemm,
    c: &mut [T],
    a: &[T],
    b: &[T],
    groups: &[Range<usize>],
    [n, m]: [usize; 2],
    work: usize,
) {
    let (inputs, outputs) = if kind == GroupedGemm::Forward { (m, n) } else { (n, m) };
    let mut tasks = Vec::new();
    for (expert, rows) in groups.iter().enumerate() {
        // Even pieces, so that none is small unless the whole group is.
        let pieces = rows.len().div_ceil(GROUP_ROWS);
        let step = rows.len().div_ceil(pieces.max(1)).max(1);
        tasks.extend(rows.clone().step_by(step).map(|first| (expert, first..(first + step).min(rows.end))));
    }
    let outs = split_lengths(c, tasks.iter().map(|(_, rows)| rows.len() * outputs));
    cpu.each(
        work,
        outs.into_iter().zip(&tasks),
        #[inline(always)]
        |(c, (expert, rows))| {
            let w = Mat::new(&b[expert * n * m..(expert + 1) * n * m], n, m);
            let a = Mat::new(&a[rows.start * inputs..rows.end * inputs], rows.len(), inputs);
            let w = if kind == GroupedGemm::Forward { w.t() } else { w };
            product(MatMut::new(c, rows.len(), outputs), a, w, Beta::Zero);
        },
    );
}

/// Weight gradient: tasks are runs of output features of one expert.
fn grouped_weight_grad<T: Float>(
    cpu: &Cpu,
    c: &mut [T],
    dy: &[T],
    x: &[T],
    groups: &[Range<usize>],
    [n, m]: [usize; 2],
    work: usize,
    beta: Beta,
) {
    if n * m == 0 {
        return;
    }
    let step = n.div_ceil(n.div_ceil(GROUP_ROWS));
    let tasks = c.chunks_mut(n * m).zip(groups).filter(|(_, rows)| !(rows.is_empty() && beta == Beta::One));
    let tasks = tasks.flat_map(|(c, rows)| c.chunks_mut(step * m).enumerate().map(move |(i, c)| (i * step, c, rows.clone())));
    cpu.each(
        work,
        tasks,
        #[inline(always)]
        |(first, c, rows)| {
            let features = c.len() / m;
            if rows.is_empty() {
                c.fill(T::ZERO);
                return;
            }
            let dy = &dy[rows.start * n + first..(rows.end - 1) * n + first + features];
            let dy = Mat::strided(dy, rows.len(), features, n);
            let x = Mat::new(&x[rows.start * m..rows.end * m], rows.len(), m);
            product(MatMut::new(c, features, m), dy.t(), x, beta);
        },
    );
}
