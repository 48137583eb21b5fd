//! What is not finite is found and told alike by all ranks, whichever of them has it.

mod tiny;

use temper_comm::Axes;
use temper_config::Arch;
use temper_model::param::ParamId;
use temper_model::{Batch, Objective, Ranks, Recompute, RopeTables, Weights};
use temper_parallel::{Buckets, Micro, NonFinite, Stage, diagnose};
use temper_tensor::{DType, cpu::Cpu};
use tiny::{Layout, dense, drawn, experts, floats, on_ranks, part};

/// What is broken: values of one weight, all of them or the last one on disk; and the factor on the loss.
#[derive(Clone, Copy)]
struct Fault<'a> {
    weight: &'a str,
    value: f64,
    last_only: bool,
    loss_scale: f64,
}

const NONE: Fault<'static> = Fault { weight: "", value: 0.0, last_only: false, loss_scale: 0.5 };

fn on_rank(arch: &Arch, ranks: &Ranks, fault: Fault) -> Option<NonFinite> {
    let ops = Cpu::new(1);
    let model = part(arch, ranks);
    let buckets = Buckets::new(&model, ranks).unwrap();
    let mut weights = Weights::alloc(buckets.slots(), DType::F32, &ops).unwrap();
    for (i, (mut values, param)) in drawn(&model.params, 4).into_iter().zip(&model.params).enumerate() {
        for piece in param.pieces.iter().filter(|p| p.name == fault.weight) {
            let end = piece.shape.iter().product::<usize>();
            for run in piece.runs() {
                let first = if fault.last_only { run.len - usize::from(run.disk + run.len == end) } else { 0 };
                values[run.memory + first..run.memory + run.len].fill(fault.value);
            }
        }
        weights.set(&ops, ParamId(i), floats(&values, &param.shape, DType::F32)).unwrap();
    }
    let mut grads = temper_model::Grads::zeros_in(buckets.slots(), DType::F32, &ops).unwrap();
    let rope = RopeTables::new(&ops, arch, 64, DType::F32).unwrap();
    let ids: Vec<i32> = (0..8).map(|i| i % arch.vocab as i32).collect();
    let positions: Vec<i32> = (0..8).collect();
    let batch = Batch::divided(&ops, &ids, &positions, &[0, 8], ranks, arch.vocab).unwrap();
    let batch = batch.with_labels(&ops, DType::F32, &ids, &[1.0; 8]).unwrap();
    let micro = Micro { batch, objective: Objective { loss_scale: fault.loss_scale, aux: None, recompute: Recompute::None } };
    diagnose(Stage { ops: &ops, model: &model, weights: &weights, rope: &rope, ranks }, &micro, &mut grads).unwrap()
}

fn layouts(experts: bool) -> Vec<Layout> {
    let axes = |tp, cp, dp, pp, ep| Axes { tp, cp, dp, pp, ep, etp: 1 };
    let all =
        [axes(1, 1, 1, 1, 1), axes(2, 1, 1, 1, 1), axes(1, 1, 1, 2, 1), axes(1, 2, 1, 1, 1), axes(2, 1, 2, 2, 1), axes(1, 1, 2, 2, 2)];
    let sized = all.into_iter().filter(|a| experts || a.ep == 1);
    sized.map(|axes| Layout { axes, sequence: axes.tp > 1, overlap: false }).collect()
}

/// Every rank of every layout finds `expected`.
#[track_caller]
fn finds(arch: &Arch, fault: Fault, expected: impl Fn(&Option<NonFinite>) -> bool) {
    for layout in layouts(arch.moe.is_some()) {
        let found = on_ranks(arch, layout, |ranks| on_rank(arch, &ranks, fault));
        assert!(found.iter().all(|f| expected(f) && *f == found[0]), "{layout:?}: {found:?}");
    }
}

#[test]
fn nothing_is_found_where_all_is_finite() {
    finds(&dense(false), NONE, Option::is_none);
    finds(&experts(), NONE, Option::is_none);
}

/// Finite weights; but the product of gate and up, each of this size, overflows.
#[test]
fn an_output_that_overflows_is_found_in_its_layer() {
    for (layer, name) in [(0, "model.layers.0.post_attention_layernorm.weight"), (1, "model.layers.1.post_attention_layernorm.weight")] {
        let fault = Fault { weight: name, value: 1e25, ..NONE };
        finds(&dense(false), fault, |f| *f == Some(NonFinite::Output(format!("layer {layer}"))));
    }
}

/// One element, which one rank of a stage holds.
#[test]
fn a_weight_is_found_that_one_rank_has() {
    let nan = |weight| Fault { weight, value: f64::NAN, last_only: true, ..NONE };
    let is = |name: &'static str| move |f: &Option<NonFinite>| *f == Some(NonFinite::Weight(name.into()));
    finds(&dense(true), nan("model.layers.1.mlp.down_proj.weight"), is("model.layers.1.mlp.down_proj.weight"));
    finds(&dense(false), nan("lm_head.weight"), is("lm_head.weight"));
    finds(&experts(), nan("model.layers.1.mlp.experts.3.down_proj.weight"), is("model.layers.1.mlp.experts.down_proj"));
}

#[test]
fn a_gradient_that_overflows_is_found() {
    let fault = Fault { loss_scale: 3e38, ..NONE };
    finds(&dense(false), fault, |f| matches!(f, Some(NonFinite::InputGrad(_) | NonFinite::WeightGrad(_))));
}
