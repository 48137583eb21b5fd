//! The devices that a plan is for: those named, else those of this machine, else assumed ones, and said so.

use super::within;
use crate::args::{Cli, Plan as Args};
use crate::backend;
use crate::exit::BadInput;
use crate::layout::place;
use std::path::Path;
use temper_config::{Device, devices, devices_from_toml};
use temper_planner::units::bytes;
use temper_planner::{Cluster, LayoutRequest};

/// The device that is planned for where none is named and this machine has none.
const ASSUMED: &str = "h100";
/// Most bytes of a file of devices.
const MAX_BYTES: u64 = 1 << 20;

/// The GPUs of this machine.
pub struct Here {
    /// The first, where its speeds are known.
    device: Option<Device>,
    /// Why not.
    why: String,
    count: usize,
}

impl Here {
    /// Looks.
    pub fn new(cli: &Cli) -> anyhow::Result<Here> {
        let found = place(cli, 1)?;
        let why = found.unknown.clone().unwrap_or_else(|| "this machine has no NVIDIA GPU".into());
        Ok(Here { device: Some(found.device.clone()).filter(|_| found.known()), why, count: backend::gpus(cli) })
    }
}

/// The devices of the question. What is taken for granted goes into `notes`.
pub fn cluster(args: &Args, wish: &LayoutRequest, here: &Here, notes: &mut Vec<String>) -> anyhow::Result<Cluster> {
    let mut device = device(args, here, notes)?;
    if let Some(bandwidth) = args.network {
        device.network_gb_s = within("--network", bandwidth, 1e-3, 1e6)?;
    }
    let gpus = args.gpus.map_or_else(|| ranks(wish, here, notes), |n| n as usize);
    let per_node = match args.nodes.map(|n| n as usize) {
        Some(nodes) if gpus.is_multiple_of(nodes) => gpus / nodes,
        Some(nodes) => return Err(BadInput(format!("--nodes {nodes}: {gpus} devices do not divide over {nodes} nodes")).into()),
        // The largest node of at most eight that the devices fill.
        None => (1..=gpus.min(8)).rev().find(|n| gpus.is_multiple_of(*n)).unwrap_or(1),
    };
    Ok(Cluster { device, gpus, per_node })
}

/// As many devices as a run would take: what the axes multiply to, dp from the GPUs here; else those GPUs, or one.
fn ranks(wish: &LayoutRequest, here: &Here, notes: &mut Vec<String>) -> usize {
    let axes = wish.ranks().filter(|_| !wish.is_searched());
    let (gpus, why) = match axes {
        Some(ranks) if wish.dp.is_some() => (ranks, "what the axes multiply to"),
        Some(ranks) => (ranks.saturating_mul((here.count / ranks.max(1)).max(1)), "what the axes multiply to, as often as GPUs are here"),
        None if here.count > 0 => (here.count, "the GPUs of this machine"),
        None => (1, "for nothing says how many"),
    };
    notes.push(format!("--gpus is not given: planned for {gpus}, {why}"));
    gpus
}

fn device(args: &Args, here: &Here, notes: &mut Vec<String>) -> anyhow::Result<Device> {
    let own = args.gpu_file.as_deref().map(of_file).transpose()?.unwrap_or_default();
    let Some(name) = &args.gpu else {
        if let [one] = &own[..] {
            return Ok(one.clone());
        }
        if let (Some(device), true) = (&here.device, own.is_empty()) {
            notes.push(format!("--gpu is not given: planned for the {} of this machine", device.title));
            return Ok(device.clone());
        }
        if !own.is_empty() {
            let names: Vec<&str> = own.iter().map(|d| d.name.as_str()).collect();
            return Err(BadInput(format!("--gpu-file has several devices: say which with --gpu: {}", names.join(" or "))).into());
        }
        let device = known(ASSUMED, devices()?)?;
        let (title, memory) = (&device.title, bytes(device.memory_bytes()));
        notes.push(format!("--gpu is not given and {}: planned for an {title} of {memory}; --gpu names another", here.why));
        return Ok(device);
    };
    known(name, [own, devices()?].concat())
}

/// The first device of this name.
fn known(name: &str, all: Vec<Device>) -> anyhow::Result<Device> {
    let names: Vec<String> = all.iter().map(|d| d.name.clone()).collect();
    let found = all.into_iter().find(|d| d.name.eq_ignore_ascii_case(name));
    let unknown = || BadInput(format!("--gpu {name}: unknown device. Known are {}; --gpu-file adds your own.", names.join(", ")));
    Ok(found.ok_or_else(unknown)?)
}

fn of_file(path: &Path) -> anyhow::Result<Vec<Device>> {
    let bad = |e: &dyn std::fmt::Display| {
        BadInput(format!("--gpu-file {}: {e}. Give a TOML file of devices, as crates/config/src/devices.toml is", path.display()))
    };
    let bytes = std::fs::metadata(path).map_err(|e| bad(&e))?.len();
    if bytes > MAX_BYTES {
        return Err(bad(&format!("{bytes} bytes; a file of devices has at most {MAX_BYTES}")).into());
    }
    let text = std::fs::read_to_string(path).map_err(|e| bad(&e))?;
    Ok(devices_from_toml(&text, &path.display().to_string())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn asked(line: &str) -> Args {
        match Cli::parse_from(format!("temper plan --model m {line}").split_whitespace()).command {
            crate::args::Command::Plan(args) => args,
            _ => panic!(),
        }
    }

    fn found(line: &str, layout: &str, here: &Here) -> (String, usize, String) {
        let (wish, mut notes) = (LayoutRequest::parse(layout, "").unwrap(), Vec::new());
        let cluster = cluster(&asked(line), &wish, here, &mut notes).unwrap();
        (cluster.device.name, cluster.gpus, notes.join("\n"))
    }

    #[test]
    fn what_is_not_given_is_taken_from_this_machine_or_said_to_be_assumed() {
        let h200 = || Here { device: Some(known("h200", devices().unwrap()).unwrap()), why: String::new(), count: 8 };
        let none = || Here { device: None, why: "this machine has no NVIDIA GPU".into(), count: 0 };
        let odd = || Here { device: None, why: "NVIDIA Foo is not among the planner's devices".into(), count: 2 };
        let (name, gpus, notes) = found("", "", &h200());
        assert_eq!((name.as_str(), gpus), ("h200", 8));
        assert!(notes.contains("of this machine") && notes.contains("planned for 8"), "{notes}");
        let (name, gpus, notes) = found("", "", &none());
        assert_eq!((name.as_str(), gpus), ("h100", 1));
        assert!(notes.contains("--gpu is not given and this machine has no NVIDIA GPU: planned for an NVIDIA H100"), "{notes}");
        let (name, _, notes) = found("", "", &odd());
        assert!(name == "h100" && notes.contains("NVIDIA Foo"), "{notes}");
        // What is given needs no word.
        assert_eq!(found("--gpu h20 --gpus 64", "", &h200()), ("h20".into(), 64, String::new()));
        // Axes say how many devices there are.
        assert_eq!(found("--gpu h20", "tp=2,pp=2,dp=3", &h200()).1, 12);
        assert_eq!(found("--gpu h20", "tp=3", &h200()).1, 6);
        assert_eq!(found("--gpu h20", "tp=16", &h200()).1, 16);
        assert_eq!(found("--gpu h20", "tp=2,auto", &h200()).1, 8);
    }
}
