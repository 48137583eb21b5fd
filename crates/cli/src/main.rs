//! `temper`: the command line. Owns stdout, exit codes and the wiring of sinks; everything else is in the libraries.

#![deny(clippy::print_stdout, clippy::print_stderr)] // panic when the reader is gone; use `out::say` and `out::tell`

mod args;
mod backend;
mod bench;
mod checkpoint;
mod data;
mod exit;
mod generate;
mod launch;
mod layout;
mod out;
mod plan;
mod rank;
mod sft;
mod shortage;
mod table;
mod trace;
mod verify;
mod weights;

use args::{Cli, Command};
use clap::Parser;
use std::{io::IsTerminal, process::ExitCode, time::Instant};

fn main() -> ExitCode {
    let started = Instant::now();
    let cli = Cli::parse();
    init_logs();
    exit::code(run(&cli, started))
}

fn run(cli: &Cli, started: Instant) -> anyhow::Result<()> {
    let backend = || anyhow::Ok(backend::open(cli, false, 0)?.ops);
    match &cli.command {
        Command::Sft(args) => launch::sft(args, cli, |rank| {
            sft::run(args, cli, rank, &|deterministic| backend::open(cli, deterministic, rank.local_rank()), started)
                .map_err(|e| shortage::beside_plan(e, || shortage::of_run(args, cli, rank.rank(), rank.ranks())))
        }),
        Command::Launch(args) => launch::launch(args),
        Command::Data(args) => data::run(args),
        Command::Checkpoint(args) => checkpoint::run(args),
        Command::Generate(args) => generate::run(args, backend()?),
        Command::Verify(args) => verify::run(args, cli),
        Command::Bench(args) => bench::run(args, cli, started),
        Command::Plan(args) => plan::run(args, cli),
    }
}

/// Logs go to stderr; `TEMPER_LOG=debug` shows more.
fn init_logs() {
    // What the data crate warns of is also in its report, which the commands print.
    let filter = tracing_subscriber::EnvFilter::try_from_env("TEMPER_LOG").unwrap_or_else(|_| "warn,temper_data=error".into());
    let colour = std::io::stderr().is_terminal();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(colour)
        .with_writer(std::io::stderr)
        .without_time()
        .with_target(false)
        // Telling that stderr is gone on stderr would panic.
        .log_internal_errors(false)
        .init();
}
