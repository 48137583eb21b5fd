//! Pipeline schedules: the order in which a stage runs its forward and backward passes, and whom it hears from and tells.
//!
//! A pipeline has `stages` (pp), each with `chunks` of the model (vpp, virtual stages) that go round: the *global chunk*
//! `chunk * stages + stage` comes after all smaller ones. 1F1B: Narayanan et al. 2021, "Efficient Large-Scale Language Model
//! Training on GPU Clusters Using Megatron-LM", section 2.2; interleaved likewise, in the order of Megatron-Core's
//! `megatron/core/pipeline_parallel/schedules.py` (`get_pp_rank_microbatches`, `get_schedule_table`).
//!
//! # What a transport must do
//! The messages from one stage to another are received in the order in which they are sent, so nothing needs tags. Best is a
//! queue for each (from, to, direction): activations forward, gradients backward. Two stages of several chunks send both the same way;
//! one queue for both keeps the order too, but needs room for one message more.
//!
//! A send may not hold up its stage until the receiver takes the message: with receives posted when their step comes, two
//! neighbours would each wait for the other. What is enough (`tests/schedule.rs`):
//! - for every schedule: a stage waits for the *previous* send on a queue before its next there, so one message a queue is
//!   under way (two where the directions share it). Each queue then moves by itself: with NCCL, a communicator and a stream of its own;
//! - for 1F1B alone: the send of a step and the receive of the next are posted together and awaited together (Megatron's
//!   `send_forward_recv_backward`). Interleaved schedules deadlock so: two stages each send a gradient that the other takes
//!   only after its next forward pass.

use crate::refusal::{PipelineRule, Refusal};

/// A pass of one micro-batch through one chunk of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Activations in, activations out (the loss, on the last global chunk).
    Forward {
        /// The micro-batch.
        micro: usize,
        /// The chunk among those of the stage.
        chunk: usize,
    },
    /// Gradients of the output in, of the input out.
    Backward {
        /// The micro-batch.
        micro: usize,
        /// The chunk among those of the stage.
        chunk: usize,
    },
}

impl Step {
    /// The stage whose output is this step's input; `None` where the step begins by itself: the forward pass of the first
    /// global chunk (token ids) and the backward pass of the last (the loss).
    pub fn source(self, stage: usize, stages: usize, chunks: usize) -> Option<usize> {
        match self {
            Step::Forward { chunk, .. } => before(chunk, stage, stages),
            Step::Backward { chunk, .. } => after(chunk, stage, stages, chunks),
        }
    }

    /// The stage that takes this step's output; `None` where nobody does: the forward pass of the last global chunk and the
    /// backward pass of the first.
    pub fn target(self, stage: usize, stages: usize, chunks: usize) -> Option<usize> {
        match self {
            Step::Forward { chunk, .. } => after(chunk, stage, stages, chunks),
            Step::Backward { chunk, .. } => before(chunk, stage, stages),
        }
    }
}

/// The stage of the previous global chunk: from the first stage round to the last, one chunk earlier.
fn before(chunk: usize, stage: usize, stages: usize) -> Option<usize> {
    match (stage, chunk) {
        (0, 0) => None,
        (0, _) => stages.checked_sub(1),
        _ => Some(stage - 1),
    }
}

/// The stage of the next global chunk: from the last stage round to the first, one chunk later.
fn after(chunk: usize, stage: usize, stages: usize, chunks: usize) -> Option<usize> {
    match (stage + 1 < stages, chunk + 1 < chunks) {
        (true, _) => Some(stage + 1),
        (false, true) => Some(0),
        (false, false) => None,
    }
}

/// The steps of `stage` of `stages`, with `chunks` of the model each: [`one_f_one_b`] with one, else [`interleaved`].
///
/// # Errors
/// No such stage, no chunk, or what [`interleaved`] refuses.
pub fn schedule(stage: usize, stages: usize, chunks: usize, micro_batches: usize) -> Result<Vec<Step>, Refusal> {
    match chunks {
        1 if stage < stages => Ok(one_f_one_b(stage, stages, micro_batches)),
        _ => interleaved(stage, stages, chunks, micro_batches),
    }
}

/// 1F1B: a stage runs one forward pass for each stage after it, then forward and backward passes in turn. Takes any number of
/// micro-batches; with fewer than stages some stages idle longer, and all is still computed. `stage` is less than `stages`.
pub fn one_f_one_b(stage: usize, stages: usize, micro_batches: usize) -> Vec<Step> {
    steps(stage, stages.max(1), 1, micro_batches)
}

/// Interleaved 1F1B: micro-batches in groups of `stages`, each group through chunk after chunk; backwards the chunks reversed.
/// The idle time is that of 1F1B divided by `chunks`, for `chunks` times the messages and more activations ([`in_flight`]).
///
/// # Errors
/// What [`check_interleaving`] refuses, no such stage, no chunk.
pub fn interleaved(stage: usize, stages: usize, chunks: usize, micro_batches: usize) -> Result<Vec<Step>, Refusal> {
    if stage >= stages || chunks == 0 {
        let found = format!("stage {stage} of {stages}, with {chunks} chunks of the model a stage");
        return Err(Refusal::new(PipelineRule::Stages, found, "Stages count from 0, and each has at least 1 chunk.".to_string()));
    }
    check_interleaving(stages, chunks, micro_batches)?;
    Ok(steps(stage, stages, chunks, micro_batches))
}

/// What one replica runs of a step. All replicas run as many micro-batches; where there are too few, they are completed by fillers: micro-batches
/// of one token that is not trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turns {
    /// Micro-batches of the replica that has the most.
    pub real: usize,
    /// The same with the fillers that an interleaved schedule takes to be a multiple of its stages.
    pub all: usize,
}

impl Turns {
    /// `micro_batches` of a step over `replicas`, each with so many stages and chunks.
    pub fn new(micro_batches: usize, replicas: usize, stages: usize, chunks: usize) -> Turns {
        let real = micro_batches.div_ceil(replicas.max(1));
        let group = if chunks > 1 { stages.max(1) } else { 1 };
        Turns { real, all: real.checked_next_multiple_of(group).unwrap_or(real) }
    }

    /// The most passes whose activations a stage holds at once ([`in_flight`]), fillers left out. `stages` and `chunks` are those of [`Turns::new`].
    pub fn in_flight(&self, stage: usize, stages: usize, chunks: usize) -> usize {
        if self.all == self.real {
            return in_flight(stage, stages, chunks, self.all);
        }
        let (mut now, mut most) = (0usize, 0);
        for step in steps(stage, stages, chunks, self.all) {
            match step {
                Step::Forward { micro, .. } if micro < self.real => now += 1,
                Step::Backward { micro, .. } if micro < self.real => now -= 1,
                _ => {}
            }
            most = most.max(now);
        }
        most
    }
}

/// Whether `stages` with `chunks` each can run `micro_batches`. One chunk always can.
///
/// # Errors
/// Several chunks without a pipeline, or micro-batches that are no multiple of the stages.
pub fn check_interleaving(stages: usize, chunks: usize, micro_batches: usize) -> Result<(), Refusal> {
    let refuse = |found, remedy| Err(Refusal::new(PipelineRule::Interleaving, found, remedy));
    if chunks > 1 && stages < 2 {
        refuse(format!("vpp {chunks} without a pipeline"), "Take vpp=1, or pp of at least 2.".to_string())
    } else if chunks > 1 && !micro_batches.is_multiple_of(stages) {
        let found = format!("{micro_batches} micro-batches are not a multiple of pp {stages}");
        let below = micro_batches / stages * stages;
        let near = if below == 0 { stages.to_string() } else { format!("{below} or {}", below.saturating_add(stages)) };
        refuse(found, format!("Interleaving runs them in groups of pp: take {near} (the global batch decides), or vpp=1."))
    } else {
        Ok(())
    }
}

/// The most passes, each of one micro-batch through one chunk, whose activations a stage holds at once: from the beginning of
/// a forward pass to the end of its backward pass. They are the forward passes that it runs ahead, and the one that comes with
/// the first backward pass. Costs nothing: the search over layouts asks often.
pub fn in_flight(stage: usize, stages: usize, chunks: usize, micro_batches: usize) -> usize {
    let ahead = warm_up(stage, stages, chunks, micro_batches);
    ahead.saturating_add(1).min(chunks.saturating_mul(micro_batches))
}

/// Forward passes before the first backward pass is due, but for the one that comes with it.
///
/// One chunk: the stages after this one. Several: all but the last chunk of the first group, and twice the stages after this
/// one (`num_warmup_microbatches` of Megatron-Core).
fn warm_up(stage: usize, stages: usize, chunks: usize, micro_batches: usize) -> usize {
    let later = stages.saturating_sub(stage.saturating_add(1));
    let ahead = match chunks {
        0 | 1 => later,
        _ => later.saturating_mul(2).saturating_add((chunks - 1).saturating_mul(stages)),
    };
    ahead.min(chunks.saturating_mul(micro_batches))
}

/// Warm-up, then a forward and a backward pass in turn, then the backward passes that are left.
fn steps(stage: usize, stages: usize, chunks: usize, micro_batches: usize) -> Vec<Step> {
    let round = stages * chunks;
    // The n-th pass of either kind. A round takes a group of `stages` micro-batches through all chunks.
    let micro = |n: usize| n / round * stages + n % stages;
    let chunk = |n: usize| n % round / stages;
    let forward = |n: usize| Step::Forward { micro: micro(n), chunk: chunk(n) };
    let backward = |n: usize| Step::Backward { micro: micro(n), chunk: chunks - 1 - chunk(n) };

    let total = chunks * micro_batches;
    let ahead = warm_up(stage, stages, chunks, micro_batches);
    let mut steps: Vec<Step> = (0..ahead).map(forward).collect();
    steps.extend((ahead..total).flat_map(|n| [forward(n), backward(n - ahead)]));
    steps.extend((total - ahead..total).map(backward));
    steps
}
