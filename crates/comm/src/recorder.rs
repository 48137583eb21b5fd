//! The flight recorder: the last operations of a rank, readable while it hangs.
//!
//! Every transport writes into it. Whoever waits too long for a rank asks for that rank's [`Standing`] (over TCP its receiving thread
//! answers, so a rank whose own thread hangs still tells where) and puts it into the error.

use crate::Operation;
use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// Operations kept. Those under way are kept whatever their number.
const KEPT: usize = 256;

/// How far an operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Under way.
    Running,
    /// Done.
    Done,
    /// Given up with an error.
    Failed,
}

/// An operation, as recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name of the group.
    pub group: Arc<str>,
    /// What it is.
    pub operation: Operation,
    /// Which one: collectives of a group count from 0; so do messages from one rank to another within a group.
    pub number: u64,
    /// The other rank of the job, for messages.
    pub peer: Option<usize>,
    /// Bytes of this rank's buffer (the whole one, where operations have a whole and a part).
    pub bytes: u64,
    /// How far it is.
    pub state: State,
    /// When it began, before now.
    pub began: Duration,
    /// When it was over, before now; zero while it runs.
    pub over: Duration,
}

impl Entry {
    /// Whether both are the same operation, seen by two ranks.
    pub fn same_call(&self, other: &Entry) -> bool {
        (&self.group, self.operation, self.number) == (&other.group, other.operation, other.number)
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{}", self.operation.name(), self.number)?;
        match (self.operation, self.peer) {
            (Operation::Send, Some(peer)) => write!(f, " to rank {peer}")?,
            (_, Some(peer)) => write!(f, " from rank {peer}")?,
            (_, None) => {}
        }
        write!(f, " of group {}", self.group)
    }
}

/// Where a rank stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// The operations under way, oldest first.
    pub running: Vec<Entry>,
    /// The operation begun last, when none is under way.
    pub last: Option<Entry>,
}

impl fmt::Display for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(oldest) = self.running.first() {
            write!(f, "it waits in {oldest} since {}", seconds(oldest.began))?;
            return match self.running.len() {
                1 => Ok(()),
                n => write!(f, " (and in {} later ones)", n - 1),
            };
        }
        match &self.last {
            None => f.write_str("it has called no operation yet"),
            Some(last) if last.state == State::Failed => write!(f, "its last operation, {last}, failed {} ago", seconds(last.over)),
            Some(last) => write!(f, "it is in no operation; the last, {last}, ended {} ago", seconds(last.over)),
        }
    }
}

/// A duration as a reader wants it.
pub(crate) fn seconds(d: Duration) -> String {
    if d < Duration::from_secs(10) { format!("{:.1} s", d.as_secs_f64()) } else { format!("{} s", d.as_secs()) }
}

/// The recorder of one rank. Clones share it.
#[derive(Clone, Default)]
pub struct Recorder {
    slots: Arc<Mutex<Slots>>,
}

#[derive(Default)]
struct Slots {
    next: u64,
    by_order: BTreeMap<u64, Slot>,
}

struct Slot {
    entry: Entry,
    began: Instant,
    over: Option<Instant>,
}

impl Slot {
    fn seen_at(&self, now: Instant) -> Entry {
        let ago = |then: Instant| now.saturating_duration_since(then);
        Entry { began: ago(self.began), over: self.over.map_or(Duration::ZERO, ago), ..self.entry.clone() }
    }
}

impl Recorder {
    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that an operation begins. It counts as failed when the ticket is dropped without [`Ticket::done`].
    pub fn begin(&self, group: &Arc<str>, operation: Operation, number: u64, peer: Option<usize>, bytes: usize) -> Ticket {
        let zero = Duration::ZERO;
        let entry =
            Entry { group: group.clone(), operation, number, peer, bytes: bytes as u64, state: State::Running, began: zero, over: zero };
        let mut slots = self.lock();
        let order = slots.next;
        slots.next += 1;
        if slots.by_order.len() >= KEPT
            && let Some(old) = slots.by_order.iter().find(|(_, s)| s.over.is_some()).map(|(order, _)| *order)
        {
            slots.by_order.remove(&old);
        }
        slots.by_order.insert(order, Slot { entry, began: Instant::now(), over: None });
        Ticket { recorder: self.clone(), order }
    }

    fn end(&self, order: u64, state: State) {
        if let Some(slot) = self.lock().by_order.get_mut(&order)
            && slot.over.is_none()
        {
            slot.over = Some(Instant::now());
            slot.entry.state = state;
        }
    }

    /// The operations recorded, oldest first.
    pub fn entries(&self) -> Vec<Entry> {
        let now = Instant::now();
        self.lock().by_order.values().map(|s| s.seen_at(now)).collect()
    }

    /// Where the rank stands.
    pub fn standing(&self) -> Standing {
        let now = Instant::now();
        let slots = self.lock();
        let running: Vec<Entry> = slots.by_order.values().filter(|s| s.over.is_none()).map(|s| s.seen_at(now)).collect();
        let last = if running.is_empty() { slots.by_order.values().next_back().map(|s| s.seen_at(now)) } else { None };
        Standing { running, last }
    }
}

/// An operation under way in a [`Recorder`].
#[must_use = "an operation whose ticket is dropped counts as failed"]
pub struct Ticket {
    recorder: Recorder,
    order: u64,
}

impl Ticket {
    /// The operation is done.
    pub fn done(self) {
        self.recorder.end(self.order, State::Done);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.recorder.end(self.order, State::Failed); // after `done` this changes nothing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_are_kept_and_those_under_way_always() {
        let recorder = Recorder::default();
        assert_eq!(recorder.standing().to_string(), "it has called no operation yet");
        let group: Arc<str> = "tp".into();
        let long = recorder.begin(&group, Operation::Recv, 7, Some(3), 16);
        for i in 0..2 * KEPT as u64 {
            recorder.begin(&group, Operation::AllReduce, i, None, 4).done();
        }
        let entries = recorder.entries();
        assert_eq!((entries.len(), entries[0].operation, entries[1].number), (KEPT, Operation::Recv, KEPT as u64 + 1));
        let standing = recorder.standing();
        assert_eq!((standing.running.len(), standing.running[0].bytes), (1, 16));
        assert!(standing.to_string().starts_with("it waits in recv #7 from rank 3 of group tp since 0.0 s"), "{standing}");
        drop(long);
        assert!(recorder.standing().to_string().starts_with("it is in no operation; the last, all_reduce #511 of group tp, ended"));
        drop(recorder.begin(&group, Operation::Barrier, 0, None, 0));
        assert!(recorder.standing().to_string().contains("barrier #0 of group tp, failed"));
    }
}
