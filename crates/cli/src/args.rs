//! The command line, parsed into types.

mod bench;
mod comm;

pub use bench::{Bench, BenchOps, BenchStep, BenchSubject};
pub use comm::{BenchComm, Transport};

use crate::exit::BadInput;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use temper_tensor::{DType, Ops};

/// Post-train Qwen3-class language models: Hugging Face folder in, Hugging Face folder out.
#[derive(Parser)]
#[command(name = "temper", version, max_term_width = 110, subcommand_required = true, arg_required_else_help = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// Threads to compute with (0: all cores).
    #[arg(long, global = true, default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=1024))]
    pub threads: u16,
    /// What to compute on.
    #[arg(long, global = true, value_enum, default_value_t = Device::Auto)]
    pub device: Device,
}

/// `--device`
#[derive(Clone, Copy, ValueEnum)]
pub enum Device {
    /// An NVIDIA GPU when there is one, else the processor.
    Auto,
    /// The processor.
    Cpu,
    /// The first visible NVIDIA GPU.
    Cuda,
}

/// The commands.
#[derive(Subcommand)]
pub enum Command {
    /// Fine-tune a model on chat data.
    Sft(Sft),
    /// Start a job on several hosts by ssh.
    Launch(Launch),
    /// Look at training data, or build it.
    #[command(subcommand)]
    Data(Data),
    /// List, check and export what a run has saved.
    #[command(subcommand)]
    Checkpoint(Checkpoint),
    /// Let a model answer.
    Generate(Generate),
    /// Compare a model with golden values, or a layout of ranks with one rank.
    Verify(Verify),
    /// Measure speed and memory with random weights and tokens.
    #[command(subcommand)]
    Bench(Bench),
    /// Say whether a run fits, in which layout, how fast, and why, before a GPU is touched.
    Plan(Plan),
}

/// `temper sft`
#[derive(Args)]
pub struct Sft {
    /// The configuration (docs/CONFIG.md lists the keys).
    pub config: PathBuf,
    /// Override a key, e.g. `--set optim.lr=2e-5`; may be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// Go on from the newest good checkpoint of the run folder, or from the given step.
    #[arg(long, value_name = "STEP", num_args = 0..=1, default_missing_value = "latest")]
    pub resume: Option<String>,
    /// Record steps into a file for Perfetto or chrome://tracing.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// The steps to record, e.g. `3..5` for 3, 4 and 5.
    #[arg(long, value_name = "STEPS", default_value = "2", requires = "trace")]
    pub trace_steps: String,
    /// Ranks of the job, each a process (default: as many as `parallel` multiplies to; where it leaves dp open, one for each GPU).
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    pub ranks: Option<u32>,
    /// Be the supervisor of so many ranks on this node: for srun or mpirun with one task a node.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub ranks_per_node: Option<u32>,
    /// Start again from the last checkpoint when a rank fails, at most so many times.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    pub restarts: u32,
    /// A rank that gives no sign of life for so many seconds is lost.
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u32).range(3..=86_400))]
    pub silence: u32,
    /// Longest that a rank waits for another in one operation, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub patience: u32,
}

/// `temper launch`
#[derive(Args)]
pub struct Launch {
    /// Hosts, one a line: `host`, `host slots=8` or `host:8`. Rank 0 runs on the first.
    #[arg(long, value_name = "FILE")]
    pub hostfile: PathBuf,
    /// Ranks of every host, whatever the file says (default: its slots, else `parallel` divided by the hosts, else a GPU each).
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub ranks_per_node: Option<u32>,
    /// What runs a command on a host: called with the host's name and a line of shell.
    #[arg(long, value_name = "COMMAND", default_value = "ssh -o BatchMode=yes")]
    pub ssh: String,
    /// Port of rank 0 on the first host; the supervisors use the next.
    #[arg(long, value_name = "PORT", default_value_t = 29_500, value_parser = clap::value_parser!(u16).range(1..65535))]
    pub port: u16,
    /// `sft CONFIG.toml ...`, as on one host.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<std::ffi::OsString>,
}

/// `temper data`
#[derive(Subcommand)]
pub enum Data {
    /// Show samples exactly as they are trained, trained tokens coloured.
    Preview(Preview),
    /// Count rows, tokens, trained share, lengths, drops, packing efficiency.
    Stats(Stats),
    /// Build a training set from a scored role-play benchmark (seeds, dialogues, evaluations).
    BuildRoleplay(BuildRoleplay),
}

/// `temper data preview`
#[derive(Args)]
pub struct Preview {
    /// The configuration.
    pub config: PathBuf,
    /// Override a key.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// How many samples to show (0: all; with --json all is the default).
    #[arg(short, long)]
    pub num: Option<usize>,
    /// Show the batch of this training step instead, as it is packed.
    #[arg(long, value_name = "STEP")]
    pub step: Option<usize>,
    /// One JSON object per sample: text, input_ids, labels (-100 where not trained).
    #[arg(long)]
    pub json: bool,
}

/// `temper data stats`
#[derive(Args)]
pub struct Stats {
    /// The configuration.
    pub config: PathBuf,
    /// Override a key.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// `temper data build-roleplay`
#[derive(Args)]
pub struct BuildRoleplay {
    /// Folder with data/{zh,en}/{seeds,dialogues,evaluations}.{parquet,jsonl} (or that `data` folder itself).
    #[arg(long = "in", value_name = "DIR")]
    pub input: PathBuf,
    /// Training file to write; the validation file is written beside it as NAME.val.jsonl.
    #[arg(long = "out", value_name = "FILE")]
    pub output: PathBuf,
    /// Least overall score, 0.5 Worlds + 0.25 Stories + 0.25 Preferences.
    #[arg(long, default_value_t = 80.0)]
    pub min_overall: f64,
    /// Least basics score.
    #[arg(long, default_value_t = 85.0)]
    pub min_basics: f64,
    /// Least logic score.
    #[arg(long, default_value_t = 60.0)]
    pub min_logic: f64,
    /// Keep only dialogues of these models; may be repeated.
    #[arg(long = "model", value_name = "NAME")]
    pub models: Vec<String>,
    /// Leave out dialogues of these models; may be repeated.
    #[arg(long = "exclude-model", value_name = "NAME")]
    pub exclude_models: Vec<String>,
    /// Most dialogues per seed, best overall first (0: no limit).
    #[arg(long, default_value_t = 0)]
    pub per_seed: usize,
    /// Most turns of a dialogue (0: no limit).
    #[arg(long, default_value_t = 0)]
    pub max_turns: usize,
    /// Share of seeds held out for validation.
    #[arg(long, default_value_t = 0.02)]
    pub val: f64,
    /// Seed of the shuffle and the split.
    #[arg(long, default_value_t = 42)]
    pub seed: u64,
    /// Print the report as JSON.
    #[arg(long)]
    pub json: bool,
}

/// `temper checkpoint`
#[derive(Subcommand)]
pub enum Checkpoint {
    /// List the checkpoints of a run and whether each is whole.
    List {
        /// The run folder.
        run: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Check every byte of the checkpoints of a run, or of one checkpoint. Exit 1 if one is damaged.
    Verify {
        /// The run folder or one checkpoint folder.
        path: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Write a folder that transformers loads.
    Export {
        /// The run folder (newest good checkpoint) or one checkpoint folder.
        path: PathBuf,
        /// Folder to write.
        #[arg(long)]
        out: PathBuf,
        /// Type of the weights: the base model's own unless given.
        #[arg(long, value_enum)]
        dtype: Option<Dtype>,
        /// Replace a model that is already there.
        #[arg(long)]
        overwrite: bool,
    },
}

/// `--dtype`
#[derive(Clone, Copy, ValueEnum)]
pub enum Dtype {
    /// bfloat16.
    #[value(alias = "bfloat16")]
    Bf16,
    /// float32.
    #[value(alias = "float32")]
    F32,
}

impl Dtype {
    /// Its name in the configuration.
    pub fn key(self) -> &'static str {
        match self {
            Dtype::Bf16 => "bfloat16",
            Dtype::F32 => "float32",
        }
    }

    /// The tensor type, if the backend computes in it.
    pub fn on(self, ops: &dyn Ops) -> anyhow::Result<DType> {
        let dtype = match self {
            Dtype::Bf16 => DType::BF16,
            Dtype::F32 => DType::F32,
        };
        if !ops.dtypes().contains(&dtype) {
            return Err(BadInput(format!("--dtype: {} does not compute in {dtype}; leave it out, or use a GPU", ops.name())).into());
        }
        Ok(dtype)
    }
}

/// `temper generate`
#[derive(Args)]
#[command(group = clap::ArgGroup::new("input").required(true))]
pub struct Generate {
    /// Model folder or Hub id.
    pub model: String,
    /// Continue this text as it is.
    #[arg(long, group = "input")]
    pub prompt: Option<String>,
    /// Answer this message in the model's chat template.
    #[arg(long, group = "input")]
    pub chat: Option<String>,
    /// System message for --chat.
    #[arg(long, requires = "chat")]
    pub system: Option<String>,
    /// Most new tokens.
    #[arg(long, default_value_t = 256)]
    pub max_tokens: usize,
    /// 0 is greedy. Default: generation_config.json's when it samples, else 0.
    #[arg(long)]
    pub temperature: Option<f64>,
    /// Sample among the k likeliest (0: all).
    #[arg(long)]
    pub top_k: Option<usize>,
    /// Sample among the likeliest that together reach this probability.
    #[arg(long)]
    pub top_p: Option<f64>,
    /// Seed of sampling.
    #[arg(long, default_value_t = 42)]
    pub seed: u64,
    /// Stop before this text; may be repeated.
    #[arg(long)]
    pub stop: Vec<String>,
    /// Answer without a thinking block, for templates that know `enable_thinking`.
    #[arg(long)]
    pub no_think: bool,
    /// Type of weights and activations (default: bf16 on a GPU, f32 on the processor).
    #[arg(long, value_enum)]
    pub dtype: Option<Dtype>,
    /// Show special tokens.
    #[arg(long)]
    pub special: bool,
    /// Print one JSON object: text, ids, finish reason, timings.
    #[arg(long)]
    pub json: bool,
}

/// `temper verify`
#[derive(Args)]
#[command(group = clap::ArgGroup::new("against").required(true).multiple(true).args(["golden", "layout"]))]
pub struct Verify {
    /// Model folder or Hub id.
    pub model: String,
    /// Golden values (input_ids, labels, and any of logits, loss, aux_loss, grad/*, step_loss, step_grad_norm, trained/*, greedy).
    #[arg(long)]
    pub golden: Option<PathBuf>,
    /// Run on several ranks, which are threads on the processor, e.g. tp=2,pp=2,ep=2; without golden values the layout is compared with
    /// one rank. Keys: tp, pp, vpp, ep, etp, cp, dp, split, sequence, recompute.
    #[arg(long, value_name = "KEY=N,...")]
    pub layout: Option<String>,
    /// Type of weights and activations; bf16 only on a GPU, with a --tol of about 3e-2.
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    pub dtype: Dtype,
    /// Largest relative error allowed (default: 1e-4, and 1e-5 against one rank).
    #[arg(long)]
    pub tol: Option<f64>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// `temper plan`
#[derive(Args)]
#[command(group = clap::ArgGroup::new("what").required(true))]
pub struct Plan {
    /// A training configuration: model, batch, types, layout and memory settings are taken from it unless given here.
    #[arg(group = "what")]
    pub config: Option<PathBuf>,
    /// Override a key of the configuration.
    #[arg(long = "set", value_name = "KEY=VALUE", requires = "config")]
    pub sets: Vec<String>,
    /// A folder with config.json, a config.json, a name such as Qwen3-235B-A22B, or a Hub id.
    #[arg(long, group = "what", value_name = "DIR|NAME")]
    pub model: Option<String>,
    /// Devices in all (default: what the axes of the layout multiply to, else the GPUs of this machine, else 1).
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1 << 17))]
    pub gpus: Option<u32>,
    /// Device: h20, h100, h200, a100, a800, h800, b200, l40s, ... (crates/config/src/devices.toml), or one of --gpu-file (default: that of this
    /// machine, else h100).
    #[arg(long, value_name = "NAME")]
    pub gpu: Option<String>,
    /// TOML file with devices of your own, in the form of crates/config/src/devices.toml.
    #[arg(long, value_name = "FILE")]
    pub gpu_file: Option<PathBuf>,
    /// Nodes that the devices are in (default: nodes of up to 8).
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1 << 17))]
    pub nodes: Option<u32>,
    /// Network bandwidth of a device, one direction, GB/s (a 200 Gb/s port: 25).
    #[arg(long, value_name = "GB/S")]
    pub network: Option<f64>,
    /// Longest sequence in tokens (default: 4096, or the configuration's).
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pub seq: Option<u32>,
    /// Mean tokens of a sequence, when sequences are not packed full.
    #[arg(long, value_name = "TOKENS")]
    pub mean_tokens: Option<f64>,
    /// Sequences an optimizer step (default: 4 a device, or the configuration's).
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pub global_batch: Option<u32>,
    /// Fix the layout, e.g. tp=8,pp=2,ep=4. Keys: tp, pp, vpp, ep, etp, cp, dp, sequence, mb, recompute, offload, split. Axes left out are 1, etp
    /// is tp (as in Megatron) and dp what is left; without axes the best is searched, with the word auto (tp=8,auto) those left out.
    #[arg(long, default_value = "", value_name = "KEY=N,...")]
    pub layout: String,
    /// Whose habits the account follows.
    #[arg(long = "as", value_enum, default_value_t = PlanAs::Temper)]
    pub account: PlanAs,
    /// Type of weights and activations (default: bf16, or the configuration's).
    #[arg(long, value_enum)]
    pub dtype: Option<Dtype>,
    /// Type of accumulated gradients (default: f32, or the configuration's).
    #[arg(long, value_enum)]
    pub grads: Option<Dtype>,
    /// Type of Adam's moments (default: f32, or the configuration's).
    #[arg(long, value_enum)]
    pub moments: Option<Dtype>,
    /// Most rows of logits that exist at once (default: as many as fit 1.25 GiB, or the configuration's).
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pub loss_chunk: Option<u32>,
    /// Share of a device's memory that a chosen layout leaves free (default: 0.05, or the configuration's parallel.reserve).
    #[arg(long, value_name = "SHARE")]
    pub reserve: Option<f64>,
    /// Rows that the busiest expert rank may get over its share.
    #[arg(long, default_value_t = 2.0)]
    pub skew: f64,
    /// Optimizer steps of the run, to say how long it takes.
    #[arg(long)]
    pub steps: Option<u64>,
    /// A speed that was measured, in tokens a second and device: its MFU is shown.
    #[arg(long, value_name = "TOKENS/S")]
    pub measured: Option<f64>,
    /// Bandwidth of the storage for checkpoints, a node, GB/s.
    #[arg(long, default_value_t = 2.0, value_name = "GB/S")]
    pub storage: f64,
    /// Expand a figure to its formula with the numbers in it: weights, peak, step, mfu, ...; `all` for every one.
    #[arg(long, value_name = "FIGURE")]
    pub explain: Option<String>,
    /// Draw the memory of every stage.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// `--as`
#[derive(Clone, Copy, ValueEnum)]
pub enum PlanAs {
    /// temper's.
    Temper,
    /// Megatron-LM's: f32 masters, whole f32 logits, moments allocated in the first step.
    Megatron,
}
