//! A pipeline of stages that run their schedules against each other: who waits for whom, and for how long.

use std::collections::{BTreeMap, VecDeque};
use temper_parallel::schedule::{Step, schedule};

/// Stages, chunks of each, micro-batches.
#[derive(Clone, Copy, Debug)]
pub struct Pipeline {
    pub stages: usize,
    pub chunks: usize,
    pub micro_batches: usize,
    /// Activations and gradients from one stage to another share a queue.
    pub shared_queues: bool,
}

/// When a stage may go on after a step whose output somebody takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sends {
    /// At once.
    Buffered,
    /// When at most this many messages of the queue are not taken yet. With 0 a send waits for its receive.
    AtMost(usize),
    /// As `AtMost(0)`, but the receive of the next step is posted together with the send.
    Exchange,
}

/// What a finished simulation tells.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Most passes of each stage between the beginning of forward and the end of backward.
    pub most_alive: Vec<usize>,
    /// Time at which the last step ends.
    pub end: usize,
}

type Queue = (usize, usize, bool); // from, to, is it a gradient (false where queues are shared)
type Message = (usize, usize); // micro-batch, global chunk that produced it
type Queues = BTreeMap<Queue, VecDeque<((Message, bool), usize)>>; // with "is it a gradient" and the time of sending

struct Stage {
    steps: Vec<Step>,
    at: usize,
    /// When the input of the step `at` was there, once it was taken.
    input: Option<usize>,
    /// The queue whose last send is waited for.
    sending: Option<Queue>,
    clock: usize,
    alive: Vec<Message>,
}

impl Pipeline {
    pub fn new(stages: usize, chunks: usize, micro_batches: usize) -> Pipeline {
        Pipeline { stages, chunks, micro_batches, shared_queues: false }
    }

    /// The real schedules of all stages.
    pub fn schedules(self) -> Vec<Vec<Step>> {
        (0..self.stages).map(|stage| schedule(stage, self.stages, self.chunks, self.micro_batches).unwrap()).collect()
    }

    fn parts(self, stage: usize, step: Step) -> (bool, usize, usize) {
        match step {
            Step::Forward { micro, chunk } => (false, micro, chunk * self.stages + stage),
            Step::Backward { micro, chunk } => (true, micro, chunk * self.stages + stage),
        }
    }

    /// Runs `schedules` with receives that wait and sends as `sends` says; a forward pass takes `cost.0`, a backward pass `cost.1`.
    ///
    /// Fails on a deadlock, a message out of order, a backward pass without its forward pass, and activations left over.
    pub fn simulate(self, schedules: Vec<Vec<Step>>, sends: Sends, cost: (usize, usize)) -> Result<Outcome, String> {
        let new = |steps| Stage { steps, at: 0, input: None, sending: None, clock: 0, alive: Vec::new() };
        let mut all: Vec<Stage> = schedules.into_iter().map(new).collect();
        let mut queues: Queues = BTreeMap::new();
        let mut outcome = Outcome { most_alive: vec![0; self.stages], end: 0 };
        let mut moved = true;
        while std::mem::take(&mut moved) {
            for (index, stage) in all.iter_mut().enumerate() {
                moved |= self.advance(index, stage, &mut queues, sends, cost)?;
                outcome.most_alive[index] = outcome.most_alive[index].max(stage.alive.len());
                outcome.end = outcome.end.max(stage.clock);
            }
        }
        let stuck: Vec<String> =
            all.iter().enumerate().filter_map(|(i, s)| s.steps.get(s.at).map(|step| format!("{i} at {step:?}"))).collect();
        if !stuck.is_empty() {
            return Err(format!("deadlock: {}", stuck.join(", ")));
        }
        if all.iter().any(|s| !s.alive.is_empty()) || queues.values().any(|q| !q.is_empty()) {
            return Err("activations or messages are left over".to_string());
        }
        Ok(outcome)
    }

    /// One move of a stage: a send that is done, an input taken, or a step.
    fn advance(self, index: usize, stage: &mut Stage, queues: &mut Queues, sends: Sends, cost: (usize, usize)) -> Result<bool, String> {
        let room = match sends {
            Sends::Buffered => usize::MAX,
            Sends::AtMost(room) => room,
            Sends::Exchange => 0,
        };
        if let Some(queue) = stage.sending
            && queues[&queue].len() <= room
        {
            stage.sending = None;
            return Ok(true);
        }
        let Some(&step) = stage.steps.get(stage.at) else { return Ok(false) };
        let (gradient, micro, global) = self.parts(index, step);
        if stage.input.is_none() && (stage.sending.is_none() || sends == Sends::Exchange) {
            let Some(source) = step.source(index, self.stages, self.chunks) else {
                stage.input = Some(0);
                return Ok(true);
            };
            let producer = if gradient { global + 1 } else { global - 1 };
            if let Some((message, time)) = queues.entry((source, index, gradient && !self.shared_queues)).or_default().pop_front() {
                if message != ((micro, producer), gradient) {
                    return Err(format!(
                        "stage {index} wants micro-batch and chunk {:?} of {source} and is sent {message:?}",
                        (micro, producer)
                    ));
                }
                stage.input = Some(time);
                return Ok(true);
            }
        }
        let (Some(input), None) = (stage.input, stage.sending) else { return Ok(false) };
        stage.clock = stage.clock.max(input) + if gradient { cost.1 } else { cost.0 };
        if gradient {
            let kept = stage.alive.iter().position(|kept| *kept == (micro, global));
            stage.alive.swap_remove(kept.ok_or_else(|| format!("stage {index}: {step:?} before its forward pass"))?);
        } else {
            stage.alive.push((micro, global));
        }
        if let Some(target) = step.target(index, self.stages, self.chunks) {
            let queue = (index, target, gradient && !self.shared_queues);
            queues.entry(queue).or_default().push_back((((micro, global), gradient), stage.clock));
            stage.sending = Some(queue);
        }
        stage.at += 1;
        stage.input = None;
        Ok(true)
    }
}
