//! [`Cluster`]: devices in nodes.

use serde::Serialize;
use temper_config::Device;

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
