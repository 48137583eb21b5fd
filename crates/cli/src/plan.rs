//! `temper plan`

mod report;

use crate::args::{Dtype, Plan as Args, PlanAs};
use crate::exit::BadInput;
use crate::out::{say, say_json};
use std::path::Path;
use temper_config::{Config, Device, devices, devices_from_toml};
use temper_planner::memory::Overheads;
use temper_planner::{Account, BUILTIN, Cluster, Job, LayoutRequest, Network, Plan, Precision, Refused, Run, explain, svg};

/// Answers, or says why the question has no answer.
pub fn run(args: &Args) -> anyhow::Result<()> {
    if args.config.is_none() && !args.sets.is_empty() {
        return Err(BadInput("--set changes a configuration: give one, or use the flags of temper plan with --model".into()).into());
    }
    let question = question(args)?;
    match temper_planner::plan(question) {
        Ok(plan) => tell(args, &plan),
        Err(refused) => refuse(args, &refused),
    }
}

/// A refusal ends with exit code 2 and names every broken constraint and the nearest legal layouts.
fn refuse(args: &Args, refused: &Refused) -> anyhow::Result<()> {
    if args.json {
        say_json(&report::refused_json(refused))?;
    }
    Err(BadInput(report::refused(refused)).into())
}

fn tell(args: &Args, plan: &Plan) -> anyhow::Result<()> {
    if let Some(path) = &args.svg {
        std::fs::write(path, svg::picture(plan))
            .map_err(|e| BadInput(format!("--svg {}: it cannot be written: {e}. Give a file in a folder that exists", path.display())))?;
    }
    if let Some(name) = &args.explain {
        return tell_explanation(args, plan, name);
    }
    if args.json {
        let mut json = plan.to_json();
        if let (Some(speed), Some(map)) = (args.measured, json.as_object_mut()) {
            map.insert("measured".into(), report::measured_json(plan, speed));
        }
        return Ok(say_json(&json)?);
    }
    Ok(say(report::human(plan, args.measured))?)
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

fn question(args: &Args) -> anyhow::Result<Run> {
    let asked = LayoutRequest::parse(&args.layout, "--layout")?;
    let cluster = cluster(args)?;
    let (network, mut job, wish) = match (&args.config, &args.model) {
        (Some(path), _) => {
            let resolved = Config::load(path, &args.sets)?;
            let network = named(&resolved.config.model.path, path.parent().unwrap_or(Path::new(".")))?;
            (network, Job::of(&resolved.config), asked.or(LayoutRequest::of(&resolved)))
        }
        (None, Some(model)) => (named(model, Path::new("."))?, Job::new(4096, args.gpus.saturating_mul(4) as usize), asked),
        (None, None) => return Err(BadInput("give a configuration, or --model".into()).into()), // clap sees to it
    };
    lay_over(args, &mut job)?;
    if let Some(speed) = args.measured {
        within("--measured", speed, 1e-6, 1e12)?;
    }
    Ok(Run { network, cluster, job, wish, overheads: Overheads::GPU })
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

/// A model by folder, file, built-in name or Hub id, in that order.
pub fn named(spec: &str, base: &Path) -> anyhow::Result<Network> {
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
    Err(BadInput(format!(
        "--model {spec}: no such folder or file, and not a name that is known. Known are {known}; or give a Hub id owner/name."
    ))
    .into())
}

fn cluster(args: &Args) -> anyhow::Result<Cluster> {
    let mut device = device(&args.gpu, args.gpu_file.as_deref())?;
    if let Some(bandwidth) = args.network {
        device.network_gb_s = within("--network", bandwidth, 1e-3, 1e6)?;
    }
    let gpus = args.gpus as usize;
    let per_node = match args.nodes.map(|n| n as usize) {
        Some(nodes) if gpus.is_multiple_of(nodes) => gpus / nodes,
        Some(nodes) => return Err(BadInput(format!("--nodes {nodes}: {gpus} devices do not divide over {nodes} nodes")).into()),
        // The largest node of at most eight that the devices fill.
        None => (1..=gpus.min(8)).rev().find(|n| gpus.is_multiple_of(*n)).unwrap_or(1),
    };
    Ok(Cluster { device, gpus, per_node })
}

fn device(name: &str, file: Option<&Path>) -> anyhow::Result<Device> {
    let mut all = match file {
        Some(path) => devices_from_toml(&read(path)?, &path.display().to_string())?,
        None => Vec::new(),
    };
    all.extend(devices()?);
    let known: Vec<String> = all.iter().map(|d| d.name.clone()).collect();
    let found = all.into_iter().find(|d| d.name.eq_ignore_ascii_case(name));
    let unknown = || BadInput(format!("--gpu {name}: unknown device. Known are {}; --gpu-file adds your own.", known.join(", ")));
    Ok(found.ok_or_else(unknown)?)
}

/// Most bytes of a file of devices.
const MAX_BYTES: u64 = 1 << 20;

fn read(path: &Path) -> anyhow::Result<String> {
    let bad = |e: &dyn std::fmt::Display| {
        BadInput(format!("--gpu-file {}: {e}. Give a TOML file of devices, as crates/config/src/devices.toml is", path.display()))
    };
    let bytes = std::fs::metadata(path).map_err(|e| bad(&e))?.len();
    if bytes > MAX_BYTES {
        return Err(bad(&format!("{bytes} bytes; a file of devices has at most {MAX_BYTES}")).into());
    }
    Ok(std::fs::read_to_string(path).map_err(|e| bad(&e))?)
}
