//! Element-wise operations, products, embedding, loss, optimizer.

use super::{Bench, inner, numeric_grad, plus};
use temper_tensor::{AdamW, AdamWState, Beta, DType, Tensor, Trans};

pub fn elementwise(b: &mut Bench, n: usize) {
    let (x, y) = (b.randn(&[n], 2.0), b.randn(&[n], 1.0));
    let mut out = b.output(&[n]);
    b.ops.add(out.view_mut(), x.view(), y.view()).unwrap();
    b.check("add", &out, || plus(&x.host, &y.host));
    b.ops.copy(out.view_mut(), x.view()).unwrap();
    b.check("copy", &out, || x.host.clone());
    b.ops.add_assign(out.view_mut(), y.view()).unwrap();
    b.check("add_assign", &out, || plus(&x.host, &y.host));
    b.ops.scale(out.view_mut(), 0.75).unwrap();
    b.check("scale", &out, || plus(&x.host, &y.host).iter().map(|v| v * 0.75).collect());
    b.ops.fill(out.view_mut(), -3.5).unwrap();
    b.check("fill", &out, || vec![-3.5; n]);
    let zeros = b.ops.zeros(b.dtype, &[n]).unwrap();
    b.check("zeros", &zeros, || vec![0.0; n]);
}

pub fn statistics(b: &mut Bench, n: usize) {
    let x = b.randn(&[n], 1.0);
    let mut out = b.ops.zeros(DType::F64, &[1]).unwrap();
    b.ops.fill(out.view_mut(), 0.5).unwrap();
    b.ops.sum_squares(out.view_mut(), x.view()).unwrap();
    b.check("sum_squares", &out, || vec![0.5 + inner(&x.host, &x.host)]);
    let mut values = x.host.clone();
    let specials = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
    let wrong = n / 3;
    for i in 0..wrong {
        values[i * 3] = specials[i % 3];
    }
    let x = b.input(&[n], values);
    let mut out = b.ops.zeros(DType::I32, &[1]).unwrap();
    b.ops.count_non_finite(out.view_mut(), x.view()).unwrap();
    b.ops.count_non_finite(out.view_mut(), x.view()).unwrap();
    b.check("count_non_finite", &out, || vec![2.0 * wrong as f64]);
}

/// Clipping to `limit`; a sum of squares or a guard that is not finite shows as NaN.
pub fn clip_factor(b: &mut Bench, limit: f64) {
    for (squares, guard) in [(16.0, 3.0), (0.25, 0.0), (0.0, 0.0), (f64::NAN, 0.0), (f64::INFINITY, 0.0), (1.0, f64::INFINITY)] {
        let wide = |x: f64| b.ops.from_host(Tensor::from_vec(vec![x], &[1]).view()).unwrap();
        let (s, g, mut factor) = (wide(squares), wide(guard), b.stat_output(&[1]));
        b.ops.clip_factor(factor.view_mut(), s.view(), g.view(), limit).unwrap();
        if !(squares.is_finite() && guard.is_finite()) {
            assert!(super::read(b.ops, &factor)[0].is_nan(), "{squares} {guard}");
            continue;
        }
        b.check("factor", &factor, || vec![if limit > 0.0 { (limit / (squares.sqrt() + 1e-6)).min(1.0) } else { 1.0 }]);
    }
}

/// As the text of `torch.optim.AdamW`. A step whose clip is NaN changes nothing.
pub fn adamw(b: &mut Bench, n: usize, step: u64) {
    let s = AdamW { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step };
    let (mut w, mut m, g) = (b.randn(&[n], 1.0), b.randn(&[n], 0.1), b.randn(&[n], 1.0));
    let squares = b.randn(&[n], 0.3).host.iter().map(|x| x * x).collect();
    let mut v = b.input(&[n], squares);
    let (clip, broken) = (b.stat(&[1], vec![0.5]), b.stat(&[1], vec![f64::NAN]));
    for clip in [&broken, &clip] {
        let state = AdamWState { weight: w.tensor.view_mut(), remainder: None, m: m.tensor.view_mut(), v: v.tensor.view_mut() };
        b.ops.adamw(state, g.view(), clip.view(), s).unwrap();
    }
    let moment = |old: f64, beta: f64, x: f64| beta * old + (1.0 - beta) * x;
    let new_m = |i: usize| moment(m.host[i], s.beta1, g.host[i] * 0.5);
    let new_v = |i: usize| moment(v.host[i], s.beta2, (g.host[i] * 0.5).powi(2));
    b.check("m", &m.tensor, || (0..n).map(new_m).collect());
    b.check("v", &v.tensor, || (0..n).map(new_v).collect());
    b.check("w", &w.tensor, || {
        let (c1, c2) = (1.0 - s.beta1.powi(step as i32), 1.0 - s.beta2.powi(step as i32));
        let update = |i: usize| (new_m(i) / c1) / ((new_v(i) / c2).sqrt() + s.eps);
        (0..n).map(|i| w.host[i] * (1.0 - s.lr * s.weight_decay) - s.lr * update(i)).collect()
    });
}

/// a[m, k] . b[k, n] by definition; `ta`, `tb` as in the operation.
pub fn product(a: &[f64], ta: bool, b: &[f64], tb: bool, [m, n, k]: [usize; 3]) -> Vec<f64> {
    let a_at = |i: usize, l: usize| if ta { a[l * m + i] } else { a[i * k + l] };
    let b_at = |l: usize, j: usize| if tb { b[j * k + l] } else { b[l * n + j] };
    let element = |i: usize, j: usize| (0..k).map(|l| a_at(i, l) * b_at(l, j)).sum();
    (0..m * n).map(|at| element(at / n, at % n)).collect()
}

pub fn gemm(bench: &mut Bench, m: usize, n: usize, k: usize, ta: Trans, tb: Trans, beta: Beta) {
    let (transposed_a, transposed_b) = (ta == Trans::Yes, tb == Trans::Yes);
    let a = bench.randn(&if transposed_a { [k, m] } else { [m, k] }, 1.0);
    let b = bench.randn(&if transposed_b { [n, k] } else { [k, n] }, 1.0);
    let mut c = bench.randn(&[m, n], 3.0);
    bench.ops.gemm(c.tensor.view_mut(), a.view(), ta, b.view(), tb, beta).unwrap();
    bench.check("c", &c.tensor, || {
        let fresh = product(&a.host, transposed_a, &b.host, transposed_b, [m, n, k]);
        if beta == Beta::One { plus(&c.host, &fresh) } else { fresh }
    });
}

/// A bf16 `b` beside an `a` of type `ta_type`, into a `c` of type `c_type`: whole numbers, so that every type has one right answer. Neighbours
/// in `a` are beyond the 8 bits of bf16 and cancel, but for a rest that `c` can hold.
pub fn gemm_mixed(bench: &mut Bench, a_type: DType, c_type: DType, ta: Trans, tb: Trans, beta: Beta) {
    let [m, n, k] = [67, 72, 130];
    let small = |i: usize| (i * 7 % 5) as f64 - 2.0;
    let large = if a_type == DType::F32 { 4096.0 + 7.0 } else { 0.0 };
    let (a_at, b_at) = (|i: usize, l: usize| large + small(i + l / 2 * (l % 2)), |l: usize, j: usize| [1.0, -1.0][(l + j) % 2]);
    let matrix = |rows: usize, cols: usize, t: Trans, at: &dyn Fn(usize, usize) -> f64| -> (Vec<f64>, [usize; 2]) {
        let values = (0..rows * cols).map(|e| if t == Trans::Yes { at(e % rows, e / rows) } else { at(e / cols, e % cols) });
        (values.collect(), if t == Trans::Yes { [cols, rows] } else { [rows, cols] })
    };
    let ((a, a_shape), (b, b_shape)) = (matrix(m, k, ta, &a_at), matrix(k, n, tb, &b_at));
    let a = bench.typed_input(a_type, a_type, &a_shape, a);
    let b = bench.typed_input(DType::BF16, DType::BF16, &b_shape, b);
    let mut c = bench.typed_input(c_type, c_type, &[m, n], (0..m * n).map(|i| (i % 9) as f64).collect());
    bench.ops.gemm(c.tensor.view_mut(), a.view(), ta, b.view(), tb, beta).unwrap();
    bench.check("c", &c.tensor, || {
        let fresh = product(&a.host, ta == Trans::Yes, &b.host, tb == Trans::Yes, [m, n, k]);
        let sum = if beta == Beta::One { plus(&c.host, &fresh) } else { fresh };
        assert!(sum.iter().all(|x| x.abs() <= 256.0), "c holds whole numbers up to 256 in every type");
        sum
    });
}

pub fn bias(b: &mut Bench, t: usize, n: usize) {
    let (mut y, bias, mut dbias) = (b.randn(&[t, n], 1.0), b.randn(&[n], 1.0), b.randn(&[n], 1.0));
    b.ops.add_bias(y.tensor.view_mut(), bias.view()).unwrap();
    b.check("y", &y.tensor, || y.host.iter().enumerate().map(|(i, y)| y + bias.host[i % n]).collect());
    let dy = b.randn(&[t, n], 1.0);
    b.ops.bias_grad(dbias.tensor.view_mut(), dy.view()).unwrap();
    b.check("dbias", &dbias.tensor, || (0..n).map(|j| dbias.host[j] + (0..t).map(|i| dy.host[i * n + j]).sum::<f64>()).collect());
}

pub fn embedding(b: &mut Bench, v: usize, h: usize, t: usize) {
    let (table, ids) = (b.randn(&[v, h], 1.0), b.random_indices(t, v));
    let on_backend = b.indices(&[t], &ids);
    let mut out = b.output(&[t, h]);
    b.ops.embedding(out.view_mut(), table.view(), on_backend.view()).unwrap();
    b.check("out", &out, || ids.iter().flat_map(|&i| table.host[i * h..(i + 1) * h].to_vec()).collect());
    let (dy, mut dtable) = (b.randn(&[t, h], 1.0), b.randn(&[v, h], 1.0));
    b.ops.embedding_grad(dtable.tensor.view_mut(), dy.view(), on_backend.view()).unwrap();
    b.check("dtable", &dtable.tensor, || {
        let mut sum = dtable.host.clone();
        ids.iter().enumerate().for_each(|(t, &id)| (0..h).for_each(|j| sum[id * h + j] += dy.host[t * h + j]));
        sum
    });
}

fn row_loss(logits: &[f64], target: i32) -> f64 {
    if target < 0 { 0.0 } else { logits.iter().map(|x| x.exp()).sum::<f64>().ln() - logits[target as usize] }
}

pub fn cross_entropy(b: &mut Bench, n: usize, v: usize) {
    let (mut logits, weights) = (b.randn(&[n, v], 3.0), b.stat_randn(&[n], 1.0));
    let mut targets: Vec<i32> = b.random_indices(n, v).iter().map(|&i| i as i32).collect();
    targets.iter_mut().skip(2).step_by(4).for_each(|t| *t = -100);
    let on_backend = b.raw_indices(&[n], targets.clone());
    let losses = |x: &[f64]| -> Vec<f64> { (0..n).map(|i| row_loss(&x[i * v..(i + 1) * v], targets[i])).collect() };
    let mut out = b.stat_output(&[n]);
    b.ops.cross_entropy(out.view_mut(), logits.tensor.view_mut(), on_backend.view(), None).unwrap();
    b.check("losses", &out, || losses(&logits.host));
    b.check("logits left alone", &logits.tensor, || logits.host.clone());
    let mut out = b.stat_output(&[n]);
    b.ops.cross_entropy(out.view_mut(), logits.tensor.view_mut(), on_backend.view(), Some(weights.view())).unwrap();
    b.check("losses with gradient", &out, || losses(&logits.host));
    b.check_grad("dlogits", &logits.tensor, || {
        // Rows are independent, so each is differentiated alone; of a wide row, only its gradient by formula is affordable.
        let row = |i: usize| {
            let x = &logits.host[i * v..(i + 1) * v];
            if v > 1000 {
                let mass: f64 = x.iter().map(|x| x.exp()).sum();
                let one_hot = |j: usize| (j as i32 == targets[i]) as u8 as f64;
                let trained = (targets[i] >= 0) as u8 as f64;
                return x.iter().enumerate().map(|(j, x)| trained * weights.host[i] * (x.exp() / mass - one_hot(j))).collect();
            }
            numeric_grad(x, |x| weights.host[i] * row_loss(x, targets[i]))
        };
        (0..n).flat_map(row).collect()
    });
}

/// Cross-entropy of a vocabulary in `parts`, all of them computed here one after another.
pub fn cross_entropy_divided(b: &mut Bench, n: usize, v: usize, parts: usize) {
    let (whole, weights) = (b.randn(&[n, v], 3.0), b.stat_randn(&[n], 1.0));
    let mut targets: Vec<i32> = b.random_indices(n, v).iter().map(|&i| i as i32).collect();
    targets.iter_mut().skip(2).step_by(4).for_each(|t| *t = -100);
    let on_backend = b.raw_indices(&[n], targets.clone());
    let borders: Vec<usize> = (0..=parts).map(|p| v * p / parts).collect();
    let mut logits: Vec<Tensor> = borders
        .windows(2)
        .map(|w| {
            let columns = (0..n).flat_map(|i| whole.host[i * v + w[0]..i * v + w[1]].to_vec()).collect();
            b.input(&[n, w[1] - w[0]], columns).tensor
        })
        .collect();
    let mut stats = b.stat_output(&[parts, n, 3]);
    for (p, logits) in logits.iter().enumerate() {
        b.ops.vocab_stats(stats.view_mut().index(p), logits.view(), on_backend.view(), borders[p]).unwrap();
    }
    let losses = || -> Vec<f64> { (0..n).map(|i| row_loss(&whole.host[i * v..(i + 1) * v], targets[i])).collect() };
    for (p, logits) in logits.iter_mut().enumerate() {
        let mut out = b.stat_output(&[n]);
        let grads = Some(weights.view());
        b.ops.cross_entropy_divided(out.view_mut(), logits.view_mut(), on_backend.view(), borders[p], stats.view(), grads).unwrap();
        b.check("losses", &out, losses);
        b.check_grad("dlogits", logits, || {
            let row = |i: usize| {
                let x = &whole.host[i * v..(i + 1) * v];
                let all = numeric_grad(x, |x| weights.host[i] * row_loss(x, targets[i]));
                all[borders[p]..borders[p + 1]].to_vec()
            };
            (0..n).flat_map(row).collect()
        });
    }
}
