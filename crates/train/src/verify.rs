//! Comparison of a model with golden values, item by item (`temper verify`).
//!
//! The file is laid out as transformers' values are: `input_ids`, `labels` [B, S] (not shifted, -100 not trained) and any of
//! `logits`, `loss`, `aux_loss`, `grad/NAME`, `step_loss`, `step_grad_norm`, `trained/NAME`, `greedy`. The five optimizer
//! steps are AdamW at lr 1e-2, betas 0.9 and 0.95, eps 1e-8, decay 0.1 on matrices, clip 1.0, all on the same batch.
//!
//! Legend: B rows of the batch, S tokens of a row, V vocabulary.

use crate::golden::{floats, integers};
use crate::step::{Settings, Trainer};
use crate::{Error, Result};
use serde::Serialize;
use std::{path::Path, sync::Arc};
use temper_checkpoint::{WeightsFolder, safetensors::File};
use temper_config::{Arch, LossReduction};
use temper_data::{IGNORE, MicroBatch, SampleId, StepBatch};
use temper_model::{Batch, Cx, Grads, Model, Names, Recompute, RopeTables, Weights, read_floats};
use temper_parallel::{AdamWConfig, Optimizer};
use temper_tensor::{Balance, DType, Ops};

const LR: f64 = 1e-2;
const ADAMW: AdamWConfig = AdamWConfig { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, clip: 1.0 };
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
        let ids = file.tensor("input_ids").ok_or_else(|| bad(path, "has no tensor `input_ids`: see `temper verify --help` for the layout"))?;
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

/// Compares the model in `folder` with the golden file, in f32.
pub fn verify(folder: &Path, golden: &Path, ops: Arc<dyn Ops>) -> Result<Report> {
    let arch = Arch::from_folder(folder)?;
    let golden = Golden::open(golden, arch.vocab)?;
    let model = Model::new(&arch)?;
    let names = Names::new(&model.params);
    let (tensors, mut notices) = WeightsFolder::open(folder)?.load(&model.params, DType::F32)?;
    notices.extend(arch.notices.iter().cloned());
    let weights = Weights::from_host(&model.params, tensors, DType::F32, &*ops)?;
    let rope = RopeTables::new(&*ops, &arch, golden.len + 32, DType::F32)?;
    let grads = Grads::zeros(&model.params, DType::F32, &*ops)?;
    let optimizer = Optimizer::new(&*ops, &model.params, DType::F32, ADAMW)?;
    let aux = arch.moe.as_ref().map(|m| (Balance::Hf, if m.aux_in_loss { m.aux_coef } else { 0.0 }));
    let settings = Settings { reduction: LossReduction::Token, balance: aux, z_coef: 0.0, recompute: Recompute::None };
    let mut trainer = Trainer { ops, model, weights, grads, optimizer, rope, settings };

    let mut report = Report { items: Vec::new(), notices };
    compare_logits(&trainer, &golden, &mut report)?;
    compare_greedy(&trainer, &golden, &mut report)?;
    if golden.labels.is_some() {
        compare_training(&mut trainer, &golden, &names, &mut report)?;
    }
    skipped_items(&golden, &names, &mut report);
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
    let cx = Cx { ops, weights: &trainer.weights, rope: &trainer.rope, batch: &batch };
    Ok(read_floats(ops, &trainer.model.forward_logits(&cx)?)?)
}

/// Greedy continuation of the first tokens of row 0; the error is the share of tokens that differ.
fn compare_greedy(trainer: &Trainer, golden: &Golden, report: &mut Report) -> Result<()> {
    let Some(want) = golden.file.tensor("greedy").and_then(|t| integers(&t)) else { return Ok(()) };
    let mut ids = golden.ids[..GREEDY_PROMPT.min(golden.len)].to_vec();
    let mut differ = 0;
    for want in &want {
        let positions: Vec<i32> = (0..ids.len() as i32).collect();
        let all = logits(trainer, &ids, &positions, &[0, ids.len() as i32])?;
        let last = &all[all.len() - trainer.model.arch.vocab..];
        let best = (0..last.len()).fold(0, |best, i| if last[i] > last[best] { i } else { best });
        differ += usize::from(best as i64 != *want);
        ids.push(*want as i32);
    }
    report.items.push(Item { name: "greedy".into(), error: differ as f64 / want.len().max(1) as f64, values: want.len() });
    Ok(())
}

fn compare_training(trainer: &mut Trainer, golden: &Golden, names: &Names, report: &mut Report) -> Result<()> {
    let batch = golden.batch();
    let (loss, aux_loss, _) = trainer.accumulate(&batch)?;
    let total = loss + aux_loss.unwrap_or(0.0) * trainer.settings.balance.map_or(0.0, |(_, coef)| coef);
    for (name, got) in [("loss", Some(total)), ("aux_loss", aux_loss)] {
        if let (Some(want), Some(got)) = (golden.floats(name)?, got) {
            report.items.push(compare(name, &[got], &want));
        }
    }
    compare_named(trainer, golden, names, "grad/", report)?;

    let want_loss = golden.floats("step_loss")?;
    let want_norm = golden.floats("step_grad_norm")?;
    let steps = want_loss.as_ref().or(want_norm.as_ref()).map_or(5, Vec::len);
    let wants_trained = golden.file.names().iter().any(|n| n.starts_with("trained/"));
    if want_loss.is_none() && want_norm.is_none() && !wants_trained {
        return Ok(());
    }
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for _ in 0..steps {
        let done = trainer.step(&batch, LR)?;
        losses.push(done.loss + done.aux_loss.unwrap_or(0.0) * trainer.settings.balance.map_or(0.0, |(_, coef)| coef));
        norms.push(done.grad_norm);
    }
    for (name, got, want) in [("step_loss", losses, want_loss), ("step_grad_norm", norms, want_norm)] {
        if let Some(want) = want {
            report.items.push(compare_scalars(name, &got, &want));
        }
    }
    compare_named(trainer, golden, names, "trained/", report)
}

/// Compares gradients (`grad/`) or weights (`trained/`) under every name the file uses.
fn compare_named(trainer: &Trainer, golden: &Golden, names: &Names, prefix: &str, report: &mut Report) -> Result<()> {
    let keys: Vec<String> = golden.file.names().iter().filter(|n| n.starts_with(prefix)).map(|n| n.to_string()).collect();
    let mut cached: Option<(temper_model::param::ParamId, Vec<f32>)> = None;
    for key in keys {
        let Some(place) = names.find(&key[prefix.len()..]) else { continue };
        if cached.as_ref().is_none_or(|(id, _)| *id != place.id) {
            let view = if prefix == "grad/" { trainer.grads.get(place.id) } else { trainer.weights.get(place.id)? };
            let host = trainer.ops.to_host(view)?;
            cached = Some((place.id, host.as_slice::<f32>().unwrap_or_default().to_vec()));
        }
        let Some((_, values)) = &cached else { continue };
        let got: Vec<f64> = values[place.range.clone()].iter().map(|v| f64::from(*v)).collect();
        if let Some(want) = golden.floats(&key)? {
            report.items.push(compare(&key, &got, &want));
        }
    }
    Ok(())
}

/// Names what the file holds and the model was not compared with.
fn skipped_items(golden: &Golden, names: &Names, report: &mut Report) {
    let compared: std::collections::HashSet<&str> = report.items.iter().map(|i| i.name.as_str()).collect();
    let mut skipped = Vec::new();
    for name in golden.file.names() {
        if matches!(name, "input_ids" | "labels") || compared.contains(name) {
            continue;
        }
        let unknown = ["grad/", "trained/"].iter().any(|p| name.strip_prefix(p).is_some_and(|n| names.find(n).is_none()));
        skipped.push(if unknown { format!("{name} (the model has no such parameter)") } else { name.to_string() });
    }
    if !skipped.is_empty() {
        report.notices.push(format!("not compared: {}", skipped.join(", ")));
    }
}

fn compare(name: &str, got: &[f64], want: &[f64]) -> Item {
    if got.len() != want.len() {
        return Item { name: format!("{name} ({} values, the file has {})", got.len(), want.len()), error: f64::INFINITY, values: got.len() };
    }
    let largest = want.iter().fold(0f64, |m, v| m.max(v.abs()));
    let difference = largest_of(got.iter().zip(want).map(|(g, w)| (g - w).abs()));
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
