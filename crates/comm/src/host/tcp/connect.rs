//! Links every pair of ranks: each rank connects to those below it and accepts those above it, both at once.

use super::door::Door;
use super::rendezvous::Table;
use super::wire::{Deadline, Pack, Unpack, fetch, post};
use crate::{Error, Result};
use std::{
    io,
    net::{SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    time::Duration,
};

/// The streams to all other ranks, by rank.
pub(super) fn all(rank: usize, table: &Table, listener: TcpListener, deadline: Deadline) -> Result<Vec<Option<TcpStream>>> {
    let size = table.addresses.len();
    std::thread::scope(|scope| {
        let above = scope.spawn(move || accept(rank, size, table.session, listener, deadline));
        let below = table.addresses[..rank].iter().enumerate().map(|(to, address)| {
            connect(rank, *address, table.session, deadline)
                .map(Some)
                .map_err(|e| Error::Transport(format!("rank {rank} cannot reach rank {to} at {address}: {e}. See whether a firewall stands between them, or announce another address")))
        });
        let below = below.collect::<Result<Vec<_>>>();
        // A thread that panicked has said so itself.
        let above = above.join().unwrap_or_else(|_| Err(Error::Transport(format!("rank {rank}: the thread that accepts ranks panicked"))));
        Ok(below?.into_iter().chain([None]).chain(above?).collect())
    })
}

/// Says who calls, and waits to be taken in.
fn connect(rank: usize, to: SocketAddr, session: u64, deadline: Deadline) -> io::Result<TcpStream> {
    loop {
        let limit = deadline.left().clamp(Duration::from_millis(1), Duration::from_secs(5));
        match TcpStream::connect_timeout(&to, limit) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                post(&stream, &Pack::default().num(session).num(rank as u64).0, deadline)?;
                fetch(&stream, deadline)?;
                return Ok(stream);
            }
            // A full queue of connections shows as a time-out; a listener is there before its address is told.
            Err(e) if deadline.passed() || e.kind() != io::ErrorKind::TimedOut => return Err(e),
            Err(_) => {}
        }
    }
}

fn accept(rank: usize, size: usize, session: u64, listener: TcpListener, deadline: Deadline) -> Result<Vec<Option<TcpStream>>> {
    let broken = |e: io::Error| Error::Transport(format!("rank {rank}: accepting ranks: {e}"));
    let greet = move |stream: &TcpStream, limit: Deadline| {
        let body = fetch(stream, limit)?;
        let mut x = Unpack(&body);
        match (x.num(), x.size()) {
            (Some(of), Some(from)) if of == session && from > rank && from < size => {
                post(stream, &[], limit)?;
                Ok(from)
            }
            _ => Err(io::Error::new(io::ErrorKind::PermissionDenied, "a rank of another start")),
        }
    };
    let mut door = Door::new(listener, Arc::new(greet)).map_err(broken)?;
    let mut streams: Vec<Option<TcpStream>> = (rank + 1..size).map(|_| None).collect();
    while streams.iter().any(Option::is_none) {
        if deadline.passed() {
            let missing: Vec<usize> = (rank + 1..size).filter(|r| streams[r - rank - 1].is_none()).collect();
            return Err(Error::Transport(format!("ranks {missing:?} did not link to rank {rank} in time{}", door.strangers())));
        }
        if let Some((from, stream)) = door.next().map_err(broken)? {
            streams[from - rank - 1] = Some(stream);
        }
    }
    Ok(streams)
}
