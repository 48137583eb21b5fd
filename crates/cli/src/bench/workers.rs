//! Ranks as processes of this host: this program again, with the environment that names each.

use crate::backend::LOCAL_WORLD_SIZE;
use std::ffi::OsString;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use temper_cluster::VARIABLES;
use temper_cuda::nccl::ENVIRONMENT;

/// How long the others may take to end after one rank failed.
const AFTER_FAILURE: Duration = Duration::from_secs(10);

/// A process that does not outlive this one's interest in it.
struct Worker(Child);

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs the command line of this process, without `--ranks`, as `ranks` processes. Only rank 0 speaks on stdout.
pub fn run(ranks: usize) -> anyhow::Result<()> {
    let program = std::env::current_exe()?;
    let arguments = without_ranks(std::env::args_os().skip(1));
    // Free now; somebody else could take it before rank 0 does, which then says so.
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let mut workers = vec![];
    for rank in 0..ranks {
        let mut command = Command::new(&program);
        command.args(&arguments).stdin(Stdio::null());
        for name in VARIABLES {
            command.env_remove(name);
        }
        for (key, value) in ENVIRONMENT.iter().filter(|(key, _)| std::env::var_os(key).is_none()) {
            command.env(key, value);
        }
        let (rank_text, ranks_text, port_text) = (rank.to_string(), ranks.to_string(), port.to_string());
        command.env("RANK", &rank_text).env("LOCAL_RANK", &rank_text).env("WORLD_SIZE", &ranks_text).env(LOCAL_WORLD_SIZE, &ranks_text);
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port_text);
        if rank > 0 {
            command.stdout(Stdio::null());
        }
        workers.push(Worker(command.spawn()?));
    }
    wait(workers)
}

/// Waits for all. The first that fails is the one to report; the others get some time to say farewell.
fn wait(mut workers: Vec<Worker>) -> anyhow::Result<()> {
    let mut failed: Option<(anyhow::Error, Instant)> = None;
    let mut running = workers.len();
    let mut over = vec![false; workers.len()];
    while running > 0 {
        for (rank, worker) in workers.iter_mut().enumerate().filter(|(rank, _)| !over[*rank]).collect::<Vec<_>>() {
            let Some(status) = worker.0.try_wait()? else { continue };
            over[rank] = true;
            running -= 1;
            if !status.success() && failed.is_none() {
                failed = Some((anyhow::anyhow!("rank {rank} failed first ({status}); what it said is above"), Instant::now()));
            }
        }
        if failed.as_ref().is_some_and(|(_, since)| since.elapsed() > AFTER_FAILURE) {
            break; // dropping the workers ends them
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    failed.map_or(Ok(()), |(error, _)| Err(error))
}

/// Arguments but for `--ranks N` and `--ranks=N`.
fn without_ranks(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut kept = vec![];
    let mut arguments = arguments;
    while let Some(argument) = arguments.next() {
        if argument == "--ranks" {
            arguments.next();
        } else if !argument.to_string_lossy().starts_with("--ranks=") {
            kept.push(argument);
        }
    }
    kept
}
