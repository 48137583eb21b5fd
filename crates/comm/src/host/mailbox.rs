//! Where messages wait until they are asked for.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// What an operation is, in a message's header: ranks that do different things find out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Broadcast,
    Point,
    Barrier,
}

impl Kind {

    pub fn name(self) -> &'static str {
        match self {
            Kind::AllReduce => "all_reduce",
            Kind::AllGather => "all_gather",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::AllToAll => "all_to_all",
            Kind::Broadcast => "broadcast",
            Kind::Point => "send/recv",
            Kind::Barrier => "barrier",
        }
    }
}

/// What a message belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub kind: Kind,
    /// Collectives count from 0 in each group; messages between two ranks have 0.
    pub number: u64,
}

/// Why nothing came.
pub(crate) enum Nothing {
    Timeout,
    Gone(String),
}

#[derive(Default)]
struct State {
    queues: HashMap<(usize, u64), VecDeque<(Header, Vec<u8>)>>,
    gone: HashMap<usize, String>,
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

    /// Nothing more will come from rank `from`; what came before may still be taken.
    pub fn gone(&self, from: usize, cause: &str) {
        self.lock().gone.entry(from).or_insert_with(|| cause.to_string());
        self.arrived.notify_all();
    }

    /// The next message of rank `from` within a group.
    pub fn take(&self, from: usize, group: u64, patience: Duration) -> Result<(Header, Vec<u8>), Nothing> {
        let end = Instant::now() + patience;
        let mut state = self.lock();
        loop {
            if let Some(message) = state.queues.get_mut(&(from, group)).and_then(VecDeque::pop_front) {
                return Ok(message);
            }
            if let Some(cause) = state.gone.get(&from) {
                return Err(Nothing::Gone(cause.clone()));
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Nothing::Timeout);
            }
            state = self.arrived.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
