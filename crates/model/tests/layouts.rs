//! Every way of dividing layers over ranks gives the losses and gradients of one rank. Ranks are threads, numbers are f64, so what is
//! left is the order of additions: 1e-11.

mod common;

use common::{Micro, micro, random_weights, relative, tiny, tiny_moe};
use std::{collections::BTreeMap, time::Duration};
use temper_comm::{Axes, Mesh, World, threads};
use temper_config::{Arch, ModelType};
use temper_model::param::{Param, ParamId, Shard};
use temper_model::{
    AuxSettings, AxisRank, Batch, Cx, Grads, Model, Objective, Parts, Portion, Ranks, Recompute, RopeTables, Seat, Weights, read_floats,
};
use temper_tensor::{Balance, DType, Tensor, cpu::Cpu};

const TOLERANCE: f64 = 1e-11;

/// What training needs to agree on.
#[derive(Default)]
struct Answer {
    /// Gradients by Hugging Face name.
    grads: BTreeMap<String, Vec<f64>>,
    /// Losses of the tokens of every micro-batch.
    losses: Vec<Vec<f64>>,
    /// Load-balancing loss and z-loss of every micro-batch.
    aux: Vec<[f64; 2]>,
}

/// What one rank has.
struct Part {
    params: Vec<Param>,
    grads: Vec<Vec<f64>>,
    /// By number of the micro-batch.
    answers: Vec<(usize, Answer)>,
}

/// One case: an architecture, its micro-batches, what is recomputed.
struct Case {
    arch: Arch,
    micro: Vec<Micro>,
    recompute: Recompute,
    balance: Balance,
}

fn run(case: &Case, axes: Axes, sequence: bool) -> Answer {
    let copies = if axes.tp > case.arch.kv_heads { vec![axes.tp / case.arch.kv_heads] } else { vec![] };
    let worlds = threads(axes.world(), Duration::from_secs(60));
    let parts: Vec<(usize, Part)> = std::thread::scope(|scope| {
        let copies = &copies;
        let ranks: Vec<_> = worlds
            .into_iter()
            .map(|world| {
                scope.spawn(move || {
                    let mesh = Mesh::new(&world, axes, copies).unwrap();
                    (world.rank(), rank(case, Ranks { mesh, sequence }))
                })
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    });
    let mut whole = Answer { losses: vec![vec![]; case.micro.len()], aux: vec![[0.0; 2]; case.micro.len()], ..Answer::default() };
    for (rank, Part { params, grads, answers }) in parts {
        let tp_rank = rank % axes.tp;
        for (param, grad) in params.iter().zip(&grads) {
            // Each tensor rank has the whole of such a gradient: one is enough.
            if param.shard == Shard::Replicated && !sequence && tp_rank != 0 {
                continue;
            }
            for piece in &param.pieces {
                let into = whole.grads.entry(piece.name.clone()).or_insert_with(|| vec![0.0; piece.shape.iter().product()]);
                for run in piece.runs() {
                    (0..run.len).for_each(|i| into[run.disk + i] += grad[run.memory + i]);
                }
            }
        }
        for (index, answer) in answers {
            if tp_rank == 0 {
                whole.losses[index].resize(answer.losses[0].len(), 0.0);
                whole.losses[index].iter_mut().zip(&answer.losses[0]).for_each(|(a, b)| *a += b);
            }
            whole.aux[index] = answer.aux[0];
        }
    }
    whole
}

/// One rank: its parameters, gradients, and the answers of its micro-batches with losses at the places of its tokens.
fn rank(case: &Case, ranks: Ranks) -> Part {
    let ops = Cpu::new(1);
    let axes = ranks.mesh.axes;
    let experts = ranks.mesh.experts.rank();
    let seat = Seat {
        tp: ranks.tensor(),
        ep: AxisRank { rank: experts / axes.etp, of: axes.ep },
        etp: AxisRank { rank: experts % axes.etp, of: axes.etp },
    };
    let whole = Model::new(&case.arch).unwrap();
    let model = Model::part(&case.arch, &Portion { seat, ..Portion::whole(&case.arch) }).unwrap();
    let weights = part_of(&whole, &random_weights(&whole.params, 3, DType::F64, &ops), &model, &ops);
    let rope = RopeTables::new(&ops, &case.arch, 64, DType::F64).unwrap();
    let mut grads = Grads::zeros(&model.params, DType::F64, &ops).unwrap();
    let settings = AuxSettings { kind: case.balance, coef: 0.3, z_coef: 0.2, scale: 1.0 / case.micro.len() as f64 };
    let objective = Objective { loss_scale: 0.1, aux: Some(settings), recompute: case.recompute };
    let mut answers = Vec::new();
    for (index, m) in case.micro.iter().enumerate().filter(|(i, _)| i % axes.dp == ranks.mesh.replica()) {
        let batch = Batch::divided(&ops, &m.ids, &m.positions, &m.cu, &ranks, case.arch.vocab).unwrap();
        let batch = batch.with_labels(&ops, DType::F64, &m.targets, &m.weights).unwrap();
        let cx = Cx { ops: &ops, weights: &weights, rope: &rope, batch: &batch, ranks: &ranks };
        let out = model.forward_backward(&cx, &mut grads, &objective).unwrap();
        let mut losses = vec![0.0; m.ids.len()];
        let places = batch.places().iter().cloned().flatten();
        for (t, loss) in places.zip(read_floats(&ops, &out.losses).unwrap()).filter(|(t, _)| *t < m.ids.len()) {
            losses[t] += loss;
        }
        // Evaluation takes another path to the same losses.
        let again = model.forward_loss(&cx, &None).unwrap();
        assert!(relative(&read_floats(&ops, &again.losses).unwrap(), &read_floats(&ops, &out.losses).unwrap()) < TOLERANCE);
        let read = |x: &Tensor| read_floats(&ops, x).unwrap()[0];
        let aux = out.aux.map_or([0.0; 2], |aux| [read(&aux.balance), read(&aux.z)]);
        answers.push((index, Answer { losses: vec![losses], aux: vec![aux], ..Answer::default() }));
    }
    let grads = (0..model.params.len()).map(|i| common::host(&ops, grads.get(ParamId(i)).unwrap())).collect();
    Part { params: model.params, grads, answers }
}

/// The weights that a part of a model has of a whole one's.
fn part_of(whole: &Model, weights: &Weights, part: &Model, ops: &Cpu) -> Weights {
    let mut own = Weights::empty(&part.params, DType::F64);
    let disk: BTreeMap<&str, Vec<f64>> = whole
        .params
        .iter()
        .enumerate()
        .flat_map(|(i, p)| {
            let values = common::host(ops, weights.get(ParamId(i)).unwrap());
            p.pieces.iter().map(move |piece| (piece.name.as_str(), values[piece.range.clone()].to_vec())).collect::<Vec<_>>()
        })
        .collect();
    for (i, p) in part.params.iter().enumerate() {
        let mut values = vec![f64::NAN; p.numel()];
        for piece in &p.pieces {
            for run in piece.runs() {
                values[run.memory..run.memory + run.len].copy_from_slice(&disk[piece.name.as_str()][run.disk..run.disk + run.len]);
            }
        }
        assert!(values.iter().all(|v| v.is_finite()), "{}", p.name);
        own.set(ops, ParamId(i), common::floats(ops, &values, &p.shape, DType::F64)).unwrap();
    }
    own
}

fn agree(case: &Case, one: &Answer, axes: Axes, sequence: bool) {
    let many = run(case, axes, sequence);
    let at = format!("{axes:?}, sequence {sequence}, {:?}", case.recompute);
    assert_eq!(one.grads.keys().collect::<Vec<_>>(), many.grads.keys().collect::<Vec<_>>(), "{at}");
    for (name, want) in &one.grads {
        let error = relative(&many.grads[name], want);
        assert!(error < TOLERANCE, "{at}: gradient of {name} is off by {error:e}");
    }
    for (i, (found, want)) in many.losses.iter().zip(&one.losses).enumerate() {
        let error = relative(found, want);
        assert!(error < TOLERANCE, "{at}: losses of micro-batch {i} are off by {error:e}");
    }
    for (found, want) in many.aux.iter().zip(&one.aux) {
        assert!(relative(found, want) < TOLERANCE, "{at}: auxiliary losses {found:?}, one rank {want:?}");
    }
}

fn axes(tp: usize, cp: usize, dp: usize, ep: usize, etp: usize) -> Axes {
    Axes { tp, cp, dp, pp: 1, ep, etp }
}

fn case(arch: Arch) -> Case {
    // 13 and 11 tokens: no layout of more than one rank divides them.
    let micro = vec![micro(arch.vocab, &[5, 1, 7], 1), micro(arch.vocab, &[11], 2)];
    Case { arch, micro, recompute: Recompute::None, balance: Balance::Hf }
}

/// Four heads on two key/value heads, biases everywhere.
fn dense() -> Arch {
    Arch { heads: 4, out_bias: true, mlp_bias: true, qkv_bias: true, intermediate: 8, ..tiny(ModelType::Qwen3) }
}

#[test]
fn dense_layers_over_tensor_context_and_data_ranks() {
    for arch in [dense(), Arch { tied: true, ..dense() }] {
        let case = case(arch);
        let one = run(&case, axes(1, 1, 1, 1, 1), false);
        for (tp, cp, dp) in [(2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 3, 1), (2, 2, 1), (1, 1, 2), (2, 2, 2), (4, 2, 1)] {
            for sequence in [false, true] {
                agree(&case, &one, axes(tp, cp, dp, 1, 1), sequence);
            }
        }
    }
}

#[test]
fn experts_over_every_axis_they_fold_into() {
    let moe = |balance| {
        let mut arch = Arch { heads: 4, ..tiny_moe(4, 2, true) };
        arch.moe.as_mut().unwrap().intermediate = 4;
        Case { balance, ..case(arch) }
    };
    for balance in [Balance::Hf, Balance::Megatron] {
        let case = moe(balance);
        let one = run(&case, axes(1, 1, 1, 1, 1), false);
        for (tp, cp, dp, ep, etp) in [
            (1, 1, 2, 2, 1),
            (2, 1, 1, 1, 1),
            (2, 1, 1, 2, 1),
            (2, 1, 1, 1, 2),
            (2, 1, 2, 2, 2),
            (2, 1, 2, 4, 1),
            (1, 2, 1, 2, 1),
            (2, 2, 2, 2, 2),
            (4, 1, 1, 2, 2),
        ] {
            for sequence in [false, true] {
                agree(&case, &one, axes(tp, cp, dp, ep, etp), sequence);
            }
        }
    }
}

#[test]
fn recomputation_changes_nothing() {
    let parts = Parts { norm: true, act: true, moe: true, mlp: true, qkv: true };
    for recompute in [Recompute::Selective(parts), Recompute::Full] {
        let dense = Case { recompute, ..case(dense()) };
        let one = run(&Case { recompute: Recompute::None, ..case(dense.arch.clone()) }, axes(1, 1, 1, 1, 1), false);
        agree(&dense, &one, axes(2, 2, 1, 1, 1), true);
        let mut arch = Arch { heads: 4, ..tiny_moe(4, 2, true) };
        arch.moe.as_mut().unwrap().intermediate = 4;
        let moe = Case { recompute, ..case(arch) };
        let one = run(&Case { recompute: Recompute::None, ..case(moe.arch.clone()) }, axes(1, 1, 1, 1, 1), false);
        agree(&moe, &one, axes(2, 1, 2, 2, 2), true);
        agree(&moe, &one, axes(2, 1, 1, 2, 1), false);
    }
}

#[test]
fn a_declaration_is_divided_without_gaps_and_starts_from_the_same_values() {
    let mut arch = Arch { heads: 4, ..tiny_moe(4, 2, true) };
    arch.moe.as_mut().unwrap().intermediate = 4;
    let whole = Model::new(&arch).unwrap();
    let disk: BTreeMap<String, Vec<f32>> = host_values(&whole.params).into_iter().collect();
    let mut covered: BTreeMap<String, Vec<u8>> = disk.iter().map(|(n, v)| (n.clone(), vec![0; v.len()])).collect();
    for rank in 0..4 {
        let place = |rank, of| AxisRank { rank, of };
        let seat = Seat { tp: place(rank, 4), ep: place(rank / 2, 2), etp: place(rank % 2, 2) };
        let part = Model::part(&arch, &Portion { seat, ..Portion::whole(&arch) }).unwrap();
        for (param, values) in part.params.iter().zip(Weights::random_host(&part.params, 7)) {
            assert_eq!(param.pieces.last().unwrap().range.end, param.numel(), "{}", param.name);
            for piece in &param.pieces {
                assert_eq!(piece.local_shape().iter().product::<usize>(), piece.range.len());
                // Two neighbours hold each of the two key/value heads.
                assert_eq!(piece.copies, if piece.name.contains("k_proj") || piece.name.contains("v_proj") { 2 } else { 1 });
                for run in piece.runs() {
                    let range = run.disk..run.disk + run.len;
                    assert_eq!(values.as_slice::<f32>().unwrap()[run.memory..run.memory + run.len], disk[&piece.name][range.clone()]);
                    covered.get_mut(&piece.name).unwrap()[range].iter_mut().for_each(|n| *n += 1);
                }
            }
        }
    }
    for (name, counts) in covered {
        let replicated = name.contains("norm") || name.contains("mlp.gate.");
        let want = if replicated {
            4
        } else if name.contains("k_proj") || name.contains("v_proj") {
            2
        } else {
            1
        };
        assert!(counts.iter().all(|n| *n == want), "{name}: {counts:?}");
    }
}

fn host_values(params: &[Param]) -> Vec<(String, Vec<f32>)> {
    let values = Weights::random_host(params, 7);
    let pieces = params.iter().zip(&values).flat_map(|(p, v)| {
        let v = v.as_slice::<f32>().unwrap();
        p.pieces.iter().map(|piece| (piece.name.clone(), v[piece.range.clone()].to_vec()))
    });
    pieces.collect()
}

#[test]
fn heads_that_do_not_divide_are_refused() {
    let seat = Seat { tp: AxisRank { rank: 0, of: 3 }, ..Seat::WHOLE };
    let error = Model::part(&dense(), &Portion { seat, ..Portion::whole(&dense()) }).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("do not divide over 3 ranks"), "{error}");
}
