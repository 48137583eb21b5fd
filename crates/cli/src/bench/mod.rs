//! `temper bench`

mod comm;
mod predict;
mod print;

use self::predict::Subject;
use crate::args::{Bench as Command, BenchOps, BenchStep, BenchSubject, Cli};
use crate::backend::{self, Backend};
use crate::exit::BadInput;
use crate::launch;
use crate::layout::{divides, of_engine, place};
use crate::out::{say, say_json};
use crate::shortage::beside_plan;
use crate::trace;
use std::{
    io::{self, IsTerminal},
    path::Path,
    time::{Duration, Instant},
};
use temper_cluster::{Rendezvous, SUPERVISOR};
use temper_comm::{Tcp, World, tcp};
use temper_config::{Arch, Config};
use temper_planner::{LayoutRequest, Network};
use temper_tensor::Rates;
use temper_train::bench::{AsRank, Bench, Options, Placed, cut, document, operations};
use temper_train::device::best_rates;
use temper_train::layout::Layout;

/// Measures and prints.
pub fn run(command: &Command, cli: &Cli, started: Instant) -> anyhow::Result<()> {
    match command {
        Command::Step(args) => step(args, cli, started),
        Command::Ops(args) => ops(args, cli, started),
        Command::Comm(args) => comm::run(args),
    }
}

fn step(args: &BenchStep, cli: &Cli, started: Instant) -> anyhow::Result<()> {
    args.trace.as_deref().map_or(Ok(()), trace::check)?;
    let Some(text) = &args.layout else {
        let part = match args.as_rank.zip(args.of.as_deref()) {
            Some((rank, text)) => Part::Alone(AsRank { rank, layout: layout(&args.subject, text, "--of")?, name: text.into() }),
            None => Part::Whole,
        };
        return measure(args, open(&args.subject, args.accumulate, part, cli, started)?);
    };
    let layout = layout(&args.subject, text, "--layout")?;
    let (found, world) = (Rendezvous::from_env().map_err(|e| BadInput(e.to_string()))?, layout.axes.world());
    let among = |me| {
        let ranks = Among { layout, me, name: text.clone() };
        measure(args, open(&args.subject, args.accumulate, Part::Among(ranks), cli, started)?)
    };
    match found {
        Some(me) if std::env::var_os(SUPERVISOR).is_none() => among(me),
        found => launch::on_this_host(world, || found.map_or(Ok(()), among)),
    }
}

/// Measures as this process is asked to; of several ranks the first prints.
fn measure(args: &BenchStep, (mut bench, subject): (Bench, Subject)) -> anyhow::Result<()> {
    let short = |e| beside_plan(anyhow::Error::from(e), || Ok(subject.planned()));
    let report = bench.steps(args.warmup as usize, args.steps as usize).map_err(short)?;
    let plan = subject.beside(&report);
    let rates = rates(&bench);
    let recording = if args.ops || args.trace.is_some() { Some(bench.record()?) } else { None };
    // Every rank has to take part in what is measured.
    if !bench.speaks() {
        return Ok(());
    }
    if let (Some(recording), Some(file)) = (&recording, &args.trace) {
        temper_train::trace::write(file, recording, report.warmup + report.steps + 1)?;
    }
    let rows = recording.as_ref().filter(|_| args.ops).map(|r| operations(r, rates));
    if args.subject.json {
        let mut value = serde_json::to_value(&report)?;
        if let Some(object) = value.as_object_mut() {
            object.insert("plan".into(), serde_json::to_value(&plan)?);
            if let Some(rows) = &rows {
                object.insert("operations".into(), serde_json::to_value(rows)?);
            }
        }
        return Ok(say_json(&value)?);
    }
    say(print::step(&report, plan.as_ref()))?;
    if let (Some(rows), Some(recording)) = (rows, recording) {
        let step_ms = recording.phases.iter().map(|p| p.device.ms()).sum();
        say(format_args!("\n{}", print::operations(&rows, rates, Some(step_ms))))?;
    }
    Ok(())
}

fn ops(args: &BenchOps, cli: &Cli, started: Instant) -> anyhow::Result<()> {
    let (mut bench, _) = open(&args.subject, 1, Part::Whole, cli, started)?;
    let terminal = io::stderr().is_terminal();
    if !terminal {
        crate::out::tell("note: every operation is repeated alone; the table comes when all are done");
    }
    bench.steps(1, 1)?;
    let rates = rates(&bench);
    let mut done = 0;
    let recording = bench.alone(&args.only, move |call| {
        done += 1;
        if terminal {
            crate::out::show(format_args!("operation {done}: {} {}", call.name, call.shape()));
        }
    })?;
    if terminal {
        crate::out::show("");
    }
    let rows = operations(&recording, rates);
    if rows.is_empty() {
        return Err(BadInput(format!("--only {}: no operation of this model's step has such a name", args.only)).into());
    }
    if args.subject.json {
        return Ok(say_json(&rows)?);
    }
    let (shape, work) = bench.subject();
    say(print::subject(shape, work))?;
    Ok(say(format_args!("\n{}", print::operations(&rows, rates, None)))?)
}

fn rates(bench: &Bench) -> Option<Rates> {
    bench.device().map(best_rates)
}

/// Which part of the work this process measures.
enum Part {
    /// All of it.
    Whole,
    /// What one rank does, the others not there.
    Alone(AsRank),
    /// What this rank does among the others.
    Among(Among),
}

/// A rank among others.
struct Among {
    layout: Layout,
    me: Rendezvous,
    name: String,
}

impl Among {
    fn join(&self, subject: &BenchSubject, backend: &Backend) -> anyhow::Result<Box<dyn World>> {
        let Rendezvous { rank, size, master, .. } = &self.me;
        let job = format!("bench {master}");
        let fingerprint = format!("temper {} bench step {} {}", env!("CARGO_PKG_VERSION"), subject.model, self.name);
        let patience = Duration::from_secs(120);
        let tcp_rank = Tcp { rank: *rank, size: *size, master, job: &job, fingerprint: &fingerprint, announce: None, patience };
        Ok(backend.join(tcp(&tcp_rank)?)?)
    }
}

impl Part {
    /// The layout and the rank in it; none of a whole.
    fn mesh(&self) -> Option<(&Layout, usize)> {
        match self {
            Part::Whole => None,
            Part::Alone(one) => Some((&one.layout, one.rank)),
            Part::Among(ranks) => Some((&ranks.layout, ranks.me.rank)),
        }
    }
}

/// Everything that is measured, allocated and drawn, with the planner's question about it.
fn open(subject: &BenchSubject, accumulate: u32, part: Part, cli: &Cli, started: Instant) -> anyhow::Result<(Bench, Subject)> {
    let arch = cut(arch(&subject.model)?, subject.layers)?;
    let resolved = Config::for_benchmark(&settings(subject, accumulate))?;
    let (alone, ranks) = (matches!(part, Part::Alone(_)), part.mesh().map_or(1, |(layout, _)| layout.axes.world()));
    let here = place(cli, if alone { 1 } else { ranks })?;
    let document = document(&resolved.config, subject.doc_len)?;
    let asked = Subject::new((&subject.model, &arch), &resolved.config, document, part.mesh(), alone, here)?;
    let local_rank = if let Part::Among(ranks) = &part { ranks.me.local_rank } else { 0 };
    let backend = backend::open(cli, resolved.config.train.deterministic, local_rank)?;
    for notice in arch.notices.iter().chain(&resolved.notices) {
        crate::out::tell(format_args!("note: {notice}"));
    }
    asked.must_fit(&*backend.ops)?;
    let place = match part {
        Part::Whole => Placed::Whole,
        Part::Alone(as_rank) => Placed::Alone(as_rank),
        Part::Among(ranks) => {
            let world = ranks.join(subject, &backend)?;
            Placed::Among { layout: ranks.layout, name: ranks.name, world }
        }
    };
    let options = Options { doc_len: subject.doc_len, place, started };
    let bench = Bench::open(&subject.model, arch, resolved, &options, backend.ops);
    Ok((bench.map_err(|e| beside_plan(e.into(), || Ok(asked.planned())))?, asked))
}

/// A layout in the words of `temper plan`, which the model can be divided by.
fn layout(subject: &BenchSubject, text: &str, origin: &str) -> anyhow::Result<Layout> {
    let asked = LayoutRequest::parse(text, origin)?;
    if asked.micro_batch.is_some() || asked.recompute.is_some() || asked.offload.is_some() {
        let found = "mb, recompute and offload have options of their own here (--micro-batch, --recompute, --set)";
        return Err(BadInput(format!("{origin}: {found}")).into());
    }
    let network = Network::of(cut(arch(&subject.model)?, subject.layers)?, &subject.model)?;
    let layout = asked.alone(network.arch.moe.is_some(), origin)?;
    divides(&network, &layout, origin)?;
    Ok(of_engine(&layout))
}

/// The arguments as configuration keys; `--set` comes last and wins.
fn settings(subject: &BenchSubject, accumulate: u32) -> Vec<String> {
    // A micro-batch that --set gives is one of as many as are accumulated, too.
    let set = subject.sets.iter().rev().find_map(|set| set.split_once('=').filter(|(key, _)| key.trim() == "train.micro_batch"));
    let micro_batch = set.and_then(|(_, value)| value.trim().parse().ok()).unwrap_or(subject.micro_batch);
    let mut sets = vec![
        format!("data.seq_len={}", subject.seq),
        format!("train.micro_batch={}", subject.micro_batch),
        format!("train.global_batch={}", u64::from(micro_batch) * u64::from(accumulate)),
    ];
    let types = [("dtype", subject.dtype), ("grads", subject.grads), ("moments", subject.moments)];
    sets.extend(types.iter().filter_map(|(key, dtype)| dtype.map(|d| format!("precision.{key}={}", d.key()))));
    sets.extend(subject.recompute.iter().map(|mode| format!("memory.recompute={mode}")));
    sets.extend(subject.sets.iter().cloned());
    sets
}

/// The architecture of a folder, a file or a built-in name.
fn arch(model: &str) -> anyhow::Result<Arch> {
    let path = Path::new(model);
    if path.is_dir() {
        return Ok(Arch::from_folder(path)?);
    }
    if path.is_file() {
        let text = std::fs::read_to_string(path).map_err(|e| BadInput(format!("{model}: {e}")))?;
        return Ok(Arch::from_json(&text, path)?);
    }
    match Arch::named(&model.to_lowercase()) {
        Some(arch) => Ok(arch?),
        None => {
            let known = Arch::names().join(", ");
            Err(BadInput(format!(
                "{model}: neither a folder with config.json, nor such a file, nor a built-in shape. Built-in are {known}"
            ))
            .into())
        }
    }
}
