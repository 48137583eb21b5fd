//! The head's judgement: what the nodes report goes in, what is to be ordered and said comes out. No clocks, files or sockets of its
//! own, so that every course of events can be tested.

use crate::fingerprint::{Fingerprint, differences};
use crate::logs::Fold;
use crate::message::{Doing, Event, Exit, Failed, Kind, Order, Start, Told, seconds};
use crate::node::spare_logs;
use crate::report::{self, Cause, Others, blamed, name, ranks_text, table};
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

    // ---- the beginning

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

    // ---- the end

    fn host(&self, rank: usize) -> Option<&str> {
        let member = self.members.get(self.ranks.get(rank)?.node)?;
        (self.members.len() > 1).then_some(member.host.as_str())
    }

    fn killing(&self) -> bool {
        self.ending.is_some_and(|e| e.killed) || self.members.iter().any(|m| m.stops > 1)
    }

    fn fail(&mut self, rank: usize, cause: Cause, now: Instant) {
        self.ranks[rank].failed = true;
        let (secondary, interrupted) = (cause.blames().is_some(), cause.is_interrupted());
        self.failures.push((rank, cause));
        if !interrupted && self.ending.is_none() {
            self.ending = Some(Ending { since: now, asked: false, killed: false });
        }
        if !secondary && !interrupted && self.announced.is_none() {
            self.announce();
        }
    }

    fn exited(&mut self, rank: usize, exit: Exit, tail: Vec<String>, now: Instant) {
        let state = &mut self.ranks[rank];
        state.exited = true;
        let ended_by_us = self.ending.is_some_and(|e| e.asked) || self.killing();
        let state = &self.ranks[rank];
        if state.done && exit != Exit::Code(0) {
            let what = report::failure(&name(rank, self.host(rank)), &Cause::Died { exit, tail }, &state.doing);
            self.acts.push(Act::Say(what.replacen("error:", "warning: its work was done, but", 1)));
        } else if !state.done && !state.failed && !ended_by_us {
            let cause = match exit {
                // Asked to stop before it could listen.
                Exit::Signal(SIGTERM) if self.stopping => {
                    Cause::Said(Failed { message: "stopped before the first step".into(), code: 130, kind: Kind::Interrupted })
                }
                _ => Cause::Died { exit, tail },
            };
            self.fail(rank, cause, now);
        }
        self.conclude();
    }

    /// Shows the first failure.
    fn announce(&mut self) {
        let lines = self.fold.due(None);
        self.acts.extend(lines.into_iter().map(Act::Say));
        let primary = |c: &Cause| c.blames().is_none() && !c.is_interrupted();
        let first = self.failures.iter().find(|(_, cause)| primary(cause));
        let first = first.or_else(|| self.failures.iter().find(|(_, cause)| cause.is_interrupted()));
        let (rank, code, text) = match first {
            Some((rank, cause)) => (*rank, cause.code(), self.describe(*rank, cause)),
            None => match self.blame() {
                Some(found) => found,
                None => return,
            },
        };
        self.announced = Some((rank, code));
        self.acts.push(Act::Say(text));
    }

    fn describe(&self, rank: usize, cause: &Cause) -> String {
        match cause {
            // What concerns the job and not one rank.
            Cause::Said(failed) if failed.kind == Kind::Interrupted || (failed.code == 2 && !self.gone_on) => {
                format!("error: {}", failed.message)
            }
            _ => report::failure(&name(rank, self.host(rank)), cause, &self.ranks[rank].doing),
        }
    }

    /// Nobody has failed on its own: the rank that most of the others complain of.
    fn blame(&self) -> Option<(usize, u8, String)> {
        let blames: Vec<usize> = self.failures.iter().filter_map(|(_, cause)| cause.blames()).map(|rank| self.root(rank)).collect();
        let count = |rank: usize| blames.iter().filter(|b| **b == rank).count();
        let (by, cause) = self.failures.first()?;
        let most = blames.iter().copied().max_by_key(|rank| (count(*rank), std::cmp::Reverse(*rank)))?;
        let Cause::Said(failed) = cause else { return None };
        let said = format!("{}: {}", name(*by, self.host(*by)), failed.message);
        let doing = self.ranks.get(most).map(|r| r.doing.clone()).unwrap_or_default();
        Some((most, cause.code(), blamed(&name(most, self.host(most)), count(most), &said, &doing)))
    }

    /// Who is behind a rank that is complained of: itself, or whom it complains of in turn.
    fn root(&self, mut rank: usize) -> usize {
        for _ in 0..self.failures.len() {
            match self.failures.iter().find(|(r, _)| *r == rank).and_then(|(_, cause)| cause.blames()) {
                Some(of) => rank = of,
                None => break,
            }
        }
        rank
    }

    fn end_in_time(&mut self, now: Instant) {
        let Some(mut ending) = self.ending else { return };
        let (patience, passed) = (self.terms.patience, now.duration_since(ending.since));
        if !ending.asked && passed >= patience.settle {
            if self.announced.is_none() {
                self.announce();
            }
            ending.asked = true;
            self.all(&Order::Ask);
        }
        if !ending.killed && passed >= patience.stop {
            ending.killed = true;
            self.all(&Order::Kill);
        }
        self.ending = Some(ending);
        if passed >= patience.stop + UNKILLABLE && self.ranks.iter().any(|r| !r.exited) && !self.freeing {
            let left: Vec<usize> = (0..self.ranks.len()).filter(|r| !self.ranks[*r].exited).collect();
            let what = format!("{} cannot be ended, not even by SIGKILL: the kernel waits for storage or a driver", ranks_text(&left));
            self.acts.push(Act::Say(format!("error: {what}. The host needs a look before the next start")));
            let code = self.announced.map_or(1, |(_, code)| code);
            self.end(code);
        }
    }

    /// All processes are gone: what now?
    fn conclude(&mut self) {
        if self.over || self.freeing || !self.ranks.iter().all(|r| r.exited) {
            return;
        }
        if self.members.iter().any(|m| m.stops > 1) {
            return self.end(130);
        }
        if self.failures.is_empty() {
            return self.end(0);
        }
        if self.announced.is_none() {
            self.announce();
        }
        let (first, code) = self.announced.unwrap_or((0, 1));
        let others = self.others(first);
        let logs = if self.logs_open { self.terms.logs.clone() } else { spare_logs(&self.terms.name) };
        self.acts.push(Act::Say(report::others(others, &logs.display().to_string())));
        match self.no_restart(first, code) {
            None => {
                let (n, of) = (self.attempt, self.terms.restarts);
                self.acts.push(Act::Say(format!("restart {n} of {of}, when all is free again")));
                (self.freeing, self.ending) = (true, None);
                self.all(&Order::Free);
            }
            Some(why) => {
                if !why.is_empty() {
                    self.acts.push(Act::Say(why));
                }
                self.end(code);
            }
        }
    }

    fn others(&self, first: usize) -> Others {
        let said = |rank: usize| {
            self.failures.iter().find_map(|(r, c)| match c {
                Cause::Said(failed) if *r == rank => Some(failed),
                _ => None,
            })
        };
        let message = said(first).map(|f| &f.message);
        let mut others = Others::default();
        for rank in (0..self.ranks.len()).filter(|r| *r != first) {
            let cause = self.failures.iter().find(|(r, _)| *r == rank).map(|(_, c)| c);
            match cause {
                None => others.stopped += usize::from(!self.ranks[rank].done),
                Some(c) if c.blames().is_some() => others.stopped += 1,
                Some(Cause::Said(failed)) if Some(&failed.message) == message => others.same += 1,
                Some(c) if c.is_interrupted() => others.stopped += 1,
                Some(_) => others.otherwise += 1,
            }
        }
        others
    }

    /// Why the job is not started again; empty where that needs no word.
    fn no_restart(&self, first: usize, code: u8) -> Option<String> {
        let interrupted = self.failures.iter().any(|(rank, c)| *rank == first && c.is_interrupted());
        if self.terms.restarts == 0 || self.stopping || interrupted {
            return Some(String::new());
        }
        if code == 2 {
            return Some("no restart: the same input would fail again".into());
        }
        if let Some(gone) = self.members.iter().find(|m| m.gone) {
            return Some(format!("no restart: {} is gone", gone.host));
        }
        (self.attempt > self.terms.restarts).then(|| format!("no restart: all {} are used up", self.terms.restarts))
    }

    fn idle(&mut self, node: usize, result: Result<(), String>, now: Instant) {
        if !self.freeing {
            return;
        }
        if let Err(what) = result {
            let host = self.members.get(node).map(|m| m.host.clone()).unwrap_or_default();
            let waited = seconds(self.terms.patience.memory);
            let text = format!("error: no restart: on {host} device memory is not free again after {waited}: {what}");
            self.acts.push(Act::Say(format!("{text}. nvidia-smi shows who holds it")));
            let code = self.announced.map_or(1, |(_, code)| code);
            return self.end(code);
        }
        if let Some(member) = self.members.get_mut(node) {
            member.idle = true;
        }
        if self.members.iter().all(|m| m.idle) {
            let resume = (self.terms.resumable)();
            let from = if resume { "from the last checkpoint" } else { "from the beginning, as there is no checkpoint yet" };
            self.acts.push(Act::Say(format!("starting again {from}")));
            self.begin(now, resume);
        }
    }

    fn stop(&mut self, node: usize) {
        let Some(member) = self.members.get_mut(node) else { return };
        member.stops += 1;
        if member.stops > 1 {
            self.all(&Order::Kill);
            if self.ranks.iter().all(|r| r.exited) {
                self.end(130);
            }
            return;
        }
        if std::mem::replace(&mut self.stopping, true) {
            return; // another node was told too
        }
        if self.ranks.iter().all(|r| r.exited) {
            return self.end(130); // between two starts, or before the first
        }
        self.acts.push(Act::Say("stopping after the step under way and a checkpoint; once more to stop at once".into()));
        self.all(&Order::Ask);
    }

    fn gone(&mut self, node: usize, why: String, now: Instant) {
        let Some(member) = self.members.get_mut(node).filter(|m| !m.gone) else { return };
        member.gone = true;
        let what = format!("node {node} ({}) is gone: {why}", member.host);
        let its: Vec<usize> = (0..self.ranks.len()).filter(|r| self.ranks[*r].node == node).collect();
        if self.freeing || its.is_empty() {
            self.acts.push(Act::Say(format!("error: {what}")));
            return self.end(1);
        }
        let open: Vec<usize> = its.iter().copied().filter(|r| !self.ranks[*r].exited).collect();
        for rank in &its {
            self.ranks[*rank].exited = true;
        }
        if let Some(first) = open.first().filter(|r| !self.ranks[**r].done) {
            self.fail(*first, Cause::NodeGone(what), now);
        }
        self.conclude();
    }
}

#[cfg(test)]
mod tests;
