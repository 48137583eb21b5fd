//! The words for what went wrong in a job: who failed first, how, and what that meant for the others.

use crate::fingerprint::Difference;
use crate::message::{Doing, Exit, Failed, Kind, seconds};
use std::time::Duration;

/// Longest value of a fingerprint that is shown.
const VALUE: usize = 60;

/// What was noticed of a rank that failed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Cause {
    /// It said so.
    Said(Failed),
    /// Its process ended without a word.
    Died { exit: Exit, tail: Vec<String> },
    /// It gives no sign of life.
    Silent { after: Duration, process: String },
    /// Its node is gone.
    NodeGone(String),
}

impl Cause {
    /// Whether another rank is to blame, and which.
    pub(crate) fn blames(&self) -> Option<usize> {
        match self {
            Cause::Said(Failed { kind: Kind::Secondary { of }, .. }) => Some(*of),
            _ => None,
        }
    }

    pub(crate) fn is_interrupted(&self) -> bool {
        matches!(self, Cause::Said(Failed { kind: Kind::Interrupted, .. }))
    }

    /// The exit code of a job that ends for this.
    pub(crate) fn code(&self) -> u8 {
        match self {
            Cause::Said(failed) => failed.code.max(1),
            Cause::Died { exit: Exit::Signal(n), .. } => u8::try_from(128 + n).unwrap_or(1),
            Cause::Died { exit: Exit::Code(n), .. } => u8::try_from(*n).ok().filter(|n| *n > 0).unwrap_or(1),
            Cause::Silent { .. } | Cause::NodeGone(_) => 1,
        }
    }
}

/// `rank 3`, or `rank 11 (gpu-2)` in a job of several hosts.
pub(crate) fn name(rank: usize, host: Option<&str>) -> String {
    host.map_or_else(|| format!("rank {rank}"), |host| format!("rank {rank} ({host})"))
}

/// The first failure, in full. `who` is from [`name`], `doing` the last that was heard of it.
pub(crate) fn failure(who: &str, cause: &Cause, doing: &Doing) -> String {
    match cause {
        Cause::Said(failed) => format!("error: {who}: {}", failed.message),
        Cause::Died { exit, tail } => {
            let mut text = format!("error: {who} {}. Last heard of it: {doing}", died(*exit));
            if !tail.is_empty() {
                text += "\n  the last it wrote:";
                tail.iter().for_each(|line| text += &format!("\n  | {line}"));
            }
            text
        }
        Cause::Silent { after, process } => {
            format!("error: {who} has given no sign of life for {}: {process}. Last heard of it: {doing}", seconds(*after))
        }
        Cause::NodeGone(what) => format!("error: {what}. Last heard of {who}: {doing}"),
    }
}

/// A failure of which only the others know: nobody but they complains of `who`.
pub(crate) fn blamed(who: &str, by: usize, said: &str, doing: &Doing) -> String {
    let waited = if by == 1 { "another rank waited for it in vain".into() } else { format!("{by} ranks waited for it in vain") };
    format!("error: {who} keeps the others waiting: it lives, and says what it does: {doing}. But {waited}\n  the first of them: {said}")
}

/// How a process ended, for its log.
pub(crate) fn ended(exit: Exit) -> String {
    match exit {
        Exit::Code(n) => format!("ended with exit code {n}"),
        Exit::Signal(_) => died(exit),
    }
}

fn died(exit: Exit) -> String {
    match exit {
        Exit::Code(n) => format!("ended without a word, with exit code {n}"),
        Exit::Signal(n) => {
            let (name, why) = match n {
                4 => ("SIGILL", "an instruction that this processor does not have"),
                6 => ("SIGABRT", "it or a library gave up"),
                7 => ("SIGBUS", "a mapped file shrank, or the disk or /dev/shm is full"),
                8 => ("SIGFPE", "a fault in a library"),
                9 => ("SIGKILL", "somebody killed it, often the kernel for want of memory: see dmesg, or the job's memory limit"),
                11 => ("SIGSEGV", "a fault in a library or the driver"),
                15 => ("SIGTERM", "somebody asked it to stop before it could listen"),
                _ => return format!("was ended by signal {n}"),
            };
            format!("was ended by {name} ({why})")
        }
    }
}

/// What the first failure meant for the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Others {
    /// Said the same.
    pub(crate) same: usize,
    /// Were interrupted, as the first was.
    pub(crate) interrupted: usize,
    /// Stopped because of it, or were stopped.
    pub(crate) stopped: usize,
    /// Failed of something else.
    pub(crate) otherwise: usize,
}

/// The rest of the ranks in one line; `logs` is where more is to be read, if anywhere. Empty where there is nothing to tell.
pub(crate) fn others(n: Others, logs: Option<String>) -> String {
    let count = |n: usize| if n == 1 { "1 other rank".to_string() } else { format!("{n} other ranks") };
    let mut parts = vec![];
    if n.same > 0 {
        parts.push(format!("{} failed in the same way", count(n.same)));
    }
    if n.interrupted > 0 {
        parts.push(format!("{} stopped", count(n.interrupted)));
    }
    if n.stopped > 0 {
        parts.push(format!("{} stopped because of it", count(n.stopped)));
    }
    if n.otherwise > 0 {
        parts.push(format!("{} failed otherwise afterwards", count(n.otherwise)));
    }
    parts.extend(logs.map(|logs| format!("logs: {logs}")));
    parts.join("; ")
}

/// In what ranks differ, one fact a line.
pub(crate) fn table(differences: &[&Difference]) -> String {
    let width = differences.iter().map(|d| d.name.len()).max().unwrap_or(0);
    let lines = differences.iter().map(|d| {
        let values: Vec<String> =
            d.values.iter().map(|(value, ranks)| format!("{} on {}", shown(value.as_deref()), ranks_text(ranks))).collect();
        format!("  {:<width$}  {}", d.name, values.join("; "))
    });
    lines.collect::<Vec<_>>().join("\n")
}

fn shown(value: Option<&str>) -> String {
    match value {
        None => "not set".into(),
        Some("") => "empty".into(),
        Some(v) if v.chars().count() > VALUE => format!("{}...", v.chars().take(VALUE).collect::<String>()),
        Some(v) => v.into(),
    }
}

/// `rank 3`, `ranks 0-2, 5`.
pub(crate) fn ranks_text(ranks: &[usize]) -> String {
    let mut ranks = ranks.to_vec();
    ranks.sort_unstable();
    ranks.dedup();
    let mut runs: Vec<(usize, usize)> = vec![];
    for rank in &ranks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == *rank => *last = *rank,
            _ => runs.push((*rank, *rank)),
        }
    }
    let runs: Vec<String> = runs.iter().map(|(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") }).collect();
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, runs.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_told_in_runs() {
        assert_eq!(ranks_text(&[4]), "rank 4");
        assert_eq!(ranks_text(&[2, 0, 1, 7, 5, 6]), "ranks 0-2, 5-7");
    }

    #[test]
    fn a_table_names_who_differs_in_what() {
        let difference = |name: &str, values: Vec<(Option<String>, Vec<usize>)>| Difference { name: name.into(), binding: true, values };
        let a = difference("config.optim.lr", vec![(Some("1e-5".into()), vec![0, 1, 2]), (Some("2e-5".into()), vec![3])]);
        let b = difference("NCCL_ALGO", vec![(None, vec![0, 1]), (Some("x".repeat(70)), vec![2, 3])]);
        let x = "x".repeat(60);
        let expect =
            format!("  config.optim.lr  1e-5 on ranks 0-2; 2e-5 on rank 3\n  NCCL_ALGO        not set on ranks 0-1; {x}... on ranks 2-3");
        assert_eq!(table(&[&a, &b]), expect);
    }
}
