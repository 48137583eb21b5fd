//! The head's judgement: what the nodes report goes in, what is to be ordered and said comes out. No clocks, files or sockets of its
//! own, so that every course of events can be tested. `ending.rs` is its second half, from the first failure on.

mod ending;

use crate::fingerprint::{Fingerprint, differences};
use crate::logs::Fold;
use crate::message::{Doing, Event, Failed, Kind, Order, Start, Told, seconds};
use crate::report::{Cause, table};
use crate::supervisor::Patience;
use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

/// Longest after SIGKILL that a process may take to be gone.
const UNKILLABLE: Duration = Duration::from_secs(10);

const SIGTERM: i32 = 15;

/// What the head is to do.
#[derive(Debug, PartialEq)]
pub(crate) enum Act {
    /// Give a node an order.
    Order(usize, Order),
    /// Show a line.
    Say(String),
    /// The job is over.
    Over(u8),
}

/// What a job is, beside its nodes.
pub(crate) struct Terms {
    pub(crate) patience: Patience,
    pub(crate) nodes: usize,
    /// Ranks that the nodes must bring together, where the user says.
    pub(crate) world: Option<usize>,
    pub(crate) restarts: usize,
    /// The name of the job.
    pub(crate) name: String,
    pub(crate) logs: PathBuf,
    /// Where rank 0 listens in this attempt.
    pub(crate) master: Box<dyn FnMut() -> (String, u16)>,
    /// Whether there is a checkpoint to go on from.
    pub(crate) resumable: Box<dyn Fn() -> bool>,
}

#[derive(Default)]
struct Member {
    host: String,
    first: usize,
    ranks: usize,
    joined: bool,
    idle: bool,
    gone: bool,
    stops: usize,
}

#[derive(Default)]
struct Rank {
    node: usize,
    print: Option<Fingerprint>,
    doing: Doing,
    done: bool,
    failed: bool,
    exited: bool,
}

/// The end of an attempt, from its first failure on.
#[derive(Clone, Copy)]
struct Ending {
    since: Instant,
    asked: bool,
    killed: bool,
}

pub(crate) struct Job {
    terms: Terms,
    began: Instant,
    attempt: usize,
    members: Vec<Member>,
    ranks: Vec<Rank>,
    /// Of this attempt, in the order of their arrival.
    failures: Vec<(usize, Cause)>,
    ending: Option<Ending>,
    /// Exit code of the failure that was announced.
    announced: Option<(usize, u8)>,
    /// The user wants an end.
    stopping: bool,
    gone_on: bool,
    logs_open: bool,
    freeing: bool,
    over: bool,
    fold: Fold,
    acts: Vec<Act>,
}

impl Job {
    pub(crate) fn new(terms: Terms, now: Instant) -> Job {
        Job {
            members: (0..terms.nodes).map(|_| Member::default()).collect(),
            terms,
            began: now,
            attempt: 0,
            ranks: vec![],
            failures: vec![],
            ending: None,
            announced: None,
            stopping: false,
            gone_on: false,
            logs_open: false,
            freeing: false,
            over: false,
            fold: Fold::default(),
            acts: vec![],
        }
    }

    /// Takes what a node reports.
    pub(crate) fn take(&mut self, node: usize, event: Event, now: Instant) -> Vec<Act> {
        if !self.over {
            self.event(node, event, now);
        }
        std::mem::take(&mut self.acts)
    }

    fn event(&mut self, node: usize, event: Event, now: Instant) {
        match event {
            Event::Joined { host, ranks, .. } => self.joined(node, host, ranks, now),
            Event::Told(rank, told) if rank < self.ranks.len() => self.told(rank, told, now),
            Event::Exited { rank, exit, tail } if rank < self.ranks.len() => self.exited(rank, exit, tail, now),
            Event::Silent { rank, for_ms, process } if rank < self.ranks.len() => {
                self.fail(rank, Cause::Silent { after: Duration::from_millis(for_ms), process }, now);
            }
            Event::Echo(rank, line) => self.fold.take(rank, line, now),
            Event::Notice(text) => self.acts.push(Act::Say(text)),
            Event::Idle(result) => self.idle(node, result, now),
            Event::Stop => self.stop(node),
            Event::Gone(why) => self.gone(node, why, now),
            Event::Told(..) | Event::Exited { .. } | Event::Silent { .. } | Event::Alive => {}
        }
    }

    /// Lets time pass.
    pub(crate) fn tick(&mut self, now: Instant) -> Vec<Act> {
        if !self.over {
            let lines = self.fold.due(Some(now));
            self.acts.extend(lines.into_iter().map(Act::Say));
            self.gather_in_time(now);
            self.end_in_time(now);
        }
        std::mem::take(&mut self.acts)
    }

    fn all(&mut self, order: &Order) {
        let there = self.members.iter().enumerate().filter(|(_, m)| m.joined && !m.gone);
        self.acts.extend(there.map(|(node, _)| Act::Order(node, order.clone())));
    }

    fn end(&mut self, code: u8) {
        let lines = self.fold.due(None);
        self.acts.extend(lines.into_iter().map(Act::Say));
        self.all(&Order::End(code));
        self.acts.push(Act::Over(code));
        self.over = true;
    }

    fn joined(&mut self, node: usize, host: String, ranks: usize, now: Instant) {
        let Some(member) = self.members.get_mut(node) else { return };
        (member.host, member.ranks, member.joined) = (host, ranks, true);
        if !self.members.iter().all(|m| m.joined) {
            return;
        }
        let mut first = 0;
        for member in &mut self.members {
            member.first = first;
            first += member.ranks;
        }
        if let Some(world) = self.terms.world.filter(|world| *world != first) {
            let brought: Vec<String> = self.members.iter().map(|m| format!("{} {}", m.host, m.ranks)).collect();
            let what = format!("the job needs {world} ranks, but its {} nodes bring {first} ({})", self.members.len(), brought.join(", "));
            self.acts.push(Act::Say(format!("error: {what}. Correct the ranks per node, or [parallel]")));
            return self.end(2);
        }
        self.begin(now, false);
    }

    fn begin(&mut self, now: Instant, resume: bool) {
        self.attempt += 1;
        (self.began, self.ending, self.announced, self.freeing, self.gone_on, self.logs_open) = (now, None, None, false, false, false);
        self.failures.clear();
        let (world, master) = (self.members.iter().map(|m| m.ranks).sum(), (self.terms.master)());
        self.ranks.clear();
        for (node, member) in self.members.iter_mut().enumerate() {
            member.idle = false;
            self.ranks.extend((0..member.ranks).map(|_| Rank { node, ..Rank::default() }));
            let start =
                Start { attempt: self.attempt, resume, first: member.first, world, master: master.clone(), job: self.terms.name.clone() };
            self.acts.push(Act::Order(node, Order::Start(start)));
        }
    }

    fn gather_in_time(&mut self, now: Instant) {
        let missing: Vec<String> = self.members.iter().enumerate().filter(|(_, m)| !m.joined).map(|(node, _)| node.to_string()).collect();
        if missing.is_empty() || now.duration_since(self.began) < self.terms.patience.gather {
            return;
        }
        let waited = seconds(self.terms.patience.gather);
        let what = format!("{} of {} nodes did not come within {waited}: number {}", missing.len(), self.members.len(), missing.join(", "));
        self.acts.push(Act::Say(format!("error: {what}. Did they start, and can they reach this one?")));
        self.end(1);
    }

    fn told(&mut self, rank: usize, told: Told, now: Instant) {
        match told {
            Told::Fingerprint(print) => {
                self.ranks[rank].print = Some(print);
                self.compare(now);
            }
            Told::Doing(doing) => self.ranks[rank].doing = doing,
            Told::Ready if rank == 0 => {
                self.logs_open = true;
                self.all(&Order::Logs);
            }
            Told::Done => self.ranks[rank].done = true,
            Told::Failed(failed) => match failed.kind {
                Kind::Passed { of } if of < self.ranks.len() => {
                    self.ranks[rank].failed = true;
                    self.fail(of, Cause::Said(Failed { kind: Kind::Own, ..failed }), now);
                }
                _ => self.fail(rank, Cause::Said(failed), now),
            },
            Told::Ready | Told::Hello { .. } => {}
        }
    }

    /// Lets the ranks go on when all have told the same.
    fn compare(&mut self, now: Instant) {
        let prints: Vec<&Fingerprint> = self.ranks.iter().filter_map(|r| r.print.as_ref()).collect();
        if prints.len() < self.ranks.len() || self.gone_on || self.ending.is_some() {
            return;
        }
        let found = differences(&prints);
        let (binding, told): (Vec<_>, Vec<_>) = found.iter().partition(|d| d.binding);
        if !told.is_empty() {
            self.acts.push(Act::Say(format!("warning: ranks differ in what may be meant so:\n{}", table(&told))));
        }
        if binding.is_empty() {
            self.gone_on = true;
            return self.all(&Order::Go);
        }
        let odd = binding.iter().filter_map(|d| d.values.last()?.1.first()).min().copied().unwrap_or(0);
        let message = format!("the ranks were not started alike, so the job ends before its first step:\n{}", table(&binding));
        self.fail(odd, Cause::Said(Failed { message, code: 2, kind: Kind::Own }), now);
    }
}

#[cfg(test)]
mod tests;
