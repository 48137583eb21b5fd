//! What a checkpoint says about the run besides tensors, and whether a configuration may go on from it.

use serde::{Deserialize, Serialize};
use temper_config::Config;

/// Saved as `state.json` in every checkpoint. The order of samples and the random numbers are functions of (seed, step), so
/// `step` is also the data cursor and the state of the generator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunState {
    /// Steps done: the next one is `step + 1`.
    pub step: usize,
    /// Updates the optimizer has made (steps minus skipped ones): its bias correction counts these.
    pub updates: u64,
    /// Steps whose update was skipped because something was not finite.
    pub skipped: u64,
    /// Learning rate of the last step.
    pub lr: f64,
    /// Fingerprint of samples, tokenisation and masks.
    pub data: String,
    /// What must not change between a run and its resume.
    pub fixed: Fixed,
    /// Steps of the whole run as planned.
    pub steps: usize,
    /// The base model's folder, for the export.
    pub model_dir: String,
}

/// What decides which tokens each step trains on and what their gradient is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fixed {
    /// `train.seed`
    pub seed: u64,
    /// `train.shuffle`
    pub shuffle: bool,
    /// `train.global_batch`
    pub global_batch: usize,
    /// `train.loss_reduction`
    pub loss_reduction: String,
    /// `data.packing`
    pub packing: bool,
    /// `data.seq_len`
    pub seq_len: usize,
}

impl Fixed {
    /// The values of a configuration.
    pub fn of(config: &Config) -> Fixed {
        Fixed {
            seed: config.train.seed,
            shuffle: config.train.shuffle,
            global_batch: config.train.global_batch,
            loss_reduction: format!("{:?}", config.train.loss_reduction).to_lowercase(),
            packing: config.data.packing,
            seq_len: config.data.seq_len,
        }
    }
}

impl RunState {
    /// What stands against going on from this state with `config` and data of fingerprint `data`; empty when nothing does.
    pub fn conflicts(&self, config: &Config, data: &str) -> Vec<String> {
        let (was, is) = (&self.fixed, &Fixed::of(config));
        let mut found = Vec::new();
        let mut differ = |key: &str, a: String, b: String| {
            if a != b {
                found.push(format!("{key} was {a} and is now {b}"));
            }
        };
        differ("train.seed", was.seed.to_string(), is.seed.to_string());
        differ("train.shuffle", was.shuffle.to_string(), is.shuffle.to_string());
        differ("train.global_batch", was.global_batch.to_string(), is.global_batch.to_string());
        differ("train.loss_reduction", was.loss_reduction.clone(), is.loss_reduction.clone());
        differ("data.packing", was.packing.to_string(), is.packing.to_string());
        differ("data.seq_len", was.seq_len.to_string(), is.seq_len.to_string());
        if self.data != data {
            found.push("the data (files, tokenizer, template or loss rule) is not what the run was trained on".into());
        }
        found
    }
}
