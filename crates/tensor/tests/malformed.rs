//! Malformed arguments give an error that names the operation; they never panic.

use proptest::prelude::*;
use temper_tensor::{
    AdamW, AdamWState, Balance, Beta, DType, Element, FromSlice, GroupedGemm, Ops, PackedSeqs, PagedSeqs, Result, RopeTable, RouterGrad,
    Tensor, Trans, View, ViewMut, cpu::Cpu,
};

/// One argument of an operation in a legal call.
#[derive(Clone)]
struct Arg {
    dtype: DType,
    shape: Vec<usize>,
    ints: Vec<i32>,
    /// Other shapes may be legal too (a table of any length).
    free: bool,
}

type Call = fn(&Cpu, Vec<ViewMut>, &[View]) -> Result<()>;

/// A legal call: outputs, inputs, and how to pass them.
struct Spec {
    name: &'static str,
    outs: Vec<Arg>,
    ins: Vec<Arg>,
    call: Call,
}

fn float(shape: &[usize]) -> Arg {
    Arg { dtype: DType::F32, shape: shape.to_vec(), ints: Vec::new(), free: false }
}

fn int(values: &[i32], shape: &[usize]) -> Arg {
    Arg { dtype: DType::I32, shape: shape.to_vec(), ints: values.to_vec(), free: false }
}

fn free(arg: Arg) -> Arg {
    Arg { free: true, ..arg }
}

macro_rules! spec {
    ($all:ident, $name:literal, [$($out:expr),*], [$($in:expr),*], |$cpu:ident, $o:ident, $i:ident| $call:expr) => {
        $all.push(Spec {
            name: $name,
            outs: vec![$($out),*],
            ins: vec![$($in),*],
            call: |$cpu, outs, $i| {
                let mut outs = outs.into_iter();
                let mut $o = || outs.next().unwrap();
                $call
            },
        })
    };
}

fn specs() -> Vec<Spec> {
    let mut s = Vec::new();
    dense(&mut s);
    layers(&mut s);
    attention(&mut s);
    moe(&mut s);
    s
}

fn dense(s: &mut Vec<Spec>) {
    let (x, f64s) = (float(&[3, 4]), |n: &[usize]| Arg { dtype: DType::F64, ..float(n) });
    spec!(s, "copy", [x.clone()], [x.clone()], |c, o, i| c.copy(o(), i[0]));
    spec!(s, "add", [x.clone()], [x.clone(), x.clone()], |c, o, i| c.add(o(), i[0], i[1]));
    spec!(s, "add_assign", [x.clone()], [x.clone()], |c, o, i| c.add_assign(o(), i[0]));
    spec!(s, "gemm", [float(&[3, 5])], [float(&[3, 4]), float(&[5, 4])], |c, o, i| {
        c.gemm(o(), i[0], Trans::No, i[1], Trans::Yes, Beta::Zero)
    });
    spec!(s, "gemm", [float(&[4, 5])], [float(&[3, 4]), float(&[3, 5])], |c, o, i| {
        c.gemm(o(), i[0], Trans::Yes, i[1], Trans::No, Beta::One)
    });
    spec!(s, "add_bias", [free(float(&[3, 4]))], [float(&[4])], |c, o, i| c.add_bias(o(), i[0]));
    spec!(s, "bias_grad", [float(&[4])], [free(float(&[3, 4]))], |c, o, i| c.bias_grad(o(), i[0]));
    let ids = int(&[0, 4, 2], &[3]);
    spec!(s, "embedding", [float(&[3, 4])], [free(float(&[5, 4])), ids.clone()], |c, o, i| c.embedding(o(), i[0], i[1]));
    spec!(s, "embedding_grad", [free(float(&[5, 4]))], [float(&[3, 4]), ids.clone()], |c, o, i| c.embedding_grad(o(), i[0], i[1]));
    spec!(s, "cross_entropy", [float(&[3]), free(float(&[3, 5]))], [int(&[0, -100, 4], &[3]), float(&[3])], |c, o, i| {
        c.cross_entropy(o(), o(), i[0], Some(i[1]))
    });
    spec!(s, "sum_squares", [f64s(&[1])], [free(float(&[3, 4]))], |c, o, i| c.sum_squares(o(), i[0]));
    spec!(s, "count_non_finite", [int(&[0], &[1])], [free(float(&[7]))], |c, o, i| c.count_non_finite(o(), i[0]));
    spec!(s, "adamw", [x.clone(), x.clone(), x.clone()], [x.clone(), float(&[1])], |c, o, i| {
        let step = AdamW { lr: 0.1, beta1: 0.9, beta2: 0.9, eps: 1e-8, weight_decay: 0.0, step: 1 };
        c.adamw(AdamWState { weight: o(), remainder: None, m: o(), v: o() }, i[0], i[1], step)
    });
}

fn layers(s: &mut Vec<Spec>) {
    let (x, w, r) = (float(&[3, 4]), float(&[4]), float(&[3]));
    spec!(s, "rms_norm", [x.clone(), r.clone()], [x.clone(), w.clone()], |c, o, i| c.rms_norm(o(), o(), i[0], i[1], 1e-5));
    spec!(s, "add_rms_norm", [x.clone(), x.clone(), r.clone()], [x.clone(), x.clone(), w.clone()], |c, o, i| {
        c.add_rms_norm(o(), o(), o(), i[0], i[1], i[2], 1e-5)
    });
    spec!(s, "rms_norm_grad_input", [x.clone()], [x.clone(), x.clone(), w.clone(), r.clone(), x.clone()], |c, o, i| {
        c.rms_norm_grad_input(o(), i[0], i[1], i[2], i[3], Some(i[4]))
    });
    spec!(s, "rms_norm_grad_weight", [w.clone()], [x.clone(), x.clone(), r.clone()], |c, o, i| {
        c.rms_norm_grad_weight(o(), i[0], i[1], i[2])
    });
    spec!(s, "swiglu", [float(&[3, 4])], [float(&[3, 8])], |c, o, i| c.swiglu(o(), i[0]));
    spec!(s, "swiglu_grad", [float(&[3, 8])], [float(&[3, 4]), float(&[3, 8])], |c, o, i| c.swiglu_grad(o(), i[0], i[1]));
    let (q, k, qkv) = (float(&[3, 4, 6]), float(&[3, 2, 6]), float(&[3, 48]));
    let (wd, rs, table, at) = (float(&[6]), float(&[3, 6]), free(float(&[9, 3])), int(&[0, 8, 2], &[3]));
    spec!(
        s,
        "qkv_prepare",
        [q.clone(), k.clone(), k.clone(), rs.clone()],
        [qkv.clone(), wd.clone(), wd.clone(), table.clone(), table.clone(), at.clone()],
        |c, o, i| c.qkv_prepare(o(), o(), o(), Some(o()), i[0], Some((i[1], i[2], 1e-5)), RopeTable { cos: i[3], sin: i[4] }, i[5])
    );
    spec!(
        s,
        "qkv_prepare_grad_input",
        [qkv.clone()],
        [q.clone(), k.clone(), k.clone(), qkv.clone(), wd.clone(), wd.clone(), rs.clone(), table.clone(), table.clone(), at.clone()],
        |c, o, i| {
            let rope = RopeTable { cos: i[7], sin: i[8] };
            c.qkv_prepare_grad_input(o(), i[0], i[1], i[2], i[3], Some((i[4], i[5], i[6])), rope, i[9])
        }
    );
    spec!(
        s,
        "qk_norm_grad_weight",
        [wd.clone(), wd.clone()],
        [q.clone(), k.clone(), qkv.clone(), rs.clone(), table.clone(), table.clone(), at.clone()],
        |c, o, i| c.qk_norm_grad_weight(o(), o(), i[0], i[1], i[2], i[3], RopeTable { cos: i[4], sin: i[5] }, i[6])
    );
}

fn attention(s: &mut Vec<Spec>) {
    let (q, k, lse, cu) = (float(&[5, 4, 3]), float(&[5, 2, 3]), float(&[5, 4]), free(int(&[0, 2, 5], &[3])));
    spec!(s, "attention", [q.clone(), lse.clone()], [q.clone(), k.clone(), k.clone(), cu.clone()], |c, o, i| {
        c.attention(o(), o(), i[0], i[1], i[2], PackedSeqs { cu: i[3], longest: 3, skip: 0 }, 0.5)
    });
    spec!(
        s,
        "attention_grad",
        [q.clone(), k.clone(), k.clone()],
        [q.clone(), q.clone(), lse.clone(), q.clone(), k.clone(), k.clone(), cu.clone()],
        |c, o, i| {
            let seqs = PackedSeqs { cu: i[6], longest: 3, skip: 0 };
            c.attention_grad(o(), o(), o(), i[0], i[1], i[2], i[3], i[4], i[5], seqs, 0.5)
        }
    );
    let cache = float(&[4, 2, 2, 3]);
    spec!(s, "kv_cache_write", [cache.clone(), cache.clone()], [float(&[3, 2, 3]), float(&[3, 2, 3]), int(&[7, 0, 3], &[3])], |c, o, i| c
        .kv_cache_write(o(), o(), i[0], i[1], i[2]));
    spec!(
        s,
        "paged_attention",
        [float(&[3, 4, 3])],
        [float(&[3, 4, 3]), cache.clone(), cache.clone(), int(&[0, 1, 3], &[3]), int(&[3, 2], &[2]), free(int(&[3, 1, 0, -1], &[2, 2]))],
        |c, o, i| c.paged_attention(o(), i[0], i[1], i[2], PagedSeqs { cu_q: i[3], context: i[4], blocks: i[5] }, 0.5)
    );
}

fn moe(s: &mut Vec<Spec>) {
    let (p, w, x) = (float(&[3, 5]), float(&[3, 2]), int(&[4, 0, 1, 2, 0, 3], &[3, 2]));
    spec!(s, "router", [p.clone(), x.clone(), w.clone()], [p.clone()], |c, o, i| c.router(o(), o(), o(), i[0], true));
    spec!(s, "router_stats", [float(&[5]), float(&[5]), float(&[1])], [p.clone(), free(x.clone()), p.clone()], |c, o, i| {
        c.router_stats(o(), o(), o(), i[0], i[1], i[2])
    });
    spec!(s, "router_grad", [p.clone()], [w.clone(), p.clone(), x.clone(), w.clone(), p.clone(), float(&[5])], |c, o, i| {
        let extra = RouterGrad { balance: Some(i[5]), z_coef: 0.1, normalised: true };
        c.router_grad(o(), i[0], i[1], i[2], i[3], i[4], extra)
    });
    spec!(s, "balance_loss", [float(&[1]), float(&[2, 5])], [float(&[2, 5]), float(&[2, 5])], |c, o, i| {
        c.balance_loss(o(), o(), i[0], i[1], 7, 2, Balance::Hf, 0.1)
    });
    let place = int(&[5, 4, 3, 2, 1, 0], &[3, 2]);
    spec!(s, "moe_sort", [free(int(&[0; 6], &[6])), place.clone()], [free(x.clone())], |c, o, i| c.moe_sort(o(), o(), i[0], 0));
    spec!(s, "moe_ranks", [int(&[0; 6], &[3, 2]), int(&[0; 2], &[2])], [free(x.clone())], |c, o, i| c.moe_ranks(o(), o(), i[0], 3, 1));
    let (t, routed) = (float(&[3, 4]), float(&[6, 4]));
    spec!(s, "moe_gather", [free(routed.clone())], [t.clone(), place.clone()], |c, o, i| c.moe_gather(o(), i[0], i[1]));
    spec!(s, "moe_combine", [t.clone()], [free(routed.clone()), w.clone(), place.clone()], |c, o, i| c.moe_combine(
        o(),
        i[0],
        Some(i[1]),
        i[2]
    ));
    let (wide, narrow) = (float(&[6, 8]), float(&[6, 4]));
    spec!(
        s,
        "moe_act_grad",
        [wide.clone(), narrow.clone(), w.clone()],
        [free(narrow.clone()), wide.clone(), w.clone(), place.clone()],
        |c, o, i| c.moe_act_grad(o(), o(), o(), i[0], i[1], i[2], i[3])
    );
    let (x, dy, w, offsets) = (float(&[6, 4]), float(&[6, 3]), float(&[2, 3, 4]), int(&[0, 5, 6], &[3]));
    spec!(s, "grouped_gemm", [dy.clone()], [x.clone(), w.clone(), offsets.clone()], |c, o, i| {
        c.grouped_gemm(GroupedGemm::Forward, o(), i[0], i[1], i[2])
    });
    spec!(s, "grouped_gemm", [x.clone()], [dy.clone(), w.clone(), offsets.clone()], |c, o, i| {
        c.grouped_gemm(GroupedGemm::InputGrad, o(), i[0], i[1], i[2])
    });
    spec!(s, "grouped_gemm", [w.clone()], [dy.clone(), x.clone(), offsets.clone()], |c, o, i| {
        c.grouped_gemm(GroupedGemm::WeightGrad(Beta::One), o(), i[0], i[1], i[2])
    });
}

fn tensor(arg: &Arg) -> Tensor {
    let n: usize = arg.shape.iter().product();
    fn of<T: Element + FromSlice>(n: usize, shape: &[usize]) -> Tensor {
        Tensor::from_vec(vec![T::default(); n], shape)
    }
    match arg.dtype {
        DType::I32 => {
            let mut values = arg.ints.clone();
            values.resize(n, 0);
            Tensor::from_vec(values, &arg.shape)
        }
        DType::F32 => of::<f32>(n, &arg.shape),
        DType::F64 => of::<f64>(n, &arg.shape),
        DType::BF16 => of::<half::bf16>(n, &arg.shape),
        DType::F16 => of::<half::f16>(n, &arg.shape),
    }
}

fn run(cpu: &Cpu, call: Call, outs: &[Arg], ins: &[Arg]) -> Result<()> {
    let (mut outs, ins): (Vec<Tensor>, Vec<Tensor>) = (outs.iter().map(tensor).collect(), ins.iter().map(tensor).collect());
    call(cpu, outs.iter_mut().map(Tensor::view_mut).collect(), &ins.iter().map(Tensor::view).collect::<Vec<_>>())
}

/// A way to spoil an argument.
#[derive(Clone, Debug)]
enum Spoil {
    Dim(usize, usize),
    DropDim,
    AddDim,
    DType(DType),
    Ints(Vec<i32>),
}

fn spoils() -> impl Strategy<Value = Spoil> {
    let dtype = prop_oneof![Just(DType::F64), Just(DType::F32), Just(DType::BF16), Just(DType::F16), Just(DType::I32)];
    prop_oneof![
        (0usize..4, 0usize..9).prop_map(|(d, n)| Spoil::Dim(d, n)),
        Just(Spoil::DropDim),
        Just(Spoil::AddDim),
        dtype.prop_map(Spoil::DType),
        prop::collection::vec(prop_oneof![-3i32..10, Just(i32::MIN), Just(i32::MAX)], 0..8).prop_map(Spoil::Ints),
    ]
}

/// Spoils `arg`; false when that changes nothing.
fn spoil(arg: &mut Arg, how: Spoil) -> bool {
    match how {
        Spoil::Dim(d, n) => {
            let d = d % arg.shape.len();
            std::mem::replace(&mut arg.shape[d], n) != n
        }
        Spoil::DropDim => arg.shape.pop().is_some(),
        Spoil::AddDim => {
            arg.shape.push(1);
            arg.shape.len() <= 4
        }
        Spoil::DType(dtype) => std::mem::replace(&mut arg.dtype, dtype) != dtype,
        Spoil::Ints(values) => {
            let old = std::mem::replace(&mut arg.ints, values);
            // Other indices may be legal, so only the absence of a panic is asked for.
            arg.free = true;
            arg.dtype == DType::I32 && old != arg.ints
        }
    }
}

#[test]
fn the_unspoiled_calls_are_legal() {
    let cpu = Cpu::new(2);
    for s in specs() {
        run(&cpu, s.call, &s.outs, &s.ins).unwrap_or_else(|e| panic!("{}: {e}", s.name));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_spoiled_argument_is_an_error(op in any::<prop::sample::Index>(), arg in any::<prop::sample::Index>(), how in spoils()) {
        let all = specs();
        let s = &all[op.index(all.len())];
        let (mut outs, mut ins) = (s.outs.clone(), s.ins.clone());
        let at = arg.index(outs.len() + ins.len());
        let spoiled = if at < outs.len() { &mut outs[at] } else { &mut ins[at - s.outs.len()] };
        // `copy` converts, and products take a bf16 `b` beside any `a`.
        let legal = (s.name == "gemm" && at == 2 && matches!(how, Spoil::DType(DType::BF16))) || s.name == "copy";
        let only_dtype = matches!(how, Spoil::DType(_));
        if !spoil(spoiled, how.clone()) {
            return Ok(());
        }
        let must_fail = !spoiled.free || (only_dtype && !matches!(s.name, "sum_squares" | "count_non_finite"));
        let result = run(&Cpu::new(1), s.call, &outs, &ins);
        if must_fail && !(legal && only_dtype) {
            let said = result.map_or_else(|e| e.to_string(), |()| "no error".into());
            prop_assert!(said.starts_with(s.name), "{}, argument {at}: {said}", s.name);
        }
    }
}

#[test]
fn half_precision_is_storage_only() {
    let cpu = Cpu::new(1);
    for dtype in [DType::BF16, DType::F16] {
        let x = Tensor::from_vec(vec![1.0f32, -2.5, 0.1], &[3]);
        let mut low = cpu.zeros(dtype, &[3]).unwrap();
        cpu.copy(low.view_mut(), x.view()).unwrap();
        let mut back = cpu.alloc(DType::F32, &[3]).unwrap();
        cpu.copy(back.view_mut(), low.view()).unwrap();
        let back = back.as_slice::<f32>().unwrap();
        assert_eq!(&back[..2], &[1.0, -2.5]);
        assert!((back[2] - 0.1).abs() < 1e-3);
        let mut out = cpu.zeros(dtype, &[3]).unwrap();
        let error = cpu.add(out.view_mut(), low.view(), low.view()).unwrap_err().to_string();
        assert!(error.starts_with("add: a has dtype") && error.contains("float32 or float64"), "{error}");
    }
}

#[test]
fn sizes_beyond_memory_are_an_error() {
    assert!(Cpu::new(1).alloc(DType::F32, &[usize::MAX, 2]).is_err());
    assert!(Cpu::new(1).alloc(DType::F32, &[usize::MAX / 8]).is_err());
    assert!(Cpu::new(1).alloc(DType::F32, &[1 << 56]).is_err());
}
