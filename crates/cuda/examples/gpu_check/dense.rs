//! Cases without sequences and experts. T tokens, H width, V vocabulary.

use crate::case::{Case, Random, Role, Role::*, Values, take};
use temper_tensor::{AdamW, AdamWState, Beta, Trans};

/// Element-wise operations over n elements.
pub fn elementwise(n: usize) -> Vec<Case> {
    vec![
        Case::new(format!("add {n}"), |ops, i, o| ops.add(o[0].view_mut(), i[0].view(), i[1].view()))
            .act(&[n], 1.0)
            .act(&[n], 1.0)
            .out(Act, &[n]),
        Case::new(format!("add_assign {n}"), |ops, i, o| ops.add_assign(o[0].view_mut(), i[0].view())).act(&[n], 1.0).adds(Act, &[n]),
        Case::new(format!("scale {n}"), |ops, _, o| ops.scale(o[0].view_mut(), 0.37)).adds(Act, &[n]),
        Case::new(format!("copy to f32 {n}"), |ops, i, o| ops.copy(o[0].view_mut(), i[0].view())).act(&[n], 1.0).out(Stat, &[n]),
        Case::new(format!("copy from f32 {n}"), |ops, i, o| ops.copy(o[0].view_mut(), i[0].view())).stat(&[n], 1.0).out(Act, &[n]),
        Case::new(format!("fill {n}"), |ops, _, o| ops.fill(o[0].view_mut(), 1.5)).out(Act, &[n]),
    ]
}

/// A copy of n elements: what memory gives an operation of this size.
pub fn copy(n: usize) -> Case {
    Case::new(format!("copy {n}"), |ops, i, o| ops.copy(o[0].view_mut(), i[0].view())).act(&[n], 1.0).out(Act, &[n])
}

/// Products C[m, n] over depth k, in the three forms that layers use.
pub fn gemm(m: usize, n: usize, k: usize) -> Vec<Case> {
    let flops = 2.0 * m as f64 * n as f64 * k as f64;
    let spread = 1.0 / (k.max(1) as f32).sqrt();
    let name = |form: &str| format!("gemm {form} {m}x{n}x{k}");
    vec![
        Case::new(name("forward"), |ops, i, o| ops.gemm(o[0].view_mut(), i[0].view(), Trans::No, i[1].view(), Trans::Yes, Beta::Zero))
            .act(&[m, k], 1.0)
            .act(&[n, k], spread)
            .out(Act, &[m, n])
            .flops(flops),
        Case::new(name("input grad"), |ops, i, o| ops.gemm(o[0].view_mut(), i[0].view(), Trans::No, i[1].view(), Trans::No, Beta::Zero))
            .act(&[m, k], 1.0)
            .act(&[k, n], spread)
            .out(Act, &[m, n])
            .flops(flops),
        Case::new(name("weight grad"), |ops, i, o| ops.gemm(o[0].view_mut(), i[0].view(), Trans::Yes, i[1].view(), Trans::No, Beta::One))
            .act(&[k, m], 1.0)
            .act(&[k, n], spread)
            .adds(Stat, &[m, n])
            .flops(flops),
        Case::new(name("bf16 beta 1"), |ops, i, o| ops.gemm(o[0].view_mut(), i[0].view(), Trans::No, i[1].view(), Trans::Yes, Beta::One))
            .act(&[m, k], 1.0)
            .act(&[n, k], spread)
            .adds(Act, &[m, n])
            .flops(flops),
    ]
}

/// A router's products, T tokens of width H to E experts, in f32 and with the exact operands that bf16 allows.
pub fn router_products(t: usize, e: usize, h: usize) -> Vec<Case> {
    let flops = 2.0 * t as f64 * e as f64 * h as f64;
    let forward = |name: &str, role: Role| {
        Case::new(format!("router product, {name} {t}x{e}x{h}"), |ops, i, o| {
            ops.gemm(o[0].view_mut(), i[0].view(), Trans::No, i[1].view(), Trans::Yes, Beta::Zero)
        })
        .input(role, &[t, h], Values::Normal(1.0))
        .input(role, &[e, h], Values::Normal(0.02))
        .out(Stat, &[t, e])
        .flops(flops)
    };
    let input_grad = |name: &str, role: Role, depth: usize| {
        Case::new(format!("router input gradient, {name} {t}x{h}x{depth}"), |ops, i, o| {
            ops.gemm(o[0].view_mut(), i[0].view(), Trans::No, i[1].view(), Trans::No, Beta::Zero)
        })
        .input(role, &[t, depth], Values::Normal(1.0))
        .input(role, &[depth, h], Values::Normal(0.02))
        .out(Stat, &[t, h])
        .flops(flops)
    };
    let weight_grad = |name: &str, role: Role, rows: usize| {
        Case::new(format!("router weight gradient, {name} {rows}x{h}x{t}"), |ops, i, o| {
            ops.gemm(o[0].view_mut(), i[0].view(), Trans::Yes, i[1].view(), Trans::No, Beta::Zero)
        })
        .input(role, &[t, rows], Values::Normal(1.0))
        .input(role, &[t, h], Values::Normal(1.0))
        .out(Stat, &[rows, h])
        .flops(flops)
    };
    vec![
        forward("f32", Stat),
        forward("activations", Act),
        input_grad("f32", Stat, e),
        input_grad("activations", Act, e),
        input_grad("activations in three parts", Act, 3 * e),
        weight_grad("f32", Stat, e),
        weight_grad("activations", Act, e),
        weight_grad("activations in three parts", Act, 3 * e),
    ]
}

/// Bias of T rows.
pub fn bias(t: usize, h: usize) -> Vec<Case> {
    vec![
        Case::new(format!("add_bias {t}x{h}"), |ops, i, o| ops.add_bias(o[0].view_mut(), i[0].view())).act(&[h], 1.0).adds(Act, &[t, h]),
        Case::new(format!("bias_grad {t}x{h}"), |ops, i, o| ops.bias_grad(o[0].view_mut(), i[0].view())).act(&[t, h], 1.0).adds(Stat, &[h]),
    ]
}

/// RMSNorm of T rows.
pub fn norm(t: usize, h: usize) -> Vec<Case> {
    let s = |op: &str| format!("{op} {t}x{h}");
    let positive = || Values::Uniform(0.5, 1.5);
    vec![
        Case::new(s("rms_norm"), |ops, i, o| {
            let [y, r] = take(o)?;
            ops.rms_norm(y.view_mut(), r.view_mut(), i[0].view(), i[1].view(), 1e-6)
        })
        .act(&[t, h], 1.0)
        .act(&[h], 1.0)
        .out(Act, &[t, h])
        .out(Stat, &[t]),
        Case::new(s("add_rms_norm"), |ops, i, o| {
            let [sum, y, r] = take(o)?;
            ops.add_rms_norm(sum.view_mut(), y.view_mut(), r.view_mut(), i[0].view(), i[1].view(), i[2].view(), 1e-6)
        })
        .act(&[t, h], 1.0)
        .act(&[t, h], 1.0)
        .act(&[h], 1.0)
        .out(Act, &[t, h])
        .out(Act, &[t, h])
        .out(Stat, &[t]),
        Case::new(s("rms_norm_grad_input"), |ops, i, o| {
            ops.rms_norm_grad_input(o[0].view_mut(), i[0].view(), i[1].view(), i[2].view(), i[3].view(), Some(i[4].view()))
        })
        .act(&[t, h], 1.0)
        .act(&[t, h], 1.0)
        .act(&[h], 1.0)
        .input(Stat, &[t], positive())
        .act(&[t, h], 1.0)
        .out(Act, &[t, h]),
        Case::new(s("rms_norm_grad_input without residual"), |ops, i, o| {
            ops.rms_norm_grad_input(o[0].view_mut(), i[0].view(), i[1].view(), i[2].view(), i[3].view(), None)
        })
        .act(&[t, h], 1.0)
        .act(&[t, h], 1.0)
        .act(&[h], 1.0)
        .input(Stat, &[t], positive())
        .out(Act, &[t, h]),
        Case::new(s("rms_norm_grad_weight"), |ops, i, o| ops.rms_norm_grad_weight(o[0].view_mut(), i[0].view(), i[1].view(), i[2].view()))
            .act(&[t, h], 1.0)
            .act(&[t, h], 1.0)
            .input(Stat, &[t], positive())
            .adds(Stat, &[h]),
    ]
}

/// SwiGLU of T rows of width I.
pub fn swiglu(t: usize, i: usize) -> Vec<Case> {
    vec![
        Case::new(format!("swiglu {t}x{i}"), |ops, i, o| ops.swiglu(o[0].view_mut(), i[0].view())).act(&[t, 2 * i], 2.0).out(Act, &[t, i]),
        Case::new(format!("swiglu_grad {t}x{i}"), |ops, i, o| ops.swiglu_grad(o[0].view_mut(), i[0].view(), i[1].view()))
            .act(&[t, i], 1.0)
            .act(&[t, 2 * i], 2.0)
            .out(Act, &[t, 2 * i]),
    ]
}

/// Embedding of T tokens; half of them are one token, so that long runs of equal ids occur.
pub fn embedding(t: usize, v: usize, h: usize) -> Vec<Case> {
    let mut r = Random(t as u64);
    let ids: Vec<i32> = (0..t).map(|i| if i % 2 == 0 { (v / 2) as i32 } else { r.below(v) as i32 }).collect();
    let moved = move |act: usize| (2 * t * h * act) as f64;
    vec![
        Case::new(format!("embedding {t} of {v}x{h}"), |ops, i, o| ops.embedding(o[0].view_mut(), i[0].view(), i[1].view()))
            .act(&[v, h], 1.0)
            .ints(&[t], ids.clone())
            .out(Act, &[t, h])
            .bytes(moved),
        Case::new(format!("embedding_grad {t} of {v}x{h}"), |ops, i, o| ops.embedding_grad(o[0].view_mut(), i[0].view(), i[1].view()))
            .act(&[t, h], 1.0)
            .ints(&[t], ids)
            .adds(Stat, &[v, h])
            .bytes(move |act| (t * h * act + t * h * 4) as f64),
    ]
}

/// Cross-entropy of n rows; every seventh target is ignored.
pub fn cross_entropy(n: usize, v: usize) -> Vec<Case> {
    let mut r = Random(7 + n as u64);
    let targets: Vec<i32> = (0..n).map(|i| if i % 7 == 3 { -100 } else { r.below(v) as i32 }).collect();
    vec![
        Case::new(format!("cross_entropy {n}x{v}"), |ops, i, o| {
            let [l, x] = take(o)?;
            ops.cross_entropy(l.view_mut(), x.view_mut(), i[0].view(), None)
        })
        .ints(&[n], targets.clone())
        .out(Stat, &[n])
        .changes(Act, &[n, v], Values::Normal(3.0))
        .bytes(move |act| (n * v * act) as f64),
        Case::new(format!("cross_entropy and grad {n}x{v}"), |ops, i, o| {
            let [l, x] = take(o)?;
            ops.cross_entropy(l.view_mut(), x.view_mut(), i[0].view(), Some(i[1].view()))
        })
        .ints(&[n], targets)
        .input(Stat, &[n], Values::Uniform(0.5, 1.5))
        .out(Stat, &[n])
        .changes(Act, &[n, v], Values::Normal(3.0)),
    ]
}

/// Optimizer operations over n elements.
pub fn optimizer(n: usize) -> Vec<Case> {
    let step = AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 3 };
    vec![
        Case::new(format!("adamw {n}"), move |ops, i, o| {
            let [w, m, v] = take(o)?;
            let state = AdamWState { weight: w.view_mut(), remainder: None, m: m.view_mut(), v: v.view_mut() };
            ops.adamw(state, i[0].view(), i[1].view(), step)
        })
        .stat(&[n], 1.0)
        .input(Stat, &[1], Values::Floats(vec![0.5]))
        .adds(Act, &[n])
        .adds(Stat, &[n])
        .changes(Stat, &[n], Values::Uniform(0.1, 1.0)),
        Case::new(format!("sum_squares {n}"), |ops, i, o| ops.sum_squares(o[0].view_mut(), i[0].view())).act(&[n], 1.0).adds(Wide, &[1]),
        Case::new(format!("count_non_finite {n}"), |ops, i, o| ops.count_non_finite(o[0].view_mut(), i[0].view()))
            .input(
                Act,
                &[n],
                Values::Floats(
                    (0..n)
                        .map(|i| {
                            if i % 97 == 5 {
                                f32::NAN
                            } else if i % 89 == 3 {
                                f32::INFINITY
                            } else {
                                i as f32
                            }
                        })
                        .collect(),
                ),
            )
            .changes(Int, &[1], Values::Ints(vec![5])),
    ]
}
