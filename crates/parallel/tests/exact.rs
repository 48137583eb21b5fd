//! With gradients whose sums are exact in any order, an optimizer divided over ranks gives the bits of one rank: gradients, weights,
//! masters, moments. The CPU has no norm and no update in bf16; what leads up to them is compared.

mod tiny;

use std::collections::BTreeMap;
use temper_comm::{Axes, Comm};
use temper_model::param::{Param, ParamId, Piece, Shard};
use temper_model::{Grads, Ranks, Weights};
use temper_parallel::{AdamWConfig, Buckets, Optimizer, Segment};
use temper_tensor::{DType, Ops, cpu::Cpu};
use tiny::*;

/// Types of weights, gradients, moments, and whether the moments lie on the host.
#[derive(Clone, Copy, Debug)]
struct Types(DType, DType, DType, bool);

/// Bits of elements in the order of their places on disk, by kind and name.
type Bits = BTreeMap<(&'static str, String), Vec<u64>>;

/// What nobody has: bits of no value here.
const UNSEEN: u64 = u64::MAX;

fn small(name: &str, at: usize, salt: usize) -> f64 {
    let seed = name.bytes().fold(salt as u64 + 7, |h, b| h.wrapping_mul(0x0100_0000_01b3) ^ u64::from(b));
    let mixed = (seed ^ at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    0.25 * ((mixed >> 40) % 17) as f64 - 2.0
}

/// A value near `x` that lies half-way between two of bf16, where roundings differ.
fn tie(x: f64) -> f64 {
    f64::from(f32::from_bits((x as f32).to_bits() & 0xffff_0000 | 0x8000))
}

/// How many ranks have a part of a gradient, and which of them this one is.
fn contributor(ranks: &Ranks, param: &Param, piece: &Piece, tied: bool) -> (usize, usize) {
    let mesh = &ranks.mesh;
    let replicas: &dyn Comm = if param.shard.is_expert() { &*mesh.expert_dp } else { &*mesh.dp };
    let tensor: Option<&dyn Comm> = match param.shard {
        Shard::Shared => Some(&*mesh.tp),
        Shard::Replicated if ranks.sequence => Some(&*mesh.tp),
        _ => mesh.copies(piece.copies),
    };
    let ends: Option<&dyn Comm> = (tied && param.name.contains("embed_tokens")).then_some(&*mesh.ends);
    let groups = [Some(replicas), tensor, ends];
    groups.into_iter().flatten().fold((1, 0), |(count, index), g| (count * g.size(), index * g.size() + g.rank()))
}

/// This rank's part of the gradient of a step.
fn gradient(ranks: &Ranks, param: &Param, step: usize, tied: bool) -> Vec<f64> {
    let part = |piece: &Piece, at: usize| {
        let (count, index) = contributor(ranks, param, piece, tied);
        let other = |k: usize| small(&piece.name, at, 100 + k);
        if index > 0 { other(index) } else { small(&piece.name, at, step) - (1..count).map(other).sum::<f64>() }
    };
    let runs = param.pieces.iter().flat_map(|p| p.runs().map(move |run| (p, run)));
    runs.flat_map(|(piece, run)| (0..run.len).map(move |i| (piece, run.disk + i))).map(|(piece, at)| part(piece, at)).collect()
}

/// Notes elements `range` of a parameter.
fn collect(bits: &mut Bits, kind: &'static str, param: &Param, range: std::ops::Range<usize>, values: &[f64]) {
    for piece in &param.pieces {
        let unseen = || vec![UNSEEN; piece.shape.iter().product()];
        let into = bits.entry((kind, piece.name.clone())).or_insert_with(unseen);
        for (disk, memory) in piece.runs().flat_map(|run| (0..run.len).map(move |i| (run.disk + i, run.memory + i))) {
            if range.contains(&memory) {
                into[disk] = values[memory - range.start].to_bits();
            }
        }
    }
}

/// Takes another rank's elements in; where both have one, it is the same.
fn merge(whole: &mut Bits, part: Bits, at: &str) {
    for (key, bits) in part {
        let into = whole.entry(key.clone()).or_insert_with(|| vec![UNSEEN; bits.len()]);
        for (seen, bits) in into.iter_mut().zip(bits).filter(|(_, bits)| *bits != UNSEEN) {
            assert!([UNSEEN, bits].contains(seen), "{at}: {key:?} differs between ranks");
            *seen = bits;
        }
    }
}

fn steps(arch: &temper_config::Arch, layout: Layout, Types(weight, grad, moment, offload): Types) -> Bits {
    let all = on_ranks(arch, layout, |ranks| {
        let ops = Cpu::new(1);
        let master = weight.stat();
        let model = part(arch, &ranks);
        let buckets = Buckets::new(&model, &ranks).unwrap();
        let mut weights = Weights::alloc(buckets.slots(), weight, &ops).unwrap();
        let mut grads = Grads::zeros_in(buckets.slots(), grad, &ops).unwrap();
        let adamw = AdamWConfig { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, clip: 1.0 };
        let mut optimizer = Optimizer::new(&ops, buckets, weight, moment, offload, adamw).unwrap();
        for (i, (values, param)) in drawn(&model.params, 4).iter().zip(&model.params).enumerate() {
            let values = floats(&values.iter().map(|v| tie(*v)).collect::<Vec<_>>(), &param.shape, master);
            // In two parts, of which the first may end anywhere.
            let (cut, end) = (param.numel() / 3, param.numel());
            let flat = values.view().reshape(&[end]);
            for range in [0..cut, cut..end].iter().filter(|r| !r.is_empty()) {
                optimizer.set_master(&ops, &mut weights, ParamId(i), range, flat.slice_rows(range.clone())).unwrap();
            }
        }
        for step in 0..3 {
            grads.begin();
            for (i, param) in model.params.iter().enumerate() {
                let values = floats(&gradient(&ranks, param, step, arch.tied), &param.shape, master);
                ops.copy(grads.sum_into(ParamId(i)).unwrap().0, values.view()).unwrap();
            }
            optimizer.reduce(&ops, &mut grads).unwrap();
            if grad == DType::BF16 {
                continue;
            }
            optimizer.measure(&ops, &grads, std::iter::empty()).unwrap();
            if weight != DType::BF16 {
                optimizer.step(&ops, &mut weights, &grads, 1e-2).unwrap();
            }
            assert!(optimizer.settle(&ops).unwrap().updated);
        }
        let mut bits = Bits::new();
        for (i, param) in model.params.iter().enumerate() {
            collect(&mut bits, "weight", param, 0..param.numel(), &host(&ops, weights.get(ParamId(i)).unwrap()));
        }
        for segment in optimizer.segments() {
            let Segment { param, range, .. } = segment.clone();
            let grad = &host(&ops, grads.get(param).unwrap())[range.clone()];
            collect(&mut bits, "gradient", &model.params[param.0], range.clone(), grad);
            let [m, v] = optimizer.moments(segment).map(|x| host(&ops, x));
            collect(&mut bits, "first moment", &model.params[param.0], range.clone(), &m);
            collect(&mut bits, "second moment", &model.params[param.0], range.clone(), &v);
            if let Some(master) = optimizer.master(&ops, &weights, segment).unwrap() {
                collect(&mut bits, "master", &model.params[param.0], range, &host(&ops, master.view()));
            }
        }
        bits
    });
    let mut whole = Bits::new();
    all.into_iter().for_each(|bits| merge(&mut whole, bits, &format!("{layout:?}")));
    assert!(whole.values().flatten().all(|bits| *bits != UNSEEN), "{layout:?}: nobody has some element");
    whole
}

#[test]
fn every_type_of_weights_gradients_and_moments_gives_the_bits_of_one_rank() {
    use DType::{BF16, F32, F64};
    let types = [Types(F64, F64, F64, false), Types(F32, F32, F32, true), Types(BF16, F32, F32, false), Types(BF16, BF16, BF16, true)];
    let stages = Axes { pp: 2, ..axes(4, 1, 3, 1, 1) };
    let dense_axes = [axes(1, 1, 2, 1, 1), axes(1, 1, 5, 1, 1), axes(4, 1, 2, 1, 1), axes(2, 3, 1, 1, 1), stages];
    let expert_axes = [axes(1, 1, 4, 2, 1), axes(4, 1, 2, 2, 2), axes(2, 2, 2, 4, 1)];
    for (i, types) in types.into_iter().enumerate() {
        for (arch, layouts) in [(dense(true), &dense_axes[..]), (experts(), &expert_axes[..])] {
            let one = steps(&arch, Layout::ONE, types);
            assert!(one.keys().any(|(kind, _)| *kind == "master") == (types.0 == BF16));
            for (j, axes) in layouts.iter().enumerate() {
                let layout = Layout { axes: *axes, sequence: (i + j) % 2 == 0, overlap: false };
                let many = steps(&arch, layout, types);
                assert!(one.keys().eq(many.keys()), "{layout:?}");
                let wrong = one.iter().find(|(key, bits)| many[*key] != **bits);
                assert!(wrong.is_none(), "{types:?}, {layout:?}: {:?} differs from one rank", wrong.unwrap().0);
            }
        }
    }
}
