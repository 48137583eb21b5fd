//! Communication between host memories: collectives made of messages, over any [`Link`] that carries them.
//!
//! A message reaches the [`Mailbox`] of its rank and waits there under (sender, group). Sending never waits for the receiver's
//! program, so no order of operations can lock ranks that call the same ones.
//!
//! What a mailbox holds is bounded by how far one rank can be ahead of another: one operation of each group for those in which
//! everybody waits for everybody, and whatever the program sends (or broadcasts) without ever being answered. A bound of our own
//! there would have to stop a sender, and could lock ranks against each other.

mod bytes;
mod collectives;
mod mailbox;
mod tcp;
mod threads;

pub use mailbox::Departure;
pub use tcp::{Tcp, tcp};
pub use threads::threads;

use crate::{Comm, Error, Recorder, Result, Solo, Standing, World};
use collectives::HostGroup;
use mailbox::{Absence, Header, Mailbox};
use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

/// How long a rank is waited for that is asked where it stands.
const ANSWER: Duration = Duration::from_secs(2);

/// Carries messages to other ranks of the job.
pub(crate) trait Link: Send + Sync {
    /// Hands a message over. Does not wait for the receiver's program.
    fn send(&self, to: usize, group: u64, header: Header, body: Vec<u8>) -> std::result::Result<(), Absence>;
    /// Asks another rank where it stands.
    fn standing(&self, of: usize, patience: Duration) -> std::result::Result<Standing, Absence>;
    /// Tells the others that this rank leaves: in order, or because of `cause`.
    fn close(&self, cause: Option<&str>);
}

/// One rank's end of the links to all others.
pub(crate) struct Endpoint {
    pub rank: usize,
    pub size: usize,
    pub mailbox: Arc<Mailbox>,
    pub recorder: Recorder,
    pub link: Box<dyn Link>,
    /// How long a rank may stay silent.
    pub patience: Duration,
    failure: OnceLock<String>,
}

impl Endpoint {
    pub fn new(rank: usize, size: usize, mailbox: Arc<Mailbox>, recorder: Recorder, link: Box<dyn Link>, patience: Duration) -> Endpoint {
        Endpoint { rank, size, mailbox, recorder, link, patience, failure: OnceLock::new() }
    }

    /// What rank `of` does, in words that follow its name.
    pub fn standing_of(&self, of: usize) -> String {
        match self.link.standing(of, ANSWER) {
            Ok(standing) => standing.to_string(),
            Err(Absence::Gone(cause)) => format!("it is gone: {cause}"),
            Err(Absence::Silent) => "it does not answer: its process is stopped, or its host is out of reach".into(),
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let panicked = std::thread::panicking().then_some("it panicked");
        self.link.close(self.failure.get().map(String::as_str).or(panicked));
    }
}

/// The ranks of a job that exchange through host memory.
#[derive(Clone)]
pub struct HostWorld {
    endpoint: Arc<Endpoint>,
}

impl HostWorld {
    pub(crate) fn new(endpoint: Endpoint) -> HostWorld {
        HostWorld { endpoint: Arc::new(endpoint) }
    }

    /// How long a rank may stay silent.
    pub fn patience(&self) -> Duration {
        self.endpoint.patience
    }

    /// This rank's operations. Another transport that uses this world for control writes into it too.
    pub fn recorder(&self) -> &Recorder {
        &self.endpoint.recorder
    }

    /// Asks rank `of` of the job where it stands; this works while its own thread hangs. `None`: it gave no answer within two
    /// seconds, or is gone.
    pub fn standing(&self, of: usize) -> Option<Standing> {
        match of {
            _ if of == self.endpoint.rank => Some(self.recorder().standing()),
            _ if of >= self.endpoint.size => None,
            _ => self.endpoint.link.standing(of, ANSWER).ok(),
        }
    }

    /// The ranks that are known to be gone.
    pub fn gone(&self) -> Vec<Departure> {
        self.endpoint.mailbox.all_gone()
    }

    /// Says why this rank is about to leave: the others are told when its world is dropped. The first cause counts.
    pub fn give_up(&self, cause: &str) {
        let _ = self.endpoint.failure.set(cause.to_string());
    }
}

impl World for HostWorld {
    fn rank(&self) -> usize {
        self.endpoint.rank
    }

    fn size(&self) -> usize {
        self.endpoint.size
    }

    fn group(&self, name: &str, members: &[usize]) -> Result<Arc<dyn Comm>> {
        let call = |what: String| Error::Call { place: format!("group {name} of ranks {members:?}"), what };
        if let Some(outside) = members.iter().find(|r| **r >= self.size()) {
            return Err(call(format!("there is no rank {outside} among {}", self.size())));
        }
        let rank = members.iter().position(|r| *r == self.rank()).ok_or_else(|| call(format!("rank {} is not in it", self.rank())))?;
        if members.len() == 1 {
            return Ok(Arc::new(Solo));
        }
        Ok(Arc::new(HostGroup::new(self.endpoint.clone(), name, members.to_vec(), rank)))
    }
}
