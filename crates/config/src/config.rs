//! [`Config`]: the sections of a training configuration file, with their defaults.

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
    /// `[precision]`
    pub precision: Precision,
    /// A floating-point type as the configuration names it (`float32` or `f32`, `bfloat16` or `bf16`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FloatType {
    /// 32 bits.
    Float32,
    /// 16 bits, 8 of exponent.
    Bfloat16,
}

/// `[memory]`
    pub memory: Memory,
    /// `[checkpoint]`
    pub checkpoint: Checkpoint,
    /// `[log]`
    pub log: Log,
}

/// `[model]`: what is trained.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Model {
    /// Folder with config.json and weights, or a Hub id `owner/name`.
    pub path: String,
    /// Folder with tokenizer files, when not the model's own.
    pub tokenizer: Option<String>,
    /// Hub revision (branch, tag or commit); "main".
    pub revision: String,
    /// Where the weights come from.
    pub init: InitFrom,
}

/// `model.init`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum InitFrom {
    /// The weights in the folder.
    Pretrained,
    /// Random, from config.json alone.
    Random,
}

/// `[data]`: what it is trained on.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Data {
    /// Training files; `train = ["a.jsonl"]` or `train = [{ path = "a.jsonl", weight = 2.0 }]`.
    pub train: Vec<Source>,
    /// Evaluation files.
    pub eval: Vec<Source>,
    /// Share of the training samples held out for evaluation when `eval` is empty; `eval_split`, 0.
    pub eval_split: f64,
    /// Chat template: the model's own, a named one, or a `.jinja` file.
    pub template: Template,
    /// Extra variables for the template, e.g. `template_args = { enable_thinking = false }`.
    pub template_args: serde_json::Map<String, serde_json::Value>,
    /// Longest sequence in tokens; 2048.
    pub seq_len: usize,
    /// Several samples to a sequence of `seq_len` (best fit, attention does not cross samples); false.
    pub packing: bool,
    /// Which turns are trained.
    pub loss: LossOn,
    /// What happens to samples longer than `seq_len`.
    pub over_long: OverLong,
    /// Share of bad rows above which training stops; `max_bad_rows`, 0.01.
    pub max_bad_rows: f64,
    /// Cache of tokenised data; none switches it off. `cache_dir = ""` is none; default `$XDG_CACHE_HOME/temper` or `~/.cache/temper`.
    pub cache_dir: Option<PathBuf>,
    /// Threads for reading and tokenising; 0 = all cores.
    pub workers: usize,
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

/// `data.loss`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LossOn {
    /// Every assistant turn.
    Assistant,
    /// The last assistant turn.
    Last,
    /// Every token.
    All,
}

/// `data.over_long`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OverLong {
    /// Keep the first `seq_len` tokens.
    Truncate,
    /// Leave the sample out.
    Drop,
    /// Cut it into pieces of at most `seq_len`.
    Split,
}

/// `[train]`: how long and in what batches.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Train {
    /// Optimizer steps; given instead of `epochs`.
    pub steps: Option<usize>,
    /// Passes over the data; 1 when `steps` is absent too.
    pub epochs: Option<f64>,
    /// Sequences per optimizer step; 8.
    pub global_batch: usize,
    /// Sequences per forward pass; 1.
    pub micro_batch: usize,
    /// Seed of shuffling and initialisation; 42.
    pub seed: u64,
    /// Shuffle the samples of each epoch; true.
    pub shuffle: bool,
    /// Mean over the tokens of the global batch, or of each micro-batch.
    pub loss_reduction: LossReduction,
    /// Load-balancing loss for mixture-of-experts models.
    pub aux_loss: AuxLoss,
    /// Its coefficient; the model's `router_aux_loss_coef` by default.
    pub aux_loss_coef: Option<f64>,
    /// Coefficient of the router z-loss; 0.
    pub z_loss_coef: f64,
    /// Evaluate every so many steps (0: only at the end, when there is evaluation data); 0.
    pub eval_every: usize,
    /// Most sequences of an evaluation (0: all); 0.
    pub eval_sequences: usize,
    /// What a NaN or infinite loss or gradient does.
    pub on_non_finite: OnNonFinite,
}

/// `train.loss_reduction`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LossReduction {
    /// Sum over all trained tokens of the global batch divided by their number.
    Token,
    /// Megatron's: mean of each micro-batch, then mean over micro-batches.
    Microbatch,
}

/// `train.aux_loss`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AuxLoss {
    /// As the model's config says: Hugging Face's when `output_router_logits` is set, else none.
    Auto,
    /// None.
    None,
    /// Hugging Face's.
    Hf,
    /// Megatron's.
    Megatron,
}

/// `train.on_non_finite`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OnNonFinite {
    /// Stop, naming the step, the layer and the samples.
    Stop,
    /// Skip the update and count it.
    Skip,
}

/// `[optim]`: AdamW and the learning rate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Optim {
    /// Peak learning rate; 1e-5.
    pub lr: f64,
    /// Lowest learning rate of the schedule; 0.
    pub min_lr: f64,
    /// Shape of the schedule; cosine.
    pub schedule: Schedule,
    /// Steps (integer) or share of all steps (fraction below 1) of linear warm-up; 0.03.
    pub warmup: Span,
    /// For `wsd`: steps or share of the final decay; 0.1.
    pub decay: Span,
    /// AdamW betas; [0.9, 0.95].
    pub betas: [f64; 2],
    /// AdamW epsilon; 1e-8.
    pub eps: f64,
    /// Decoupled weight decay on tensors of two or more dims; 0.1.
    pub weight_decay: f64,
    /// Largest gradient norm (0 switches clipping off); 1.0.
    pub clip: f64,
}

/// `optim.schedule`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// Half a cosine from `lr` to `min_lr`.
    Cosine,
    /// A straight line from `lr` to `min_lr`.
    Linear,
    /// `lr` throughout.
    Constant,
    /// Warm-up, stable, then linear decay over `decay`.
    Wsd,
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

/// `[precision]`
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Precision {
    /// Weights and activations; float32, the only one of the CPU backend.
    pub dtype: FloatType,
}

/// `[memory]`
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Memory {
    /// What is computed again in backward.
    pub recompute: Recompute,
    /// Rows of logits that exist at once; 0 chooses.
    pub loss_chunk: usize,
}

/// `memory.recompute`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Nothing.
    None,
    /// Every layer, from its input.
    Full,
}

/// `[checkpoint]`
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Checkpoint {
    /// Save every so many steps (0: only at the end); 0.
    pub every: usize,
    /// How many of the newest to keep (0: all); 3.
    pub keep_last: usize,
    /// Never delete steps that are multiples of this (0: none); 0.
    pub keep_every: usize,
    /// Write the final weights as a Hugging Face folder `hf/`; true.
    pub export: bool,
    /// Dtype of the export; none (`"auto"`) is the base model's own.
    pub export_dtype: Option<FloatType>,
}

/// `[log]`
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Log {
    /// The run folder; `runs/<name of the configuration file>`.
    pub dir: PathBuf,
    /// Print every so many steps; 1.
    pub every: usize,
    /// Write TensorBoard files; true.
    pub tensorboard: bool,
    /// A chat prompt answered by the trained model at the end of the run; none.
    pub sample_prompt: Option<String>,
}
