//! The backend of this process, chosen once.

use crate::args::{Cli, Device};
use std::sync::Arc;
use temper_comm::{HostWorld, World};
use temper_cuda::nccl::NcclWorld;
use temper_cuda::{Cuda, Options};
use temper_tensor::{Ops, cpu::Cpu};

/// A backend, and the GPU if it is one.
pub struct Backend {
    /// Its operations.
    pub ops: Arc<dyn Ops>,
    /// The GPU, which communication needs too.
    pub gpu: Option<Arc<Cuda>>,
}

/// Opens the backend. `deterministic`: equal runs give equal bits on a GPU too (the CPU's always do). `local_rank`: the rank among
/// those of this host, which share its GPUs and cores.
pub fn open(cli: &Cli, deterministic: bool, local_rank: usize) -> anyhow::Result<Backend> {
    match cli.device {
        Device::Auto if !temper_cuda::present() => {}
        Device::Cpu => {}
        Device::Auto | Device::Cuda => {
            // Slurm may show each rank its own GPU only.
            let ordinal = if temper_cuda::count() == 1 { 0 } else { local_rank };
            let gpu = Arc::new(Cuda::open(Options { ordinal, deterministic, ..Options::default() })?);
            return Ok(Backend { ops: gpu.clone(), gpu: Some(gpu) });
        }
    }
    Ok(Backend { ops: Arc::new(Cpu::new(threads(cli.threads))), gpu: None })
}

impl Backend {
    /// The ranks of `host`, exchanging from where this backend's tensors are.
    pub fn join(&self, host: HostWorld) -> temper_comm::Result<Box<dyn World>> {
        Ok(match &self.gpu {
            Some(gpu) => Box::new(NcclWorld::open(gpu.device(), host)?),
            None => Box::new(host),
        })
    }
}

/// Number of ranks of this host, for its workers.
pub const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";

/// Ranks of this host, which share its memory and cores, where that is known.
pub fn ranks_here() -> Option<usize> {
    std::env::var(LOCAL_WORLD_SIZE).ok()?.parse().ok()
}

/// Threads of this rank: as asked for, else its share of the cores (0: all).
fn threads(asked: u16) -> usize {
    match ranks_here().filter(|ranks| *ranks > 1) {
        Some(ranks) if asked == 0 => std::thread::available_parallelism().map_or(1, |cores| (cores.get() / ranks).max(1)),
        _ => asked.into(),
    }
}

/// GPUs that ranks of this host may take.
pub fn gpus(cli: &Cli) -> usize {
    if matches!(cli.device, Device::Cpu) { 0 } else { temper_cuda::count() }
}
