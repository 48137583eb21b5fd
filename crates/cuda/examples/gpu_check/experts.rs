//! Cases of a mixture of experts. T tokens, E experts, K experts a token, S = T*K rows, H width, N matrix rows.

use crate::case::{Case, Random, Role::*, Values, take};
use temper_tensor::{Balance, Beta, GroupedGemm, RouterGrad};

/// Experts of each token, without repetition. Skewed: low experts are chosen more, and expert 3 never (when there is room).
fn choice(t: usize, e: usize, k: usize, skewed: bool) -> Vec<i32> {
    let mut r = Random(11);
    let mut all = Vec::with_capacity(t * k);
    for _ in 0..t {
        let mut own: Vec<i32> = vec![];
        while own.len() < k {
            let bound = if skewed { 1 + r.below(e) } else { e };
            let x = r.below(bound) as i32;
            let barred = skewed && x == 3 && e > k + 3;
            if !barred && !own.contains(&x) {
                own.push(x);
            }
        }
        all.extend(own);
    }
    all
}

/// Router, statistics, losses and gradient.
pub fn router(t: usize, e: usize, k: usize) -> Vec<Case> {
    let s = |op: &str| format!("{op} {t}x{e} top {k}");
    let kept = |c: Case| c.out(Stat, &[t, e]).out(Int, &[t, k]).out(Stat, &[t, k]);
    let mut all = vec![];
    for normalise in [true, false] {
        let word = if normalise { "router normalised" } else { "router" };
        all.push(kept(
            Case::new(s(word), move |ops, i, o| {
                let [p, x, w] = take(o)?;
                ops.router(p.view_mut(), x.view_mut(), w.view_mut(), i[0].view(), normalise)
            })
            .input(Stat, &[t, e], Values::Coarse),
        ));
        all.push(
            kept(
                Case::new(s(&format!("{word} and grad")), move |ops, i, o| {
                    let [p, x, w, d] = take(o)?;
                    ops.router(p.view_mut(), x.view_mut(), w.view_mut(), i[0].view(), normalise)?;
                    let extra = RouterGrad { balance: Some(i[2].view()), z_coef: 0.3, normalised: normalise };
                    ops.router_grad(d.view_mut(), i[1].view(), p.view(), x.view(), w.view(), i[0].view(), extra)
                })
                .input(Stat, &[t, e], Values::Coarse)
                .stat(&[t, k], 1.0)
                .stat(&[e], 0.1),
            )
            .out(Stat, &[t, e]),
        );
    }
    all.push(
        Case::new(s("router_stats"), |ops, i, o| {
            let [n, p, z] = take(o)?;
            ops.router_stats(n.view_mut(), p.view_mut(), z.view_mut(), i[0].view(), i[1].view(), i[2].view())
        })
        .input(Stat, &[t, e], Values::Uniform(0.0, 1.0))
        .ints(&[t, k], choice(t, e, k, true))
        .input(Stat, &[t, e], Values::Coarse)
        .adds(Stat, &[e])
        .adds(Stat, &[e])
        .adds(Stat, &[1]),
    );
    for kind in [Balance::Hf, Balance::Megatron] {
        all.push(
            Case::new(s(&format!("balance_loss {kind:?}")), move |ops, i, o| {
                let [l, g] = take(o)?;
                ops.balance_loss(l.view_mut(), g.view_mut(), i[0].view(), i[1].view(), t, k, kind, 0.7)
            })
            .input(Stat, &[3, e], Values::Uniform(0.0, t as f32))
            .input(Stat, &[3, e], Values::Uniform(0.0, t as f32))
            .out(Stat, &[1])
            .out(Stat, &[3, e]),
        );
    }
    all
}

/// Sorting, gathering and combining, with all experts here and with half of them elsewhere.
pub fn routing(t: usize, e: usize, k: usize, h: usize) -> Vec<Case> {
    [0..e, e / 4..e / 4 + e.div_ceil(2)]
        .into_iter()
        .filter(|here| here.len() < 256 || here.start == 0)
        .flat_map(|here| part(t, e, k, h, here))
        .collect()
}

fn part(t: usize, e: usize, k: usize, h: usize, here: std::ops::Range<usize>) -> Vec<Case> {
    let s = |op: &str| format!("{op} {t} tokens {k} of {e} x{h}, {} here", here.len());
    let experts = choice(t, e, k, true);
    // The permutation, as the contract states it.
    let mut source: Vec<i32> = (0..(t * k) as i32).collect();
    let class = |r: i32| if here.contains(&(experts[r as usize] as usize)) { experts[r as usize] } else { i32::MAX };
    source.sort_by_key(|r| class(*r));
    let rows = source.iter().filter(|r| class(**r) < i32::MAX).count();
    let mut place = vec![0i32; t * k];
    source.iter().enumerate().for_each(|(i, r)| place[*r as usize] = i as i32);
    let (first, count) = (here.start, here.len());
    vec![
        Case::new(s("moe_sort"), move |ops, i, o| {
            let [f, p] = take(o)?;
            ops.moe_sort(f.view_mut(), p.view_mut(), i[0].view(), first)
        })
        .ints(&[t, k], experts.clone())
        .out(Int, &[count + 1])
        .out(Int, &[t, k]),
        Case::new(s("moe_ranks"), move |ops, i, o| {
            let [r, n] = take(o)?;
            ops.moe_ranks(r.view_mut(), n.view_mut(), i[0].view(), e.div_ceil(4), 2)
        })
        .ints(&[t, k], experts)
        .out(Int, &[t, e.div_ceil(e.div_ceil(4)) * 2])
        .out(Int, &[e.div_ceil(e.div_ceil(4)) * 2]),
        Case::new(s("moe_gather"), |ops, i, o| ops.moe_gather(o[0].view_mut(), i[0].view(), i[1].view()))
            .act(&[t, h], 1.0)
            .ints(&[t, k], place.clone())
            .out(Act, &[rows, h]),
        Case::new(s("moe_combine"), |ops, i, o| ops.moe_combine(o[0].view_mut(), i[0].view(), Some(i[1].view()), i[2].view()))
            .act(&[rows, h], 1.0)
            .stat(&[t, k], 1.0)
            .ints(&[t, k], place.clone())
            .out(Act, &[t, h]),
        Case::new(s("moe_combine without weights"), |ops, i, o| ops.moe_combine(o[0].view_mut(), i[0].view(), None, i[1].view()))
            .act(&[rows, h], 1.0)
            .ints(&[t, k], place.clone())
            .out(Act, &[t, h]),
        Case::new(s("moe_act_grad"), |ops, i, o| {
            let [d, a, w] = take(o)?;
            ops.moe_act_grad(d.view_mut(), a.view_mut(), w.view_mut(), i[0].view(), i[1].view(), i[2].view(), i[3].view())
        })
        .act(&[rows, h], 1.0)
        .act(&[rows, 2 * h], 1.0)
        .stat(&[t, k], 1.0)
        .ints(&[t, k], place)
        .out(Act, &[rows, 2 * h])
        .out(Act, &[rows, h])
        .out(Stat, &[t, k]),
    ]
}

/// Rows of each expert for S rows: even, or uneven with empty experts.
fn offsets(rows: usize, e: usize, skewed: bool) -> Vec<i32> {
    let weight = |i: usize| {
        if !skewed {
            1
        } else if i == 3 || i % 11 == 7 {
            0
        } else {
            1 + i * 37 % 19
        }
    };
    let total: usize = (0..e).map(weight).sum::<usize>().max(1);
    let mut sum = 0;
    let mut all = vec![0i32];
    for i in 0..e {
        sum += weight(i);
        all.push((sum * rows / total) as i32);
    }
    all[e] = rows as i32;
    all
}

/// The three grouped products of S rows, matrices [E, N, M].
pub fn grouped(rows: usize, e: usize, n: usize, m: usize, skewed: bool) -> Vec<Case> {
    let word = if skewed { "uneven" } else { "even" };
    let s = |kind: GroupedGemm| format!("grouped_gemm {kind:?} {rows} rows {e}x{n}x{m} {word}");
    let flops = 2.0 * rows as f64 * n as f64 * m as f64;
    let form = |kind: GroupedGemm, a: &[usize], b: &[usize], depth: usize| {
        Case::new(s(kind), move |ops, i, o| ops.grouped_gemm(kind, o[0].view_mut(), i[0].view(), i[1].view(), i[2].view()))
            .act(a, 1.0)
            .act(b, 1.0 / (depth.max(1) as f32).sqrt())
            .ints(&[e + 1], offsets(rows, e, skewed))
            .flops(flops)
    };
    vec![
        form(GroupedGemm::Forward, &[rows, m], &[e, n, m], m).out(Act, &[rows, n]),
        form(GroupedGemm::InputGrad, &[rows, n], &[e, n, m], n).out(Act, &[rows, m]),
        form(GroupedGemm::WeightGrad(Beta::One), &[rows, n], &[rows, m], rows / e.max(1)).adds(Stat, &[e, n, m]),
        form(GroupedGemm::WeightGrad(Beta::Zero), &[rows, n], &[rows, m], rows / e.max(1)).out(Stat, &[e, n, m]),
    ]
}
