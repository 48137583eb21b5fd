//! Questions that several tests ask.

#![allow(dead_code)] // each test file uses some of it

use temper_config::{Device, devices};
use temper_planner::memory::Overheads;
use temper_planner::*;

/// A model that ships with temper.
pub fn network(name: &str) -> Network {
    Network::builtin(name).unwrap_or_else(|| panic!("{name} is not built in")).unwrap()
}

/// A device of the table.
pub fn device(name: &str) -> Device {
    devices().unwrap().into_iter().find(|d| d.name == name).unwrap()
}

/// Devices in nodes of at most eight.
pub fn cluster(name: &str, gpus: usize) -> Cluster {
    Cluster { device: device(name), gpus, per_node: gpus.min(8) }
}

/// A question with a layout (or none, for a search).
pub fn run(model: &str, cluster: Cluster, job: Job, layout: &str) -> Run {
    let wish = LayoutRequest::parse(layout, "--layout").unwrap();
    Run { network: network(model), cluster, job, wish, overheads: Overheads::GPU }
}

/// The plan of a legal layout.
#[track_caller]
pub fn planned(run: Run) -> Plan {
    plan(run).unwrap_or_else(|refused| panic!("{:?}", refused.problems))
}

/// Within a relative tolerance.
#[track_caller]
pub fn near(got: f64, want: f64, tolerance: f64) {
    assert!((got - want).abs() <= tolerance * want.abs(), "{got:.6e} is {:+.2} % off {want:.6e}", 100.0 * (got / want - 1.0));
}
