//! Where messages wait until they are asked for.

use crate::{Operation, Standing};
use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// What a message belongs to: ranks that do different things find out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// A message between two ranks is [`Operation::Send`] on both sides.
    pub operation: Operation,
    /// Collectives count from 0 in each group, messages from 0 in each group and direction.
    pub number: u64,
}

/// Why a rank gave or took nothing.
#[derive(Clone, Debug)]
pub(crate) enum Absence {
    /// It may still come.
    Silent,
    /// It will not.
    Gone(String),
}

/// The end of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Departure {
    /// The rank of the job.
    pub rank: usize,
    /// How it was noticed, or what the rank said.
    pub cause: String,
    /// It said farewell, and no failure.
    pub orderly: bool,
}

impl Departure {
    /// A rank that said farewell, with or without a failure.
    pub(crate) fn farewell(rank: usize, failure: Option<&str>, plain: &str) -> Departure {
        let cause = failure.map_or(plain.to_string(), |failure| format!("it gave up: {failure}"));
        Departure { rank, cause, orderly: failure.is_none() }
    }
}

type Message = (Header, Vec<u8>);

#[derive(Default)]
struct State {
    /// By sender and group.
    queues: HashMap<(usize, u64), VecDeque<Message>>,
    gone: BTreeMap<usize, Departure>,
    standings: HashMap<usize, Standing>,
}

/// The messages that reached a rank.
#[derive(Default)]
pub(crate) struct Mailbox {
    state: Mutex<State>,
    arrived: Condvar,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A message of rank `from` within a group.
    pub fn put(&self, from: usize, group: u64, header: Header, body: Vec<u8>) {
        self.lock().queues.entry((from, group)).or_default().push_back((header, body));
        self.arrived.notify_all();
    }

    /// Nothing more will come from a rank; what came before may still be taken. The first departure counts.
    pub fn gone(&self, departure: Departure) {
        self.lock().gone.entry(departure.rank).or_insert(departure);
        self.arrived.notify_all();
    }

    /// The ranks that are gone, in their order.
    pub fn all_gone(&self) -> Vec<Departure> {
        self.lock().gone.values().cloned().collect()
    }

    /// Where rank `from` says that it stands.
    pub fn put_standing(&self, from: usize, standing: Standing) {
        self.lock().standings.insert(from, standing);
        self.arrived.notify_all();
    }

    /// The next message of rank `from` within a group.
    pub fn take(&self, from: usize, group: u64, patience: Duration) -> Result<Message, Absence> {
        self.wait_for(from, patience, |state| state.queues.get_mut(&(from, group)).and_then(VecDeque::pop_front))
    }

    /// What rank `from` answered when asked where it stands.
    pub fn take_standing(&self, from: usize, patience: Duration) -> Result<Standing, Absence> {
        self.wait_for(from, patience, |state| state.standings.remove(&from))
    }

    fn wait_for<T>(&self, from: usize, patience: Duration, mut take: impl FnMut(&mut State) -> Option<T>) -> Result<T, Absence> {
        let end = Instant::now() + patience;
        let mut state = self.lock();
        loop {
            if let Some(found) = take(&mut state) {
                return Ok(found);
            }
            if let Some(departure) = state.gone.get(&from) {
                return Err(Absence::Gone(departure.cause.clone()));
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Absence::Silent);
            }
            state = self.arrived.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
