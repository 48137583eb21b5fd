//! The arguments of `temper bench comm`.

use clap::{Args, ValueEnum};

/// `temper bench comm`
#[derive(Args)]
pub struct BenchComm {
    /// How ranks exchange.
    #[arg(long, value_enum, default_value_t = Transport::Threads)]
    pub transport: Transport,
    /// Start so many ranks on this host. Without it, this process is the rank that its environment names (RANK, WORLD_SIZE,
    /// LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or those of mpirun and srun).
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(2..=1024))]
    pub ranks: Option<u16>,
    /// Measure along each axis of a layout, e.g. `tp=2,pp=2` (data parallel takes what is left). Default: all ranks.
    #[arg(long, value_name = "AXES")]
    pub layout: Option<String>,
    /// Smallest buffer, e.g. 4K, 1MiB, 2G.
    #[arg(long, value_name = "SIZE", default_value = "4K", value_parser = size)]
    pub min: u64,
    /// Largest buffer. Default: 4 GiB between GPUs, 256 MiB between processors, or what fits into memory.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub max: Option<u64>,
    /// Only operations whose name contains this.
    #[arg(long, value_name = "WORD", default_value = "")]
    pub only: String,
    /// Seconds that a rank may stay silent.
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u16).range(1..))]
    pub patience: u16,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// `--transport`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Transport {
    /// Threads of one process.
    Threads,
    /// Processes over TCP.
    Tcp,
    /// GPUs through NCCL, one process each.
    Nccl,
}

/// Bytes, from `4096`, `4K`, `4KiB`, `1G` and so on; units are powers of 1024.
fn size(text: &str) -> Result<u64, String> {
    let lower = text.to_lowercase();
    let digits = lower.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match lower[digits.len()..].trim_end_matches("ib").trim_end_matches('b') {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        other => return Err(format!("{other}: not a unit; they are K, M and G")),
    };
    let number: u64 = digits.trim().parse().map_err(|_| "not a size like 4K, 1MiB or 2G".to_string())?;
    number.checked_mul(1 << shift).filter(|n| (4..=1 << 40).contains(n)).ok_or("not between 4 bytes and 1 TiB".into())
}
