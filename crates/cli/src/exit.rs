//! Exit codes: 0 done, 1 failed, 2 bad input. And the one line that says why.

use crate::out::{Stdout, tell};
use std::process::ExitCode;

/// The work was done and its answer is no: `verify` found a difference, a checkpoint is damaged. Already printed.
#[derive(Debug, thiserror::Error)]
#[error("")]
pub struct Negative;

/// What there is to say is said, by a supervisor: only the exit code is left.
#[derive(Debug, thiserror::Error)]
#[error("exit code {0}")]
pub struct Told(pub u8);

/// The input is at fault, in a way that only the command line knows.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct BadInput(pub String);

/// Prints an error, if there is one, and gives the exit code.
pub fn code(result: anyhow::Result<()>) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
    if error.is::<Negative>() || error.is::<Told>() {
        return ExitCode::from(code_of(&error));
    }
    if is_closed_pipe(&error) {
        return ExitCode::SUCCESS; // `temper ... | head` is not a failure
    }
    let of = if error.is::<std::io::Error>() && Stdout::lost().is_some() { "standard output cannot be written: " } else { "" };
    tell(format_args!("error: {of}{error}")); // the libraries' messages tell their causes
    ExitCode::from(code_of(&error))
}

/// The exit code of an error.
pub fn code_of(error: &anyhow::Error) -> u8 {
    match error.downcast_ref() {
        Some(Told(code)) => *code,
        None if is_bad_input(error) => 2,
        None => 1,
    }
}

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}

fn is_bad_input(error: &anyhow::Error) -> bool {
    if let Some(e) = error.downcast_ref::<temper_train::Error>() {
        return e.is_bad_input();
    }
    if let Some(e) = error.downcast_ref::<temper_checkpoint::Error>() {
        return e.is_bad_input();
    }
    if let Some(e) = error.downcast_ref::<temper_monitor::Error>() {
        return e.is_bad_input();
    }
    if let Some(e) = error.downcast_ref::<temper_rollout::Error>() {
        return e.is_bad_input();
    }
    if let Some(e) = error.downcast_ref::<temper_cluster::Error>() {
        return e.is_bad_input();
    }
    error.is::<BadInput>() || error.is::<temper_planner::Error>() || error.is::<temper_config::Error>() || error.is::<temper_data::Error>()
}
