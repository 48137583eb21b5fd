//! Attention over packed sequences and over a paged cache.

use super::{Bench, inner, numeric_grad};
use temper_tensor::{PackedSeqs, PagedSeqs, Tensor};

const SCALE: f64 = 0.4;

/// Output and log-sum-exp of one query head at one position, over the keys it sees.
fn attend(q: &[f64], keys: &[&[f64]], values: &[&[f64]]) -> (Vec<f64>, f64) {
    let scores: Vec<f64> = keys.iter().map(|k| SCALE * inner(q, k)).collect();
    let lse = scores.iter().map(|s| s.exp()).sum::<f64>().ln();
    let weighted = |i: usize| scores.iter().zip(values).map(|(s, v)| (s - lse).exp() * v[i]).sum();
    ((0..q.len()).map(weighted).collect(), lse)
}

/// o [T, Nq, D] and lse [T, Nq], one sequence after another.
fn naive(q: &[f64], k: &[f64], v: &[f64], lengths: &[usize], nq: usize, nk: usize, d: usize) -> (Vec<f64>, Vec<f64>) {
    let (mut o, mut lse, mut start) = (Vec::new(), Vec::new(), 0);
    for &n in lengths {
        for t in start..start + n {
            for h in 0..nq {
                let at = |s: usize| (s * nk + h / (nq / nk)) * d;
                let keys: Vec<&[f64]> = (start..=t).map(|s| &k[at(s)..][..d]).collect();
                let values: Vec<&[f64]> = (start..=t).map(|s| &v[at(s)..][..d]).collect();
                let (out, l) = attend(&q[(t * nq + h) * d..][..d], &keys, &values);
                o.extend(out);
                lse.push(l);
            }
        }
        start += n;
    }
    (o, lse)
}

fn bounds(lengths: &[usize]) -> Vec<usize> {
    lengths.iter().fold(vec![0], |mut b, n| {
        b.push(b[b.len() - 1] + n);
        b
    })
}

fn packed<'a>(cu: &'a Tensor, lengths: &[usize]) -> PackedSeqs<'a> {
    PackedSeqs { cu: cu.view(), longest: lengths.iter().copied().max().unwrap_or(0), skip: 0 }
}

pub fn forward(b: &mut Bench, lengths: &'static [usize], nq: usize, nk: usize, d: usize) {
    let t = lengths.iter().sum();
    let (q, k, v) = (b.randn(&[t, nq, d], 1.0), b.randn(&[t, nk, d], 1.0), b.randn(&[t, nk, d], 1.0));
    let cu = b.indices(&[lengths.len() + 1], &bounds(lengths));
    let (mut o, mut lse) = (b.output(&[t, nq, d]), b.stat_output(&[t, nq]));
    b.ops.attention(o.view_mut(), lse.view_mut(), q.view(), k.view(), v.view(), packed(&cu, lengths), SCALE).unwrap();
    let expected = || naive(&q.host, &k.host, &v.host, lengths, nq, nk, d);
    b.check("o", &o, || expected().0);
    b.check("lse", &lse, || expected().1);
}

pub fn backward(b: &mut Bench, lengths: &'static [usize], nq: usize, nk: usize, d: usize) {
    let t = lengths.iter().sum();
    let (q, k, v) = (b.randn(&[t, nq, d], 1.0), b.randn(&[t, nk, d], 1.0), b.randn(&[t, nk, d], 1.0));
    let dout = b.randn(&[t, nq, d], 1.0);
    let cu = b.indices(&[lengths.len() + 1], &bounds(lengths));
    let (o, lse) = naive(&q.host, &k.host, &v.host, lengths, nq, nk, d);
    let (o, lse) = (b.input(&[t, nq, d], o), b.stat(&[t, nq], lse));
    let (mut dq, mut dk, mut dv) = (b.output(&[t, nq, d]), b.output(&[t, nk, d]), b.output(&[t, nk, d]));
    let saved = (dout.view(), o.view(), lse.view());
    b.ops
        .attention_grad(
            dq.view_mut(),
            dk.view_mut(),
            dv.view_mut(),
            saved.0,
            saved.1,
            saved.2,
            q.view(),
            k.view(),
            v.view(),
            packed(&cu, lengths),
            SCALE,
        )
        .unwrap();
    let loss = |q: &[f64], k: &[f64], v: &[f64]| inner(&naive(q, k, v, lengths, nq, nk, d).0, &dout.host);
    b.check_grad("dq", &dq, || numeric_grad(&q.host, |q| loss(q, &k.host, &v.host)));
    b.check_grad("dk", &dk, || numeric_grad(&k.host, |k| loss(&q.host, k, &v.host)));
    b.check_grad("dv", &dv, || numeric_grad(&v.host, |v| loss(&q.host, &k.host, v)));
}

/// The first `skip` rows of the packed sequences have no queries.
pub fn later_queries(b: &mut Bench, lengths: &'static [usize], skip: usize, nq: usize, nk: usize, d: usize) {
    let s: usize = lengths.iter().sum();
    let t = s - skip;
    let all = b.randn(&[s, nq, d], 1.0).host;
    let (k, v, dout) = (b.randn(&[s, nk, d], 1.0), b.randn(&[s, nk, d], 1.0), b.randn(&[t, nq, d], 1.0));
    let q = b.input(&[t, nq, d], all[skip * nq * d..].to_vec());
    let expected = |q: &[f64], k: &[f64], v: &[f64]| {
        let (o, lse) = naive(&[&all[..skip * nq * d], q].concat(), k, v, lengths, nq, nk, d);
        (o[skip * nq * d..].to_vec(), lse[skip * nq..].to_vec())
    };
    let cu = b.indices(&[lengths.len() + 1], &bounds(lengths));
    let seqs = PackedSeqs { skip, ..packed(&cu, lengths) };
    let (mut o, mut lse) = (b.output(&[t, nq, d]), b.stat_output(&[t, nq]));
    b.ops.attention(o.view_mut(), lse.view_mut(), q.view(), k.view(), v.view(), seqs, SCALE).unwrap();
    b.check("o", &o, || expected(&q.host, &k.host, &v.host).0);
    b.check("lse", &lse, || expected(&q.host, &k.host, &v.host).1);

    let (o, lse) = expected(&q.host, &k.host, &v.host);
    let (o, lse) = (b.input(&[t, nq, d], o), b.stat(&[t, nq], lse));
    let (mut dq, mut dk, mut dv) = (b.output(&[t, nq, d]), b.output(&[s, nk, d]), b.output(&[s, nk, d]));
    let (saved, inputs) = ((dout.view(), o.view(), lse.view()), (q.view(), k.view(), v.view()));
    let outputs = (dq.view_mut(), dk.view_mut(), dv.view_mut());
    b.ops.attention_grad(outputs.0, outputs.1, outputs.2, saved.0, saved.1, saved.2, inputs.0, inputs.1, inputs.2, seqs, SCALE).unwrap();
    let loss = |q: &[f64], k: &[f64], v: &[f64]| inner(&expected(q, k, v).0, &dout.host);
    b.check_grad("dq", &dq, || numeric_grad(&q.host, |q| loss(q, &k.host, &v.host)));
    b.check_grad("dk", &dk, || numeric_grad(&k.host, |k| loss(&q.host, k, &v.host)));
    b.check_grad("dv", &dv, || numeric_grad(&v.host, |v| loss(&q.host, &k.host, v)));
}

/// `seqs` are (queries, context) pairs; the cache blocks are dealt out in a scrambled order.
pub fn paged(b: &mut Bench, seqs: &'static [(usize, usize)], nq: usize, nk: usize, d: usize, size: usize) {
    let columns = seqs.iter().map(|s| s.1.div_ceil(size)).max().unwrap_or(0) + 1;
    let blocks = seqs.len() * columns + 3;
    let mut table = vec![-1i32; seqs.len() * columns];
    let mut slots = Vec::new();
    for (i, &(_, context)) in seqs.iter().enumerate() {
        let block = |j: usize| ((i * columns + j) * 7 + 2) % blocks;
        assert!(!blocks.is_multiple_of(7), "the deal must be a permutation");
        (0..context.div_ceil(size)).for_each(|j| table[i * columns + j] = block(j) as i32);
        slots.extend((0..context).map(|p| block(p / size) * size + p % size));
    }
    let total = slots.len();
    let (k, v) = (b.randn(&[total, nk, d], 1.0), b.randn(&[total, nk, d], 1.0));
    let (mut cache_k, mut cache_v) = (b.output(&[blocks, size, nk, d]), b.output(&[blocks, size, nk, d]));
    let on_backend = b.indices(&[total], &slots);
    b.ops.kv_cache_write(cache_k.view_mut(), cache_v.view_mut(), k.view(), v.view(), on_backend.view()).unwrap();
    b.check("cache_k", &cache_k, || {
        let mut cache = vec![777.0; blocks * size * nk * d];
        slots.iter().zip(k.host.chunks(nk * d)).for_each(|(s, k)| cache[s * nk * d..(s + 1) * nk * d].copy_from_slice(k));
        cache
    });

    let t = seqs.iter().map(|s| s.0).sum();
    let q = b.randn(&[t, nq, d], 1.0);
    let cu_q = b.indices(&[seqs.len() + 1], &bounds(&seqs.iter().map(|s| s.0).collect::<Vec<_>>()));
    let context = b.indices(&[seqs.len()], &seqs.iter().map(|s| s.1).collect::<Vec<_>>());
    let table = b.raw_indices(&[seqs.len(), columns], table);
    let paged = PagedSeqs { cu_q: cu_q.view(), context: context.view(), blocks: table.view() };
    let mut o = b.output(&[t, nq, d]);
    b.ops.paged_attention(o.view_mut(), q.view(), cache_k.view(), cache_v.view(), paged, SCALE).unwrap();
    b.check("o", &o, || {
        let (mut o, mut row, mut first) = (Vec::new(), 0, 0);
        for &(queries, context) in seqs {
            for i in 0..queries {
                for h in 0..nq {
                    let at = |p: usize| ((first + p) * nk + h / (nq / nk)) * d;
                    let seen = context - queries + i + 1;
                    let keys: Vec<&[f64]> = (0..seen).map(|p| &k.host[at(p)..][..d]).collect();
                    let values: Vec<&[f64]> = (0..seen).map(|p| &v.host[at(p)..][..d]).collect();
                    o.extend(attend(&q.host[(row * nq + h) * d..][..d], &keys, &values).0);
                }
                row += 1;
            }
            first += context;
        }
        o
    });
}
