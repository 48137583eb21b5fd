//! What hardware reaches of its peaks.

use crate::cluster::Cluster;
use crate::layout::Group;
use temper_config::Device;

/// Shares of the peaks that kernels and links reach, and what a collective costs before its first byte.
///
/// Measured on H200s: products, attention and memory inside whole steps (`temper bench step --ops`, docs/BENCHMARKS-cuda.md), where the card
/// holds its power limit and is a tenth slower than in an operation alone; NVLink by NCCL's all-reduce (332 of 450 GB/s); the
/// host's memory by off-loaded updates (42 of 55 GB/s in each direction).
/// The network's share is the 184 of 200 GB/s that eight 200 Gb/s ports reached in an all-reduce over 64 devices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Large matrix products.
    pub gemm: f64,
    /// Products of experts.
    pub grouped: f64,
    /// Attention over many heads and tokens, forward.
    pub attention: f64,
    /// Attention, backward.
    pub attention_grad: f64,
    /// Chunked gated delta rule.
    pub recurrence: f64,
    /// Memory bandwidth of elementwise kernels.
    pub memory: f64,
    /// Links within a node.
    pub link: f64,
    /// Links between nodes.
    pub network: f64,
    /// The way to the host's memory, both directions at once.
    pub host: f64,
    /// Seconds before a collective's first byte, within a node and between nodes.
    pub latency: (f64, f64),
    /// Seconds that an operation on little data takes all the same: its start, and the last blocks to end.
    pub operation: f64,
    /// Share of a micro-batch's compute behind which communication of gradients and weights hides.
    pub overlap: f64,
}

/// The rates used throughout.
pub const RATES: Rates = Rates {
    gemm: 0.72,
    grouped: 0.62,
    attention: 0.55,
    attention_grad: 0.44,
    recurrence: 0.25,
    memory: 0.82,
    link: 0.74,
    network: 0.92,
    host: 0.77,
    latency: (10e-6, 25e-6),
    operation: 5e-6,
    overlap: 0.8,
};

/// Rows and columns of a tile of a matrix product, and the depth at which its start and end cost as much as its middle.
const TILE: f64 = 128.0;

/// Seconds of a product of `[m, k]` and `[k, n]`: the slower of arithmetic (with partly filled tiles) and memory.
///
/// `extra` is bytes moved beside the three matrices of `a` bytes an element.
pub fn gemm(device: &Device, share: f64, m: f64, n: f64, k: f64, a: f64, extra: f64) -> f64 {
    if m <= 0.0 || n <= 0.0 || k <= 0.0 {
        return 0.0;
    }
    let filled = |size: f64| size / ((size / TILE).ceil() * TILE);
    let share = share * filled(m) * filled(n) * k / (k + TILE);
    let arithmetic = 2.0 * m * n * k / (device.peak() * share);
    arithmetic.max(stream(device, (m * k + k * n + m * n) * a + extra))
}

/// Share of its rate that attention reaches with few heads and queries: each block of a device takes one head of [`TILE`] queries, and with
/// as many blocks as the device has units half of them wait, since later queries see more keys.
pub fn filled(heads: f64, queries: f64) -> f64 {
    let blocks = (heads * queries / TILE).max(1.0);
    blocks / (blocks + UNITS)
}

/// Multiprocessors, or what corresponds to them: 132 on an H100, H200 or H800, 108 on an A100, 148 on a B200.
const UNITS: f64 = 128.0;

/// Seconds to move bytes through the device's memory.
pub fn stream(device: &Device, bytes: f64) -> f64 {
    bytes / (device.memory_tb_s * 1e12 * RATES.memory)
}

/// Bandwidth in bytes/s of a ring through a group: each node's members share the way out over their ports.
pub fn ring_bandwidth(cluster: &Cluster, group: Group) -> f64 {
    let link = cluster.device.link_gb_s * 1e9 * RATES.link;
    match group.nodes {
        0 | 1 => link,
        _ => link.min(group.per_node as f64 * cluster.device.network_gb_s * 1e9 * RATES.network),
    }
}

/// Seconds of an all-gather or a reduce-scatter of `bytes` (the whole tensor) in a ring.
pub fn ring(cluster: &Cluster, group: Group, bytes: f64) -> f64 {
    let n = group.size as f64;
    if group.size <= 1 {
        return 0.0;
    }
    bytes * (n - 1.0) / n / ring_bandwidth(cluster, group) + latency(group)
}

/// Seconds of an all-to-all in which each rank sends `bytes` in all: what stays in the node and what leaves it go at once.
pub fn all_to_all(cluster: &Cluster, group: Group, bytes: f64) -> f64 {
    if group.size <= 1 {
        return 0.0;
    }
    let n = group.size as f64;
    let away = bytes * (n - group.per_node as f64) / n;
    let near = bytes * (group.per_node as f64 - 1.0) / n;
    let device = &cluster.device;
    (away / (device.network_gb_s * 1e9 * RATES.network)).max(near / (device.link_gb_s * 1e9 * RATES.link)) + latency(group)
}

/// Seconds to send `bytes` to the next member of a group.
pub fn send(cluster: &Cluster, group: Group, bytes: f64) -> f64 {
    if group.size <= 1 {
        return 0.0;
    }
    let device = &cluster.device;
    let bandwidth = if group.nodes > 1 { device.network_gb_s * RATES.network } else { device.link_gb_s * RATES.link };
    bytes / (bandwidth * 1e9) + latency(group)
}

fn latency(group: Group) -> f64 {
    if group.nodes > 1 { RATES.latency.1 } else { RATES.latency.0 }
}
