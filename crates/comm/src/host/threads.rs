//! Ranks that are threads of one process: for tests, and to prove layouts on one machine.

use super::mailbox::{Absence, Departure, Header, Mailbox};
use super::{Endpoint, HostWorld, Link};
use crate::{Recorder, Standing};
use std::{sync::Arc, time::Duration};

/// The worlds of `size` ranks, one for each thread. A rank may be silent for `patience`; one that drops its world is gone.
pub fn threads(size: usize, patience: Duration) -> Vec<HostWorld> {
    let all: Arc<Vec<Rank>> = Arc::new((0..size).map(|_| Rank::default()).collect());
    (0..size)
        .map(|rank| {
            let link = Box::new(ThreadLink { rank, all: all.clone() });
            let (mailbox, recorder) = (all[rank].mailbox.clone(), all[rank].recorder.clone());
            HostWorld::new(Endpoint::new(rank, size, mailbox, recorder, link, patience))
        })
        .collect()
}

/// What others reach of a rank.
#[derive(Default)]
struct Rank {
    mailbox: Arc<Mailbox>,
    recorder: Recorder,
}

struct ThreadLink {
    rank: usize,
    all: Arc<Vec<Rank>>,
}

impl Link for ThreadLink {
    fn send(&self, to: usize, group: u64, header: Header, body: Vec<u8>) -> Result<(), Absence> {
        self.all[to].mailbox.put(self.rank, group, header, body);
        Ok(())
    }

    fn standing(&self, of: usize, _: Duration) -> Result<Standing, Absence> {
        Ok(self.all[of].recorder.standing())
    }

    fn close(&self, cause: Option<&str>) {
        for rank in self.all.iter() {
            rank.mailbox.gone(Departure::farewell(self.rank, cause, "its thread ended"));
        }
    }
}
