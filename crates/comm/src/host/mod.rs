//! Communication between host memories: collectives made of messages, over any [`Link`] that carries them.
//!
//! A message reaches the [`Mailbox`] of its rank and waits there under (sender, group). Sending never waits for the receiver, so no
//! order of operations can lock ranks that call the same ones.

mod bytes;
mod collectives;
mod mailbox;
mod threads;

pub use threads::threads;

use crate::{Comm, Error, Result, Solo, World};
use collectives::HostGroup;
use mailbox::{Header, Mailbox};
use std::{sync::Arc, time::Duration};

/// Carries messages to other ranks of the job.
pub(crate) trait Link: Send + Sync {
    /// Hands a message over. Does not wait for the receiver.
    fn send(&self, to: usize, group: u64, header: Header, body: Vec<u8>) -> std::result::Result<(), String>;
    /// Tells the others that this rank leaves.
    fn close(&self);
}

/// One rank's end of the links to all others.
pub(crate) struct Endpoint {
    pub rank: usize,
    pub size: usize,
    pub mailbox: Arc<Mailbox>,
    pub link: Box<dyn Link>,
    /// How long a rank may stay silent.
    pub patience: Duration,
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.link.close();
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
