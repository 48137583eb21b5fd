//! Cases with sequences: QKV preparation, attention, generation. Nq query heads, Nk key heads, D head size.

use crate::case::{Case, Random, Role::*, Values, take};
use temper_tensor::{PackedSeqs, PagedSeqs, RopeTable};

/// Heads and their size.
#[derive(Clone, Copy)]
pub struct Heads {
    /// Query heads.
    pub nq: usize,
    /// Key heads.
    pub nk: usize,
    /// Head size.
    pub d: usize,
}

/// Positions of packed sequences, and their starts.
fn packed(lengths: &[usize]) -> (Vec<i32>, Vec<i32>) {
    let positions = lengths.iter().flat_map(|l| 0..*l as i32).collect();
    let mut starts = vec![0];
    for l in lengths {
        starts.push(starts[starts.len() - 1] + *l as i32);
    }
    (positions, starts)
}

/// Rotary tables of P positions.
fn rope(p: usize, d: usize) -> (Vec<f32>, Vec<f32>) {
    let angle = |i: usize| (i / (d / 2)) as f64 * 1e6f64.powf(-2.0 * (i % (d / 2)) as f64 / d as f64);
    let n = p * (d / 2);
    ((0..n).map(|i| angle(i).cos() as f32).collect(), (0..n).map(|i| angle(i).sin() as f32).collect())
}

/// Split, norm and rotation, forward and backward.
pub fn qkv(lengths: &[usize], h: Heads) -> Vec<Case> {
    let Heads { nq, nk, d } = h;
    let (positions, _) = packed(lengths);
    let t = positions.len();
    let longest = lengths.iter().copied().max().unwrap_or(1).max(1);
    let (cos, sin) = rope(longest, d);
    let s = |op: &str| format!("{op} {t} tokens {nq}/{nk}/{d}");
    let width = (nq + 2 * nk) * d;
    let tables = |c: Case| {
        c.input(Stat, &[longest, d / 2], Values::Floats(cos.clone()))
            .input(Stat, &[longest, d / 2], Values::Floats(sin.clone()))
            .ints(&[t], positions.clone())
    };
    let heads = |c: Case| c.out(Act, &[t, nq, d]).out(Act, &[t, nk, d]).out(Act, &[t, nk, d]);
    let grads = |c: Case| tables(c).act(&[t, nq, d], 1.0).act(&[t, nk, d], 1.0).act(&[t, nk, d], 1.0).act(&[t, width], 1.0);
    let weights = |c: Case| c.act(&[d], 1.0).act(&[d], 1.0);
    let rstd = || Values::Uniform(0.5, 1.5);
    vec![
        heads(
            weights(tables(Case::new(s("qkv_prepare with norm"), |ops, i, o| {
                let [q, k, v, r] = take(o)?;
                let table = RopeTable { cos: i[0].view(), sin: i[1].view() };
                let norm = Some((i[3].view(), i[4].view(), 1e-6));
                ops.qkv_prepare(q.view_mut(), k.view_mut(), v.view_mut(), Some(r.view_mut()), i[5].view(), norm, table, i[2].view())
            })))
            .act(&[t, width], 1.0),
        )
        .out(Stat, &[t, nq + nk]),
        heads(
            tables(Case::new(s("qkv_prepare"), |ops, i, o| {
                let [q, k, v] = take(o)?;
                let table = RopeTable { cos: i[0].view(), sin: i[1].view() };
                ops.qkv_prepare(q.view_mut(), k.view_mut(), v.view_mut(), None, i[3].view(), None, table, i[2].view())
            }))
            .act(&[t, width], 1.0),
        ),
        weights(grads(Case::new(s("qkv_prepare_grad_input with norm"), |ops, i, o| {
            let table = RopeTable { cos: i[0].view(), sin: i[1].view() };
            let norm = Some((i[7].view(), i[8].view(), i[9].view()));
            ops.qkv_prepare_grad_input(o[0].view_mut(), i[3].view(), i[4].view(), i[5].view(), i[6].view(), norm, table, i[2].view())
        })))
        .input(Stat, &[t, nq + nk], rstd())
        .out(Act, &[t, width]),
        grads(Case::new(s("qkv_prepare_grad_input"), |ops, i, o| {
            let table = RopeTable { cos: i[0].view(), sin: i[1].view() };
            ops.qkv_prepare_grad_input(o[0].view_mut(), i[3].view(), i[4].view(), i[5].view(), i[6].view(), None, table, i[2].view())
        }))
        .out(Act, &[t, width])
        .bytes(move |act| (2 * t * width * act) as f64),
        grads(Case::new(s("qk_norm_grad_weight"), |ops, i, o| {
            let [wq, wk] = take(o)?;
            let table = RopeTable { cos: i[0].view(), sin: i[1].view() };
            ops.qk_norm_grad_weight(wq.view_mut(), wk.view_mut(), i[3].view(), i[4].view(), i[6].view(), i[7].view(), table, i[2].view())
        }))
        .input(Stat, &[t, nq + nk], rstd())
        .adds(Stat, &[d])
        .adds(Stat, &[d])
        .bytes(move |act| (2 * t * (nq + nk) * d * act) as f64),
    ]
}

/// Attention forward; and backward, which runs the forward first for its statistics.
pub fn attention(lengths: &[usize], h: Heads) -> Vec<Case> {
    let Heads { nq, nk, d } = h;
    let (_, starts) = packed(lengths);
    let t: usize = lengths.iter().sum();
    let scale = 1.0 / (d as f64).sqrt();
    let pairs: f64 = lengths.iter().map(|l| (*l as f64).powi(2)).sum();
    let flops = 2.0 * pairs * (nq * d) as f64;
    let (b, longest) = (lengths.len(), lengths.iter().copied().max().unwrap_or(0));
    let s = |op: &str| format!("{op} {b} sequences {t} tokens {nq}/{nk}/{d}");
    let inputs = |c: Case| c.act(&[t, nq, d], 1.0).act(&[t, nk, d], 1.0).act(&[t, nk, d], 1.0).ints(&[b + 1], starts.clone());
    vec![
        inputs(Case::new(s("attention"), move |ops, i, o| {
            let [out, lse] = take(o)?;
            ops.attention(
                out.view_mut(),
                lse.view_mut(),
                i[0].view(),
                i[1].view(),
                i[2].view(),
                PackedSeqs { cu: i[3].view(), longest, skip: 0 },
                scale,
            )
        }))
        .out(Act, &[t, nq, d])
        .out(Stat, &[t, nq])
        .flops(flops),
        inputs(Case::new(s("attention and grad"), move |ops, i, o| {
            let [out, lse, dq, dk, dv] = take(o)?;
            let [q, k, v, cu, g] = [0, 1, 2, 3, 4].map(|n| i[n].view());
            let seqs = PackedSeqs { cu, longest, skip: 0 };
            ops.attention(out.view_mut(), lse.view_mut(), q, k, v, seqs, scale)?;
            ops.attention_grad(dq.view_mut(), dk.view_mut(), dv.view_mut(), g, out.view(), lse.view(), q, k, v, seqs, scale)
        }))
        .act(&[t, nq, d], 1.0)
        .out(Act, &[t, nq, d])
        .out(Stat, &[t, nq])
        .out(Act, &[t, nq, d])
        .out(Act, &[t, nk, d])
        .out(Act, &[t, nk, d])
        .flops(3.5 * flops),
    ]
}

/// A paged cache: writes, and attention of the last `new` tokens of each sequence.
pub fn paged(context: &[usize], new: usize, block: usize, h: Heads) -> Vec<Case> {
    let Heads { nq, nk, d } = h;
    let b = context.len();
    let most = context.iter().map(|c| c.div_ceil(block)).max().unwrap_or(1);
    let blocks = b * most;
    // Blocks are handed out in an order that is not the cache's: from the last to the first.
    let mut table = vec![-1i32; b * most];
    let mut next = blocks as i32;
    for (i, c) in context.iter().enumerate() {
        for j in 0..c.div_ceil(block) {
            next -= 1;
            table[i * most + j] = next;
        }
    }
    let queries: Vec<usize> = context.iter().map(|c| new.min(*c)).collect();
    let t: usize = queries.iter().sum();
    let (_, cu) = packed(&queries);
    let contexts: Vec<i32> = context.iter().map(|c| *c as i32).collect();
    let scale = 1.0 / (d as f64).sqrt();
    let mut r = Random(3);
    let mut free: Vec<i32> = (0..(blocks * block) as i32).collect();
    let slots: Vec<i32> = (0..t).map(|_| free.swap_remove(r.below(free.len()))).collect();
    let keys: usize = context.iter().sum();
    vec![
        Case::new(format!("kv_cache_write {t} tokens {nk}/{d}"), |ops, i, o| {
            let [ck, cv] = take(o)?;
            ops.kv_cache_write(ck.view_mut(), cv.view_mut(), i[0].view(), i[1].view(), i[2].view())
        })
        .act(&[t, nk, d], 1.0)
        .act(&[t, nk, d], 1.0)
        .ints(&[t], slots)
        .adds(Act, &[blocks, block, nk, d])
        .adds(Act, &[blocks, block, nk, d])
        .bytes(move |act| (4 * t * nk * d * act) as f64),
        Case::new(format!("paged_attention {b} sequences {t} queries {keys} keys {nq}/{nk}/{d}"), move |ops, i, o| {
            let seqs = PagedSeqs { cu_q: i[3].view(), context: i[4].view(), blocks: i[5].view() };
            ops.paged_attention(o[0].view_mut(), i[0].view(), i[1].view(), i[2].view(), seqs, scale)
        })
        .act(&[t, nq, d], 1.0)
        .act(&[blocks, block, nk, d], 1.0)
        .act(&[blocks, block, nk, d], 1.0)
        .ints(&[b + 1], cu)
        .ints(&[b], contexts)
        .ints(&[b, most], table)
        .out(Act, &[t, nq, d])
        .bytes(move |act| (2 * keys * nk * d * act) as f64),
    ]
}
