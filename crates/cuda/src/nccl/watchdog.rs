//! Looks after the operations under way: NCCL neither notices a rank that hangs nor, within a host, one that was killed.

use super::communicator::Communicator;
use super::failure::Failure;
use super::lane::{Flight, Lane};
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use temper_comm::{Departure, Entry, Error, HostWorld, Operation, Recorder, State};

/// How often it looks; the recorder knows the end of an operation as exactly.
const TICK: Duration = Duration::from_millis(20);
/// So long after the end of a rank its operations may still land.
const GRACE: Duration = Duration::from_secs(1);

struct Shared {
    host: HostWorld,
    failure: Arc<Failure>,
    watched: Mutex<Watched>,
    stop: Mutex<bool>,
    wake: Condvar,
}

#[derive(Default)]
struct Watched {
    lanes: Vec<Weak<Lane>>,
    communicators: Vec<Weak<Communicator>>,
}

/// The watchdog of a world. Ends with its last group.
pub(super) struct Watchdog {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts to look after the world that `root` spans.
    pub fn start(host: HostWorld, root: &Arc<Communicator>) -> std::io::Result<Watchdog> {
        let watched = Mutex::new(Watched { lanes: vec![], communicators: vec![Arc::downgrade(root)] });
        let shared = Arc::new(Shared { host, failure: Arc::default(), watched, stop: Mutex::default(), wake: Condvar::new() });
        let inner = shared.clone();
        let thread = std::thread::Builder::new().name("temper-watchdog".into()).spawn(move || inner.run())?;
        Ok(Watchdog { shared, thread: Some(thread) })
    }

    /// The first failure.
    pub fn failure(&self) -> &Arc<Failure> {
        &self.shared.failure
    }

    /// Where operations are recorded.
    pub fn recorder(&self) -> &Recorder {
        self.shared.host.recorder()
    }

    /// Looks after a group too.
    pub fn look_after(&self, lane: &Arc<Lane>) {
        let mut watched = self.shared.watched();
        watched.lanes.push(Arc::downgrade(lane));
        watched.communicators.push(Arc::downgrade(&lane.communicator));
    }

    /// Ends everything because of a failure; the communicators are aborted a moment later.
    pub fn fail(&self, error: Error) {
        self.shared.fail(error);
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        *self.shared.stop.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.shared.wake.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic has been printed
        }
    }
}

impl Shared {
    fn watched(&self) -> MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, error: Error) {
        let text = error.to_string();
        if self.failure.set(error) {
            tracing::error!("{text}");
            self.host.give_up(&text);
        }
    }

    fn run(&self) {
        let mut gone_since = HashMap::new();
        loop {
            {
                let stop = self.stop.lock().unwrap_or_else(PoisonError::into_inner);
                let (stop, _) = self.wake.wait_timeout_while(stop, TICK, |stop| !*stop).unwrap_or_else(PoisonError::into_inner);
                if *stop {
                    return;
                }
            }
            if self.failure.check().is_err() {
                self.abort();
                continue;
            }
            // One that left in order may have done its part of what is still under way here.
            let gone: Vec<Departure> = self.host.gone().into_iter().filter(|gone| !gone.orderly).collect();
            for departure in &gone {
                gone_since.entry(departure.rank).or_insert_with(Instant::now);
            }
            let lanes: Vec<Arc<Lane>> = {
                let mut watched = self.watched();
                watched.lanes.retain(|lane| lane.strong_count() > 0);
                watched.lanes.iter().filter_map(Weak::upgrade).collect()
            };
            if let Some(error) = lanes.iter().find_map(|lane| self.verdict(lane, &gone, &gone_since)) {
                self.fail(error);
            }
        }
    }

    fn abort(&self) {
        let all: Vec<Arc<Communicator>> = self.watched().communicators.drain(..).filter_map(|c| c.upgrade()).collect();
        // All at once: the work of one may stand behind that of another.
        std::thread::scope(|scope| all.iter().for_each(|communicator| drop(scope.spawn(|| communicator.abort()))));
    }

    /// What is wrong with a group's oldest operation, if anything is.
    fn verdict(&self, lane: &Lane, gone: &[Departure], gone_since: &HashMap<usize, Instant>) -> Option<Error> {
        let flight = match lane.oldest() {
            Ok(flight) => flight?,
            Err(e) => return Some(Error::Transport(format!("rank {}, group {}: {e}", lane.own, lane.name))),
        };
        let place = || lane.place(flight.operation, flight.number);
        let concerned = |rank: usize| flight.peer.map_or(lane.members.contains(&rank), |peer| peer == rank);
        let long_gone = |rank: &usize| gone_since.get(rank).is_some_and(|since| since.elapsed() > GRACE);
        if let Some(departure) = gone.iter().find(|gone| concerned(gone.rank) && long_gone(&gone.rank)) {
            return Some(Error::Lost { place: place(), from: departure.rank, cause: departure.cause.clone() });
        }
        if let Some(text) = lane.communicator.asynchronous_error() {
            return Some(Error::Call { place: place(), what: format!("NCCL reports: {text}") });
        }
        let after = flight.began.elapsed();
        if after < self.host.patience() {
            return None;
        }
        let (from, found) = self.blame(lane, &flight);
        Some(Error::Timeout { place: place(), from, after, found })
    }

    /// The rank that a late operation waits for, and what that rank does instead.
    fn blame(&self, lane: &Lane, flight: &Flight) -> (usize, String) {
        let others: Vec<usize> = match flight.peer {
            Some(peer) => vec![peer],
            None => lane.members.iter().copied().filter(|rank| *rank != lane.own).collect(),
        };
        for rank in &others {
            match self.host.standing(*rank) {
                None => return (*rank, "it does not answer: its process is gone or stopped, or its host is out of reach".into()),
                Some(standing) if !standing.running.iter().any(|entry| meets(entry, flight, lane)) => return (*rank, standing.to_string()),
                Some(_) => {}
            }
        }
        let rank = others.first().copied().unwrap_or(lane.own);
        (rank, "all ranks of the group are in this operation, so a GPU or the link between GPUs stands still, or one of them is in it behind other work".into())
    }
}

/// Whether another rank's operation is the other side of ours.
fn meets(entry: &Entry, flight: &Flight, lane: &Lane) -> bool {
    let other_side = match flight.operation {
        Operation::Send => Operation::Recv,
        Operation::Recv => Operation::Send,
        operation => operation,
    };
    let peer_is_us = flight.peer.is_none() || entry.peer == Some(lane.own);
    entry.state == State::Running
        && *entry.group == *lane.name
        && entry.operation == other_side
        && entry.number == flight.number
        && peer_is_us
}
