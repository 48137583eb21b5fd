//! RMSNorm, the step between the QKV product and attention, SwiGLU.

use super::{Bench, inner, numeric_grad, plus};
use temper_tensor::RopeTable;

const EPS: f64 = 1e-3;

fn rstd(row: &[f64]) -> f64 {
    1.0 / (inner(row, row) / row.len() as f64 + EPS).sqrt()
}

fn normed(x: &[f64], w: &[f64]) -> Vec<f64> {
    x.chunks(w.len()).flat_map(|row| row.iter().zip(w).map(|(x, w)| w * x * rstd(row)).collect::<Vec<_>>()).collect()
}

pub fn rms_norm(b: &mut Bench, n: usize, h: usize) {
    let (x, other, w) = (b.randn(&[n, h], 1.0), b.randn(&[n, h], 1.0), b.randn(&[h], 1.0));
    let (mut sum, mut y, mut r) = (b.output(&[n, h]), b.output(&[n, h]), b.stat_output(&[n]));
    b.ops.add_rms_norm(sum.view_mut(), y.view_mut(), r.view_mut(), x.view(), other.view(), w.view(), EPS).unwrap();
    let total = plus(&x.host, &other.host);
    b.check("add: sum", &sum, || total.clone());
    b.check("add: y", &y, || normed(&total, &w.host));
    b.check("add: rstd", &r, || total.chunks(h).map(rstd).collect());
    b.ops.rms_norm(y.view_mut(), r.view_mut(), x.view(), w.view(), EPS).unwrap();
    b.check("y", &y, || normed(&x.host, &w.host));
    b.check("rstd", &r, || x.host.chunks(h).map(rstd).collect());

    let (dy, mut dw) = (b.randn(&[n, h], 1.0), b.randn(&[h], 1.0));
    let mut dx = b.output(&[n, h]);
    // Rows are independent, so each is differentiated alone.
    let by_x = || -> Vec<f64> {
        let row = |(x, dy): (&[f64], &[f64])| numeric_grad(x, |x| inner(&normed(x, &w.host), dy));
        x.host.chunks(h).zip(dy.host.chunks(h)).flat_map(row).collect()
    };
    b.ops.rms_norm_grad_input(dx.view_mut(), dy.view(), x.view(), w.view(), r.view(), None).unwrap();
    b.check_grad("dx", &dx, by_x);
    b.ops.rms_norm_grad_input(dx.view_mut(), dy.view(), x.view(), w.view(), r.view(), Some(other.view())).unwrap();
    b.check_grad("dx with residual", &dx, || plus(&by_x(), &other.host));
    b.ops.rms_norm_grad_weight(dw.tensor.view_mut(), dy.view(), x.view(), r.view()).unwrap();
    b.check_grad("dw", &dw.tensor, || {
        let by_w = |j: usize| -> f64 { x.host.chunks(h).zip(dy.host.chunks(h)).map(|(x, dy)| dy[j] * x[j] * rstd(x)).sum() };
        (0..h).map(|j| dw.host[j] + by_w(j)).collect()
    });
}

pub fn swiglu_row(x: &[f64]) -> Vec<f64> {
    let (gate, up) = x.split_at(x.len() / 2);
    gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect()
}

pub fn swiglu(b: &mut Bench, t: usize, i: usize) {
    let (x, dy) = (b.randn(&[t, 2 * i], 3.0), b.randn(&[t, i], 1.0));
    let (mut y, mut dx) = (b.output(&[t, i]), b.output(&[t, 2 * i]));
    b.ops.swiglu(y.view_mut(), x.view()).unwrap();
    b.check("y", &y, || x.host.chunks(2 * i).flat_map(swiglu_row).collect());
    b.ops.swiglu_grad(dx.view_mut(), dy.view(), x.view()).unwrap();
    b.check_grad("dgate_up", &dx, || {
        let row = |(x, dy): (&[f64], &[f64])| numeric_grad(x, |x| inner(&swiglu_row(x), dy));
        x.host.chunks(2 * i).zip(dy.host.chunks(i)).flat_map(row).collect()
    });
}

/// The rotary tables of `p` positions, as the contract defines them.
fn tables(p: usize, d: usize) -> (Vec<f64>, Vec<f64>) {
    let angle = |at: usize| (at / (d / 2)) as f64 * 100f64.powf(-2.0 * (at % (d / 2)) as f64 / d as f64);
    let n = p * d / 2;
    ((0..n).map(|i| angle(i).cos()).collect(), (0..n).map(|i| angle(i).sin()).collect())
}

/// Everything between the product and attention for one token: [q | k | v], rotated, with the rstd of each head.
struct Reference {
    nq: usize,
    nk: usize,
    d: usize,
    weights: Option<(Vec<f64>, Vec<f64>)>,
    cos: Vec<f64>,
    sin: Vec<f64>,
    positions: Vec<usize>,
}

impl Reference {
    fn width(&self) -> usize {
        (self.nq + 2 * self.nk) * self.d
    }

    fn token(&self, t: usize, x: &[f64]) -> Vec<f64> {
        let mut out = Vec::new();
        for (h, head) in x.chunks(self.d).enumerate() {
            if h >= self.nq + self.nk {
                out.extend_from_slice(head);
                continue;
            }
            let head = match &self.weights {
                Some((wq, wk)) => normed(head, if h < self.nq { wq } else { wk }),
                None => head.to_vec(),
            };
            let half = self.d / 2;
            for i in 0..self.d {
                let at = self.positions[t] * half + i % half;
                let turned = if i < half { -head[i + half] } else { head[i - half] };
                out.push(head[i] * self.cos[at] + turned * self.sin[at]);
            }
        }
        out
    }

    /// Columns `from..to` heads of every token of `x`.
    fn heads(&self, x: &[f64], from: usize, to: usize) -> Vec<f64> {
        let all = x.chunks(self.width()).enumerate().map(|(t, x)| self.token(t, x));
        all.flat_map(|y| y[from * self.d..to * self.d].to_vec()).collect()
    }
}

fn reference(b: &mut Bench, t: usize, nq: usize, nk: usize, d: usize, norm: bool) -> Reference {
    let limit = t + 3;
    let (cos, sin) = tables(limit, d);
    let (cos, sin) = (b.stat(&[limit, d / 2], cos).host, b.stat(&[limit, d / 2], sin).host);
    let weights = norm.then(|| (b.randn(&[d], 1.0).host, b.randn(&[d], 1.0).host));
    let positions = b.random_indices(t, limit);
    Reference { nq, nk, d, weights, cos, sin, positions }
}

pub fn qkv_prepare(b: &mut Bench, t: usize, nq: usize, nk: usize, d: usize, norm: bool) {
    let e = reference(b, t, nq, nk, d, norm);
    let limit = t + 3;
    let (cos, sin) = (b.stat(&[limit, d / 2], e.cos.clone()), b.stat(&[limit, d / 2], e.sin.clone()));
    let positions = b.indices(&[t], &e.positions);
    let rope = RopeTable { cos: cos.view(), sin: sin.view() };
    let x = b.randn(&[t, e.width()], 1.0);
    let (mut q, mut k, mut v) = (b.output(&[t, nq, d]), b.output(&[t, nk, d]), b.output(&[t, nk, d]));
    let mut r = b.stat_output(&[t, nq + nk]);
    let weights = e.weights.clone().map(|(wq, wk)| (b.input(&[d], wq), b.input(&[d], wk)));
    let given = weights.as_ref().map(|(wq, wk)| (wq.view(), wk.view(), EPS));
    let saved = norm.then(|| r.view_mut());
    b.ops.qkv_prepare(q.view_mut(), k.view_mut(), v.view_mut(), saved, x.view(), given, rope, positions.view()).unwrap();
    b.check("q", &q, || e.heads(&x.host, 0, nq));
    b.check("k", &k, || e.heads(&x.host, nq, nq + nk));
    b.check("v", &v, || e.heads(&x.host, nq + nk, nq + 2 * nk));
    if norm {
        let of_token = |x: &[f64]| x.chunks(d).take(nq + nk).map(rstd).collect::<Vec<_>>();
        b.check("rstd", &r, || x.host.chunks(e.width()).flat_map(of_token).collect());
    }
}

pub fn qkv_prepare_grad(b: &mut Bench, t: usize, nq: usize, nk: usize, d: usize, norm: bool) {
    let e = reference(b, t, nq, nk, d, norm);
    let (limit, width) = (t + 3, e.width());
    let (cos, sin) = (b.stat(&[limit, d / 2], e.cos.clone()), b.stat(&[limit, d / 2], e.sin.clone()));
    let positions = b.indices(&[t], &e.positions);
    let rope = RopeTable { cos: cos.view(), sin: sin.view() };
    let x = b.randn(&[t, width], 1.0);
    let r = b.stat(&[t, nq + nk], x.host.chunks(width).flat_map(|x| x.chunks(d).take(nq + nk).map(rstd).collect::<Vec<_>>()).collect());
    let (dq, dk, dv) = (b.randn(&[t, nq, d], 1.0), b.randn(&[t, nk, d], 1.0), b.randn(&[t, nk, d], 1.0));
    let weights = e.weights.clone().map(|(wq, wk)| (b.input(&[d], wq), b.input(&[d], wk)));
    let given = weights.as_ref().map(|(wq, wk)| (wq.view(), wk.view(), r.view()));
    let mut dx = b.output(&[t, width]);
    b.ops.qkv_prepare_grad_input(dx.view_mut(), dq.view(), dk.view(), dv.view(), x.view(), given, rope, positions.view()).unwrap();
    let dy = |t: usize| {
        let row = |x: &[f64], n: usize| x[t * n * d..(t + 1) * n * d].to_vec();
        [row(&dq.host, nq), row(&dk.host, nk), row(&dv.host, nk)].concat()
    };
    b.check_grad("dqkv", &dx, || {
        let row = |(t, x): (usize, &[f64])| numeric_grad(x, |x| inner(&e.token(t, x), &dy(t)));
        x.host.chunks(width).enumerate().flat_map(row).collect()
    });
    if !norm {
        return;
    }
    let (mut dwq, mut dwk) = (b.randn(&[d], 1.0), b.randn(&[d], 1.0));
    let outs = (dwq.tensor.view_mut(), dwk.tensor.view_mut());
    b.ops.qk_norm_grad_weight(outs.0, outs.1, dq.view(), dk.view(), x.view(), r.view(), rope, positions.view()).unwrap();
    let by_weights = || {
        let (wq, wk) = e.weights.clone().unwrap();
        numeric_grad(&[wq, wk].concat(), |w| {
            let (wq, wk) = w.split_at(d);
            let weights = Some((wq.to_vec(), wk.to_vec()));
            let e = Reference { weights, cos: e.cos.clone(), sin: e.sin.clone(), positions: e.positions.clone(), ..e };
            x.host.chunks(width).enumerate().map(|(t, x)| inner(&e.token(t, x), &dy(t))).sum()
        })
    };
    b.check_grad("dwq", &dwq.tensor, || plus(&dwq.host, &by_weights()[..d]));
    b.check_grad("dwk", &dwk.tensor, || plus(&dwk.host, &by_weights()[d..]));
}
