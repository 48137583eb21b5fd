//! How a job ends: whose failure is told, how the others are ended, whether it is started again.

use super::{Act, Ending, Job, SIGTERM, UNKILLABLE};
use crate::message::{Exit, Failed, Kind, Order, seconds};
use crate::node::spare_logs;
use crate::report::{self, Cause, Others, blamed, name, ranks_text};
use std::time::Instant;

impl Job {
    fn host(&self, rank: usize) -> Option<&str> {
        let member = self.members.get(self.ranks.get(rank)?.node)?;
        (self.members.len() > 1).then_some(member.host.as_str())
    }

    fn killing(&self) -> bool {
        self.ending.is_some_and(|e| e.killed) || self.members.iter().any(|m| m.stops > 1)
    }

    pub(super) fn fail(&mut self, rank: usize, cause: Cause, now: Instant) {
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

    pub(super) fn exited(&mut self, rank: usize, exit: Exit, tail: Vec<String>, now: Instant) {
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
        let most = blames.iter().copied().max_by_key(|rank| (count(*rank), std::cmp::Reverse(*rank)))?;
        // Who waited for it knows more than who only saw another go, though that may be heard first.
        let (by, cause) = self.failures.iter().find(|(_, cause)| cause.blames() == Some(most)).or(self.failures.first())?;
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

    pub(super) fn end_in_time(&mut self, now: Instant) {
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
        self.tell_others(first, code);
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

    /// Tells what became of the other ranks, and where the logs are. Where there is no run folder they are written elsewhere, but not for a
    /// fault of the input or an interruption, which leaves nothing to be looked up.
    fn tell_others(&mut self, first: usize, code: u8) {
        let others = self.others(first);
        let all_is_said = (code == 2 || self.is_interrupted(first)) && others.otherwise == 0;
        let logs = match (self.logs_open, all_is_said) {
            (true, _) => Some(self.terms.logs.clone()),
            (false, true) => None,
            (false, false) => {
                self.all(&Order::SpareLogs);
                Some(spare_logs(&self.terms.name))
            }
        };
        let each = if self.members.len() > 1 && !self.logs_open { " of each host" } else { "" };
        let text = report::others(others, logs.map(|l| format!("{}{each}", l.display())));
        self.acts.extend((!text.is_empty()).then_some(Act::Say(text)));
    }

    fn is_interrupted(&self, first: usize) -> bool {
        self.failures.iter().any(|(rank, c)| *rank == first && c.is_interrupted())
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
                Some(c) if c.is_interrupted() && self.is_interrupted(first) => others.interrupted += 1,
                Some(Cause::Said(failed)) if Some(&failed.message) == message => others.same += 1,
                Some(c) if c.is_interrupted() => others.stopped += 1,
                Some(_) => others.otherwise += 1,
            }
        }
        others
    }

    /// Why the job is not started again; empty where that needs no word.
    fn no_restart(&self, first: usize, code: u8) -> Option<String> {
        if self.terms.restarts == 0 || self.stopping || self.is_interrupted(first) {
            return Some(String::new());
        }
        if code == 2 {
            return Some("no restart: the same input would fail again".into());
        }
        let lasting = |c: &Cause| matches!(c, Cause::Said(Failed { kind: Kind::Lasting, .. }));
        if self.failures.iter().any(|(rank, c)| *rank == first && lasting(c)) {
            return Some("no restart: it would come to the same end".into());
        }
        if let Some(gone) = self.members.iter().find(|m| m.gone) {
            return Some(format!("no restart: {} is gone", gone.host));
        }
        (self.attempt > self.terms.restarts).then(|| format!("no restart: all {} are used up", self.terms.restarts))
    }

    pub(super) fn idle(&mut self, node: usize, result: Result<(), String>, now: Instant) {
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

    pub(super) fn stop(&mut self, node: usize) {
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

    pub(super) fn gone(&mut self, node: usize, why: String, now: Instant) {
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
