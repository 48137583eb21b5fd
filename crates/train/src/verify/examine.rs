//! The examination of a model: each rank answers for its part, and the answers are put together.
//!
//! Legend: T tokens, V vocabulary.

use super::gathered::Gathered;
use super::questions::Questions;
use super::slack::{Constants, Slack, elements, host};
use crate::Result;
use crate::share::largest_over_ranks;
use crate::step::Trainer;
use std::sync::{Mutex, PoisonError};
use temper_data::MicroBatch;
use temper_model::param::{Param, ParamId};
use temper_model::read_floats;
use temper_parallel::{Pipeline, Stage};

/// What the ranks write down together.
pub(crate) struct Sheet {
    /// [T, V], NaN where no rank has written.
    logits: Mutex<Vec<f64>>,
    grads: Gathered,
    trained: Gathered,
    slack: Gathered,
}

impl Sheet {
    /// Empty, for the model with these parameters.
    pub fn new(whole: &[Param]) -> Sheet {
        let empty = || Gathered::new(whole);
        Sheet { logits: Mutex::default(), grads: empty(), trained: empty(), slack: empty() }
    }
}

/// What each rank must find alike.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Told {
    loss: Option<f64>,
    aux_loss: Option<f64>,
    step_loss: Vec<f64>,
    step_norm: Vec<f64>,
    greedy: [Option<usize>; 2],
}

/// What the whole model answers.
pub(crate) struct Answers {
    /// [T, V].
    pub logits: Option<Vec<f64>>,
    /// With the auxiliary loss as far as it is trained on.
    pub loss: Option<f64>,
    /// Load-balancing loss without coefficient.
    pub aux_loss: Option<f64>,
    /// Gradients of the first step, summed over ranks.
    pub grads: Gathered,
    /// Losses of the optimizer steps.
    pub step_loss: Vec<f64>,
    /// Norms of their gradients.
    pub step_norm: Vec<f64>,
    /// Weights after them.
    pub trained: Gathered,
    /// How far each of these may stray because of rounding alone.
    pub slack: Gathered,
    /// Greedy tokens that are not those asked for, before the steps and after them.
    pub greedy: [Option<usize>; 2],
    /// Whether every rank was told the same losses and norms.
    pub ranks_agree: bool,
}

impl Answers {
    /// From what every rank was told and what they wrote down.
    pub fn new(told: &[Told], sheet: Sheet) -> Answers {
        let ranks_agree = told.windows(2).all(|two| two[0] == two[1]);
        let Told { loss, aux_loss, step_loss, step_norm, greedy } = told.first().cloned().unwrap_or_default();
        let logits = sheet.logits.into_inner().unwrap_or_else(PoisonError::into_inner);
        Answers {
            logits: (!logits.is_empty()).then_some(logits),
            loss,
            aux_loss,
            grads: sheet.grads,
            step_loss,
            step_norm,
            trained: sheet.trained,
            slack: sheet.slack,
            greedy,
            ranks_agree,
        }
    }
}

/// Asks a rank. All ranks are asked the same.
pub(crate) fn examine(trainer: &mut Trainer, q: &Questions, sheet: &Sheet) -> Result<Told> {
    let mut told = Told::default();
    if q.logits {
        write_logits(trainer, &q.all, &sheet.logits)?;
    }
    told.greedy[0] = greedy_differences(trainer, q)?;
    if !q.losses {
        return Ok(told);
    }
    let done = trainer.gradients(&q.step)?;
    let losses = trainer.report(&done)?;
    (told.loss, told.aux_loss) = (Some(losses.loss + weighted(trainer, losses.aux_loss)), losses.aux_loss);
    if q.grads {
        for segment in trainer.optimizer.segments() {
            let values = host(trainer, elements(trainer.grads.get(segment.param)?, segment.range.clone()))?;
            sheet.grads.put(&trainer.model.params[segment.param.0], segment.range.clone(), &values)?;
        }
    }
    // A file made after training has greedy tokens of the model as it became.
    if q.steps || told.greedy[0].is_some_and(|n| n > 0) {
        steps(trainer, q, sheet, &mut told)?;
        told.greedy[1] = greedy_differences(trainer, q)?;
    }
    Ok(told)
}

/// The auxiliary loss as it is part of the loss.
fn weighted(trainer: &Trainer, aux_loss: Option<f64>) -> f64 {
    aux_loss.unwrap_or(0.0) * trainer.settings.balance.map_or(0.0, |(_, coef)| coef)
}

fn steps(trainer: &mut Trainer, q: &Questions, sheet: &Sheet, told: &mut Told) -> Result<()> {
    let constants = Constants { lr: q.lr, beta2: q.adamw.betas[1], eps: q.adamw.eps, clip: q.adamw.clip };
    let mut slack = Slack::new(trainer, &sheet.slack, constants)?;
    for step in 1..=q.step_count {
        let done = trainer.step(&q.step, q.lr)?;
        slack.grow(trainer, done.grad_norm, step as i32)?;
        told.step_loss.push(done.loss + weighted(trainer, done.aux_loss));
        told.step_norm.push(done.grad_norm);
    }
    if q.trained {
        slack.put(trainer, &sheet.slack)?;
        write_weights(trainer, &sheet.trained)?;
    }
    Ok(())
}

/// The exact weights: what this rank updates from its masters, where there are any, else all that it holds.
fn write_weights(trainer: &Trainer, into: &Gathered) -> Result<()> {
    let mut masters = false;
    for segment in trainer.optimizer.segments() {
        if let Some(master) = trainer.optimizer.master(&*trainer.ops, &trainer.weights, segment)? {
            masters = true;
            into.put(&trainer.model.params[segment.param.0], segment.range.clone(), &host(trainer, master.view())?)?;
        }
    }
    for (i, param) in trainer.model.params.iter().enumerate().filter(|_| !masters) {
        into.put(param, 0..param.numel(), &host(trainer, trainer.weights.get(ParamId(i))?)?)?;
    }
    Ok(())
}

/// This rank's logits of a micro-batch: the rows of its tokens, for each its classes. Nothing on all but the last stage.
struct OwnLogits {
    /// Tokens among those of the micro-batch.
    rows: Vec<usize>,
    /// First class.
    first: usize,
    /// Of each row.
    classes: usize,
    /// By row.
    values: Vec<f64>,
}

/// Runs the micro-batch through the stages; every rank takes part.
fn own_logits(trainer: &Trainer, tokens: &MicroBatch) -> Result<Option<OwnLogits>> {
    let batch = trainer.upload(tokens)?;
    let Trainer { ops, model, weights, rope, ranks, .. } = trainer;
    let stage = Stage { ops: &**ops, model, weights, rope, ranks };
    let (Some(logits), Some(head)) = (Pipeline::new(stage).logits(&batch)?, &model.head) else { return Ok(None) };
    let rows = batch.places().iter().cloned().flatten().collect();
    let values = read_floats(&**ops, &logits)?;
    Ok(Some(OwnLogits { rows, first: head.vocab.start, classes: head.vocab.len(), values }))
}

fn write_logits(trainer: &Trainer, tokens: &MicroBatch, into: &Mutex<Vec<f64>>) -> Result<()> {
    let Some(own) = own_logits(trainer, tokens)? else { return Ok(()) };
    let (count, vocab) = (tokens.tokens(), trainer.model.arch.vocab);
    if trainer.ranks.mesh.replica() != 0 {
        return Ok(()); // all replicas have them
    }
    let mut into = into.lock().unwrap_or_else(PoisonError::into_inner);
    into.resize(count * vocab, f64::NAN);
    for (row, values) in own.rows.iter().zip(own.values.chunks(own.classes)).filter(|(row, _)| **row < count) {
        into[row * vocab + own.first..][..own.classes].copy_from_slice(values);
    }
    Ok(())
}

/// How many tokens differ from the likeliest after the prompt and the tokens before them; nothing if none are asked for.
fn greedy_differences(trainer: &Trainer, q: &Questions) -> Result<Option<usize>> {
    if q.greedy.is_empty() || q.prompt.is_empty() {
        return Ok(None);
    }
    let tokens = super::questions::pack(&[(q.greedy_tokens(), vec![temper_data::IGNORE; q.greedy_tokens().len()])]);
    // The largest logit of each row, and of the classes that have it the first, as a number below zero.
    let mut best = vec![f64::NEG_INFINITY; q.greedy.len()];
    let mut first = best.clone();
    let own = own_logits(trainer, &tokens)?;
    let rows = || own.iter().flat_map(|own| own.rows.iter().zip(own.values.chunks(own.classes)).map(move |(row, v)| (own.first, *row, v)));
    let asked = |row: usize| row.checked_sub(q.prompt.len() - 1).filter(|i| *i < q.greedy.len());
    for (_, row, values) in rows() {
        if let Some(i) = asked(row) {
            best[i] = values.iter().fold(best[i], |m, v| m.max(*v));
        }
    }
    let world = &*trainer.ranks.mesh.world;
    largest_over_ranks(&*trainer.ops, world, &mut best)?;
    for (start, row, values) in rows() {
        if let Some(i) = asked(row)
            && let Some(at) = values.iter().position(|v| *v == best[i])
        {
            first[i] = first[i].max(-((start + at) as f64));
        }
    }
    largest_over_ranks(&*trainer.ops, world, &mut first)?;
    Ok(Some(q.greedy.iter().zip(&first).filter(|(want, found)| **want as f64 != -**found).count()))
}
