//! Devices as data: what their data sheets say. One table for the planner, for MFU and for the floors of operations.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;

const TABLE: &str = include_str!("devices.toml");

/// The data sheet of a device. Bandwidths are in one direction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Name on the command line.
    pub name: String,
    /// Its name in words.
    #[serde(default)]
    pub title: String,
    /// Parts of the name that the driver gives the card. The longest of all devices that fits says which one it is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cards: Vec<String>,
    /// Memory in MiB as the driver reports it.
    pub memory_mib: u64,
    /// Dense bf16 peak with f32 accumulation, TFLOP/s.
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
    /// The device that a backend's name mentions; none for processors and unknown ones.
    pub fn of(backend: &str) -> Option<Device> {
        let fit = |d: &Device| d.cards.iter().filter(|card| backend.contains(card.as_str())).map(String::len).max();
        devices().ok()?.into_iter().filter_map(|d| Some((fit(&d)?, d))).max_by_key(|(length, _)| *length).map(|(_, d)| d)
    }

    /// Memory in bytes.
    pub fn memory_bytes(&self) -> f64 {
        self.memory_mib as f64 * 1_048_576.0
    }

    /// Dense bf16 peak in FLOP/s.
    pub fn peak(&self) -> f64 {
        self.bf16_tflops * 1e12
    }
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

/// Figures beyond these are mistakes: a unit mixed up, a zero too many.
const SENSIBLE: RangeInclusive<f64> = 1e-3..=1e6;
/// The same of memory in MiB.
const SENSIBLE_MIB: RangeInclusive<f64> = 1.0..=1e9;

/// Devices from the text of a file; `origin` is what errors call it.
///
/// # Errors
/// When the text is not TOML of the form of the built-in table, a figure is not a positive number of a sensible size, or a name is empty or
/// that of another device of the file.
pub fn devices_from_toml(text: &str, origin: &str) -> Result<Vec<Device>> {
    let file: File = toml::from_str(text).map_err(|e| Error::Syntax { origin: origin.to_string(), message: e.to_string() })?;
    for (i, d) in file.device.iter().enumerate() {
        named(d, &file.device[..i]).and_then(|()| sensible(d)).map_err(|(key, found, remedy)| Error::Key {
            origin: origin.to_string(),
            key,
            found,
            remedy,
        })?;
    }
    Ok(file.device)
}

/// Key, what was found, and the remedy.
type Fault = (String, String, String);

/// A device can be asked for by its name.
fn named(d: &Device, before: &[Device]) -> std::result::Result<(), Fault> {
    let found = if d.name.trim().is_empty() {
        "found an empty name".to_string()
    } else if before.iter().any(|other| other.name.eq_ignore_ascii_case(&d.name)) {
        format!("two devices are called {:?}", d.name)
    } else {
        return Ok(());
    };
    Err(("device.name".to_string(), found, "Give each device a name of its own.".to_string()))
}

fn sensible(d: &Device) -> std::result::Result<(), Fault> {
    let figures = [
        ("memory_mib", "MiB", d.memory_mib as f64, SENSIBLE_MIB),
        ("bf16_tflops", "TFLOP/s", d.bf16_tflops, SENSIBLE),
        ("fp8_tflops", "TFLOP/s", d.fp8_tflops.unwrap_or(1.0), SENSIBLE),
        ("memory_tb_s", "TB/s", d.memory_tb_s, SENSIBLE),
        ("link_gb_s", "GB/s", d.link_gb_s, SENSIBLE),
        ("network_gb_s", "GB/s", d.network_gb_s, SENSIBLE),
        ("host_gb_s", "GB/s", d.host_gb_s, SENSIBLE),
    ];
    let Some((key, unit, value, range)) = figures.into_iter().find(|(_, _, value, range)| !range.contains(value)) else { return Ok(()) };
    let expected = format!("Expected a number from {} to {} {unit}.", range.start(), range.end());
    Err((format!("{}.{key}", d.name), format!("found {value}"), expected))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_are_told_apart_by_the_name_that_the_driver_gives() {
        let of = |name: &str| Device::of(name).map(|d| (d.name, d.bf16_tflops, d.memory_tb_s));
        let is = |name: &str, tflops, tb_s| Some((name.to_string(), tflops, tb_s));
        assert_eq!(of("cuda (NVIDIA H200, compute capability 9.0)"), is("h200", 989.4, 4.8));
        assert_eq!(of("cuda (NVIDIA H20, compute capability 9.0)"), is("h20", 148.0, 4.0));
        assert_eq!(of("cuda (NVIDIA H100 80GB HBM3, compute capability 9.0)"), is("h100", 989.4, 3.35));
        assert_eq!(of("cuda (NVIDIA H100 PCIe, compute capability 9.0)"), is("h100-pcie", 756.5, 2.0));
        assert_eq!(of("cuda (NVIDIA H200 NVL, compute capability 9.0)"), is("h200-nvl", 835.5, 4.8));
        assert_eq!(of("cuda (NVIDIA A100-SXM4-80GB, compute capability 8.0)"), is("a100", 312.0, 2.039));
        assert_eq!(of("cuda (NVIDIA A100-SXM4-40GB, compute capability 8.0)"), is("a100-40g", 312.0, 1.555));
        assert_eq!(of("cpu (2 threads)"), None);
    }

    #[test]
    fn the_table_is_whole() {
        let all = devices().unwrap();
        for name in ["h20", "h100", "h200", "a100", "a800", "h800", "b200", "l40s"] {
            assert!(all.iter().any(|d| d.name == name), "{name}");
        }
        for d in all {
            assert!(!d.source.is_empty() && !d.title.is_empty() && !d.cards.is_empty(), "{}", d.name);
            assert!(d.fp8_tflops.is_none_or(|fp8| (1.9..2.1).contains(&(fp8 / d.bf16_tflops))), "{}", d.name);
        }
    }

    #[test]
    fn mistakes_are_named() {
        let with = |figure: &str| {
            let all = "memory_mib=1024\nbf16_tflops=1.0\nmemory_tb_s=1.0\nlink_gb_s=1.0\nnetwork_gb_s=1.0\nhost_gb_s=1.0\n";
            let key = figure.split('=').next().unwrap();
            let others: String = all.lines().filter(|l| !l.starts_with(&format!("{key}="))).map(|l| format!("{l}\n")).collect();
            format!("[[device]]\nname='x'\n{others}{figure}")
        };
        for (text, said) in [
            ("x".to_string(), "key"),
            ("[[device]]\nname = \"x\"\n".to_string(), "memory_mib"),
            ("device = 3".to_string(), "invalid type"),
            (with("bf16_tflops=0.0"), "x.bf16_tflops"),
            (with("bf16_tflops=nan"), "x.bf16_tflops"),
            (with("link_gb_s=1e12"), "x.link_gb_s"),
            (with("network_gb_s=1e-9"), "x.network_gb_s"),
            ("[[device]]\nname='x'\nspeed=1".to_string(), "speed"),
            (with("memory_mib=1100000000"), "x.memory_mib: found 1100000000. Expected a number from 1 to 1000000000 MiB."),
            (with("memory_mib=0"), "x.memory_mib: found 0."),
            (with("host_gb_s=1.0").replace("'x'", "' '"), "found an empty name"),
            (format!("{}\n{}", with("host_gb_s=1.0"), with("host_gb_s=1.0").replace("'x'", "'X'")), "two devices are called \"X\""),
        ] {
            let error = devices_from_toml(&text, "mine.toml").unwrap_err().to_string();
            assert!(error.contains("mine.toml") && error.contains(said), "{text}: {error}");
        }
        assert!(devices_from_toml(&with("bf16_tflops=2.0"), "").is_ok());
    }
}
