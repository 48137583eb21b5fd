//! Tiny networks trained for a few steps on ranks that are threads, stages by hand: what the tests of the optimizer compare.
#![allow(dead_code, reason = "each test binary uses its own part")]

#[path = "../../../model/tests/common/tiny.rs"]
mod shared;

#[allow(unused_imports, reason = "each test binary uses its own part")]
pub use shared::relative;
use shared::{micro, mixture, tiny};
use std::{collections::BTreeMap, time::Duration};
use temper_comm::{Axes, Mesh, threads};
use temper_config::{Arch, ModelType};
use temper_model::param::{Block, Param, ParamId};
use temper_model::{
    Act, AuxSettings, AxisRank, Batch, Cx, Grads, Kept, Model, Objective, Portion, Ranks, Recompute, RopeTables, Seat, Weights, finish_aux,
};
use temper_parallel::{AdamWConfig, Buckets, Optimizer, Segment, Settled, Stages};
use temper_tensor::{Balance, DType, Ops, Rng, Tensor, View, cpu::Cpu};

/// A dense network of a few hundred parameters, biases everywhere, four heads on two key/value heads.
pub fn dense(tied: bool) -> Arch {
    Arch { intermediate: 8, tied, qkv_bias: true, out_bias: true, mlp_bias: true, ..tiny(ModelType::Qwen3) }
}

/// A dense layer and one of four experts, two of which work on each token.
pub fn experts() -> Arch {
    mixture(&[0])
}

/// Sizes of the axes.
pub fn axes(tp: usize, cp: usize, dp: usize, ep: usize, etp: usize) -> Axes {
    Axes { tp, cp, dp, pp: 1, ep, etp }
}

/// How the ranks work.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    pub axes: Axes,
    pub sequence: bool,
    /// Sums over ranks begin in the backward pass.
    pub overlap: bool,
}

impl Layout {
    pub const ONE: Layout = Layout { axes: Axes { tp: 1, cp: 1, dp: 1, pp: 1, ep: 1, etp: 1 }, sequence: false, overlap: false };
}

/// What is trained.
#[derive(Clone)]
pub struct Job {
    pub arch: Arch,
    pub dtype: DType,
    pub adamw: AdamWConfig,
    pub steps: usize,
    /// Step and rank whose first loss is not a number.
    pub broken: Option<(usize, usize)>,
}

/// What a rank has after its steps.
pub struct End {
    pub params: Vec<Param>,
    pub weights: Vec<Vec<f64>>,
    pub settled: Vec<Settled>,
    pub segments: Vec<Segment>,
    /// Elements of one moment.
    pub moments: usize,
}

/// Runs `each` on every rank of a layout, with its groups.
pub fn on_ranks<T: Send>(arch: &Arch, layout: Layout, each: impl Fn(Ranks) -> T + Sync) -> Vec<T> {
    let Layout { axes, sequence, .. } = layout;
    let copies = if axes.tp > arch.kv_heads { vec![axes.tp / arch.kv_heads] } else { vec![] };
    let worlds = threads(axes.world(), Duration::from_secs(60));
    std::thread::scope(|scope| {
        let (each, copies) = (&each, &copies);
        let start =
            |world: temper_comm::HostWorld| scope.spawn(move || each(Ranks { mesh: Mesh::new(&world, axes, copies).unwrap(), sequence }));
        let ranks: Vec<_> = worlds.into_iter().map(start).collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

/// What a rank holds of a network.
pub fn part(arch: &Arch, ranks: &Ranks) -> Model {
    let Axes { pp, ep, etp, .. } = ranks.mesh.axes;
    let (stage, experts) = (ranks.mesh.stage(), ranks.mesh.experts.rank());
    let seat = Seat { tp: ranks.tensor(), ep: AxisRank { rank: experts / etp, of: ep }, etp: AxisRank { rank: experts % etp, of: etp } };
    let layers = Stages::new(arch.layers, pp, 1, &[]).unwrap().layers_of(stage, 0);
    Model::part(arch, &Portion { seat, chunks: vec![layers], embed: stage == 0, head: stage + 1 == pp }).unwrap()
}

/// Values that depend on nothing but the name on disk and the place there: the same model in every layout.
pub fn drawn(params: &[Param], seed: u64) -> Vec<Vec<f64>> {
    let value = |piece: &temper_model::param::Piece, at: usize| {
        let name: u64 = piece.name.bytes().fold(seed, |h, b| h.wrapping_mul(31).wrapping_add(u64::from(b)));
        let normal = Rng::new(name, 1).normal_at(at as u64);
        let norm = piece.name.contains("norm");
        f64::from(u8::from(norm)) + if piece.shape.len() == 1 { 0.2 } else { 0.4 } * normal
    };
    let of = |param: &Param| {
        let runs = param.pieces.iter().flat_map(|p| p.runs().map(move |run| (p, run)));
        runs.flat_map(|(piece, run)| (0..run.len).map(move |i| value(piece, run.disk + i))).collect()
    };
    params.iter().map(of).collect()
}

/// Host values as a tensor.
pub fn floats(values: &[f64], shape: &[usize], dtype: DType) -> Tensor {
    match dtype {
        DType::F64 => Tensor::from_vec(values.to_vec(), shape),
        _ => Tensor::from_vec(values.iter().map(|v| *v as f32).collect(), shape),
    }
}

/// A float view on the host.
pub fn host(ops: &dyn Ops, x: View) -> Vec<f64> {
    let mut wide = ops.alloc(DType::F64, x.shape()).unwrap();
    match x.dtype() {
        DType::F64 => ops.copy(wide.view_mut(), x).unwrap(),
        _ => {
            let mut single = ops.alloc(DType::F32, x.shape()).unwrap();
            ops.copy(single.view_mut(), x).unwrap();
            return single.as_slice::<f32>().unwrap().iter().map(|v| f64::from(*v)).collect();
        }
    }
    wide.as_slice::<f64>().unwrap().to_vec()
}

/// Trains on all ranks.
pub fn train(job: &Job, layout: Layout) -> Vec<End> {
    on_ranks(&job.arch, layout, |ranks| Rank::new(job, layout, ranks).train())
}

/// One rank at work.
struct Rank<'j> {
    job: &'j Job,
    layout: Layout,
    ops: Cpu,
    ranks: Ranks,
    model: Model,
    weights: Weights,
    grads: Grads,
    optimizer: Optimizer,
    rope: RopeTables,
}

impl<'j> Rank<'j> {
    fn new(job: &'j Job, layout: Layout, ranks: Ranks) -> Rank<'j> {
        let ops = Cpu::new(1);
        let model = part(&job.arch, &ranks);
        let buckets = Buckets::new(&model, &ranks).unwrap();
        let mut weights = Weights::alloc(buckets.slots(), job.dtype, &ops).unwrap();
        for (i, (values, param)) in drawn(&model.params, 3).iter().zip(&model.params).enumerate() {
            weights.set(&ops, ParamId(i), floats(values, &param.shape, job.dtype)).unwrap();
        }
        let grads = Grads::zeros_in(buckets.slots(), job.dtype, &ops).unwrap();
        let optimizer = Optimizer::new(&ops, buckets, job.dtype, job.dtype, false, job.adamw).unwrap();
        let rope = RopeTables::new(&ops, &job.arch, 64, job.dtype).unwrap();
        Rank { job, layout, ops, ranks, model, weights, grads, optimizer, rope }
    }

    fn train(mut self) -> End {
        let settled = (0..self.job.steps).map(|step| self.step(step)).collect();
        let weights = (0..self.model.params.len()).map(|i| host(&self.ops, self.weights.get(ParamId(i)).unwrap())).collect();
        let moments = self.optimizer.exp_avg.iter().map(Tensor::numel).sum();
        End { weights, settled, segments: self.optimizer.segments().to_vec(), moments, params: self.model.params }
    }

    fn step(&mut self, step: usize) -> Settled {
        self.grads.begin();
        let (replica, replicas) = (self.ranks.mesh.replica(), self.ranks.mesh.axes.dp);
        let mine: Vec<usize> = (0..MICRO.len()).filter(|i| i % replicas == replica).collect();
        let mut losses: Vec<Tensor> = Vec::new();
        for (i, index) in mine.iter().enumerate() {
            losses.extend(self.micro(step, *index, i + 1 == mine.len()));
        }
        if self.job.broken == Some((step, self.ranks.mesh.rank)) {
            let first = losses[0].view_mut().slice_rows(0..1);
            self.ops.fill(first, f64::NAN).unwrap();
        }
        self.optimizer.reduce(&self.ops, &mut self.grads).unwrap();
        self.optimizer.measure(&self.ops, &self.grads, losses.iter().map(Tensor::view)).unwrap();
        self.optimizer.step(&self.ops, &mut self.weights, &self.grads, 1e-2).unwrap();
        self.optimizer.settle(&self.ops).unwrap()
    }

    /// A micro-batch forward and backward, layer by layer; its losses on the last stage.
    fn micro(&mut self, step: usize, index: usize, last: bool) -> Option<Tensor> {
        let Rank { ops, ranks, model, weights, grads, optimizer, rope, .. } = self;
        let m = micro(self.job.arch.vocab, MICRO[index], (step * MICRO.len() + index) as u64);
        let batch = Batch::divided(ops, &m.ids, &m.positions, &m.cu, ranks, self.job.arch.vocab).unwrap();
        let batch = batch.with_labels(ops, self.job.dtype, &m.targets, &m.weights).unwrap();
        let cx = Cx { ops, weights, rope, batch: &batch, ranks };
        let settings = AuxSettings { kind: Balance::Megatron, coef: 0.3, z_coef: 0.2, scale: 1.0 / MICRO.len() as f64 };
        let objective = Objective { loss_scale: 0.1, aux: Some(settings), recompute: Recompute::None };
        let overlap = self.layout.overlap && last;
        let mut ready = |grads: &mut Grads, block| {
            if overlap {
                optimizer.ready(ops, grads, block).unwrap()
            }
        };
        let (forward, backward, stage) = (ranks.mesh.forward.clone(), ranks.mesh.backward.clone(), ranks.mesh.stage());
        let exchanged = || ops.alloc(self.job.dtype, &[cx.rows(), self.job.arch.hidden]).unwrap();

        let mut stats = model.aux_stats(&cx, &objective.aux).unwrap();
        let mut x: Act = match &model.embed {
            Some(embed) => embed.forward(&cx).unwrap(),
            None => {
                let mut x = exchanged();
                forward.recv(x.view_mut()).unwrap().wait().unwrap();
                x.into()
            }
        };
        let mut kept: Vec<Vec<Kept>> = Vec::new();
        for i in 0..model.layers.len() {
            let (y, k) = model.forward_layers(&cx, i..i + 1, x, stats.as_mut(), objective.recompute).unwrap();
            kept.push(k);
            x = y;
        }
        let (losses, mut dx) = match &model.head {
            Some(head) => {
                let (losses, dx) = head.forward_backward(&cx, &x, objective.loss_scale, grads).unwrap();
                ready(grads, Block::Head);
                (Some(losses), dx)
            }
            None => {
                forward.send(x.view()).unwrap().wait().unwrap();
                let mut dx = exchanged();
                backward.recv(dx.view_mut()).unwrap().wait().unwrap();
                (None, dx.into())
            }
        };
        let (_, aux) = finish_aux(&cx, stats, &objective.aux).unwrap();
        for (i, kept) in kept.into_iter().enumerate().rev() {
            dx = model.backward_layers(&cx, i..i + 1, kept, dx, &aux, grads).unwrap();
            ready(grads, Block::Layer(model.chunks[0].start + i + stage * model.layers.len()));
        }
        match &model.embed {
            Some(embed) => {
                embed.backward_weight(&cx, &dx, grads).unwrap();
                ready(grads, Block::Embedding);
            }
            None => backward.send(dx.view()).unwrap().wait().unwrap(),
        }
        losses
    }
}

/// Lengths of the documents of each micro-batch of a step: no layout of more than one rank divides their sums.
const MICRO: [&[usize]; 2] = [&[5, 1, 7], &[11]];

/// Every element on disk of what ranks hold, by name; panics where two ranks hold different bits of one, or nobody holds one.
pub fn on_disk<'e>(ranks: impl Iterator<Item = (&'e [Param], &'e [Vec<f64>])>, at: &str) -> BTreeMap<String, Vec<f64>> {
    let mut all: BTreeMap<String, Vec<Option<f64>>> = BTreeMap::new();
    for (params, values) in ranks {
        for (param, values) in params.iter().zip(values) {
            for piece in &param.pieces {
                let into = all.entry(piece.name.clone()).or_insert_with(|| vec![None; piece.shape.iter().product()]);
                for (i, run) in piece.runs().flat_map(|run| (0..run.len).map(move |i| (i, run))) {
                    let (seen, value) = (&mut into[run.disk + i], values[run.memory + i]);
                    let first = *seen.get_or_insert(value);
                    assert_eq!(first.to_bits(), value.to_bits(), "{at}: ranks differ in element {} of {}", run.disk + i, piece.name);
                }
            }
        }
    }
    let whole = |(name, values): (String, Vec<Option<f64>>)| {
        let values = values.into_iter().map(|v| v.unwrap_or_else(|| panic!("{at}: nobody holds all of {name}"))).collect();
        (name, values)
    };
    all.into_iter().map(whole).collect()
}
