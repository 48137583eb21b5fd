//! Benchmarks of the very step that trains: random weights, random tokens, any shape.
//!
//! Legend: S tokens of a sequence, B sequences of a micro-batch, A micro-batches of a step.

mod alone;
mod input;
mod operations;
mod report;

pub use operations::{OperationRow, operations};
pub use report::{Memory, PhaseTime, RankOf, Shape, Spread, StepReport, Work};

pub use self::alone::Skew;
use self::alone::{AloneWorld, Others};
use crate::layout::Layout;
use crate::measure::Flops;
use crate::precision::Precision;
use crate::setup;
use crate::step::Trainer;
use crate::{Error, Result};
use std::{sync::Arc, time::Instant};
use temper_comm::World;
use temper_config::{Arch, Config, Device, Resolved};
use temper_data::StepBatch;
use temper_model::{Portion, Ranks, declare};
use temper_tensor::{Call, Level, Ops, Phase, Recording, Traced};

/// Most tokens of a step: what they are drawn into takes 16 bytes each on the host.
const MOST_TOKENS: usize = 1 << 26;

/// What is measured, beside the configuration.
pub struct Options {
    /// Tokens of a document; a sequence is packed with them (the last one shorter). One document per sequence when absent.
    pub doc_len: Option<usize>,
    /// Which part of the work is done here.
    pub place: Placed,
    /// When the program started.
    pub started: Instant,
}

/// The part of the work that this process does.
pub enum Placed {
    /// All of it.
    Whole,
    /// That of one rank of a layout, the other ranks not there.
    Alone(AsRank),
    /// That of this rank among the others.
    Among {
        /// The layout.
        layout: Layout,
        /// The layout in the user's words.
        name: String,
        /// The ranks.
        world: Box<dyn World>,
    },
}

/// Which rank of which layout.
#[derive(Clone, Debug)]
pub struct AsRank {
    /// The rank.
    pub rank: usize,
    /// The layout.
    pub layout: Layout,
    /// The layout in the user's words.
    pub name: String,
}

/// A model ready to be measured.
pub struct Bench {
    trainer: Trainer,
    traced: Arc<Traced>,
    batch: StepBatch,
    lr: f64,
    device: Option<Device>,
    flops: Flops,
    shape: Shape,
    rank: Option<RankOf>,
    others: Arc<Others>,
    /// Ranks that share the work of a step.
    world: f64,
    work: Work,
    started: Instant,
    startup_s: f64,
}

impl AsRank {
    /// The rank's groups, of which nobody else is there, and its part of the model.
    fn place(&self, arch: &Arch, ops: Arc<dyn Ops>) -> Result<(Ranks, Portion, Arc<Others>)> {
        let AsRank { rank, layout, .. } = self;
        let size = layout.axes.world();
        if *rank >= size {
            return Err(Error::Input(format!("--as-rank {rank}: the layout has ranks 0 to {}", size - 1)));
        }
        let world = AloneWorld::new(ops, *rank, size);
        let ranks = layout.ranks(&world, arch)?;
        let portion = layout.portion(arch, &ranks)?;
        Ok((ranks, portion, world.others()))
    }
}

impl Bench {
    /// Checks the sizes, allocates what a run allocates and draws weights and tokens.
    ///
    /// # Errors
    /// Sizes that make no sense, before anything is allocated.
    pub fn open(name: &str, arch: Arch, mut resolved: Resolved, options: &Options, ops: Arc<dyn Ops>) -> Result<Bench> {
        let precision = Precision::choose(&mut resolved, &*ops)?;
        let config = &resolved.config;
        let work = work(config, options, precision)?;
        let traced = Arc::new(Traced::new(ops.clone()));
        let (ranks, portion, others) = match &options.place {
            Placed::Whole => (Ranks::single().clone(), Portion::whole(&arch), Arc::default()),
            // What stands for the other ranks is no operation of this one.
            Placed::Alone(as_rank) => as_rank.place(&arch, ops.clone())?,
            Placed::Among { layout, world, .. } => {
                let ranks = layout.ranks(&**world, &arch)?;
                let portion = layout.portion(&arch, &ranks)?;
                (ranks, portion, Arc::default())
            }
        };
        let model = setup::network(config, &arch, &portion, precision, &*ops)?;
        let batch = input::batch(&work, arch.vocab, config.train.seed, ranks.mesh.axes.dp);
        setup::announce_attention(&*ops, &portion.seat.arch(&arch)?, precision, &batch);
        let world = ranks.mesh.axes.world();
        let mut trainer = setup::configured(config, model, ranks, precision, work.doc_len, traced.clone())?;
        input::draw_weights(&mut trainer, config.train.seed)?;
        traced.wait()?;
        Ok(Bench {
            lr: config.optim.lr,
            device: Device::of(&traced.name()),
            flops: Flops::new(&arch, &declare(&arch), &traced.name()),
            shape: Shape::new(name, &arch),
            rank: RankOf::new(&options.place, &trainer.model.params),
            others,
            world: world as f64,
            started: options.started,
            startup_s: options.started.elapsed().as_secs_f64(),
            trainer,
            traced,
            batch,
            work,
        })
    }

    /// Times `steps` steps after `warmup` others.
    pub fn steps(&mut self, warmup: usize, steps: usize) -> Result<StepReport> {
        let (mut to_first_step_s, mut left_out) = (None, 0);
        let mut losses = Vec::with_capacity(warmup + steps);
        for _ in 0..warmup {
            let done = self.trainer.step(&self.batch, self.lr)?;
            losses.push(done.loss);
            left_out += usize::from(!done.updated);
            to_first_step_s.get_or_insert_with(|| self.started.elapsed().as_secs_f64());
        }
        self.others.stood_in_ms()?;
        let growths = self.traced.memory().map_or(0, |m| m.growths);
        self.traced.reset_memory_peak();
        let (mut times, mut stood_in) = (Vec::with_capacity(steps), Vec::with_capacity(steps));
        let mut phases = vec![Vec::with_capacity(steps); Phase::ALL.len()];
        for _ in 0..steps {
            self.others.begin();
            self.traced.start(Level::Phases)?;
            let clock = Instant::now();
            let done = self.trainer.step(&self.batch, self.lr)?;
            let ms = clock.elapsed().as_secs_f64() * 1e3;
            stood_in.push(self.others.stood_in_ms()?);
            times.push(ms - stood_in[stood_in.len() - 1]);
            losses.push(done.loss);
            left_out += usize::from(!done.updated);
            to_first_step_s.get_or_insert_with(|| self.started.elapsed().as_secs_f64());
            let recording = self.traced.finish()?;
            for (phase, all) in Phase::ALL.iter().zip(&mut phases) {
                all.push(recording.phases.iter().filter(|p| p.what == *phase).map(|p| p.device.ms()).sum::<f64>());
            }
        }
        let step_ms = Spread::of(times);
        let seconds = step_ms.median / 1e3;
        let flops_per_s = self.flops.of_step(&self.batch) / seconds / self.world;
        Ok(StepReport {
            backend: self.traced.name(),
            model: self.shape.clone(),
            rank: self.rank.clone().map(|rank| RankOf {
                skew: self.others.skew(),
                stood_in_ms: rank.alone.then(|| Spread::of(stood_in)),
                ..rank
            }),
            work: self.work.clone(),
            startup_s: self.startup_s,
            to_first_step_s: to_first_step_s.unwrap_or(0.0),
            warmup,
            steps,
            phases: Phase::ALL.iter().zip(phases).map(|(p, ms)| PhaseTime { phase: p.name(), ms: Spread::of(ms) }).collect(),
            tokens_per_s: self.batch.tokens() as f64 / seconds / self.world,
            model_tflops: flops_per_s / 1e12,
            mfu: self.flops.mfu(flops_per_s),
            memory: self.traced.memory().map(|m| Memory::new(&m, growths)),
            losses,
            left_out,
            step_ms,
        })
    }

    /// Records every operation of one step.
    pub fn record(&mut self) -> Result<Recording> {
        self.traced.start(Level::Operations)?;
        self.recorded()
    }

    /// Repeats every operation of a step whose name contains `only` on its own operands, once per shape. The model is no longer
    /// what training would have made of it. `hear` is told of each before it is repeated.
    pub fn alone(&mut self, only: &str, hear: impl FnMut(&Call) + Send + 'static) -> Result<Recording> {
        self.traced.start_alone(only, hear)?;
        self.recorded()
    }

    /// Whether this process speaks for all ranks.
    pub fn speaks(&self) -> bool {
        self.rank.as_ref().is_none_or(|rank| rank.alone || rank.rank == 0)
    }

    /// The data sheet of the device, where it is known.
    pub fn device(&self) -> Option<&Device> {
        self.device.as_ref()
    }

    /// Shape and batch.
    pub fn subject(&self) -> (&Shape, &Work) {
        (&self.shape, &self.work)
    }

    /// A step, and what was recorded of it.
    fn recorded(&mut self) -> Result<Recording> {
        let done = self.trainer.step(&self.batch, self.lr);
        let recording = self.traced.finish()?;
        done?;
        Ok(recording)
    }
}

/// The architecture with its first `layers` layers; all when absent.
///
/// # Errors
/// When it does not have so many.
pub fn cut(mut arch: Arch, layers: Option<usize>) -> Result<Arch> {
    let Some(layers) = layers else { return Ok(arch) };
    if layers == 0 || layers > arch.layers {
        return Err(Error::Input(format!("--layers {layers}: the model has {} layers; give 1 to {}", arch.layers, arch.layers)));
    }
    arch.layers = layers;
    if let Some(moe) = &mut arch.moe {
        moe.dense_layers.retain(|l| *l < layers);
    }
    Ok(arch)
}

/// Tokens of a document of a benchmark: as asked, else of a whole sequence.
///
/// # Errors
/// More tokens a step than a benchmark takes, or documents that do not fit a sequence.
pub fn document(config: &Config, asked: Option<usize>) -> Result<usize> {
    let (seq_len, micro_batch) = (config.data.seq_len, config.train.micro_batch);
    let tokens = seq_len.saturating_mul(config.train.global_batch);
    if tokens > MOST_TOKENS || seq_len.saturating_mul(micro_batch) > MOST_TOKENS {
        return Err(Error::Input(format!(
            "{} sequences of {seq_len} tokens are {tokens} tokens a step; a benchmark takes at most {MOST_TOKENS}. Lower --seq, --micro-batch or --accumulate",
            config.train.global_batch
        )));
    }
    match asked.unwrap_or(seq_len) {
        length if (1..=seq_len).contains(&length) => Ok(length),
        length => Err(Error::Input(format!("--doc-len {length}: a document has 1 to {seq_len} tokens (--seq)"))),
    }
}

fn work(config: &Config, options: &Options, precision: Precision) -> Result<Work> {
    let (seq_len, micro_batch) = (config.data.seq_len, config.train.micro_batch);
    let doc_len = document(config, options.doc_len)?;
    Ok(Work {
        seq_len,
        micro_batch,
        accumulate: config.train.global_batch / micro_batch,
        doc_len,
        tokens: seq_len * config.train.global_batch,
        recompute: config.memory.recompute,
        dtype: precision.weights.name(),
        grads: precision.grads.name(),
        moments: precision.moments.name(),
        offload_optimizer: precision.offload,
    })
}
