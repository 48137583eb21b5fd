//! Comparison of a model with golden values, or of a layout with one rank, item by item (`temper verify`).
//!
//! A golden file is laid out as transformers' values are: `input_ids`, `labels` [B, S] (not shifted, -100 not trained) and any of
//! `logits`, `loss`, `aux_loss`, `grad/NAME`, `step_loss`, `step_grad_norm`, `trained/NAME`, `greedy`. The five optimizer
//! steps are AdamW at lr 1e-2, betas 0.9 and 0.95, eps 1e-8, decay 0.1 on matrices, clip 1.0, all on the same batch.
//!
//! The ranks of a layout are threads of this process. All are asked the same `questions`, each answers for its part (`examine`), the
//! answers are put together as whole tensors under their Hugging Face names (`gathered`) and compared with a `reference`.
//!
//! Legend: B rows of the batch, S tokens of a row.

mod compare;
mod examine;
mod gathered;
mod golden;
mod questions;
mod reference;
mod slack;
mod team;

pub use compare::Item;

use crate::Result;
use crate::layout::Layout;
use crate::precision::Precision;
use crate::setup::allocate;
use crate::step::{Settings, Trainer};
use compare::{compare, compare_scalars};
use examine::{Answers, Sheet, examine};
use gathered::Gathered;
use golden::Golden;
use questions::Questions;
use reference::{OneRank, Reference};
use serde::Serialize;
use std::{path::Path, sync::Arc};
use temper_checkpoint::WeightsFolder;
use temper_comm::World;
use temper_config::{Arch, LossReduction};
use temper_model::{Model, Names, Recompute, RopeTables, declare};
use temper_tensor::{Balance, DType, Ops};

/// What `verify` found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Everything that could be compared.
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

/// A model, and how it is to be run.
pub struct Subject<'a> {
    /// Folder of config.json and weights.
    pub folder: &'a Path,
    /// Type of weights and activations.
    pub dtype: DType,
    /// The ranks: one, or several that are threads of this process.
    pub layout: Layout,
    /// What the forward pass keeps.
    pub recompute: Recompute,
    /// The backend of all ranks.
    pub ops: Arc<dyn Ops>,
}

impl Subject<'_> {
    /// Compares with a golden file.
    ///
    /// # Errors
    /// Faults of the model's folder or of the file; a layout that does not fit the model.
    pub fn against_golden(&self, golden: &Path) -> Result<Report> {
        let arch = Arch::from_folder(self.folder)?;
        let golden = Golden::open(golden, arch.vocab)?;
        let questions = Questions::of(&golden, &arch, self.layout.axes);
        let (answers, mut notices) = self.ask(&self.layout, self.dtype, &arch, &questions)?;
        if arch.moe.is_some() && self.layout.axes.dp > 1 && questions.losses {
            notices.push(
                "the load-balancing loss is one of a micro-batch, so the rows of the file stay one: the other replicas run fillers".into(),
            );
        }
        let mut report = Report { items: Vec::new(), notices };
        compare_all(&golden, &answers, &arch, &mut report)?;
        Ok(report)
    }

    /// Compares the layout with one rank: logits, losses, gradients and five optimizer steps on random tokens.
    ///
    /// # Errors
    /// Faults of the model's folder; a layout that does not fit the model.
    pub fn against_one_rank(&self) -> Result<Report> {
        let arch = Arch::from_folder(self.folder)?;
        let questions = Questions::random(&arch, self.layout.axes);
        let (one, notices) = self.ask(&Layout::single(), self.dtype, &arch, &questions)?;
        let double = self.ops.dtypes().contains(&DType::F64);
        let exact = double.then(|| self.ask(&Layout::single(), DType::F64, &arch, &questions)).transpose()?;
        let (many, _) = self.ask(&self.layout, self.dtype, &arch, &questions)?;
        let one = OneRank::new(one, exact.map(|(answers, _)| answers), &arch);
        let mut report = Report { items: Vec::new(), notices: notices.into_iter().chain(one.told()).collect() };
        compare_all(&one, &many, &arch, &mut report)?;
        Ok(report)
    }

    /// Asks every rank of a layout. Also returns notices of the loader.
    fn ask(&self, layout: &Layout, dtype: DType, arch: &Arch, questions: &Questions) -> Result<(Answers, Vec<String>)> {
        let whole = declare(arch);
        let weights = WeightsFolder::open(self.folder)?;
        let notices = weights.check(&whole)?.into_iter().chain(arch.notices.iter().cloned());
        let sheet = Sheet::new(&whole);
        let told = team::team(layout, |world| {
            let mut trainer = self.trainer((layout, dtype), arch, questions, world)?;
            trainer.fill(false, &|slots| weights.read(slots))?;
            examine(&mut trainer, questions, &sheet)
        })?;
        Ok((Answers::new(&told, sheet), notices.collect()))
    }

    /// A rank's part of the model, its weights to be filled.
    fn trainer(&self, (layout, dtype): (&Layout, DType), arch: &Arch, questions: &Questions, world: &dyn World) -> Result<Trainer> {
        let ops = self.ops.clone();
        let ranks = layout.ranks(world, arch)?;
        let model = Model::part(arch, &layout.portion(arch, &ranks)?)?;
        let rope = RopeTables::new(&*ops, arch, questions.longest(), dtype)?;
        let [balance, z_coef] = questions.aux;
        let balance = arch.moe.as_ref().map(|_| (Balance::Hf, balance));
        let settings = Settings { reduction: LossReduction::Token, balance, z_coef, recompute: self.recompute };
        let sums = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let precision = Precision { weights: dtype, grads: sums, moments: sums, offload: false };
        allocate(model, ranks, precision, questions.adamw, settings, rope, ops)
    }
}

/// Compares everything that the reference has.
fn compare_all(reference: &dyn Reference, answers: &Answers, arch: &Arch, report: &mut Report) -> Result<()> {
    let names = Names::new(&declare(arch));
    let scalar = |value: Option<f64>| value.map(|v| vec![v]);
    for (name, got) in [("logits", answers.logits.clone()), ("loss", scalar(answers.loss)), ("aux_loss", scalar(answers.aux_loss))] {
        if let (Some(got), Some(want)) = (got, reference.floats(name)?) {
            report.items.push(compare(name, &got, &want, &reference.rounding(name)?));
        }
    }
    if answers.loss.is_some() {
        compare_named(reference, &names, ("grad/", &answers.grads, None), report)?;
    }
    if !answers.step_loss.is_empty() {
        for (name, got) in [("step_loss", &answers.step_loss), ("step_grad_norm", &answers.step_norm)] {
            if let Some(want) = reference.floats(name)? {
                report.items.push(compare_scalars(name, got, &want, &reference.rounding(name)?));
            }
        }
        compare_named(reference, &names, ("trained/", &answers.trained, Some(&answers.slack)), report)?;
    }
    compare_greedy(answers, reference, report);
    if !answers.ranks_agree {
        report.items.push(Item::wrong("losses and norms (ranks were told different ones)".into(), 0));
    }
    skipped_items(reference, report);
    Ok(())
}

/// Compares gradients (`grad/`) or weights (`trained/`) under every name the reference uses; weights with their slack.
fn compare_named(
    reference: &dyn Reference,
    names: &Names,
    (prefix, values, slack): (&str, &Gathered, Option<&Gathered>),
    report: &mut Report,
) -> Result<()> {
    let (mut loose, mut total) = (0, 0);
    for key in reference.names().into_iter().filter(|n| n.starts_with(prefix)) {
        let Some(place) = names.find(&key[prefix.len()..]) else {
            report.items.push(Item::wrong(format!("{key} (the model has no such parameter)"), 0));
            continue;
        };
        let Some(want) = reference.floats(key)? else { continue };
        let of = |from: &Gathered| from.get(place.id, place.range.clone()).unwrap_or_default();
        let rounding = reference.rounding(key)?;
        // Measured, it needs no bound.
        let bound = slack.filter(|_| rounding.is_empty()).map(of).unwrap_or_default();
        report.items.push(compare(key, &of(values), &want, if bound.is_empty() { &rounding } else { &bound }));
        let largest = want.iter().fold(0f64, |m, v| m.max(v.abs()));
        loose += bound.iter().filter(|s| **s > 1e-4 * largest).count();
        total += want.len();
    }
    if loose > 0 {
        report.notices.push(format!(
            "{prefix}*: the gradient of {loose} of {total} weights is within rounding of zero, where Adam makes any two correct programs \
             differ; their difference counts only beyond that bound (docs/NUMERICS.md)"
        ));
    }
    let copies = values.copies();
    if copies.unequal > 0 {
        let name = format!("{prefix}* ({} of {} values that several ranks have differ between them)", copies.unequal, copies.values);
        report.items.push(Item::wrong(name, copies.values));
    }
    Ok(())
}

/// The greedy tokens of a file are those of the model as it is, or of the model after the five steps: whichever fits.
fn compare_greedy(answers: &Answers, reference: &dyn Reference, report: &mut Report) {
    let [before, after] = answers.greedy;
    let Some(differ) = before.into_iter().chain(after).min() else { return };
    if after == Some(differ) && before != after {
        report.notices.push("greedy: compared with the weights after the optimizer steps".into());
    }
    let count = reference.greedy();
    let error = differ as f64 / count.max(1) as f64;
    report.items.push(Item { name: "greedy".into(), difference: error, error, values: count });
}

/// Names what the reference holds and the model was not compared with.
fn skipped_items(reference: &dyn Reference, report: &mut Report) {
    let compared = |name: &str| report.items.iter().any(|i| i.name == name || i.name.starts_with(&format!("{name} (")));
    let skipped: Vec<&str> = reference.names().into_iter().filter(|n| !compared(n)).collect();
    if !skipped.is_empty() {
        report.notices.push(format!("not compared: {}", skipped.join(", ")));
    }
}
