//! Mixture of experts: routing, moving tokens, products per expert, balancing.

use super::norm::swiglu_row;
use super::{Bench, dense, inner, numeric_grad, plus};
use temper_tensor::{Balance, Beta, GroupedGemm, RouterGrad};

fn softmax(x: &[f64]) -> Vec<f64> {
    let mass: f64 = x.iter().map(|x| x.exp()).sum();
    x.iter().map(|x| x.exp() / mass).collect()
}

fn lse(x: &[f64]) -> f64 {
    x.iter().map(|x| x.exp()).sum::<f64>().ln()
}

/// Experts of one token by falling probability, equal ones by index.
fn ranked(probs: &[f64], k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..probs.len()).collect();
    order.sort_by(|&a, &b| probs[b].total_cmp(&probs[a]).then(a.cmp(&b)));
    order.truncate(k);
    order
}

fn chosen_weights(probs: &[f64], chosen: &[usize], normalise: bool) -> Vec<f64> {
    let sum: f64 = chosen.iter().map(|&e| probs[e]).sum();
    chosen.iter().map(|&e| probs[e] / if normalise { sum } else { 1.0 }).collect()
}

pub fn router(b: &mut Bench, t: usize, e: usize, k: usize) {
    let mut logits = b.stat_randn(&[t, e], 2.0).host;
    // The second token has equal logits everywhere: the first experts win.
    logits.iter_mut().skip(e).take(e).for_each(|x| *x = 0.25);
    let logits = b.stat(&[t, e], logits);
    let probs = || -> Vec<Vec<f64>> { logits.host.chunks(e).map(softmax).collect() };
    for normalise in [false, true] {
        let (mut p, mut x, mut w) = (b.stat_output(&[t, e]), b.index_output(&[t, k]), b.stat_output(&[t, k]));
        b.ops.router(p.view_mut(), x.view_mut(), w.view_mut(), logits.view(), normalise).unwrap();
        b.check("probs", &p, || probs().concat());
        b.check("experts", &x, || probs().iter().flat_map(|p| ranked(p, k)).map(|e| e as f64).collect());
        b.check("weights", &w, || probs().iter().flat_map(|p| chosen_weights(p, &ranked(p, k), normalise)).collect());
        let (mut counts, mut sums, mut z) = (b.stat_randn(&[e], 1.0), b.stat_randn(&[e], 1.0), b.stat_randn(&[1], 1.0));
        let outs = (counts.tensor.view_mut(), sums.tensor.view_mut(), z.tensor.view_mut());
        b.ops.router_stats(outs.0, outs.1, outs.2, p.view(), x.view(), logits.view()).unwrap();
        b.check("counts", &counts.tensor, || {
            let mut n = counts.host.clone();
            probs().iter().flat_map(|p| ranked(p, k)).for_each(|e| n[e] += 1.0);
            n
        });
        b.check("prob_sums", &sums.tensor, || probs().iter().fold(sums.host.clone(), |s, p| plus(&s, p)));
        b.check("z_sum", &z.tensor, || vec![z.host[0] + logits.host.chunks(e).map(|x| lse(x).powi(2)).sum::<f64>()]);
    }
}

pub fn router_grad(b: &mut Bench, t: usize, normalised: bool, balance: bool, z_coef: f64) {
    let (e, k) = (6, 2);
    let logits = b.stat_randn(&[t, e], 1.0);
    let dweights = b.stat_randn(&[t, k], 1.0);
    let pressure = b.stat_randn(&[e], 1.0);
    let (mut p, mut x, mut w) = (b.stat_output(&[t, e]), b.index_output(&[t, k]), b.stat_output(&[t, k]));
    b.ops.router(p.view_mut(), x.view_mut(), w.view_mut(), logits.view(), normalised).unwrap();
    let mut dlogits = b.stat_output(&[t, e]);
    let extra = RouterGrad { balance: balance.then(|| pressure.view()), z_coef, normalised };
    b.ops.router_grad(dlogits.view_mut(), dweights.view(), p.view(), x.view(), w.view(), logits.view(), extra).unwrap();
    let loss = |logits: &[f64]| -> f64 {
        let row = |(i, x): (usize, &[f64])| {
            let probs = softmax(x);
            let chosen = ranked(&softmax(&logits[i * e..(i + 1) * e]), k);
            let through_weights = inner(&chosen_weights(&probs, &chosen, normalised), &dweights.host[i * k..(i + 1) * k]);
            let pressed = if balance { inner(&probs, &pressure.host) } else { 0.0 };
            through_weights + pressed + z_coef * lse(x).powi(2) / t as f64
        };
        logits.chunks(e).enumerate().map(row).sum()
    };
    b.check_grad("dlogits", &dlogits, || numeric_grad(&logits.host, loss));
}

/// The two losses as their sources write them: over all tokens, from one-hot choices and probabilities.
pub fn balance_loss(b: &mut Bench, kind: Balance, l: usize, e: usize, tokens: usize, k: usize) {
    let probs: Vec<Vec<Vec<f64>>> = (0..l).map(|_| b.stat_randn(&[tokens, e], 1.0).host.chunks(e).map(softmax).collect()).collect();
    let hits: Vec<Vec<f64>> = probs
        .iter()
        .map(|layer| {
            let mut n = vec![0.0; e];
            layer.iter().flat_map(|p| ranked(p, k)).for_each(|e| n[e] += 1.0);
            n
        })
        .collect();
    let sums: Vec<f64> = probs.iter().flat_map(|layer| layer.iter().fold(vec![0.0; e], |s, p| plus(&s, p))).collect();
    let (counts, prob_sums) = (b.stat(&[l, e], hits.concat()), b.stat(&[l, e], sums));
    let (mut loss, mut grad) = (b.stat_output(&[1]), b.stat_output(&[l, e]));
    let coef = 0.7;
    b.ops.balance_loss(loss.view_mut(), grad.view_mut(), counts.view(), prob_sums.view(), tokens, k, kind, coef).unwrap();
    let rows = tokens as f64;
    let naive = |sums: &[f64]| -> f64 {
        if tokens == 0 {
            return 0.0;
        }
        match kind {
            Balance::Hf => {
                let pooled = |x: &[f64], i: usize| (0..l).map(|l| x[l * e + i]).sum::<f64>() / (l as f64 * rows);
                e as f64 * (0..e).map(|i| pooled(&counts.host, i) * pooled(sums, i)).sum::<f64>()
            }
            Balance::Megatron => e as f64 / (k as f64 * rows * rows) * inner(&counts.host, sums),
        }
    };
    b.check("loss", &loss, || vec![naive(&prob_sums.host)]);
    b.check_grad("grad", &grad, || numeric_grad(&prob_sums.host, |s| coef * naive(s)));
}

/// Experts of which those in `here` are here, the others elsewhere.
pub fn dispatch(b: &mut Bench, t: usize, h: usize, e: usize, k: usize, here: std::ops::Range<usize>) {
    let chosen: Vec<usize> = b.random_indices(t, e).iter().flat_map(|&x| (0..k).map(move |j| (x + 2 * j) % e)).collect();
    let experts = b.indices(&[t, k], &chosen);
    let count = here.len();
    let (mut offsets, mut place) = (b.index_output(&[count + 1]), b.index_output(&[t, k]));
    b.ops.moe_sort(offsets.view_mut(), place.view_mut(), experts.view(), here.start).unwrap();
    // The (t, k) whose experts are here, by expert, then the others.
    let mut order: Vec<usize> = (0..t * k).collect();
    order.sort_by_key(|&i| if here.contains(&chosen[i]) { (chosen[i], i) } else { (e, i) });
    let rows = chosen.iter().filter(|c| here.contains(c)).count();
    let mut places = vec![0; t * k];
    order.iter().enumerate().for_each(|(to, &from)| places[from] = to);
    order.truncate(rows);
    let before = |x: usize| chosen.iter().filter(|&&c| here.contains(&c) && c < here.start + x).count() as f64;
    b.check("offsets", &offsets, || (0..=count).map(before).collect());
    b.check("place", &place, || places.iter().map(|&x| x as f64).collect());

    let x = b.randn(&[t, h], 1.0);
    let mut gathered = b.output(&[rows, h]);
    b.ops.moe_gather(gathered.view_mut(), x.view(), place.view()).unwrap();
    b.check("gathered", &gathered, || order.iter().flat_map(|&i| x.host[i / k * h..][..h].to_vec()).collect());
    let mut gathered = b.index_output(&[rows, k]);
    b.ops.moe_gather(gathered.view_mut(), experts.view(), place.view()).unwrap();
    b.check("gathered whole numbers", &gathered, || {
        order.iter().flat_map(|&i| chosen[i / k * k..][..k].iter().map(|&c| c as f64)).collect()
    });

    let (y, weights) = (b.randn(&[rows, h], 1.0), b.stat_randn(&[t, k], 1.0));
    let row = |i: usize| if places[i] < rows { &y.host[places[i] * h..][..h] } else { &[][..] };
    let combined = |w: &[f64]| -> Vec<f64> {
        let element = |t: usize, j: usize| (0..k).map(|c| row(t * k + c).get(j).map_or(0.0, |y| w[t * k + c] * y)).sum();
        (0..t * h).map(|at| element(at / h, at % h)).collect()
    };
    let mut out = b.output(&[t, h]);
    b.ops.moe_combine(out.view_mut(), y.view(), Some(weights.view()), place.view()).unwrap();
    b.check("combined", &out, || combined(&weights.host));
    b.ops.moe_combine(out.view_mut(), y.view(), None, place.view()).unwrap();
    b.check("combined without weights", &out, || combined(&vec![1.0; t * k]));

    // The gradients of sum_tk w[t, k] * <dact[r], swiglu(gate_up[r])>, r = place[t, k].
    let (gate_up, dact) = (b.randn(&[rows, 2 * h], 1.0), b.randn(&[rows, h], 1.0));
    let (mut dgate_up, mut act, mut dw) = (b.output(&[rows, 2 * h]), b.output(&[rows, h]), b.stat_output(&[t, k]));
    let outs = (dgate_up.view_mut(), act.view_mut(), dw.view_mut());
    b.ops.moe_act_grad(outs.0, outs.1, outs.2, dact.view(), gate_up.view(), weights.view(), place.view()).unwrap();
    let acts: Vec<Vec<f64>> = gate_up.host.chunks(2 * h).map(swiglu_row).collect();
    b.check("act", &act, || {
        order.iter().zip(&acts).flat_map(|(&i, a)| a.iter().map(move |a| (i, a))).map(|(i, a)| weights.host[i] * a).collect()
    });
    b.check("dweights", &dw, || {
        let one = |i: usize| acts.get(places[i]).map_or(0.0, |a| inner(a, &dact.host[places[i] * h..][..h]));
        (0..t * k).map(one).collect()
    });
    b.check_grad("dgate_up", &dgate_up, || {
        let row = |(r, x): (usize, &[f64])| {
            let loss = |x: &[f64]| weights.host[order[r]] * inner(&swiglu_row(x), &dact.host[r * h..][..h]);
            numeric_grad(x, loss)
        };
        gate_up.host.chunks(2 * h).enumerate().flat_map(row).collect()
    });
}

/// Which ranks the experts of a token lie on: `slices` ranks for every `per_rank` experts.
pub fn ranks(b: &mut Bench, t: usize, e: usize, k: usize, per_rank: usize, slices: usize) {
    let chosen: Vec<usize> = b.random_indices(t, e).iter().flat_map(|&x| (0..k).map(move |j| (x + 2 * j) % e)).collect();
    let experts = b.indices(&[t, k], &chosen);
    let n = e / per_rank * slices;
    let (mut ranks, mut rows) = (b.index_output(&[t, n]), b.index_output(&[n]));
    b.ops.moe_ranks(ranks.view_mut(), rows.view_mut(), experts.view(), per_rank, slices).unwrap();
    let on = |r: usize, c: &usize| (r / slices * per_rank..(r / slices + 1) * per_rank).contains(c);
    b.check("ranks", &ranks, || {
        let one = |t: usize, r: usize| if chosen[t * k..][..k].iter().any(|c| on(r, c)) { r } else { n };
        (0..t * n).map(|i| one(i / n, i % n) as f64).collect()
    });
    b.check("rows", &rows, || (0..n).map(|r| chosen.iter().filter(|c| on(r, c)).count() as f64).collect());
}

/// The product of one expert, from its rows of x and dy, its weight, and their number.
type PerExpert<'a> = &'a dyn Fn(&[f64], &[f64], &[f64], usize) -> Vec<f64>;

pub fn grouped_gemm(b: &mut Bench, kind: GroupedGemm, sizes: &'static [usize], n: usize, m: usize) {
    let (e, s) = (sizes.len(), sizes.iter().sum());
    let mut bounds = vec![0];
    sizes.iter().for_each(|x| bounds.push(bounds[bounds.len() - 1] + x));
    let offsets = b.indices(&[e + 1], &bounds);
    let (x, dy, w) = (b.randn(&[s, m], 1.0), b.randn(&[s, n], 1.0), b.randn(&[e, n, m], 1.0));
    let per_expert = |f: PerExpert| -> Vec<f64> {
        let one = |i: usize| {
            let rows = bounds[i]..bounds[i + 1];
            f(
                &x.host[rows.start * m..rows.end * m],
                &dy.host[rows.start * n..rows.end * n],
                &w.host[i * n * m..(i + 1) * n * m],
                rows.len(),
            )
        };
        (0..e).flat_map(one).collect()
    };
    match kind {
        GroupedGemm::Forward => {
            let mut c = b.output(&[s, n]);
            b.ops.grouped_gemm(kind, c.view_mut(), x.view(), w.view(), offsets.view()).unwrap();
            b.check("c", &c, || per_expert(&|x, _, w, rows| dense::product(x, false, w, true, [rows, n, m])));
        }
        GroupedGemm::InputGrad => {
            let mut c = b.output(&[s, m]);
            b.ops.grouped_gemm(kind, c.view_mut(), dy.view(), w.view(), offsets.view()).unwrap();
            b.check("c", &c, || per_expert(&|_, dy, w, rows| dense::product(dy, false, w, false, [rows, m, n])));
        }
        GroupedGemm::WeightGrad(beta) => {
            let mut c = b.randn(&[e, n, m], 1.0);
            b.ops.grouped_gemm(kind, c.tensor.view_mut(), dy.view(), x.view(), offsets.view()).unwrap();
            let fresh = || per_expert(&|x, dy, _, rows| dense::product(dy, true, x, false, [n, m, rows]));
            b.check("c", &c.tensor, || if beta == Beta::One { plus(&c.host, &fresh()) } else { fresh() });
        }
    }
}
