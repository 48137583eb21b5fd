//! `temper plan`

mod place;
mod report;

use self::place::{Here, cluster};
use crate::args::{Cli, Dtype, Plan as Args, PlanAs};
use crate::exit::BadInput;
use crate::layout::refusal;
use crate::out::{say, say_json};
use std::path::Path;
use temper_config::{Config, Resolved};
use temper_planner::memory::Overheads;
use temper_planner::{Account, BUILTIN, Job, LayoutRequest, Network, Plan, Precision, Refused, Run, explain, svg};

/// Answers, or says why the question has no answer.
pub fn run(args: &Args, cli: &Cli) -> anyhow::Result<()> {
    if args.config.is_none() && !args.sets.is_empty() {
        return Err(BadInput("--set changes a configuration: give one, or use the flags of temper plan with --model".into()).into());
    }
    let (question, notes) = question(args, cli)?;
    match temper_planner::plan(question) {
        Ok(plan) => tell(args, &plan, &notes),
        Err(refused) => refuse(args, &refused),
    }
}

/// A refusal ends with exit code 2 and names every broken constraint and the nearest legal layouts.
fn refuse(args: &Args, refused: &Refused) -> anyhow::Result<()> {
    if args.json {
        say_json(&report::refused_json(refused))?;
    }
    let told = |layout: &temper_planner::Layout| format!("--layout {}", layout.told(refused.has_experts));
    let nearest: Vec<String> = refused.nearest.iter().map(told).collect();
    Err(refusal(&format!("{} cannot be run", told(&refused.layout)), &refused.problems, &nearest).into())
}

fn tell(args: &Args, plan: &Plan, notes: &[String]) -> anyhow::Result<()> {
    if let Some(path) = &args.svg {
        let unwritten = |e: std::io::Error| {
            let remedy = match e.kind() {
                std::io::ErrorKind::NotFound => "Give a file in a folder that exists",
                std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => "Free space there, or give a file elsewhere",
                _ => "Give a file that can be written",
            };
            BadInput(format!("--svg {}: it cannot be written: {e}. {remedy}", path.display()))
        };
        std::fs::write(path, svg::picture(plan)).map_err(unwritten)?;
    }
    if let Some(name) = &args.explain {
        return tell_explanation(args, plan, name);
    }
    if args.json {
        let mut json = plan.to_json();
        if let Some(map) = json.as_object_mut() {
            map.insert("notes".into(), notes.into());
            if let Some(speed) = args.measured {
                map.insert("measured".into(), report::measured_json(plan, speed));
            }
        }
        return Ok(say_json(&json)?);
    }
    Ok(say(report::human(plan, args.measured, notes))?)
}

fn tell_explanation(args: &Args, plan: &Plan, name: &str) -> anyhow::Result<()> {
    let names: Vec<&str> = explain::NAMES.iter().map(|(name, _)| *name).collect();
    let wanted = if name == "all" { names.clone() } else { vec![name] };
    let all: Vec<_> = wanted.into_iter().filter_map(|name| explain::explain(plan, name)).collect();
    if all.is_empty() {
        return Err(BadInput(format!("--explain {name}: no such figure. Figures are {}, or all.", names.join(", "))).into());
    }
    if args.json {
        return Ok(say_json(&all)?);
    }
    let text: Vec<String> = all.iter().map(report::explanation).collect();
    Ok(say(text.join("\n\n"))?)
}

/// The configuration, unless what was given in its place is a model.
fn configuration(path: &Path, sets: &[String]) -> anyhow::Result<Resolved> {
    let builtin = |name: &str| BUILTIN.iter().any(|known| known.eq_ignore_ascii_case(name));
    if path.join("config.json").is_file() || (!path.exists() && path.to_str().is_some_and(builtin)) {
        let path = path.display();
        return Err(BadInput(format!("{path} is a model, not a configuration: temper plan --model {path}")).into());
    }
    Ok(Config::load_without_files(path, sets)?)
}

/// The question, and what it takes for granted.
fn question(args: &Args, cli: &Cli) -> anyhow::Result<(Run, Vec<String>)> {
    let asked = LayoutRequest::parse(&args.layout, "--layout")?;
    let resolved = args.config.as_ref().map(|path| configuration(path, &args.sets)).transpose()?;
    let wish = asked.or(resolved.as_ref().map(LayoutRequest::of).unwrap_or_default());
    let mut notes = Vec::new();
    let cluster = cluster(args, &wish, &Here::new(cli)?, &mut notes)?;
    let mut overheads = Overheads::GPU;
    if let Some(resolved) = &resolved {
        overheads.reserve = resolved.config.parallel.reserve;
    }
    if let Some(share) = args.reserve {
        // As of parallel.reserve.
        if !(0.0..1.0).contains(&share) {
            return Err(BadInput(format!("--reserve {share}: give a number from 0 to below 1")).into());
        }
        overheads.reserve = share;
    }
    let (network, mut job) = match (&args.config, &resolved, &args.model) {
        (Some(path), Some(resolved), _) => {
            let network = named("model.path", &resolved.config.model.path, path.parent().unwrap_or(Path::new(".")))?;
            notes.extend(unknown(resolved, args));
            (network, Job::of(&resolved.config))
        }
        (.., Some(model)) => (named("--model", model, Path::new("."))?, Job::new(4096, cluster.gpus.saturating_mul(4))),
        _ => return Err(BadInput("give a configuration, or --model".into()).into()), // clap sees to it
    };
    lay_over(args, &mut job)?;
    if let Some(speed) = args.measured {
        within("--measured", speed, 1e-6, 1e12)?;
    }
    Ok((Run { network, cluster, job, wish, overheads }, notes))
}

/// What a configuration leaves to its data, which is not read.
fn unknown(resolved: &Resolved, args: &Args) -> Vec<String> {
    let config = &resolved.config;
    let mut notes = Vec::new();
    if !resolved.absent.is_empty() {
        let names: Vec<String> = resolved.absent.iter().map(|path| path.display().to_string()).collect();
        notes.push(format!("not here, and not needed for a plan: {}", names.join(", ")));
    }
    if config.train.steps.or(args.steps.map(|n| n as usize)).is_none() {
        let epochs = config.train.epochs.unwrap_or(1.0);
        notes.push(format!(
            "how many steps train.epochs = {epochs} makes depends on the data, so the length of the run is not known: --steps gives it"
        ));
    }
    if !config.data.packing && args.mean_tokens.is_none() {
        notes.push("data.packing is off: time is that of full sequences; --mean-tokens says how long they are on average".into());
    }
    notes
}

/// A number of the command line that must make sense.
fn within(name: &str, value: f64, least: f64, most: f64) -> Result<f64, BadInput> {
    match (least..=most).contains(&value) {
        true => Ok(value),
        false => Err(BadInput(format!("{name} {value}: give a number from {least} to {most}"))),
    }
}

/// What the command line says of the job, over what is known of it.
fn lay_over(args: &Args, job: &mut Job) -> anyhow::Result<()> {
    if let Some(seq) = args.seq {
        (job.seq, job.mean_tokens) = (seq as usize, f64::from(seq));
    }
    job.global_batch = args.global_batch.map_or(job.global_batch, |n| n as usize);
    job.account = match args.account {
        PlanAs::Temper => Account::Temper,
        PlanAs::Megatron => Account::Megatron,
    };
    let bytes = |dtype: Option<Dtype>, otherwise: u8| match dtype {
        Some(Dtype::Bf16) => 2,
        Some(Dtype::F32) => 4,
        None => otherwise,
    };
    let p = job.precision;
    job.precision = Precision {
        weight_bytes: bytes(args.dtype, p.weight_bytes),
        grad_bytes: bytes(args.grads, p.grad_bytes),
        moment_bytes: bytes(args.moments, p.moment_bytes),
    };
    job.loss_chunk = args.loss_chunk.map_or(job.loss_chunk, |n| n as usize);
    job.skew = within("--skew", args.skew, 1.0, 1e3)?;
    job.storage_gb_s = within("--storage", args.storage, 1e-3, 1e6)?;
    job.steps = args.steps.or(job.steps);
    if let Some(tokens) = args.mean_tokens {
        job.mean_tokens = within("--mean-tokens", tokens, 1.0, job.seq as f64)?;
    }
    Ok(())
}

/// A model by folder, file, built-in name or Hub id, in that order; `origin` is where it was named.
fn named(origin: &str, spec: &str, base: &Path) -> anyhow::Result<Network> {
    let path = base.join(spec);
    if path.is_dir() {
        return Ok(Network::from_folder(&path)?);
    }
    if path.is_file() {
        return Ok(Network::from_file(&path)?);
    }
    if let Some(network) = Network::builtin(spec) {
        return Ok(network?);
    }
    if temper_config::is_hub_id(spec) {
        let folder = temper_checkpoint::resolve_model(spec, base, "main", false)?;
        return Ok(Network::from_folder(&folder)?.called(spec));
    }
    let known = BUILTIN.join(", ");
    let set = if origin == "model.path" { " (--set model.path=NAME)" } else { "" };
    Err(BadInput(format!(
        "{origin} {spec}: no such folder or file, and not a name that is known. Known are {known}{set}; or give a Hub id owner/name."
    ))
    .into())
}
