//! Ranks that are threads of one process: for tests, and to prove layouts on one machine.

use super::mailbox::{Header, Mailbox};
use super::{Endpoint, HostWorld, Link};
use std::{sync::Arc, time::Duration};

/// The worlds of `size` ranks, one for each thread. A rank may be silent for `patience`; one that drops its world is gone.
pub fn threads(size: usize, patience: Duration) -> Vec<HostWorld> {
    let all: Arc<Vec<Arc<Mailbox>>> = Arc::new((0..size).map(|_| Arc::default()).collect());
    (0..size)
        .map(|rank| {
            let link = ThreadLink { rank, all: all.clone() };
            HostWorld::new(Endpoint { rank, size, mailbox: all[rank].clone(), link: Box::new(link), patience })
        })
        .collect()
}

struct ThreadLink {
    rank: usize,
    all: Arc<Vec<Arc<Mailbox>>>,
}

impl Link for ThreadLink {
    fn send(&self, to: usize, group: u64, header: Header, body: Vec<u8>) -> Result<(), String> {
        self.all[to].put(self.rank, group, header, body);
        Ok(())
    }

    fn close(&self) {
        for mailbox in self.all.iter() {
            mailbox.gone(self.rank, "its thread ended");
        }
    }
}
