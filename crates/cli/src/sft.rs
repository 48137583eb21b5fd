//! `temper sft`

use crate::args::{Cli, Sft};
use crate::backend::{Backend, ranks_here};
use crate::exit::BadInput;
use crate::generate::{answer, chat_prompt};
use crate::layout;
use crate::out::{Stdout, say, tell};
use crate::rank::Rank;
use crate::trace::{self, StepTrace};
use std::{
    io,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use temper_checkpoint::Store;
use temper_config::Config;
use temper_monitor::{Fan, Progress, Target};
use temper_rollout::{Request, end_tokens_in};
use temper_tensor::Traced;
use temper_train::{
    run::{Begin, Run},
    sft::train,
};

/// Most tokens of the reply that ends a run.
const REPLY_TOKENS: usize = 128;

/// Opens the backend: bitwise repeatable or not.
pub type Open<'a> = &'a dyn Fn(bool) -> anyhow::Result<Backend>;

/// Ends a run in order, once there is one to end.
type Stops = Arc<OnceLock<Arc<AtomicBool>>>;

/// Trains as one rank, then shows what came of it.
pub fn run(args: &Sft, cli: &Cli, rank: &Rank, open: Open, started: Instant) -> anyhow::Result<()> {
    let stops = Stops::default();
    if !rank.is_supervised() {
        stop_on_signals(&stops, false)?;
    }
    rank.doing("opening the device");
    let mut resolved = Config::load(&args.config, &args.sets)?;
    let here = ranks_here().unwrap_or_else(|| rank.ranks());
    layout::settle(&mut resolved, rank.ranks(), &layout::place(cli, here)?)?;
    let begin = if rank.resumes() { Begin::Latest } else { begin(args)? };
    let backend = open(resolved.config.train.deterministic)?;
    let mut ops = backend.ops.clone();
    let traced = match &args.trace {
        Some(file) if rank.speaks() => Some((trace::steps(&args.trace_steps)?, Arc::new(Traced::new(ops.clone())), file)),
        _ => None,
    };
    if let Some((_, traced, file)) = &traced {
        trace::check(file)?;
        ops = traced.clone();
    }
    let world = rank.join(&resolved, &backend, Duration::from_secs(args.patience.into()))?;
    rank.doing("reading model and data");
    let mut run = Run::open(resolved, begin, ops, &*world, started)?;
    let steps = run.state.step + 1..=run.state.steps;
    let recorder = traced.map(|(wanted, traced, file)| StepTrace::new(traced, wanted, steps, file)).transpose()?;
    // From here on a signal leaves something to go on from.
    let _ = stops.set(run.stop.clone());
    if rank.is_supervised() {
        stop_on_signals(&stops, true)?;
    }
    run.take_folder()?;
    rank.ready();
    if run.config().log.sample_prompt.is_some() && !run.layout.is_whole() {
        run.notices
            .push(format!("log.sample_prompt: in this layout ({}) no rank has the whole model, so it will not be answered", run.layout));
    }
    let mut sinks = sinks(&run, rank, recorder)?;
    // Here, while the other ranks still listen.
    train(&mut run, &mut sinks).map_err(anyhow::Error::from).inspect_err(|e| rank.give_up(e))?;
    if let Some(prompt) = run.config().log.sample_prompt.clone().filter(|_| run.layout.is_whole()) {
        rank.doing("answering log.sample_prompt");
        // The run is done and saved: a prompt that cannot be answered does not make it fail.
        let answered = run.on_first(|| Ok(reply(&run, &prompt)))?;
        if let Some(Err(error)) = answered {
            tell(format_args!("note: log.sample_prompt is not answered: {error}"));
        }
    }
    if rank.speaks() {
        whereabouts(run.config())?;
        tell_what_is_lost(run.config());
    }
    Ok(())
}

/// Who hears of the run: on the rank that speaks the screen and the run folder, a trace if one is recorded, the supervisor if there is one.
fn sinks(run: &Run, rank: &Rank, recorder: Option<StepTrace>) -> anyhow::Result<Fan> {
    let mut sinks = Fan::new();
    if rank.speaks() {
        let progress = Progress::new(Target::detect(Box::new(Stdout)), run.config().log.every);
        sinks = Fan::for_run(run.dir(), run.config().log.tensorboard)?.with(progress);
    }
    if let Some(recorder) = recorder {
        sinks = sinks.with(recorder);
    }
    if let Some(beats) = rank.beats() {
        sinks = sinks.with(beats);
    }
    Ok(sinks)
}

/// The first Ctrl-C (or SIGTERM, as schedulers send it) ends the run after the step under way, saved; the second at once, and so does one
/// while model and data are still read, which leaves the run folder as it was. A supervisor has said so already.
fn stop_on_signals(stops: &Stops, supervised: bool) -> anyhow::Result<()> {
    let stops = stops.clone();
    ctrlc::set_handler(move || {
        let Some(stop) = stops.get() else {
            tell("error: stopped before the first step; the run folder is as it was");
            std::process::exit(130);
        };
        if stop.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
        if !supervised {
            tell("stopping after the step under way and a checkpoint; once more to stop at once");
        }
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

/// Where everything is. What stdout does not take is told later.
fn whereabouts(config: &Config) -> io::Result<()> {
    match whereabouts_of(config).into_iter().try_for_each(say) {
        Err(_) if Stdout::lost().is_some() => Ok(()),
        result => result,
    }
}

/// The lines of a run that is complete: where everything is.
fn whereabouts_of(config: &Config) -> Vec<String> {
    let dir = &config.log.dir;
    let tensorboard = if config.log.tensorboard { ", tensorboard/" } else { "" };
    let mut lines = vec![
        ("checkpoints", format!("{}", Store::new(dir).dir().display())),
        ("metrics", format!("{}  (also loss.svg{tensorboard})", dir.join("events.jsonl").display())),
    ];
    if config.checkpoint.export {
        let hf = dir.join("hf");
        lines.push(("model", format!("{}  (loads in transformers, vLLM and temper)", hf.display())));
        lines.push(("try it", format!("temper generate {} --chat \"...\"", hf.display())));
    }
    lines.into_iter().map(|(name, text)| format!("{name:<12} {text}")).collect()
}

/// After a run that is complete: on stderr, that stdout took not all of it, and where everything is. That is no failure of the run.
pub fn tell_what_is_lost(config: &Config) {
    if let Some(why) = Stdout::lost() {
        tell(format_args!("warning: standard output could not be written: {why}. The run itself is complete:"));
        whereabouts_of(config).iter().for_each(tell);
    }
}
