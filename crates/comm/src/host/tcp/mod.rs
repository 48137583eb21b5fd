//! Ranks that are processes on one or several hosts, linked by TCP: CPU jobs, and the control channel of GPU jobs.
//!
//! Path of a start: [`rendezvous`] brings the ranks together at rank 0's address, [`connect`] links every pair, [`peer`] runs each
//! link with one thread that sends and one that receives. All pairs are linked at once, not when first needed: a host that another
//! cannot reach is found before training, and a rank that dies is noticed by all others at once, whatever they wait for. The price,
//! two small threads and one socket a peer, is fine up to some hundreds of ranks; data of larger jobs goes through NCCL anyway.
//!
//! There is no secrecy and no proof of identity: the job's name and a number of the start keep out strangers and stale workers, not
//! attackers. Ranks belong on a network that its users trust, as with NCCL and Gloo.

mod connect;
mod door;
mod peer;
mod rendezvous;
mod wire;

use super::mailbox::{Absence, Header, Mailbox};
use super::{Endpoint, HostWorld, Link};
use crate::{Error, Recorder, Result, Standing};
use peer::Peer;
use std::{net::IpAddr, sync::Arc, time::Duration};
use wire::{Deadline, Frame};

/// How long a rank that leaves waits for its last messages to be on their way.
const FLUSH: Duration = Duration::from_secs(5);

/// How a rank joins the others.
#[derive(Clone, Copy, Debug)]
pub struct Tcp<'a> {
    /// This rank, from 0.
    pub rank: usize,
    /// Ranks of the job.
    pub size: usize,
    /// Where rank 0 listens, `host:port`, as the other ranks reach it.
    pub master: &'a str,
    /// A name that all ranks of this start have in common and no other start has, an earlier attempt of the same job included.
    pub job: &'a str,
    /// What the ranks run, in words (hashes of program and configuration): it must be the same on all.
    pub fingerprint: &'a str,
    /// Under which address the others reach this rank. `None`: that of its connection to rank 0.
    pub announce: Option<IpAddr>,
    /// How long a rank may stay silent, at the start and later.
    pub patience: Duration,
}

/// Joins the ranks of a job. Returns when all of them are linked.
///
/// # Errors
/// When a rank does not come, is claimed twice, was started for another number of ranks, runs something else, or cannot be reached
/// by another: one text, the same on all ranks, that names the ranks.
pub fn tcp(me: &Tcp) -> Result<HostWorld> {
    if me.rank >= me.size {
        return Err(Error::Transport(format!("rank {} of {} ranks: ranks count from 0", me.rank, me.size)));
    }
    let mailbox = Arc::<Mailbox>::default();
    let recorder = Recorder::default();
    let mut peers = vec![];
    if me.size > 1 {
        let deadline = Deadline::after(me.patience);
        let (table, listener, calls) = rendezvous::meet(me, deadline)?;
        let linked = connect::all(me.rank, &table, listener, deadline);
        let (streams, linked) = linked.map_or_else(|e| (vec![], Err(e)), |streams| (streams, Ok(())));
        calls.settle(me, linked, deadline)?;
        for (rank, stream) in streams.into_iter().enumerate() {
            let peer = stream.map(|stream| Peer::start(rank, stream, &mailbox, &recorder)).transpose();
            peers.push(peer.map_err(|e| Error::Transport(format!("rank {}: a link to rank {rank}: {e}", me.rank)))?);
        }
    }
    let link = Box::new(TcpLink { peers, mailbox: mailbox.clone(), patience: me.patience });
    Ok(HostWorld::new(Endpoint::new(me.rank, me.size, mailbox, recorder, link, me.patience)))
}

struct TcpLink {
    /// By rank; none for this one.
    peers: Vec<Option<Peer>>,
    mailbox: Arc<Mailbox>,
    patience: Duration,
}

impl TcpLink {
    fn peer(&self, rank: usize) -> std::result::Result<&Peer, Absence> {
        let found = self.peers.get(rank).and_then(Option::as_ref);
        found.ok_or_else(|| Absence::Gone("there is no link to it".into()))
    }
}

impl Link for TcpLink {
    fn send(&self, to: usize, group: u64, header: Header, body: Vec<u8>) -> std::result::Result<(), Absence> {
        self.peer(to)?.send(Frame::Message(group, header), body, self.patience)
    }

    fn standing(&self, of: usize, patience: Duration) -> std::result::Result<Standing, Absence> {
        self.peer(of)?.send(Frame::Ask, vec![], patience)?;
        self.mailbox.take_standing(of, patience)
    }

    fn close(&self, cause: Option<&str>) {
        let deadline = Deadline::after(FLUSH);
        for peer in self.peers.iter().flatten() {
            peer.leave(cause.unwrap_or_default());
        }
        for peer in self.peers.iter().flatten() {
            peer.flush(deadline);
        }
    }
}
