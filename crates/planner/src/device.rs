//! Devices as data, and the cluster made of them.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

const TABLE: &str = include_str!("../devices.toml");

/// What the planner knows of a device. Bandwidths are in one direction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Name on the command line.
    pub name: String,
    /// Name on the card.
    #[serde(default)]
    pub title: String,
    /// Memory in MiB as the driver reports it.
    pub memory_mib: u64,
    /// Dense bf16 peak, TFLOP/s.
    pub bf16_tflops: f64,
    /// Dense fp8 peak, TFLOP/s, if it has fp8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fp8_tflops: Option<f64>,
    /// Bandwidth of its memory, TB/s.
    pub memory_tb_s: f64,
    /// Bandwidth to the other devices of its node, GB/s.
    pub link_gb_s: f64,
    /// Its share of the bandwidth to other nodes, GB/s.
    pub network_gb_s: f64,
    /// Bandwidth to the host's memory, GB/s.
    pub host_gb_s: f64,
    /// Where the figures are from.
    #[serde(default)]
    pub source: String,
}

impl Device {
    /// Memory in bytes.
    pub fn memory_bytes(&self) -> f64 {
        self.memory_mib as f64 * 1_048_576.0
    }

    /// Dense bf16 peak in FLOP/s.
    pub fn peak(&self) -> f64 {
        self.bf16_tflops * 1e12
    }
}

/// Devices in nodes of equal size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cluster {
    /// The device.
    pub device: Device,
    /// Devices in all.
    pub gpus: usize,
    /// Devices in a node.
    pub per_node: usize,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    device: Vec<Device>,
}

/// The built-in devices.
///
/// # Errors
/// Never in practice: the table is part of the program and tested.
pub fn devices() -> Result<Vec<Device>> {
    devices_from_toml(TABLE, "the built-in table of devices")
}

/// Devices from the text of a file; `origin` is what errors call it.
///
/// # Errors
/// When the text is not TOML of the form of the built-in table, or a figure is not a positive number.
pub fn devices_from_toml(text: &str, origin: &str) -> Result<Vec<Device>> {
    let file: File = toml::from_str(text).map_err(|e| Error::Syntax { origin: origin.to_string(), message: e.to_string() })?;
    for d in &file.device {
        let figures = [
            ("memory_mib", d.memory_mib as f64),
            ("bf16_tflops", d.bf16_tflops),
            ("fp8_tflops", d.fp8_tflops.unwrap_or(1.0)),
            ("memory_tb_s", d.memory_tb_s),
            ("link_gb_s", d.link_gb_s),
            ("network_gb_s", d.network_gb_s),
            ("host_gb_s", d.host_gb_s),
        ];
        if let Some((key, value)) = figures.iter().find(|(_, v)| !(1e-6..=1e9).contains(v)) {
            let key = format!("{}.{key}", d.name);
            return Err(Error::key(origin, &key, format!("found {value}"), "Expected a positive number in the unit of the key."));
        }
    }
    Ok(file.device)
}
