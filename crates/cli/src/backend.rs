//! The backend of this process, chosen once.

use crate::args::{Cli, Device};
use std::sync::Arc;
use temper_cuda::{Cuda, Options};
use temper_tensor::{Ops, cpu::Cpu};

/// A backend, and the GPU if it is one.
pub struct Backend {
    /// Its operations.
    pub ops: Arc<dyn Ops>,
    /// The GPU, which communication needs too.
    pub gpu: Option<Arc<Cuda>>,
}

/// Opens the operations alone: bitwise repeatable or not.
pub type OpenOps<'a> = &'a dyn Fn(bool) -> anyhow::Result<Arc<dyn Ops>>;

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

/// Threads of this rank: as asked for, else its share of the cores (0: all).
fn threads(asked: u16) -> usize {
    let here = std::env::var("LOCAL_WORLD_SIZE").ok().and_then(|n| n.parse::<usize>().ok()).filter(|n| *n > 1);
    match here {
        Some(ranks) if asked == 0 => std::thread::available_parallelism().map_or(1, |cores| (cores.get() / ranks).max(1)),
        _ => asked.into(),
    }
}

/// GPUs that ranks of this host may take.
pub fn gpus(cli: &Cli) -> usize {
    if matches!(cli.device, Device::Cpu) { 0 } else { temper_cuda::count() }
}
