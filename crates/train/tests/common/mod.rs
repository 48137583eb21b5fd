//! Training in a layout, compared with one rank: losses, gradient norms, gradients and weights after the steps. Ranks are threads.
#![allow(dead_code, reason = "each test binary uses its own part")]

#[path = "../../../model/tests/common/tiny.rs"]
mod tiny;

use std::{collections::BTreeMap, sync::Arc, time::Duration};
use temper_comm::{Axes, World, threads};
use temper_config::{Arch, LossReduction, ModelType};
use temper_data::{MicroBatch, StepBatch};
use temper_model::param::{ParamId, Shard};
use temper_model::{Model, Recompute, RopeTables, Weights, declare};
use temper_parallel::AdamWConfig;
use temper_tensor::{Balance, DType, Ops, Rng, Tensor, cpu::Cpu};
use temper_train::layout::Layout;
use temper_train::precision::Precision;
use temper_train::setup::allocate;
use temper_train::step::{Settings, Trainer};
use tiny::{mixture, relative, tiny};

const ADAMW: AdamWConfig = AdamWConfig { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, clip: 0.5 };

/// A model and what it is trained on.
#[derive(Clone)]
pub struct Job {
    pub arch: Arch,
    /// Lengths of the documents of each micro-batch.
    pub micro: Vec<Vec<usize>>,
    pub recompute: Recompute,
    pub reduction: LossReduction,
    pub balance: Option<(Balance, f64)>,
    pub dtype: DType,
    /// Optimizer steps.
    pub steps: usize,
    pub lr: f64,
    /// What one rank's gradients may be off in f32 for the model to show anything.
    pub conditioned: f64,
    /// How many times that two ways of adding may differ.
    pub roundings: f64,
}

/// What one step reports, and what training leaves.
#[derive(Debug, Default)]
pub struct Answer {
    /// loss, auxiliary loss, z-loss and gradient norm of each step.
    pub steps: Vec<[f64; 4]>,
    /// Gradients of the first step by Hugging Face name, every rank's part added up here.
    pub grads: BTreeMap<String, Vec<f64>>,
    /// The same as the optimizer sums them over ranks.
    pub summed: BTreeMap<String, Vec<f64>>,
    /// Weights at the end.
    pub weights: BTreeMap<String, Vec<f64>>,
}

pub fn dense() -> Job {
    Job {
        arch: Arch { layers: 4, intermediate: 8, ..tiny(ModelType::Qwen3) },
        micro: vec![vec![5, 1, 7], vec![11], vec![3, 3], vec![9]],
        recompute: Recompute::None,
        reduction: LossReduction::Token,
        balance: None,
        dtype: DType::F64,
        steps: 5,
        lr: 1e-2,
        conditioned: 2e-5,
        roundings: 2.0,
    }
}

pub fn experts() -> Job {
    Job { arch: Arch { layers: 4, ..mixture(&[]) }, balance: Some((Balance::Hf, 0.3)), ..dense() }
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
            put(rank, &mut all.weights, answer.weights);
            put(rank, &mut all.summed, answer.summed);
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
            if step == 0 {
                answer.summed = summed(&trainer);
            }
        }
        answer.weights = by_name(&trainer, |t, id| host(&*t.ops, t.weights.get(id).unwrap()), f64::NAN, |_| true);
        let eval = self.batch(99);
        let sum = trainer.evaluate(&eval.micro, |_, _| ()).unwrap();
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

/// Adds what a rank has to what others have. Where several have an element it must be the same to the last bit.
fn put(rank: usize, all: &mut BTreeMap<String, Vec<f64>>, new: BTreeMap<String, Vec<f64>>) {
    for (name, values) in new {
        let held = all.entry(name.clone()).or_insert_with(|| vec![f64::NAN; values.len()]);
        for (held, new) in held.iter_mut().zip(values).filter(|(_, new)| !new.is_nan()) {
            assert!(held.is_nan() || *held == new, "rank {rank} has another {name}: {new} and {held}");
            *held = new;
        }
    }
}

/// Of the gradients what this rank updates, at its place in whole tensors full of NaN.
fn summed(trainer: &Trainer) -> BTreeMap<String, Vec<f64>> {
    let mut own: Vec<Vec<f64>> = trainer.model.params.iter().map(|p| vec![f64::NAN; p.numel()]).collect();
    for segment in trainer.optimizer.segments() {
        let values = host(&*trainer.ops, trainer.grads.get(segment.param).unwrap());
        own[segment.param.0][segment.range.clone()].copy_from_slice(&values[segment.range.clone()]);
    }
    by_name(trainer, |_, id| own[id.0].clone(), f64::NAN, |_| true)
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

pub fn layout(tp: usize, cp: usize, dp: usize, pp: usize, ep: usize, etp: usize) -> Layout {
    Layout { axes: Axes { tp, cp, dp, pp, ep, etp }, sequence: tp > 1, vpp: 1, split: Vec::new() }
}

/// One rank's answers, and how well they are determined.
pub struct One {
    answer: Answer,
    /// In single precision: how far the gradients are from exact ones, at most.
    rounding: f64,
    /// In single precision: how far rounding of gradients may move each weight.
    spread: BTreeMap<String, Vec<f64>>,
    /// And what each step reports.
    reported: Vec<[f64; 4]>,
}

/// Runs whose gradients are blurred by what f32 rounds off; their spread says how well weights are determined (docs/NUMERICS.md).
const BLURRED_RUNS: u64 = 8;

impl Job {
    /// What one rank answers, keeping all activations.
    pub fn one(&self) -> One {
        let plain = Job { recompute: Recompute::None, ..self.clone() };
        let answer = plain.train(&Layout::single());
        assert_eq!(answer.weights.len(), declare(&self.arch).iter().map(|p| p.pieces.len()).sum::<usize>());
        let mut one = One { rounding: 0.0, spread: BTreeMap::new(), reported: vec![[0.0; 4]; answer.steps.len()], answer };
        if self.dtype == DType::F64 {
            return one;
        }
        let double = Job { dtype: DType::F64, ..plain };
        let exact = double.train(&Layout::single());
        let grads = || one.answer.grads.iter().map(|(name, single)| (name, single, &exact.grads[name]));
        one.rounding = grads().map(|(_, single, exact)| relative(single, exact)).fold(0.0, f64::max);
        let blur: BTreeMap<String, f64> = grads().map(|(name, single, exact)| (name.clone(), noise(single, exact))).collect();
        one.spread = exact.weights.iter().map(|(name, w)| (name.clone(), vec![0.0; w.len()])).collect();
        let farther = |far: &mut f64, a: &f64, b: &f64| *far = far.max((a - b).abs());
        for seed in 0..BLURRED_RUNS {
            let blurred = double.blurred(&blur, seed);
            for (name, far) in &mut one.spread {
                let both = blurred.weights[name].iter().zip(&exact.weights[name]);
                far.iter_mut().zip(both).for_each(|(far, (a, b))| farther(far, a, b));
            }
            for (far, (a, b)) in one.reported.iter_mut().zip(blurred.steps.iter().zip(&exact.steps)) {
                (0..4).for_each(|i| farther(&mut far[i], &a[i], &b[i]));
            }
        }
        one
    }

    /// One rank's steps with gradients that are changed at random by normal values of the sizes in `blur`.
    fn blurred(&self, blur: &BTreeMap<String, f64>, seed: u64) -> Answer {
        let world = threads(1, Duration::from_secs(120)).remove(0);
        let mut t = self.trainer(&Layout::single(), &world);
        let (ops, mut answer) = (t.ops.clone(), Answer::default());
        for step in 0..self.steps {
            let done = t.accumulate(&self.batch(step)).unwrap();
            let (rng, mut draws) = (Rng::new(seed, step as u64), 0);
            for (i, param) in t.model.params.iter().enumerate() {
                let mut values = host(&*ops, t.grads.get(ParamId(i)).unwrap());
                for piece in &param.pieces {
                    for g in values[piece.range.clone()].iter_mut().filter(|g| **g != 0.0) {
                        draws += 1;
                        *g += blur[&piece.name] * rng.normal_at(draws);
                    }
                }
                let values = ops.adopt(Tensor::from_vec(values, &param.shape)).unwrap();
                ops.copy(t.grads.sum_into(ParamId(i)).unwrap().0, values.view()).unwrap();
            }
            t.optimizer.measure(&*ops, &t.grads, std::iter::empty()).unwrap();
            t.optimizer.step(&*ops, &mut t.weights, &t.grads, self.lr).unwrap();
            let (told, settled) = (t.report(&done).unwrap(), t.optimizer.settle(&*ops).unwrap());
            answer.steps.push([told.loss, told.aux_loss.unwrap_or(0.0), told.z_loss.unwrap_or(0.0), settled.grad_norm]);
        }
        answer.steps.push([t.evaluate(&self.batch(99).micro, |_, _| ()).unwrap(), 0.0, 0.0, 0.0]);
        answer.weights = by_name(&t, |t, id| host(&*t.ops, t.weights.get(id).unwrap()), f64::NAN, |_| true);
        answer
    }
}

/// Four times the root mean square of what single precision rounds off a gradient: as much as two programs differ by, and more.
fn noise(single: &[f64], exact: &[f64]) -> f64 {
    let squares: f64 = single.iter().zip(exact).map(|(a, b)| (a - b) * (a - b)).sum();
    let touched = exact.iter().filter(|g| **g != 0.0).count().max(1);
    4.0 * (squares / touched as f64).sqrt()
}

/// Compares a layout with one rank; says what differs first.
pub fn agree(job: &Job, one: &One, layout: &Layout) -> Result<(), String> {
    if one.rounding > job.conditioned {
        return Err(format!("one rank's own gradients are off by {:e}: such a model shows nothing", one.rounding));
    }
    let many = job.train(layout);
    let tolerance = if job.dtype == DType::F64 { 1e-9 } else { 1e-5 };
    for (step, ((found, want), spread)) in many.steps.iter().zip(&one.answer.steps).zip(&one.reported).enumerate() {
        for ((found, want), spread) in found.iter().zip(want).zip(spread) {
            if (found - want).abs() > tolerance * want.abs() + 2.0 * spread || found.is_nan() {
                return Err(format!("step {step}: {:?}, one rank {:?}, {spread:e} of spread", many.steps[step], one.answer.steps[step]));
            }
        }
    }
    let names = |tensors: &BTreeMap<String, Vec<f64>>| tensors.keys().cloned().collect::<Vec<_>>();
    // Where sums cancel, one rank itself is off by more than 1e-5 would allow two to differ: each may be off by `rounding`.
    let allowed = tolerance.max(job.roundings * one.rounding);
    let (grads, weights) = (&one.answer.grads, &one.answer.weights);
    for (what, many, one) in
        [("gradient", &many.grads, grads), ("summed gradient", &many.summed, grads), ("weight", &many.weights, weights)]
    {
        if names(many) != names(one) {
            return Err(format!("{what}s of {:?}, one rank {:?}", names(many), names(one)));
        }
        let apart = one.iter().find(|(name, want)| what != "weight" && relative(&many[*name], want) >= allowed);
        if let Some((name, want)) = apart {
            return Err(format!("{what} of {name} is off by {:e}, {allowed:e} allowed", relative(&many[name], want)));
        }
    }
    let no_spread = Vec::new();
    for (name, want) in weights {
        let spread = one.spread.get(name).unwrap_or(&no_spread).iter().copied().chain(std::iter::repeat(0.0));
        let largest = want.iter().fold(0.0, |m: f64, w| m.max(w.abs()));
        for (i, ((found, want), spread)) in many.weights[name].iter().zip(want).zip(spread).enumerate() {
            let allowed = tolerance * largest + 2.0 * spread;
            if (found - want).abs() > allowed || found.is_nan() {
                return Err(format!("element {i} of {name} is {found} after the steps, one rank's {want}; {allowed:e} allowed"));
            }
        }
    }
    Ok(())
}

/// Compares several layouts.
pub fn all_agree(job: &Job, layouts: &[Layout]) {
    let one = job.one();
    layouts.iter().for_each(|layout| agree(job, &one, layout).unwrap_or_else(|e| panic!("{layout:?}: {e}")));
}
