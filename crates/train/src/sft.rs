//! Supervised fine-tuning: the loop from the first step to the last, with evaluation and checkpoints.

use crate::events::{End, Eval, Event, Notice, Saved, Sink, Start};
use crate::guard::{Watch, diagnose, last_good};
use crate::measure::{Flops, peak_memory, step_event};
use crate::outcome::StepResult;
use crate::run::{CheckpointSaved, Run};
use crate::{Error, Result};
use std::time::Instant;
use temper_config::OnNonFinite;
use temper_data::{MicroBatch, StepBatch};
use temper_model::{declare, param::count};

/// Trains from the run's next step to its last and leaves the final checkpoint (and export) behind.
pub fn train(run: &mut Run, sink: &mut dyn Sink) -> Result<End> {
    let flops = Flops::new(&run.source.arch, &declare(&run.source.arch), &run.trainer.ops.name());
    let began = Instant::now();
    if run.state.step >= run.state.steps {
        return finish_again(run, sink);
    }
    let mut end = End { step: run.state.step, loss: f64::NAN, tokens: 0, wall_s: 0.0, skipped: run.state.skipped };
    announce(run, sink);
    if run.config().train.eval_every > 0 && run.state.step == 0 {
        evaluate(run, 0, sink)?;
    }
    let mut watch = Watch::new(run.source.arch.vocab, &run.state);
    for step in run.state.step + 1..=run.state.steps {
        let clock = Instant::now();
        let batch = run.loader.batch(step - 1);
        let lr = run.schedule.at(step);
        let done = run.trainer.step(&batch, lr)?;
        if !done.updated {
            skip_or_stop(run, (step, watch.good()), &batch, &done, sink)?;
        }
        run.state.step = step;
        run.state.updates = run.trainer.optimizer.updates;
        run.state.lr = lr;
        end.tokens += batch.tokens() as u64;
        end.loss = done.loss;
        sink.event(&Event::Step(step_event(
            step,
            &batch,
            &done,
            lr,
            &flops,
            peak_memory(&*run.trainer.ops),
            clock.elapsed().as_secs_f64(),
        )));

        let last = step == run.state.steps;
        if let Some(found) = watch.step(step, &done, last) {
            return diverged(run, &found, watch.good(), sink);
        }
        (run.prunes, run.state.first_loss) = (watch.is_good(), watch.first);
        if due(step, run.config().train.eval_every) || last {
            evaluate(run, step, sink)?;
        }
        let stop = done.stop && !last;
        if due(step, run.config().checkpoint.every) || last || stop {
            tell_saved(run.save()?, sink);
        }
        tell_saved(run.saved(stop)?, sink);
        if stop {
            return Err(Error::Interrupted { step, path: run.store.dir() });
        }
    }
    tell_saved(run.saved(true)?, sink);
    if run.config().checkpoint.export {
        run.export(true)?;
    }
    (end.step, end.skipped, end.wall_s) = (run.state.step, run.state.skipped, began.elapsed().as_secs_f64());
    sink.event(&Event::End(end.clone()));
    Ok(end)
}

/// What a NaN or infinity does: ends the run, or is counted. `good` is the last step that left good weights.
fn skip_or_stop(run: &mut Run, (step, good): (usize, usize), batch: &StepBatch, done: &StepResult, sink: &mut dyn Sink) -> Result<()> {
    let found = diagnose(run, step, batch, done)?;
    if run.config().train.on_non_finite == OnNonFinite::Stop {
        return diverged(run, &found, good, sink);
    }
    run.state.skipped += 1;
    sink.event(&Event::Notice(Notice { message: format!("{found}. Update skipped"), count: Some(run.state.skipped) }));
    Ok(())
}

/// Ends a run for what was `found`, when what it still saves is there.
fn diverged<T>(run: &mut Run, found: &str, good: usize, sink: &mut dyn Sink) -> Result<T> {
    tell_saved(run.saved(true)?, sink);
    Err(Error::Diverged(format!("{found}. {}", last_good(run, good)?)))
}

/// A run that is resumed after its last step: nothing to train, but the export is made if it is missing.
fn finish_again(run: &mut Run, sink: &mut dyn Sink) -> Result<End> {
    run.notices.push(format!("the run is already at its last step, {}: nothing to train", run.state.steps));
    for message in std::mem::take(&mut run.notices) {
        sink.event(&Event::Notice(Notice { message, count: None }));
    }
    if run.config().checkpoint.export {
        run.export(false)?;
    }
    Ok(End { step: run.state.step, loss: f64::NAN, tokens: 0, wall_s: 0.0, skipped: run.state.skipped })
}

fn due(step: usize, every: usize) -> bool {
    every > 0 && step.is_multiple_of(every)
}

fn announce(run: &mut Run, sink: &mut dyn Sink) {
    let (params, active_params) = count(&run.source.arch, &declare(&run.source.arch));
    sink.event(&Event::Start(Start {
        step: run.state.step + 1,
        steps: run.state.steps,
        params,
        active_params,
        backend: run.trainer.ops.name(),
        samples: run.report.kept as usize,
        sequences: run.report.packing.sequences as usize,
        resumed_from: run.resumed_from,
        ranks: run.layout.axes.world(),
        layout: (run.layout.axes.world() > 1).then(|| run.layout.to_string()),
        startup_s: run.started.elapsed().as_secs_f64(),
        loaded: run.loaded.clone(),
    }));
    for message in std::mem::take(&mut run.notices) {
        sink.event(&Event::Notice(Notice { message, count: None }));
    }
}

/// Mean loss over the held-out samples.
fn evaluate(run: &Run, step: usize, sink: &mut dyn Sink) -> Result<()> {
    if run.eval.is_empty() {
        return Ok(());
    }
    let clock = Instant::now();
    let weight: f64 = run.eval.iter().map(MicroBatch::weight_sum).sum();
    let loss = run.trainer.evaluate(&run.eval, |done, of| sink.evaluating(done, of))? / weight;
    let trained_tokens = run.eval.iter().map(MicroBatch::trained_tokens).sum();
    sink.event(&Event::Eval(Eval { step, loss, perplexity: loss.exp(), trained_tokens, wall_s: clock.elapsed().as_secs_f64() }));
    Ok(())
}

fn tell_saved(saved: Option<CheckpointSaved>, sink: &mut dyn Sink) {
    let Some(CheckpointSaved { step, path, bytes, took, paused, notices }) = saved else { return };
    let paused_s = paused.map(|paused| paused.as_secs_f64());
    sink.event(&Event::Checkpoint(Saved { step, path, bytes, wall_s: took.as_secs_f64(), paused_s }));
    for message in notices {
        sink.event(&Event::Notice(Notice { message, count: None }));
    }
}
