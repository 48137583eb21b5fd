//! What a run reports. Everything a screen, a log file or TensorBoard shows comes from these events.

use serde::{Deserialize, Serialize};

/// One line of `events.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The run begins, or goes on after a resume: then what an earlier attempt logged of its `step` and later ones no longer counts.
    Start(Start),
    /// An optimizer step was done.
    Step(Step),
    /// An evaluation was done.
    Eval(Eval),
    /// A checkpoint was committed.
    Checkpoint(Saved),
    /// Something the user should know: counts of dropped rows, choices made, faults passed over.
    Notice(Notice),
    /// The run ended.
    End(End),
}

/// Start of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Start {
    /// First step to be done, from 1.
    pub step: usize,
    /// Last step of the run.
    pub steps: usize,
    /// The step of the checkpoint that the run goes on from; absent when it begins.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub resumed_from: Option<usize>,
    /// Ranks that train together.
    pub ranks: usize,
    /// How they divide the work, as [`crate::layout::Layout`] shows itself; absent for one rank.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub layout: Option<String>,
    /// All parameters.
    pub params: u64,
    /// Parameters used for one token.
    pub active_params: u64,
    /// Backend and its threads.
    pub backend: String,
    /// Samples after filtering.
    pub samples: usize,
    /// Sequences of one epoch (packed or not).
    pub sequences: usize,
    /// Seconds from the start of the program to here.
    pub startup_s: f64,
    /// How the weights (and moments) came from disk; absent when they were drawn.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub loaded: Option<Loading>,
}

/// Reading of a model's weights, or of a checkpoint, by the rank that reports and by all.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Loading {
    /// Bytes that this rank read from files.
    pub bytes: u64,
    /// Bytes of what it holds, as they lie in the files; the rest shared a checksum or a row with them.
    pub wanted_bytes: u64,
    /// Seconds until they were in their place.
    pub wall_s: f64,
    /// GB (10^9 bytes) read a second.
    pub gb_per_s: f64,
    /// Ranks that read.
    pub ranks: usize,
    /// Bytes that all of them read.
    pub all_bytes: u64,
    /// Of all, by the time of the slowest.
    pub all_gb_per_s: f64,
}

/// An optimizer step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Number of the step, from 1.
    pub step: usize,
    /// Epochs passed after it.
    pub epoch: f64,
    /// Mean cross-entropy over the trained tokens (without auxiliary losses).
    pub loss: f64,
    /// Load-balancing loss without its coefficient; mixture-of-experts models only.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub aux_loss: Option<f64>,
    /// Router z-loss without its coefficient; only when it is on.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub z_loss: Option<f64>,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Learning rate of this step.
    pub lr: f64,
    /// Tokens of the step.
    pub tokens: usize,
    /// Trained tokens of the step.
    pub trained_tokens: usize,
    /// Tokens per second of this step.
    pub tokens_per_s: f64,
    /// Model TFLOP/s (docs/NUMERICS.md has the count).
    pub model_tflops: f64,
    /// Share of the device's dense peak; absent where the peak is not known.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub mfu: Option<f64>,
    /// Largest memory of the process so far.
    pub mem_peak_bytes: u64,
    /// Seconds of this step.
    pub wall_s: f64,
    /// True when the update was skipped because of a NaN or infinity.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub skipped: bool,
}

/// An evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Eval {
    /// After this step (0: before training).
    pub step: usize,
    /// Mean cross-entropy over the trained tokens.
    pub loss: f64,
    /// exp(loss).
    pub perplexity: f64,
    /// Trained tokens evaluated.
    pub trained_tokens: usize,
    /// Seconds it took.
    pub wall_s: f64,
}

/// A committed checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    /// Its step.
    pub step: usize,
    /// Its folder.
    pub path: String,
    /// Its size.
    pub bytes: u64,
    /// Seconds from its begin to its commit.
    pub wall_s: f64,
    /// Seconds that training stood still for it, where the rest happened beside training.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub paused_s: Option<f64>,
}

/// A message with its count.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Notice {
    /// The message.
    pub message: String,
    /// How many times it happened, where that makes sense.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub count: Option<u64>,
}

/// End of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct End {
    /// Last step done.
    pub step: usize,
    /// Loss of the last step.
    pub loss: f64,
    /// Tokens trained on since the start (or resume).
    pub tokens: u64,
    /// Seconds since the start (or resume).
    pub wall_s: f64,
    /// Updates skipped because of a NaN or infinity.
    pub skipped: u64,
}

/// Something that takes events: the log file, TensorBoard, the terminal.
pub trait Sink {
    /// Takes one event. A sink reports its own failures; training does not stop for them.
    fn event(&mut self, event: &Event);

    /// Hears how far the evaluation under way is: `done` of `of` micro-batches of this rank. No event, since nothing has come of it yet.
    fn evaluating(&mut self, done: usize, of: usize) {
        let _ = (done, of);
    }
}

impl<S: Sink + ?Sized> Sink for Box<S> {
    fn event(&mut self, event: &Event) {
        (**self).event(event);
    }

    fn evaluating(&mut self, done: usize, of: usize) {
        (**self).evaluating(done, of);
    }
}
