//! [`Config`]: the sections of a training configuration file. A declaration here is the struct that the code reads, the
//! parser, and the entry of `docs/CONFIG.md`.

use crate::choices::*;
use crate::error::Result;
use crate::keys;
use crate::section::{Key, Reader, Section, section};
use crate::spec::{Bounds, choice, choice_or, count, flag, float, integer, name, path, text};
use serde::Serialize;
use std::path::PathBuf;

/// A whole configuration, every value present and checked.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Config {
    /// `[model]`
    pub model: Model,
    /// `[data]`
    pub data: Data,
    /// `[train]`
    pub train: Train,
    /// `[optim]`
    pub optim: Optim,
    /// `[parallel]`
    pub parallel: Parallel,
    /// `[precision]`
    pub precision: Precision,
    /// `[memory]`
    pub memory: Memory,
    /// `[checkpoint]`
    pub checkpoint: Checkpoint,
    /// `[log]`
    pub log: Log,
}

/// Most steps, epochs and sequences that make sense; keeps products inside 64 bits.
const MANY: usize = 1_000_000_000;
/// Most ranks of an axis.
const RANKS: usize = 1 << 16;
/// Share of a device's memory that a chosen layout leaves free unless told otherwise.
pub const RESERVE: f64 = 0.05;
/// Longest sequence.
const LONGEST: usize = 1 << 24;

section! {
    /// What is trained.
    "model" Model {
        /// Folder with `config.json` and weights, or a Hub id `owner/name`. A folder next to the configuration file wins.
        path: String = name();
        /// Folder (or Hub id) with tokenizer files, when not the model's own.
        tokenizer: Option<String> = name().optional("the model's own");
        /// Hub revision: branch, tag or commit.
        revision: String = keys::revision();
        /// Where the weights come from.
        init: InitFrom = choice(InitFrom::Pretrained);
    }
}

section! {
    /// What it is trained on.
    "data" Data {
        /// Training files: `["a.jsonl"]`, or `[{ path = "a.jsonl", weight = 2.0 }]` to see each sample of a file twice an epoch (0.5: every second one).
        train: Vec<Source> = keys::sources(true);
        /// Evaluation files.
        eval: Vec<Source> = keys::sources(false);
        /// Share of the training samples held out for evaluation when `eval` is empty.
        eval_split: f64 = float(0.0, Bounds::below(0.0, 1.0));
        /// Chat template: the model's own, a built-in one, or a Jinja file.
        template: Template = keys::template();
        /// Extra variables for the template, e.g. `{ enable_thinking = false }`.
        template_args: serde_json::Map<String, serde_json::Value> = keys::template_args();
        /// Longest sequence in tokens.
        seq_len: usize = count(2048, 2..=LONGEST);
        /// Put several samples into one sequence of `seq_len` (best fit; attention does not cross samples).
        packing: bool = flag(false);
        /// Which turns are trained.
        loss: LossOn = choice(LossOn::Assistant);
        /// What happens to samples longer than `seq_len`.
        over_long: OverLong = choice(OverLong::Truncate);
        /// Share of bad rows above which the run stops.
        max_bad_rows: f64 = float(0.01, Bounds::within(0.0, 1.0));
        /// Folder of the cache of tokenised data; "" switches the cache off.
        cache_dir: Option<PathBuf> = keys::cache_dir();
        /// Threads for reading and tokenising; 0 takes all cores.
        workers: usize = count(0, 0..=256);
    }
}

section! {
    /// How long and in what batches.
    "train" Train {
        /// Optimizer steps; give this or `epochs`.
        steps: Option<usize> = count(0, 1..=MANY).optional("as `epochs` says");
        /// Passes over the data; give this or `steps`.
        epochs: Option<f64> = float(1.0, Bounds::above(0.0, 1e6)).optional("1.0 when `steps` is absent too");
        /// Sequences per optimizer step.
        global_batch: usize = count(8, 1..=1 << 20);
        /// Sequences per forward pass; divides `global_batch`.
        micro_batch: usize = count(1, 1..=1 << 20);
        /// Seed of shuffling and initialisation.
        seed: u64 = integer(42, 0..=u64::MAX);
        /// Equal runs give equal bits on a GPU too, at some cost (attention by slower kernels); on the CPU they always do.
        deterministic: bool = flag(false);
        /// Shuffle the samples of each epoch.
        shuffle: bool = flag(true);
        /// What the loss is a mean over.
        loss_reduction: LossReduction = choice(LossReduction::Token);
        /// Load-balancing loss of mixture-of-experts models.
        aux_loss: AuxLoss = choice(AuxLoss::Auto);
        /// Coefficient of the load-balancing loss.
        aux_loss_coef: Option<f64> = float(0.0, Bounds::within(0.0, 1e3)).optional("the model's `router_aux_loss_coef`");
        /// Coefficient of the router z-loss.
        z_loss_coef: f64 = float(0.0, Bounds::within(0.0, 1e3));
        /// Evaluate every so many steps; 0 only at the end, when there is evaluation data.
        eval_every: usize = count(0, 0..=MANY);
        /// Most sequences of an evaluation; 0 takes all.
        eval_sequences: usize = count(0, 0..=MANY);
        /// What a NaN or infinite loss or gradient does.
        on_non_finite: OnNonFinite = choice(OnNonFinite::Stop);
    }
}

section! {
    /// AdamW and the learning rate.
    "optim" Optim {
        /// Peak learning rate.
        lr: f64 = float(1e-5, Bounds::within(0.0, 10.0));
        /// Lowest learning rate of the schedule; at most `lr`.
        min_lr: f64 = float(0.0, Bounds::within(0.0, 10.0));
        /// Shape of the schedule.
        schedule: Schedule = choice(Schedule::Cosine);
        /// Linear warm-up: steps (integer), or share of all steps (fraction below 1).
        warmup: Span = keys::span(Span::Fraction(0.03));
        /// Final decay of `wsd`: steps (integer), or share of all steps (fraction below 1).
        decay: Span = keys::span(Span::Fraction(0.1));
        /// AdamW betas.
        betas: [f64; 2] = keys::betas();
        /// AdamW epsilon.
        eps: f64 = float(1e-8, Bounds::above(0.0, 1.0));
        /// Decoupled weight decay on tensors of two or more dims.
        weight_decay: f64 = float(0.1, Bounds::within(0.0, 10.0));
        /// Largest gradient norm; 0 switches clipping off.
        clip: f64 = float(1.0, Bounds::within(0.0, 1e6));
    }
}

section! {
    /// How the work is spread over ranks (processes, one per GPU), as in Megatron: tp x cp x dp x pp ranks in all, experts folded into them.
    "parallel" Parallel {
        /// Let the planner choose the axes that are not given: the layout that it expects to be the fastest of those that fit.
        /// `parallel = "auto"` is the same, for the axes that are given elsewhere (`--set`) too.
        auto: bool = flag(false);
        /// Share of a device's memory that the planner leaves free where it chooses: for what no plan knows, such as other processes.
        reserve: f64 = float(RESERVE, Bounds::below(0.0, 1.0));
        /// Tensor parallel size: neighbours that share every matrix.
        tp: usize = count(1, 1..=RANKS);
        /// Tensor ranks also divide the tokens between the matrices (sequence parallelism).
        sequence: bool = flag(true);
        /// Pipeline parallel size: stages of layers.
        pp: usize = count(1, 1..=RANKS);
        /// Virtual stages of each rank (interleaved schedule).
        vpp: usize = count(1, 1..=RANKS);
        /// Layers of each stage, e.g. `[47, 47]`, where they do not divide evenly.
        split: Vec<usize> = keys::split();
        /// Expert parallel size; folds into the ranks of a stage and does not multiply them.
        ep: usize = count(1, 1..=RANKS);
        /// Tensor parallel size within an expert. As in Megatron it is that of `tp` unless given: `etp = 1` keeps experts whole.
        etp: Option<usize> = count(1, 1..=RANKS).optional("as `tp` where the model has experts, else 1");
        /// Context parallel size: ranks that share every sequence.
        cp: usize = count(1, 1..=RANKS);
        /// Data parallel size.
        dp: Option<usize> = count(1, 1..=RANKS).optional("what the other axes leave of the ranks");
    }
}

section! {
    /// Types of numbers.
    "precision" Precision {
        /// Weights and activations; "auto" is bfloat16 on a GPU and float32 on the CPU (which has no other). With bfloat16 the optimizer
        /// keeps exact float32 weights all the same, as 16 bits beside each.
        dtype: Option<FloatType> = choice_or::<FloatType>("auto");
        /// Gradients of weights.
        grads: FloatType = choice(FloatType::Float32);
        /// Adam's moments.
        moments: FloatType = choice(FloatType::Float32);
    }
}

section! {
    /// Memory against time.
    "memory" Memory {
        /// What is computed again in the backward pass instead of being kept.
        recompute: Recompute = choice(Recompute::None);
        /// What "selective" computes again, cheapest first: norm, act (passes over memory), qkv, mlp (products), moe (the experts).
        recompute_parts: Vec<RecomputePart> = keys::recompute_parts();
        /// Keep Adam's moments and the remainders of the weights in pinned host memory: 10 bytes a parameter less on the GPU, for a
        /// slower update.
        offload_optimizer: bool = flag(false);
        /// Rows of logits that exist at once; 0 chooses.
        loss_chunk: usize = count(0, 0..=LONGEST);
    }
}

section! {
    /// What is saved.
    "checkpoint" Checkpoint {
        /// Save every so many steps, at the end, and when the run is interrupted (Ctrl-C, SIGTERM); 0 only at the end.
        every: usize = count(500, 0..=MANY);
        /// How many of the newest checkpoints to keep; 0 keeps all.
        keep_last: usize = count(3, 0..=MANY);
        /// Never delete checkpoints at multiples of this step; 0 for none.
        keep_every: usize = count(0, 0..=MANY);
        /// Write the final weights as a Hugging Face folder `hf/` in the run folder.
        export: bool = flag(true);
        /// Type of the exported weights; "auto" is the base model's own.
        export_dtype: Option<FloatType> = choice_or::<FloatType>("auto");
    }
}

section! {
    /// The run folder and what is shown.
    "log" Log {
        /// The run folder, relative to the configuration file.
        dir: PathBuf = path().default_is("`runs/` and the name of the configuration file");
        /// Print every so many steps.
        every: usize = count(1, 1..=MANY);
        /// Write TensorBoard files.
        tensorboard: bool = flag(true);
        /// A chat prompt that the trained model answers at the end of the run.
        sample_prompt: Option<String> = text().optional("no prompt");
    }
}

/// One data file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Source {
    /// The file, relative to the configuration's folder.
    pub path: PathBuf,
    /// How often each of its samples is seen in an epoch: 2.0 twice, 0.5 every second one.
    pub weight: f64,
}

/// `data.template`
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Template {
    /// `chat_template.jinja` or the key in `tokenizer_config.json` of the tokenizer folder.
    Model,
    /// A built-in one: `chatml`, `qwen3`, `alpaca`, `llama3`.
    Named(String),
    /// A Jinja file.
    File(PathBuf),
}

/// A length in steps or as a share of the run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Span {
    /// So many steps.
    Steps(usize),
    /// This share of all steps, below 1.
    Fraction(f64),
}

/// The size of the axis within an expert, `etp` where it is given: as in Megatron that of `tp`, so that `tp` alone divides the whole model. A
/// model without experts has none to divide.
pub fn expert_tensor(etp: Option<usize>, tp: usize, has_experts: bool) -> usize {
    etp.unwrap_or(if has_experts { tp } else { 1 })
}

impl Config {
    /// Every key of the file, in the order of the reference.
    pub fn keys() -> Vec<Key> {
        Self::sections().into_iter().flat_map(|(_, _, keys)| keys).collect()
    }

    /// Name, description and keys of every section, in the order of the reference.
    pub(crate) fn sections() -> Vec<(&'static str, String, Vec<Key>)> {
        fn one<S: Section>() -> (&'static str, String, Vec<Key>) {
            (S::NAME, S::ABOUT.concat().trim().to_string(), S::keys())
        }
        vec![
            one::<Model>(),
            one::<Data>(),
            one::<Train>(),
            one::<Optim>(),
            one::<Parallel>(),
            one::<Precision>(),
            one::<Memory>(),
            one::<Checkpoint>(),
            one::<Log>(),
        ]
    }

    /// Reads every section; paths are still as written.
    pub(crate) fn read(reader: &Reader) -> Result<Self> {
        Ok(Self {
            model: Model::read(reader)?,
            data: Data::read(reader)?,
            train: Train::read(reader)?,
            optim: Optim::read(reader)?,
            parallel: Parallel::read(reader)?,
            precision: Precision::read(reader)?,
            memory: Memory::read(reader)?,
            checkpoint: Checkpoint::read(reader)?,
            log: Log::read(reader)?,
        })
    }
}
