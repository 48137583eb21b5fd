use super::*;
use crate::layout::Layout;
use crate::precision::Precision;
use crate::setup::allocate;
use crate::step::Settings;
use std::sync::Arc;
use std::time::Duration;
use temper_comm::{Axes, threads};
use temper_config::LossReduction;
use temper_model::{Model, Recompute, RopeTables};
use temper_parallel::AdamWConfig;
use temper_tensor::{DType, cpu::Cpu};

#[path = "../../../model/tests/common/tiny.rs"]
mod tiny;

/// Every element is in one part, no part overlaps another in its buffer, and none begins at an odd place of a parameter.
#[test]
fn parts_cover_all_and_fit_their_buffers() {
    let lengths = [3, STAGE, 2 * STAGE + 5, 1, 127, STAGE - 200];
    let rest = lengths.iter().enumerate().map(|(i, n)| (Target::Moment(i, i % 2 == 0), ParamId(i), 7..7 + n)).collect();
    let stages = staged(rest, STAGE);
    let mut ends = [7; 6];
    for stage in &stages {
        let mut free = 0;
        for part in stage {
            assert!(part.at >= free && part.at.is_multiple_of(ALIGN) && part.within().end <= STAGE, "{part:?}");
            free = part.within().end;
            assert_eq!(part.range.start, ends[part.param.0], "{part:?}");
            assert!((part.range.start - 7).is_multiple_of(ALIGN), "{part:?}");
            ends[part.param.0] = part.range.end;
        }
    }
    assert_eq!(ends, lengths.map(|n| n + 7));
    assert_eq!(stages.len(), 5);
}

/// A value for every element, with bits in all of its mantissa.
fn value(kind: Kind, name: &str, element: usize) -> f32 {
    let seed = name.bytes().chain(kind.to_string().bytes()).fold(element as u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    f32::from_bits(0x3f80_0000 | (seed >> 17) as u32 & 0x007f_ffff) * if seed & 1 == 0 { 1.0 } else { -1.0 }
}

fn files(slots: Vec<Slot<'_>>) -> temper_checkpoint::Result<Traffic> {
    for Slot { kind, param, range, into } in slots {
        let SliceMut::F32(into) = into.data else { panic!("single precision is asked for") };
        into.iter_mut().zip(range).for_each(|(to, element)| *to = value(kind, &param.name, element));
    }
    Ok(Traffic::default())
}

fn trainer(world: &dyn temper_comm::World, axes: Axes, weights: DType) -> Trainer {
    let arch = tiny::mixture(&[0]);
    let layout = Layout { axes, sequence: axes.tp > 1, vpp: 1, split: Vec::new() };
    let ranks = layout.ranks(world, &arch).unwrap();
    let model = Model::part(&arch, &layout.portion(&arch, &ranks).unwrap()).unwrap();
    let ops = Arc::new(Cpu::new(1));
    let rope = RopeTables::new(&*ops, &arch, 8, weights).unwrap();
    let precision = Precision { weights, grads: DType::F32, moments: DType::F32, offload: false };
    let adamw = AdamWConfig { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, clip: 1.0 };
    let settings = Settings { reduction: LossReduction::Token, balance: None, z_coef: 0.0, recompute: Recompute::None };
    allocate(model, ranks, precision, adamw, settings, rope, ops).unwrap()
}

#[track_caller]
fn holds(x: View, want: impl Iterator<Item = f32>, what: &str) {
    let found: Vec<u32> = x.as_slice::<f32>().unwrap().iter().map(|x| x.to_bits()).collect();
    assert_eq!(found, want.map(f32::to_bits).collect::<Vec<_>>(), "{what}");
}

/// In place, through large buffers and through small ones, weights or masters and moments are what the files say, to the last bit.
#[test]
fn every_way_gives_what_the_files_hold() {
    let axes = |tp, dp, pp, ep| Axes { tp, cp: 1, dp, pp, ep, etp: 1 };
    for axes in [axes(1, 1, 1, 1), axes(1, 3, 1, 1), axes(2, 2, 1, 2), axes(2, 1, 2, 1)] {
        for (weights, far, stage) in [
            (DType::F32, false, STAGE),
            (DType::F32, true, STAGE),
            (DType::F32, true, 256),
            (DType::BF16, true, 128),
            (DType::BF16, false, 384),
        ] {
            std::thread::scope(|scope| {
                for world in threads(axes.world(), Duration::from_secs(30)) {
                    scope.spawn(move || {
                        let mut trainer = trainer(&world, axes, weights);
                        let all: fn(&ViewMut<'_>) -> bool = |_| true;
                        let how = How { far: if far { all } else { is_far }, stage };
                        trainer.fill_so(true, &files, how).unwrap();
                        check(&trainer, &format!("{axes:?} {weights} {far} {stage}"));
                    });
                }
            });
        }
    }
}

fn check(trainer: &Trainer, what: &str) {
    let (ops, optimizer) = (&*trainer.ops, &trainer.optimizer);
    for (i, param) in trainer.model.params.iter().enumerate() {
        let all = (0..param.numel()).map(|e| value(Kind::Weight, &param.name, e));
        let held = trainer.weights.get(ParamId(i)).unwrap();
        let mut single = ops.alloc(DType::F32, &[param.numel()]).unwrap();
        ops.copy(single.view_mut(), held.reshape(&[param.numel()])).unwrap();
        match trainer.weights.dtype() {
            // The nearest, ties away from zero.
            DType::BF16 => holds(single.view(), all.map(|x| f32::from_bits((x.to_bits() + 0x8000) & 0xffff_0000)), what),
            _ => holds(single.view(), all, what),
        }
    }
    for segment in optimizer.segments() {
        let name = &trainer.model.params[segment.param.0].name;
        let want = |kind| segment.range.clone().map(move |e| value(kind, name, e));
        if let Some(master) = optimizer.master(ops, &trainer.weights, segment).unwrap() {
            holds(master.view(), want(Kind::Weight), what);
        }
        let [m, v] = optimizer.moments(segment);
        holds(m, want(Kind::ExpAvg), what);
        holds(v, want(Kind::ExpAvgSq), what);
    }
}
