//! Every layout trains as one rank does: losses, gradient norms and weights after five optimizer steps. Ranks are threads.
//!
//! In f64 what is left is the order of additions, so that weights too can be compared: AdamW moves a weight whose gradient is nearly
//! zero by its sign, which in f32 any two orders disagree about (docs/NUMERICS.md). In f32 losses, norms and gradients agree to 1e-5,
//! or to twice what one rank itself is off by where its sums cancel.

#[path = "../../model/tests/common/tiny.rs"]
mod tiny;

use std::{collections::BTreeMap, sync::Arc, time::Duration};
use temper_comm::{Axes, World, threads};
use temper_config::{Arch, LossReduction, ModelType, Moe};
use temper_data::{MicroBatch, StepBatch};
use temper_model::param::{ParamId, Shard};
use temper_model::{Model, Recompute, RopeTables, Weights, declare};
use temper_parallel::AdamWConfig;
use temper_tensor::{Balance, DType, Ops, Rng, cpu::Cpu};
use temper_train::layout::Layout;
use temper_train::precision::Precision;
use temper_train::setup::allocate;
use temper_train::step::{Settings, Trainer};
use tiny::{relative, tiny};

const ADAMW: AdamWConfig = AdamWConfig { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, clip: 0.5 };

/// A model and what it is trained on.
#[derive(Clone)]
struct Job {
    arch: Arch,
    /// Lengths of the documents of each micro-batch.
    micro: Vec<Vec<usize>>,
    recompute: Recompute,
    reduction: LossReduction,
    balance: Option<(Balance, f64)>,
    dtype: DType,
    /// Optimizer steps.
    steps: usize,
    lr: f64,
}

/// What one step reports, and what training leaves.
#[derive(Debug, Default)]
struct Answer {
    /// loss, auxiliary loss, z-loss and gradient norm of each step.
    steps: Vec<[f64; 4]>,
    /// Gradients of the first step by Hugging Face name.
    grads: BTreeMap<String, Vec<f64>>,
    /// Weights at the end.
    weights: BTreeMap<String, Vec<f64>>,
}

/// Four layers of the tiny network.
fn deep(model_type: ModelType) -> Arch {
    Arch { layers: 4, intermediate: 8, ..tiny(model_type) }
}

fn dense() -> Job {
    Job {
        arch: deep(ModelType::Qwen3),
        micro: vec![vec![5, 1, 7], vec![11], vec![3, 3], vec![9]],
        recompute: Recompute::None,
        reduction: LossReduction::Token,
        balance: None,
        dtype: DType::F64,
        steps: 5,
        lr: 1e-2,
    }
}

fn experts() -> Job {
    let moe = Moe {
        experts: 4,
        top_k: 2,
        intermediate: 4,
        normalise: true,
        sparse_step: 1,
        dense_layers: Vec::new(),
        aux_coef: 0.01,
        aux_in_loss: true,
    };
    Job { arch: Arch { moe: Some(moe), ..deep(ModelType::Qwen3Moe) }, balance: Some((Balance::Hf, 0.3)), ..dense() }
}

impl Job {
    fn batch(&self, step: usize) -> StepBatch {
        let mut rng = Rng::new(17, step as u64);
        let micro = self.micro.iter().map(|lengths| {
            let mut m = MicroBatch { cu_seqlens: vec![0], ..MicroBatch::default() };
            for &n in lengths {
                let ids: Vec<i32> = (0..n).map(|_| rng.below(self.arch.vocab) as i32).collect();
                for t in 0..n {
                    let trained = t + 1 < n && t % 4 != 2;
                    m.targets.push(if trained { ids[t + 1] } else { temper_data::IGNORE });
                    m.weights.push(f32::from(u8::from(trained)));
                    m.positions.push(t as i32);
                }
                m.ids.extend(ids);
                m.cu_seqlens.push(m.ids.len() as i32);
            }
            m
        });
        StepBatch { micro: micro.collect(), epoch: 0.0 }
    }

    /// Trains on every rank of a layout.
    fn train(&self, layout: &Layout) -> Answer {
        let worlds = threads(layout.axes.world(), Duration::from_secs(120));
        let answers: Vec<Answer> = std::thread::scope(|scope| {
            let ranks: Vec<_> = worlds.into_iter().map(|world| scope.spawn(move || self.rank(layout, &world))).collect();
            ranks.into_iter().map(|r| r.join().unwrap()).collect()
        });
        let mut all = Answer::default();
        for (rank, answer) in answers.into_iter().enumerate() {
            if rank == 0 {
                all.steps = answer.steps;
            } else {
                assert_eq!(all.steps, answer.steps, "rank {rank} was told something else than rank 0");
            }
            for (name, values) in answer.weights {
                // Where ranks hold the same element it must be the same to the last bit.
                let held = all.weights.entry(name.clone()).or_insert_with(|| vec![f64::NAN; values.len()]);
                for (held, new) in held.iter_mut().zip(values).filter(|(_, new)| !new.is_nan()) {
                    assert!(held.is_nan() || *held == new, "rank {rank} has another {name}: {new} and {held}");
                    *held = new;
                }
            }
            for (name, values) in answer.grads {
                let sum = all.grads.entry(name).or_insert_with(|| vec![0.0; values.len()]);
                sum.iter_mut().zip(values).for_each(|(a, b)| *a += b);
            }
        }
        all
    }

    fn rank(&self, layout: &Layout, world: &dyn World) -> Answer {
        let mut trainer = self.trainer(layout, world);
        let mut answer = Answer::default();
        trainer.accumulate(&self.batch(0)).unwrap();
        let ranks = trainer.ranks.clone();
        answer.grads = by_name(
            &trainer,
            |t, id| host(&*t.ops, t.grads.get(id).unwrap()),
            0.0,
            |shard| {
                // Each tensor rank has the whole of such a gradient: one is enough.
                shard != Shard::Replicated || ranks.sequence || ranks.mesh.tp.rank() == 0
            },
        );
        for step in 0..self.steps {
            let done = trainer.step(&self.batch(step), self.lr).unwrap();
            assert!(done.updated);
            answer.steps.push([done.loss, done.aux_loss.unwrap_or(0.0), done.z_loss.unwrap_or(0.0), done.grad_norm]);
        }
        answer.weights = by_name(&trainer, |t, id| host(&*t.ops, t.weights.get(id).unwrap()), f64::NAN, |_| true);
        let eval = self.batch(99);
        let sum = trainer.evaluate(&eval.micro).unwrap();
        answer.steps.push([sum, 0.0, 0.0, 0.0]);
        answer
    }

    fn trainer(&self, layout: &Layout, world: &dyn World) -> Trainer {
        let ops: Arc<dyn Ops> = Arc::new(Cpu::new(1));
        let ranks = layout.ranks(world, &self.arch).unwrap();
        let model = Model::part(&self.arch, &layout.portion(&self.arch, &ranks).unwrap()).unwrap();
        let precision = Precision { weights: self.dtype, grads: self.dtype, moments: self.dtype, offload: false };
        let settings = Settings { reduction: self.reduction, balance: self.balance, z_coef: 0.05, recompute: self.recompute };
        let rope = RopeTables::new(&*ops, &self.arch, 64, self.dtype).unwrap();
        let host = Weights::random_host(&model.params, 11);
        let mut trainer = allocate(model, ranks, precision, ADAMW, settings, rope, ops).unwrap();
        trainer.set_weights(host).unwrap();
        trainer
    }
}

/// The elements of the parameters that a rank holds, at their places in whole tensors full of `empty`.
fn by_name(
    trainer: &Trainer,
    values: impl Fn(&Trainer, ParamId) -> Vec<f64>,
    empty: f64,
    wanted: impl Fn(Shard) -> bool,
) -> BTreeMap<String, Vec<f64>> {
    let mut all = BTreeMap::new();
    for (i, param) in trainer.model.params.iter().enumerate().filter(|(_, p)| wanted(p.shard)) {
        let values = values(trainer, ParamId(i));
        for piece in &param.pieces {
            let whole = all.entry(piece.name.clone()).or_insert_with(|| vec![empty; piece.shape.iter().product()]);
            for run in piece.runs() {
                whole[run.disk..run.disk + run.len].copy_from_slice(&values[run.memory..run.memory + run.len]);
            }
        }
    }
    all
}

fn host(ops: &dyn Ops, x: temper_tensor::View) -> Vec<f64> {
    let t = ops.to_host(x).unwrap();
    match t.dtype() {
        DType::F64 => t.as_slice::<f64>().unwrap().to_vec(),
        _ => t.as_slice::<f32>().unwrap().iter().map(|v| f64::from(*v)).collect(),
    }
}

fn layout(tp: usize, cp: usize, dp: usize, pp: usize, ep: usize, etp: usize) -> Layout {
    Layout { axes: Axes { tp, cp, dp, pp, ep, etp }, sequence: tp > 1, vpp: 1, split: Vec::new() }
}

/// Compares a layout with one rank. `rounding` is how far one rank's gradients are from exact ones, at most.
fn agree(job: &Job, one: &Answer, rounding: f64, layout: &Layout) {
    let many = job.train(layout);
    let tolerance = if job.dtype == DType::F64 { 1e-9 } else { 1e-5 };
    for (step, (found, want)) in many.steps.iter().zip(&one.steps).enumerate() {
        for (found, want) in found.iter().zip(want) {
            let all = (&many.steps[step], &one.steps[step]);
            assert!((found - want).abs() <= tolerance * want.abs(), "{layout:?}, step {step}: {:?}, one rank {:?}", all.0, all.1);
        }
    }
    let compared = [("gradient", &many.grads, &one.grads), ("weight", &many.weights, &one.weights)];
    for (what, many, one) in compared.into_iter().take(if job.dtype == DType::F64 { 2 } else { 1 }) {
        assert_eq!(one.keys().collect::<Vec<_>>(), many.keys().collect::<Vec<_>>());
        for (name, want) in one {
            let error = relative(&many[name], want);
            // Where sums cancel, one rank itself is off by more than 1e-5 would allow two to differ: each may be off by `rounding`.
            let allowed = tolerance.max(2.0 * rounding);
            assert!(error < allowed, "{layout:?}: {what} of {name} is off by {error:e}, {allowed:e} allowed");
        }
    }
}

fn all_agree(job: &Job, layouts: &[Layout]) {
    let single = layout(1, 1, 1, 1, 1, 1);
    let one = job.train(&single);
    assert_eq!(one.weights.len(), declare(&job.arch).iter().map(|p| p.pieces.len()).sum::<usize>());
    let mut rounding = 0.0;
    if job.dtype == DType::F32 {
        let exact = Job { dtype: DType::F64, ..job.clone() }.train(&single);
        let errors = one.grads.iter().map(|(name, grad)| relative(grad, &exact.grads[name]));
        rounding = errors.fold(0.0, f64::max);
        assert!(rounding < 2e-5, "one rank's gradients are off by {rounding:e}");
    }
    layouts.iter().for_each(|layout| agree(job, &one, rounding, layout));
}

#[test]
fn dense_models_over_every_axis() {
    let layouts = [
        layout(2, 1, 1, 1, 1, 1),
        Layout { sequence: false, ..layout(2, 1, 1, 1, 1, 1) },
        layout(4, 1, 1, 1, 1, 1),
        layout(1, 2, 1, 1, 1, 1),
        layout(1, 1, 2, 1, 1, 1),
        layout(1, 1, 3, 1, 1, 1),
        layout(1, 1, 1, 2, 1, 1),
        layout(1, 1, 1, 4, 1, 1),
        Layout { split: vec![1, 3], ..layout(1, 1, 1, 2, 1, 1) },
        Layout { vpp: 2, ..layout(1, 1, 1, 2, 1, 1) },
        layout(2, 1, 2, 2, 1, 1),
        layout(2, 2, 2, 2, 1, 1),
        Layout { sequence: false, ..layout(4, 1, 2, 2, 1, 1) },
    ];
    all_agree(&dense(), &layouts);
    all_agree(&Job { arch: Arch { tied: true, ..dense().arch }, ..dense() }, &layouts);
}

#[test]
fn experts_over_every_axis() {
    let layouts = [
        layout(1, 1, 2, 1, 2, 1),
        layout(1, 1, 4, 1, 2, 1),
        layout(2, 1, 1, 1, 2, 1),
        layout(2, 1, 1, 1, 1, 2),
        layout(2, 1, 2, 2, 2, 1),
        layout(2, 1, 2, 1, 4, 1),
        layout(1, 2, 1, 2, 2, 1),
        Layout { sequence: false, ..layout(2, 1, 2, 2, 2, 2) },
        Layout { vpp: 2, ..layout(2, 1, 2, 2, 4, 1) },
        layout(2, 2, 2, 2, 2, 2),
    ];
    all_agree(&experts(), &layouts);
    all_agree(&Job { balance: Some((Balance::Megatron, 0.3)), reduction: LossReduction::Microbatch, ..experts() }, &layouts[4..9]);
}

#[test]
fn in_single_precision_losses_and_gradients_agree_to_1e_5() {
    // Weights of a trained model's size: with the large ones of the tests in f64 a rounding of 6e-8 grows two hundredfold on its way back.
    let single = |job: Job| Job { dtype: DType::F32, lr: 1e-3, arch: Arch { init_std: 0.1, ..job.arch.clone() }, ..job };
    all_agree(&single(dense()), &[layout(2, 1, 2, 2, 1, 1), layout(4, 2, 1, 1, 1, 1)]);
    let experts = Job { recompute: Recompute::Full, ..experts() };
    all_agree(&single(experts), &[layout(2, 1, 2, 2, 2, 2), layout(1, 2, 2, 1, 4, 1)]);
}

/// Full-parameter SFT of Qwen3-235B-A22B on 64 ranks: its depth, heads, experts and layout, at a tiny width.
#[test]
fn the_layout_of_235b_on_64_ranks() {
    let mut arch = Arch { hidden: 16, layers: 94, heads: 64, kv_heads: 4, head_dim: 2, vocab: 40, ..experts().arch };
    arch.moe = arch.moe.map(|moe| Moe { experts: 128, top_k: 8, intermediate: 2, ..moe });
    let job = Job { arch, micro: vec![vec![9, 7], vec![16], vec![3, 13], vec![11]], steps: 1, ..experts() };
    all_agree(&job, &[Layout { split: vec![47, 47], ..layout(8, 1, 4, 2, 4, 1) }]);
}

/// Qwen3-30B-A3B with packing on 8 ranks: EP does not multiply the ranks.
#[test]
fn the_layout_of_30b_on_8_ranks() {
    let mut arch = Arch { layers: 48, heads: 32, kv_heads: 4, head_dim: 2, ..experts().arch };
    arch.moe = arch.moe.map(|moe| Moe { experts: 16, top_k: 4, intermediate: 2, ..moe });
    let job = Job { arch, micro: vec![vec![3, 1, 6], vec![5, 5], vec![2, 2, 2, 4], vec![8]], steps: 2, ..experts() };
    all_agree(&job, &[layout(2, 1, 2, 2, 2, 1)]);
}

/// Qwen3.6-35B-A3B's layout on 40 ranks (of attention and experts; its linear attention comes with the hybrid layers).
#[test]
fn the_layout_of_35b_on_40_ranks() {
    let mut arch = Arch { layers: 10, heads: 16, kv_heads: 2, ..experts().arch };
    arch.moe = arch.moe.map(|moe| Moe { experts: 64, top_k: 8, intermediate: 2, ..moe });
    let micro = (0..40).map(|i| vec![3 + i % 5, 4]).collect();
    all_agree(&Job { arch, micro, steps: 1, recompute: Recompute::Full, ..experts() }, &[layout(1, 1, 40, 1, 8, 1)]);
}

/// Qwen3-8B's 36 layers do not divide over 8 stages: refused unless asked for.
#[test]
fn thirty_six_layers_on_eight_stages() {
    let arch = Arch { layers: 36, heads: 4, ..dense().arch };
    let job = Job { arch: arch.clone(), micro: (0..8).map(|i| vec![3 + i]).collect(), steps: 1, ..dense() };
    let even = layout(1, 1, 1, 8, 1, 1);
    let refused = std::thread::scope(|scope| {
        let ranks = threads(8, Duration::from_secs(20)).into_iter().map(|world| {
            let (even, arch) = (&even, &arch);
            scope.spawn(move || even.portion(arch, &even.ranks(&world, arch).unwrap()).unwrap_err().to_string())
        });
        ranks.collect::<Vec<_>>().into_iter().map(|r| r.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(refused.iter().all(|e| e.contains("36 layers do not divide over pp 8") && e.contains("split=")), "{}", refused[0]);
    all_agree(&job, &[Layout { split: vec![4, 4, 4, 5, 5, 5, 5, 4], ..layout(1, 1, 4, 8, 1, 1) }]);
}
