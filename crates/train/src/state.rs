//! What a checkpoint says about the run besides tensors, and whether a configuration may go on from it.

use crate::layout::Layout;
use crate::setup::Source;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use temper_config::{Arch, Config};

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
    /// `[optim]`, whose changes are told.
    #[serde(default)]
    pub optim: Map<String, Value>,
    /// Steps of the whole run as planned.
    pub steps: usize,
    /// The first loss of the run that was a number: by it a run is judged to have diverged.
    #[serde(default)]
    pub first_loss: Option<f64>,
    /// The layout that saved it, in words; empty in checkpoints from before this was recorded.
    #[serde(default)]
    pub layout: String,
    /// The base model's folder, for the export.
    pub model_dir: String,
}

impl RunState {
    /// That of a run of so many steps before its first, on data of a fingerprint.
    pub(crate) fn new(config: &Config, source: &Source, data: &str, steps: usize, layout: &Layout) -> RunState {
        RunState {
            step: 0,
            updates: 0,
            skipped: 0,
            lr: 0.0,
            data: data.to_string(),
            fixed: Fixed::of(config, &source.arch),
            optim: object(&config.optim),
            steps,
            first_loss: None,
            layout: layout.to_string(),
            model_dir: source.model_dir.display().to_string(),
        }
    }
}

/// What decides which tokens each step trains on and what their gradient is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fixed {
    /// `train.seed`
    #[serde(rename = "train.seed")]
    pub seed: u64,
    /// `train.shuffle`
    #[serde(rename = "train.shuffle")]
    pub shuffle: bool,
    /// `train.global_batch`
    #[serde(rename = "train.global_batch")]
    pub global_batch: usize,
    /// `train.loss_reduction`
    #[serde(rename = "train.loss_reduction")]
    pub loss_reduction: String,
    /// `data.packing`
    #[serde(rename = "data.packing")]
    pub packing: bool,
    /// `data.seq_len`
    #[serde(rename = "data.seq_len")]
    pub seq_len: usize,
    /// The architecture as far as it decides what the weights compute.
    #[serde(default)]
    pub arch: Map<String, Value>,
}

/// Keys of an architecture that a resume may change: they do not enter the computation of a step.
const FREE: [&str; 6] = ["init_std", "max_positions", "dtype", "bos", "eos", "notices"];

/// A serialisable value as an object.
pub(crate) fn object(value: &impl Serialize) -> Map<String, Value> {
    match serde_json::to_value(value) {
        Ok(Value::Object(map)) => map,
        _ => Map::new(),
    }
}

/// What differs between two objects, in words; keys that only one of them has are passed over.
fn changes(prefix: &str, was: &Map<String, Value>, is: &Map<String, Value>) -> Vec<String> {
    let plain = |v: &Value| v.as_str().map_or_else(|| v.to_string(), str::to_string);
    let common = was.iter().filter_map(|(key, old)| Some((key, old, is.get(key)?)));
    common
        .filter(|(_, old, new)| old != new)
        .map(|(key, old, new)| format!("{prefix}{key} was {} and is now {}", plain(old), plain(new)))
        .collect()
}

impl Fixed {
    /// The values of a configuration and its model.
    pub fn of(config: &Config, arch: &Arch) -> Fixed {
        let mut arch = object(arch);
        arch.retain(|key, _| !FREE.contains(&key.as_str()));
        Fixed {
            arch,
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
    /// What stands against going on from this state with what is `planned` now; empty when nothing does.
    pub fn conflicts(&self, planned: &RunState) -> Vec<String> {
        let (mut was, mut is) = (object(&self.fixed), object(&planned.fixed));
        let nested = |map: &mut Map<String, Value>| match map.remove("arch") {
            Some(Value::Object(arch)) => arch,
            _ => Map::new(),
        };
        let (arch_was, arch_is) = (nested(&mut was), nested(&mut is));
        let mut found = changes("", &was, &is);
        found.extend(changes("the model's ", &arch_was, &arch_is));
        if self.data != planned.data {
            found.push("the data (files, tokenizer, template or loss rule) is not what the run was trained on".into());
        }
        if self.step > planned.steps {
            found.push(format!("the checkpoint is at step {}, past the {} steps of this run", self.step, planned.steps));
        }
        found
    }

    /// Changes that a run may go on with but should hear of.
    pub fn told(&self, planned: &RunState) -> Vec<String> {
        let mut told = changes("optim.", &self.optim, &planned.optim);
        if self.steps != planned.steps {
            told.push(format!(
                "the run was planned for {} steps and is now for {}; the learning rate follows the new plan",
                self.steps, planned.steps
            ));
        }
        told
    }
}
