//! Comparison of a model with golden values, item by item (`temper verify`).
//!
//! The file is laid out as transformers' values are: `input_ids`, `labels` [B, S] (not shifted, -100 not trained) and any of
//! `logits`, `loss`, `aux_loss`, `grad/NAME`, `step_loss`, `step_grad_norm`, `trained/NAME`, `greedy`. The five optimizer
//! steps are AdamW at lr 1e-2, betas 0.9 and 0.95, eps 1e-8, decay 0.1 on matrices, clip 1.0, all on the same batch.
//!
//! Legend: B rows of the batch, S tokens of a row, V vocabulary.

use crate::golden::{floats, integers};
use crate::outcome::Losses;
use crate::precision::Precision;
use crate::setup::allocate;
use crate::slack::{Constants, Slack, exact, host};
use crate::step::{Settings, Trainer};
use crate::{Error, Result};
use serde::Serialize;
use std::{path::Path, sync::Arc};
use temper_checkpoint::{WeightsFolder, safetensors::File};
use temper_config::{Arch, LossReduction};
use temper_data::{IGNORE, MicroBatch, SampleId, StepBatch};
use temper_model::{Batch, Cx, Model, Names, Ranks, Recompute, RopeTables, param::ParamId, read_floats};
use temper_parallel::AdamWConfig;
use temper_tensor::{Balance, DType, Ops};

const LR: f64 = 1e-2;
const ADAMW: AdamWConfig = AdamWConfig { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, clip: 1.0 };
const STEPS: usize = 5;
const GREEDY_PROMPT: usize = 12;

/// How far one item of the golden file is from the model's value.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Item {
    /// Its name in the file.
    pub name: String,
    /// Largest absolute difference divided by the largest golden value (for lists of scalars: each by itself); NaN never passes.
    pub error: f64,
    /// Number of values compared.
    pub values: usize,
}

/// What `verify` found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Every item of the file that the model can be compared with.
    pub items: Vec<Item>,
    /// Things worth knowing: items not compared, notices of the loader.
    pub notices: Vec<String>,
}

impl Report {
    /// Whether all items are within `tol`, and there is at least one.
    pub fn passes(&self, tol: f64) -> bool {
        !self.items.is_empty() && self.items.iter().all(|i| i.error <= tol)
    }
}

/// A golden file read into memory where it is small, mapped where it is large.
struct Golden {
    file: File,
    rows: usize,
    len: usize,
    ids: Vec<i32>,
    labels: Option<Vec<i32>>,
}

impl Golden {
    fn open(path: &Path, vocab: usize) -> Result<Golden> {
        let file = File::open(path)?;
        let ids =
            file.tensor("input_ids").ok_or_else(|| bad(path, "has no tensor `input_ids`: see `temper verify --help` for the layout"))?;
        let (rows, len) = match ids.shape[..] {
            [rows, len] if rows * len > 0 => (rows, len),
            _ => return Err(bad(path, &format!("input_ids has shape {:?}, expected [rows, tokens]", ids.shape))),
        };
        let shape = ids.shape.clone();
        let ids = integers(&ids).ok_or_else(|| bad(path, "input_ids is not an integer tensor"))?;
        let in_vocab = |id: &i64| (0..vocab as i64).contains(id);
        if let Some(id) = ids.iter().find(|id| !in_vocab(id)) {
            return Err(bad(path, &format!("input_ids holds {id}, but the model's vocabulary has {vocab} rows")));
        }
        let labels = match file.tensor("labels") {
            None => None,
            Some(l) if l.shape != shape => return Err(bad(path, &format!("labels has shape {:?}, input_ids {shape:?}", l.shape))),
            Some(l) => {
                let labels = integers(&l).ok_or_else(|| bad(path, "labels is not an integer tensor"))?;
                if let Some(l) = labels.iter().find(|l| **l != i64::from(IGNORE) && !in_vocab(l)) {
                    return Err(bad(path, &format!("labels holds {l}, outside the vocabulary of {vocab}")));
                }
                Some(labels.iter().map(|l| *l as i32).collect())
            }
        };
        Ok(Golden { file, rows, len, ids: ids.iter().map(|i| *i as i32).collect(), labels })
    }

    fn floats(&self, name: &str) -> Result<Option<Vec<f64>>> {
        let Some(t) = self.file.tensor(name) else { return Ok(None) };
        Ok(Some(floats(&t).ok_or_else(|| bad(self.file.path(), &format!("{name} is not a float tensor")))?))
    }

    /// Whether the file holds anything that the optimizer steps produce.
    fn wants_steps(&self) -> bool {
        self.file.names().iter().any(|n| n.starts_with("step_") || n.starts_with("trained/"))
    }

    /// All rows as documents of one micro-batch, with labels shifted to targets.
    fn batch(&self) -> StepBatch {
        let mut micro = MicroBatch { cu_seqlens: vec![0], ..MicroBatch::default() };
        for row in 0..self.rows {
            let at = row * self.len..(row + 1) * self.len;
            micro.ids.extend(&self.ids[at.clone()]);
            micro.positions.extend(0..self.len as i32);
            let labels = self.labels.as_ref().map_or(&[][..], |l| &l[at]);
            let targets = (0..self.len).map(|t| labels.get(t + 1).copied().unwrap_or(IGNORE));
            micro.targets.extend(targets);
            micro.cu_seqlens.push(micro.ids.len() as i32);
            micro.samples.push(SampleId { source: 0, row: row as u64 + 1, piece: 0 });
        }
        micro.weights = micro.targets.iter().map(|t| if *t == IGNORE { 0.0 } else { 1.0 }).collect();
        StepBatch { micro: vec![micro], epoch: 0.0 }
    }
}

fn bad(path: &Path, message: &str) -> Error {
    Error::Input(format!("{}: {message}", path.display()))
}

/// Compares the model in `folder` with the golden file, with weights and activations of type `dtype`.
pub fn verify(folder: &Path, golden: &Path, dtype: DType, ops: Arc<dyn Ops>) -> Result<Report> {
    let arch = Arch::from_folder(folder)?;
    let golden = Golden::open(golden, arch.vocab)?;
    let model = Model::new(&arch)?;
    let names = Names::new(&model.params);
    let (tensors, mut notices) = WeightsFolder::open(folder)?.load(&model.params, DType::F32)?;
    notices.extend(arch.notices.iter().cloned());
    let rope = RopeTables::new(&*ops, &arch, golden.len + 32, dtype)?;
    let aux = arch.moe.as_ref().map(|m| (Balance::Hf, if m.aux_in_loss { m.aux_coef } else { 0.0 }));
    let settings = Settings { reduction: LossReduction::Token, balance: aux, z_coef: 0.0, recompute: Recompute::None };
    let precision = Precision { weights: dtype, grads: DType::F32, moments: DType::F32, offload: false };
    let mut trainer = allocate(model, Ranks::single().clone(), precision, ADAMW, settings, rope, ops)?;
    trainer.set_weights(tensors)?;

    let mut report = Report { items: Vec::new(), notices };
    compare_logits(&trainer, &golden, &mut report)?;
    let greedy = golden.file.tensor("greedy").and_then(|t| integers(&t));
    let before = greedy.as_ref().map(|want| greedy_differences(&trainer, &golden, want)).transpose()?;
    let mut after = None;
    if golden.labels.is_some() {
        compare_loss(&mut trainer, &golden, &names, &mut report)?;
        if golden.wants_steps() || before.is_some_and(|n| n > 0) {
            compare_steps(&mut trainer, &golden, &names, &mut report)?;
            after = greedy.as_ref().map(|want| greedy_differences(&trainer, &golden, want)).transpose()?;
        }
    }
    compare_greedy(before, after, greedy.as_deref().unwrap_or_default(), &mut report);
    skipped_items(&golden, &mut report);
    Ok(report)
}

fn compare_logits(trainer: &Trainer, golden: &Golden, report: &mut Report) -> Result<()> {
    let Some(want) = golden.floats("logits")? else { return Ok(()) };
    let micro = &golden.batch().micro[0];
    let got = logits(trainer, &micro.ids, &micro.positions, &micro.cu_seqlens)?;
    report.items.push(compare("logits", &got, &want));
    Ok(())
}

fn logits(trainer: &Trainer, ids: &[i32], positions: &[i32], cu_seqlens: &[i32]) -> Result<Vec<f64>> {
    let ops = &*trainer.ops;
    let batch = Batch::new(ops, ids, positions, cu_seqlens)?;
    let cx = Cx { ops, weights: &trainer.weights, rope: &trainer.rope, batch: &batch, ranks: &trainer.ranks };
    Ok(read_floats(ops, &trainer.model.forward_logits(&cx)?)?)
}

/// Greedy continuation of the first tokens of row 0: how many tokens differ.
fn greedy_differences(trainer: &Trainer, golden: &Golden, want: &[i64]) -> Result<usize> {
    let mut ids = golden.ids[..GREEDY_PROMPT.min(golden.len)].to_vec();
    let mut differ = 0;
    for want in want {
        let positions: Vec<i32> = (0..ids.len() as i32).collect();
        let all = logits(trainer, &ids, &positions, &[0, ids.len() as i32])?;
        let last = &all[all.len() - trainer.model.arch.vocab..];
        let best = (0..last.len()).fold(0, |best, i| if last[i] > last[best] { i } else { best });
        differ += usize::from(best as i64 != *want);
        ids.push(*want as i32);
    }
    Ok(differ)
}

/// The greedy tokens of the file are those of the model as it is, or of the model after the five steps: whichever fits.
fn compare_greedy(before: Option<usize>, after: Option<usize>, want: &[i64], report: &mut Report) {
    let Some(differ) = before.into_iter().chain(after).min() else { return };
    if after == Some(differ) && before != after {
        report.notices.push("greedy: compared with the weights after the optimizer steps".into());
    }
    report.items.push(Item { name: "greedy".into(), error: differ as f64 / want.len().max(1) as f64, values: want.len() });
}

fn compare_loss(trainer: &mut Trainer, golden: &Golden, names: &Names, report: &mut Report) -> Result<()> {
    let done = trainer.accumulate(&golden.batch())?;
    let Losses { loss, aux_loss, .. } = trainer.report(&done)?;
    for (name, got) in [("loss", Some(loss + weighted(trainer, aux_loss))), ("aux_loss", aux_loss)] {
        if let (Some(want), Some(got)) = (golden.floats(name)?, got) {
            report.items.push(compare(name, &[got], &want));
        }
    }
    compare_named(golden, names, "grad/", report, |id| Ok((host(trainer, trainer.grads.get(id)?)?, None)))
}

/// The auxiliary loss as it is part of the loss.
fn weighted(trainer: &Trainer, aux_loss: Option<f64>) -> f64 {
    aux_loss.unwrap_or(0.0) * trainer.settings.balance.map_or(0.0, |(_, coef)| coef)
}

fn compare_steps(trainer: &mut Trainer, golden: &Golden, names: &Names, report: &mut Report) -> Result<()> {
    let want_loss = golden.floats("step_loss")?;
    let want_norm = golden.floats("step_grad_norm")?;
    let steps = want_loss.as_ref().or(want_norm.as_ref()).map_or(STEPS, Vec::len);
    let constants = Constants { lr: LR, beta2: ADAMW.betas[1], eps: ADAMW.eps, clip: ADAMW.clip };
    let mut slack = Slack::new(trainer, constants);
    let batch = golden.batch();
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 1..=steps {
        let done = trainer.step(&batch, LR)?;
        slack.grow(trainer, done.grad_norm, step as i32)?;
        losses.push(done.loss + weighted(trainer, done.aux_loss));
        norms.push(done.grad_norm);
    }
    for (name, got, want) in [("step_loss", losses, want_loss), ("step_grad_norm", norms, want_norm)] {
        if let Some(want) = want {
            report.items.push(compare_scalars(name, &got, &want));
        }
    }
    compare_named(golden, names, "trained/", report, |id| Ok((exact(trainer, id)?, Some(slack.of(id)))))
}

/// Compares gradients (`grad/`) or weights (`trained/`) under every name the file uses. `values` gives a parameter's elements
/// and, for trained weights, how far each may stray because of rounding alone.
fn compare_named<'s>(
    golden: &Golden,
    names: &Names,
    prefix: &str,
    report: &mut Report,
    values: impl Fn(ParamId) -> Result<(Vec<f32>, Option<&'s [f64]>)>,
) -> Result<()> {
    let keys: Vec<String> = golden.file.names().iter().filter(|n| n.starts_with(prefix)).map(|n| n.to_string()).collect();
    let (mut loose, mut total) = (0, 0);
    for key in keys {
        let Some(place) = names.find(&key[prefix.len()..]) else {
            report.items.push(Item { name: format!("{key} (the model has no such parameter)"), error: f64::INFINITY, values: 0 });
            continue;
        };
        let Some(want) = golden.floats(&key)? else { continue };
        let (values, slack) = values(place.id)?;
        let got: Vec<f64> = values[place.range.clone()].iter().map(|v| f64::from(*v)).collect();
        let slack = slack.map(|s| &s[place.range.clone()]);
        report.items.push(compare_within(&key, &got, &want, slack.unwrap_or_default()));
        let largest = want.iter().fold(0f64, |m, v| m.max(v.abs()));
        loose += slack.unwrap_or_default().iter().filter(|s| **s > 1e-4 * largest).count();
        total += want.len();
    }
    if loose > 0 {
        report.notices.push(format!(
            "{prefix}*: the gradient of {loose} of {total} weights is within rounding of zero, where Adam makes any two correct programs \
             differ; their difference counts only beyond that bound (docs/NUMERICS.md)"
        ));
    }
    Ok(())
}

/// Names what the file holds and the model was not compared with.
fn skipped_items(golden: &Golden, report: &mut Report) {
    let compared = |name: &str| report.items.iter().any(|i| i.name == name || i.name.starts_with(&format!("{name} (")));
    let skipped: Vec<&str> = golden.file.names().into_iter().filter(|n| !matches!(*n, "input_ids" | "labels") && !compared(n)).collect();
    if !skipped.is_empty() {
        report.notices.push(format!("not compared: {}", skipped.join(", ")));
    }
}

fn compare(name: &str, got: &[f64], want: &[f64]) -> Item {
    compare_within(name, got, want, &[])
}

/// As [`compare`]; of each difference only what exceeds its slack counts (no slack where the list is empty).
fn compare_within(name: &str, got: &[f64], want: &[f64], slack: &[f64]) -> Item {
    if got.len() != want.len() {
        return Item {
            name: format!("{name} ({} values, the file has {})", got.len(), want.len()),
            error: f64::INFINITY,
            values: got.len(),
        };
    }
    let largest = want.iter().fold(0f64, |m, v| m.max(v.abs()));
    let slack = slack.iter().copied().chain(std::iter::repeat(0.0));
    // `max` would swallow a NaN.
    let beyond = |d: f64, s: f64| if d > s || d.is_nan() { d - s } else { 0.0 };
    let difference = largest_of(got.iter().zip(want).zip(slack).map(|((g, w), s)| beyond((g - w).abs(), s)));
    Item { name: name.into(), error: if largest > 0.0 { difference / largest } else { difference }, values: want.len() }
}

fn compare_scalars(name: &str, got: &[f64], want: &[f64]) -> Item {
    let error = if got.len() == want.len() {
        largest_of(got.iter().zip(want).map(|(g, w)| (g - w).abs() / w.abs().max(f64::MIN_POSITIVE)))
    } else {
        f64::INFINITY
    };
    Item { name: name.into(), error, values: want.len() }
}

/// The largest value; NaN if any is.
fn largest_of(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(0.0, |m: f64, v| if v.is_nan() || m.is_nan() { f64::NAN } else { m.max(v) })
}
