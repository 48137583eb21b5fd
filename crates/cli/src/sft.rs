//! `temper sft`

use crate::args::Sft;
use crate::exit::BadInput;
use crate::generate::{answer, chat_prompt};
use crate::out::{say, tell};
use crate::trace::{self, StepTrace};
use std::{
    io,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};
use temper_config::Config;
use temper_monitor::{Fan, Progress, Target};
use temper_rollout::{Request, end_tokens_in};
use temper_tensor::{Ops, Traced};
use temper_train::{
    run::{Begin, Run},
    sft::train,
};

/// Most tokens of the reply that ends a run.
const REPLY_TOKENS: usize = 128;

/// Opens the backend: bitwise repeatable or not.
pub type Open<'a> = &'a dyn Fn(bool) -> anyhow::Result<Arc<dyn Ops>>;

/// Trains, then shows what came of it.
pub fn run(args: &Sft, open: Open, started: Instant) -> anyhow::Result<()> {
    let resolved = Config::load(&args.config, &args.sets)?;
    let begin = begin(args)?;
    let mut ops = open(resolved.config.train.deterministic)?;
    let traced = match &args.trace {
        Some(file) => Some((trace::steps(&args.trace_steps)?, Arc::new(Traced::new(ops.clone())), file)),
        None => None,
    };
    if let Some((_, traced, file)) = &traced {
        trace::check(file)?;
        ops = traced.clone();
    }
    let mut run = Run::open(resolved, begin, ops, &temper_comm::Solo, started)?;
    stop_on_signals(&run)?;
    let progress = Progress::new(Target::detect(Box::new(io::stdout())), run.config().log.every);
    let mut sinks = Fan::for_run(run.dir(), run.config().log.tensorboard)?.with(progress);
    if let Some((steps, traced, file)) = traced {
        sinks = sinks.with(StepTrace::new(traced, steps, run.state.step + 1..=run.state.steps, file)?);
    }
    train(&mut run, &mut sinks)?;
    if let Some(prompt) = run.config().log.sample_prompt.clone() {
        // The run is done and saved: a prompt that cannot be answered does not make it fail.
        if let Err(error) = reply(&run, &prompt) {
            crate::out::tell(format_args!("note: log.sample_prompt is not answered: {error}"));
        }
    }
    Ok(whereabouts(&run)?)
}

/// The first Ctrl-C (or SIGTERM, as schedulers send it) ends the run after the step under way, saved; the second at once.
fn stop_on_signals(run: &Run) -> anyhow::Result<()> {
    let stop = run.stop.clone();
    ctrlc::set_handler(move || {
        if stop.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
        tell("stopping after the step under way and a checkpoint; once more to stop at once");
    })?;
    Ok(())
}

fn begin(args: &Sft) -> anyhow::Result<Begin> {
    match args.resume.as_deref() {
        None => Ok(Begin::New),
        Some("latest") => Ok(Begin::Latest),
        Some(step) => match step.parse() {
            Ok(step) => Ok(Begin::Step(step)),
            Err(_) => Err(BadInput(format!("--resume {step}: give a step number, or nothing for the newest checkpoint")).into()),
        },
    }
}

/// The trained model answers the prompt of `log.sample_prompt`.
fn reply(run: &Run, prompt: &str) -> anyhow::Result<()> {
    let t = &run.trainer;
    let (ids, turn_end) = chat_prompt(&run.template, &run.tokenizer, None, prompt)?;
    let ends = end_tokens_in(&run.source.model_dir, &|t| run.tokenizer.id_of(t), turn_end.as_deref(), run.source.arch.vocab)?;
    let done = answer(&*t.ops, &t.model, &t.weights, &run.tokenizer, true, &Request::greedy(&ids, REPLY_TOKENS, &ends.ids), |_| ())?;
    Ok(say(format_args!("\n> {prompt}\n{}\n", done.text.trim()))?)
}

/// Where everything is.
fn whereabouts(run: &Run) -> io::Result<()> {
    let dir = run.dir();
    let mut lines = vec![
        ("checkpoints", format!("{}", run.store.dir().display())),
        (
            "metrics",
            format!(
                "{}  (also loss.svg{})",
                dir.join("events.jsonl").display(),
                if run.config().log.tensorboard { ", tensorboard/" } else { "" }
            ),
        ),
    ];
    if run.config().checkpoint.export {
        let hf = dir.join("hf");
        lines.push(("model", format!("{}  (loads in transformers, vLLM and temper)", hf.display())));
        lines.push(("try it", format!("temper generate {} --chat \"...\"", hf.display())));
    }
    for (name, text) in lines {
        say(format_args!("{name:<12} {text}"))?;
    }
    Ok(())
}
