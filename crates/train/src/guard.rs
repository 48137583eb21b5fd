//! What a NaN or infinity came from: the step, the first layer or parameter, the samples.

use crate::Result;
use crate::outcome::StepResult;
use crate::run::Run;
use temper_data::{SampleId, StepBatch};

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
