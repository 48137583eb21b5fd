//! The arguments of `temper bench`.

use super::{BenchComm, Dtype};
use clap::{Args, Subcommand};
use std::path::PathBuf;

/// `temper bench`
#[derive(Subcommand)]
pub enum Bench {
    /// Time the optimizer step that trains: phases, tokens/s, model TFLOP/s, MFU, memory.
    Step(BenchStep),
    /// Time each operation of the step alone, once per shape, against what the device can do.
    Ops(BenchOps),
    /// Time the exchange between ranks: bus bandwidth of every operation and size, as nccl-tests counts it.
    Comm(BenchComm),
}

/// The model and the batch of a benchmark.
#[derive(Args)]
pub struct BenchSubject {
    /// Folder with config.json, a config.json, or a built-in shape like qwen3-8b. Weights are random.
    pub model: String,
    /// Keep only so many layers.
    #[arg(long)]
    pub layers: Option<usize>,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u32).range(2..=1 << 24))]
    pub seq: u32,
    /// Tokens of a document; sequences are packed with them. Default: one document per sequence.
    #[arg(long)]
    pub doc_len: Option<usize>,
    /// Sequences of a micro-batch.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub micro_batch: u32,
    /// What is computed again in the backward pass (memory.recompute).
    #[arg(long)]
    pub recompute: Option<String>,
    /// Type of weights and activations.
    #[arg(long, value_enum)]
    pub dtype: Option<Dtype>,
    /// Type of gradients.
    #[arg(long, value_enum)]
    pub grads: Option<Dtype>,
    /// Type of Adam's moments.
    #[arg(long, value_enum)]
    pub moments: Option<Dtype>,
    /// Set any other key of memory, precision, optim or train that matters here; may be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// `temper bench step`
#[derive(Args)]
pub struct BenchStep {
    /// Model and batch.
    #[command(flatten)]
    pub subject: BenchSubject,
    /// Micro-batches of an optimizer step.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub accumulate: u32,
    /// Measure as so many ranks as this layout has, each a process of this host with a GPU of its own, e.g. tp=2 or dp=2,ep=2.
    #[arg(long, value_name = "LAYOUT", conflicts_with = "as_rank", id = "ranks_layout")]
    pub layout: Option<String>,
    /// Measure one rank of a layout on this device, the other ranks not there (communication costs nothing).
    #[arg(long, value_name = "RANK", requires = "layout")]
    pub as_rank: Option<usize>,
    /// The layout, e.g. tp=8,pp=2,ep=4,etp=1,dp=4. Keys: tp, pp, vpp, ep, etp, cp, dp, split.
    #[arg(long = "of", value_name = "LAYOUT", requires = "as_rank", id = "layout")]
    pub of: Option<String>,
    /// Timed steps.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub steps: u32,
    /// Steps before them.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(0..=100_000))]
    pub warmup: u32,
    /// Record one more step and print where its time went, operation by operation.
    #[arg(long)]
    pub ops: bool,
    /// Record one more step into a file for Perfetto or chrome://tracing.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
}

/// `temper bench ops`
#[derive(Args)]
pub struct BenchOps {
    /// Model and batch.
    #[command(flatten)]
    pub subject: BenchSubject,
    /// Only operations whose name contains this.
    #[arg(long, value_name = "WORD", default_value = "")]
    pub only: String,
}
