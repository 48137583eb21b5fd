//! Checks that take more than one value.

use crate::choices::{AuxLoss, Recompute, Schedule};
use crate::config::{Config, Span};
use crate::error::{Error, Result};
use crate::section::Reader;

/// Refuses values that contradict each other; returns notices about values without effect.
pub(crate) fn check(config: &Config, reader: &Reader) -> Result<Vec<String>> {
    lengths(config, reader)?;
    schedule(config, reader)?;
    evaluation(config, reader)?;
    Ok(idle(config, reader))
}

fn lengths(config: &Config, reader: &Reader) -> Result<()> {
    let train = &config.train;
    if train.steps.is_some() && train.epochs.is_some() {
        return Err(reader.error("train", "epochs", "given together with train.steps", "Keep one of the two."));
    }
    if !train.global_batch.is_multiple_of(train.micro_batch) {
        let found = format!("{} sequences are not a multiple of train.micro_batch = {}", train.global_batch, train.micro_batch);
        let key = if reader.given("train", "global_batch") { "global_batch" } else { "micro_batch" };
        return Err(reader.error("train", key, found, "An optimizer step takes whole micro-batches: change one of the two."));
    }
    Ok(())
}

fn schedule(config: &Config, reader: &Reader) -> Result<()> {
    let optim = &config.optim;
    if optim.min_lr > optim.lr {
        let found = format!("{} is above optim.lr = {}", optim.min_lr, optim.lr);
        return Err(reader.error("optim", "min_lr", found, "It is the lowest learning rate: lower it, or raise optim.lr."));
    }
    let decay = if optim.schedule == Schedule::Wsd { optim.decay } else { Span::Steps(0) };
    if let (Span::Fraction(warmup), Span::Fraction(decay)) = (optim.warmup, decay)
        && warmup + decay > 1.0
    {
        return Err(too_long(reader, format!("warm-up and decay take {} of the run", warmup + decay)));
    }
    let Some(steps) = config.train.steps else { return Ok(()) };
    // Part of a step counts in full only once it is a whole one, so that a short run keeps its fractions.
    let of = |span| match span {
        Span::Steps(n) => n as f64,
        Span::Fraction(f) => f * steps as f64,
    };
    if of(optim.warmup) >= steps as f64 {
        let found = format!("{} steps of warm-up in a run of {steps} (train.steps)", of(optim.warmup));
        return Err(reader.error("optim", "warmup", found, "Warm-up must end before the run does."));
    }
    if of(optim.warmup) + of(decay) > steps as f64 {
        let found = format!("warm-up and decay take {} steps of {steps} (train.steps)", of(optim.warmup) + of(decay));
        return Err(too_long(reader, found));
    }
    Ok(())
}

fn too_long(reader: &Reader, found: String) -> Error {
    reader.error("optim", "decay", found, "Shorten optim.warmup or optim.decay.")
}

fn evaluation(config: &Config, reader: &Reader) -> Result<()> {
    let data = &config.data;
    if !data.eval.is_empty() && data.eval_split > 0.0 {
        let found = format!("{} although data.eval names files", data.eval_split);
        return Err(reader.error("data", "eval_split", found, "Keep one of the two."));
    }
    if config.train.eval_every > 0 && data.eval.is_empty() && data.eval_split == 0.0 {
        let found = format!("{}, but there is no evaluation data", config.train.eval_every);
        return Err(reader.error("train", "eval_every", found, "Give data.eval or data.eval_split, or remove it."));
    }
    Ok(())
}

/// Keys that are given but change nothing.
fn idle(config: &Config, reader: &Reader) -> Vec<String> {
    let mut notices = Vec::new();
    let mut idle = |section: &str, name: &str, because: &str| {
        if reader.given(section, name) {
            notices.push(format!("{section}.{name} has no effect: {because}"));
        }
    };
    if config.optim.schedule != Schedule::Wsd {
        idle("optim", "decay", "it belongs to optim.schedule = \"wsd\"");
    }
    if config.optim.schedule == Schedule::Constant {
        idle("optim", "min_lr", "the schedule is constant");
    }
    if config.train.aux_loss == AuxLoss::None {
        idle("train", "aux_loss_coef", "train.aux_loss is \"none\"");
    }
    if config.memory.recompute != Recompute::Selective {
        idle("memory", "recompute_parts", "it belongs to memory.recompute = \"selective\"");
    }
    if !config.checkpoint.export {
        idle("checkpoint", "export_dtype", "checkpoint.export is false");
    }
    notices
}
