//! Whether a run still learns: what a NaN or infinity came from (the step, the first layer or parameter, the samples), and when a run has
//! diverged for good.

use crate::Result;
use crate::outcome::StepResult;
use crate::run::Run;
use crate::state::RunState;
use temper_data::{SampleId, StepBatch};

/// Steps in a row that are bad before a run counts as diverged.
const MOST_BAD: usize = 10;
/// At the end of a run, so many are enough.
const MOST_BAD_LAST: usize = 3;
/// A loss is bad beyond this multiple of that of a model that knows nothing, and of the first that was seen.
const FAR: f64 = 2.0;

/// Watches for divergence. A step is bad when its update was skipped, or when its loss is twice what both a model that gives every token
/// the same probability (ln V, of V tokens of the vocabulary) and the first step of the run had: single batches do that, many in a row
/// do not.
pub struct Watch {
    uniform: f64,
    /// The first loss of the run that was a number.
    pub first: Option<f64>,
    /// The last step whose weights were seen to be good: the one before the last that was not bad.
    good: usize,
    bad: usize,
}

impl Watch {
    /// For a run in this state, of a model with so many tokens.
    pub fn new(vocab: usize, state: &RunState) -> Watch {
        Watch { uniform: (vocab as f64).ln(), first: state.first_loss, good: state.step.saturating_sub(1), bad: 0 }
    }

    /// Takes a step, the last one of the run or not. Returns what is wrong when the run has diverged.
    pub fn step(&mut self, step: usize, done: &StepResult, last: bool) -> Option<String> {
        self.first = self.first.or(Some(done.loss).filter(|loss| loss.is_finite()));
        let limit = FAR * self.first.map_or(self.uniform, |first| self.uniform.max(first));
        if done.updated && done.loss <= limit {
            (self.good, self.bad) = (step - 1, 0);
            return None;
        }
        self.bad += 1;
        let enough = if last { MOST_BAD_LAST.min(step) } else { MOST_BAD };
        (self.bad >= enough).then(|| {
            let what = if done.updated { "losses far beyond where they began" } else { "updates that had to be skipped" };
            let (loss, first, uniform) = (done.loss, self.first.unwrap_or(f64::NAN), self.uniform);
            format!(
                "the run has diverged: {what}, {} steps in a row up to step {step} (loss {loss:.3}; the first was {first:.3}, and guessing would have \
                 {uniform:.3}). Lower optim.lr, lengthen optim.warmup or lower optim.clip",
                self.bad
            )
        })
    }

    /// Whether the last step was good, so that old checkpoints may go.
    pub fn is_good(&self) -> bool {
        self.bad == 0
    }

    /// The last step that left weights with which another went well.
    pub fn good(&self) -> usize {
        self.good
    }
}

/// Names the newest whole checkpoint of `step` or before, in words that end an error.
pub fn last_good(run: &Run, step: usize) -> Result<String> {
    let newest = run.store.list()?.into_iter().rev().find(|c| c.fault.is_none() && c.step <= step);
    Ok(match newest {
        Some(c) => format!("The last checkpoint that a later step has shown to be good is {} (--resume {})", c.path.display(), c.step),
        None => "No checkpoint is there that a later step has shown to be good".into(),
    })
}

/// Names what was not finite in a step and the samples it was computed from.
pub fn diagnose(run: &mut Run, step: usize, batch: &StepBatch, done: &StepResult) -> Result<String> {
    let what =
        if done.loss.is_finite() { format!("the gradient norm is {}", done.grad_norm) } else { format!("the loss is {}", done.loss) };
    let mut place = String::from("no single layer shows it");
    let mut samples: Vec<SampleId> = batch.micro.iter().flat_map(|m| m.samples.iter().cloned()).collect();
    for micro in &batch.micro {
        if let Some(found) = run.trainer.first_non_finite(micro)? {
            place = found;
            samples = micro.samples.clone();
            break;
        }
    }
    let sources = &run.config().data.train;
    let names: Vec<String> = samples
        .iter()
        .map(|s| {
            let file = sources.get(s.source as usize).map_or_else(|| s.source.to_string(), |f| f.path.display().to_string());
            format!("{file}:{}", s.row)
        })
        .collect();
    Ok(format!(
        "step {step}: {what}; first in {place}; samples {}. Lower optim.lr, look at these samples (temper data preview), or set train.on_non_finite = \"skip\"",
        names.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watched(losses: &[f64]) -> (usize, Option<String>) {
        let mut watch = Watch { uniform: 256f64.ln(), first: None, good: 0, bad: 0 }; // 5.545
        for (n, loss) in losses.iter().enumerate() {
            let done = StepResult { loss: *loss, aux_loss: None, z_loss: None, grad_norm: 1.0, updated: loss.is_finite(), stop: false };
            if let Some(found) = watch.step(n + 1, &done, n + 1 == losses.len()) {
                return (n + 1, Some(found));
            }
        }
        (watch.good(), None)
    }

    #[test]
    fn ten_bad_steps_in_a_row_are_divergence() {
        let nan = [&[5.0, 4.0], &[f64::NAN; 20][..]].concat();
        let (step, found) = watched(&nan);
        let found = found.unwrap();
        assert!(step == 12 && found.contains("skipped, 10 steps in a row up to step 12") && found.contains("first was 5.000"), "{found}");
        let far = [&[5.0, 4.0], &[11.2; 20][..]].concat();
        assert_eq!(watched(&far).0, 12);
        // A model that begins worse than guessing is measured by itself.
        assert_eq!(watched(&[&[8.0], &[11.2; 20][..]].concat()).1, None);
    }

    #[test]
    fn leaps_and_high_losses_are_not() {
        let leaps: Vec<f64> = (0..40).map(|n| if n % 10 == 0 { 5.0 } else { 50.0 }).collect();
        assert_eq!(watched(&[&leaps[..], &[5.0]].concat()), (40, None));
        assert_eq!(watched(&[2.0; 40]).1, None);
        assert_eq!(watched(&[&[2.0; 9], &[11.0; 30][..]].concat()).1, None, "bad, but not beyond guessing");
    }

    #[test]
    fn a_run_that_ends_badly_has_diverged_too() {
        assert_eq!(watched(&[5.0, 5.0, 90.0, 90.0, 90.0]).0, 5);
        assert_eq!(watched(&[5.0, 5.0, 5.0, 90.0, 90.0]).1, None);
        assert!(watched(&[f64::NAN]).1.is_some(), "it has done nothing");
    }
}
