//! Where messages wait until they are asked for.

use crate::{Operation, Standing};
use std::{
    collections::{HashMap, VecDeque},
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

type Message = (Header, Vec<u8>);

#[derive(Default)]
struct State {
    /// By sender and group.
    queues: HashMap<(usize, u64), VecDeque<Message>>,
    gone: HashMap<usize, String>,
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

    /// Nothing more will come from rank `from`; what came before may still be taken. The first cause counts.
    pub fn gone(&self, from: usize, cause: &str) {
        self.lock().gone.entry(from).or_insert_with(|| cause.to_string());
        self.arrived.notify_all();
    }

    /// The ranks that are gone, and why.
    pub fn all_gone(&self) -> Vec<(usize, String)> {
        let mut all: Vec<_> = self.lock().gone.iter().map(|(rank, cause)| (*rank, cause.clone())).collect();
        all.sort();
        all
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
            if let Some(cause) = state.gone.get(&from) {
                return Err(Absence::Gone(cause.clone()));
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Absence::Silent);
            }
            state = self.arrived.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
