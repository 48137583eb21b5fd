//! Random access to the batches of a run.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use temper_config::Train;

use super::Content;
use crate::pack::{Order, Sequence, sequences};
use crate::{MicroBatch, StepBatch};

/// Epochs whose order is kept in memory: a run uses one at a time, a look-ahead two.
const KEPT_EPOCHS: usize = 2;

/// The batches of a training run. Any step can be asked for at any time, so a resumed run needs no replay.
///
/// A step trains `global_batch` sequences in passes of `micro_batch`. It never crosses from one epoch to the next:
/// the last step of an epoch trains what is left.
#[derive(Debug)]
pub struct Loader {
    content: Arc<Content>,
    order: Order,
    global_batch: usize,
    micro_batch: usize,
    steps: Option<usize>,
    epochs: f64,
    known: Mutex<Known>,
}

/// What has been worked out so far.
#[derive(Debug, Default)]
struct Known {
    /// First step of each epoch, and of the one after the last.
    starts: Vec<usize>,
    recent: VecDeque<(usize, Arc<Vec<Sequence>>)>,
}

impl Loader {
    pub(super) fn new(content: Arc<Content>, train: &Train) -> Self {
        let order = Order { seed: train.seed, shuffle: train.shuffle, pack: content.packing.then_some(content.seq_len) };
        Self {
            content,
            order,
            global_batch: train.global_batch.max(1),
            micro_batch: train.micro_batch.max(1),
            steps: train.steps,
            epochs: train.epochs.unwrap_or(1.0).max(0.0),
            known: Mutex::new(Known { starts: vec![0], recent: VecDeque::new() }),
        }
    }

    /// Optimizer steps of an epoch (from 0).
    pub fn steps_per_epoch(&self, epoch: usize) -> usize {
        self.sequences(epoch).len().div_ceil(self.global_batch)
    }

    /// Optimizer steps of the run: `train.steps`, else those of `train.epochs`, a part of an epoch rounded up.
    pub fn total_steps(&self) -> usize {
        if let Some(steps) = self.steps {
            return steps;
        }
        let whole = self.epochs.floor() as usize;
        let part = ((self.epochs - self.epochs.floor()) * self.steps_per_epoch(whole) as f64).ceil() as usize;
        self.first_step(whole) + part
    }

    /// The batch of a step, from 0. Empty only when there is nothing to train.
    pub fn batch(&self, step: usize) -> StepBatch {
        if self.content.train.shares.iter().all(|s| s.weight <= 0.0 || s.documents.is_empty()) {
            return StepBatch::default();
        }
        let epoch = self.epoch_of(step);
        let all = self.sequences(epoch);
        let from = ((step - self.first_step(epoch)) * self.global_batch).min(all.len());
        let to = (from + self.global_batch).min(all.len());
        let micro = all[from..to].chunks(self.micro_batch).map(|s| self.content.micro_batch(&self.content.train, s));
        let micro: Vec<MicroBatch> = micro.collect();
        StepBatch { micro, epoch: epoch as f64 + to as f64 / all.len().max(1) as f64 }
    }

    fn epoch_of(&self, step: usize) -> usize {
        let mut epoch = 0;
        while self.first_step(epoch + 1) <= step {
            epoch += 1;
        }
        epoch
    }

    /// Steps of all epochs before this one.
    fn first_step(&self, epoch: usize) -> usize {
        loop {
            let (count, last) = {
                let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(start) = known.starts.get(epoch) {
                    return *start;
                }
                (known.starts.len(), known.starts.last().copied().unwrap_or(0))
            };
            let next = last + self.steps_per_epoch(count - 1);
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            if known.starts.len() == count {
                known.starts.push(next);
            }
        }
    }

    fn sequences(&self, epoch: usize) -> Arc<Vec<Sequence>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, found)) = known.recent.iter().find(|(e, _)| *e == epoch) {
            return found.clone();
        }
        let documents = &self.content.train;
        let made = Arc::new(sequences(&documents.lengths, &documents.shares, self.order, epoch as u64));
        known.recent.push_back((epoch, made.clone()));
        if known.recent.len() > KEPT_EPOCHS {
            known.recent.pop_front();
        }
        made
    }
}

impl MicroBatch {
    /// Adds a document: its tokens and the weight of each as a target (the first has none).
    pub(super) fn push_document(&mut self, ids: &[u32], weights: &[f32], id: crate::SampleId) {
        let token = |id: u32| i32::try_from(id).unwrap_or(i32::MAX);
        for (t, this) in ids.iter().enumerate() {
            let weight = weights.get(t + 1).copied().filter(|w| *w > 0.0);
            self.ids.push(token(*this));
            self.positions.push(i32::try_from(t).unwrap_or(i32::MAX));
            self.weights.push(weight.unwrap_or(0.0));
            self.targets.push(weight.and(ids.get(t + 1)).map_or(crate::IGNORE, |next| token(*next)));
        }
        self.cu_seqlens.push(i32::try_from(self.ids.len()).unwrap_or(i32::MAX));
        self.samples.push(id);
    }
}
