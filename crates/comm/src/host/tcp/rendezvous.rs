//! How ranks find each other: each calls at rank 0's address with its card, rank 0 answers with the addresses of all.
//!
//! The calls stay open until every rank says that it is linked to all others, so that one failure ends the start of all ranks, with
//! one text. Letters, in order: card (rank to 0), table or refusal (0 to rank), linked or failure (rank to 0), go or refusal (0 to rank).

use super::Tcp;
use super::door::Door;
use super::wire::{Deadline, Pack, Unpack, fetch, post};
use crate::{Error, Result};
use std::{
    collections::BTreeMap,
    hash::{BuildHasher, RandomState},
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    sync::Arc,
    time::Duration,
};

/// The other ranks wait so much longer than rank 0, to hear from it who is missing.
const GRACE: Duration = Duration::from_secs(10);
/// How long rank 0 tries to take its port from a run that is just ending.
const TAKE_PORT: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_millis(50);

/// Everyone's addresses, in the order of ranks, and a number that no other start has.
#[derive(Clone)]
pub(super) struct Table {
    pub session: u64,
    pub addresses: Vec<SocketAddr>,
}

/// The open calls, until all ranks are linked.
pub(super) enum Calls {
    /// Rank 0's, by rank.
    Master(BTreeMap<usize, TcpStream>),
    /// Another rank's own.
    Caller(TcpStream),
}

fn transport<T>(what: String) -> Result<T> {
    Err(Error::Transport(what))
}

/// Brings all ranks together. Gives the table, this rank's own listener and the open calls.
pub(super) fn meet(me: &Tcp, deadline: Deadline) -> Result<(Table, TcpListener, Calls)> {
    if me.rank == 0 { receive(me, deadline) } else { call(me, deadline) }
}

/// A refusal starts with 0, everything else with 1.
fn refusal(text: &str) -> Vec<u8> {
    Pack::default().num(0).text(text).0
}

/// What a rank says of itself.
struct Card {
    rank: usize,
    size: usize,
    job: String,
    fingerprint: String,
    address: SocketAddr,
}

impl Card {
    fn pack(&self) -> Vec<u8> {
        let pack = Pack::default().num(self.rank as u64).num(self.size as u64);
        pack.text(&self.job).text(&self.fingerprint).text(&self.address.to_string()).0
    }

    fn unpack(body: &[u8]) -> Option<Card> {
        let mut x = Unpack(body);
        let (rank, size) = (x.size()?, x.size()?);
        Some(Card { rank, size, job: x.text()?, fingerprint: x.text()?, address: x.text()?.parse().ok()? })
    }
}

// Rank 0.

/// Opens the master address. Where it is not an address of this host itself (a service in front of it), all addresses.
fn listen(master: &str, deadline: Deadline) -> Result<TcpListener> {
    let give_up = Deadline::after(TAKE_PORT.min(deadline.left()));
    loop {
        let error = match resolve(master).and_then(TcpListener::bind) {
            Ok(listener) => return Ok(listener),
            Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable => {
                let any = resolve(master).map(|a| SocketAddr::new(unspecified(a.ip()), a.port()));
                match any.and_then(TcpListener::bind) {
                    Ok(listener) => return Ok(listener),
                    Err(e) => e,
                }
            }
            Err(e) => e,
        };
        if give_up.passed() {
            return transport(format!(
                "rank 0 cannot listen on the master address {master}: {error}. Another program may hold the port: choose another MASTER_PORT"
            ));
        }
        std::thread::sleep(RETRY);
    }
}

fn resolve(master: &str) -> io::Result<SocketAddr> {
    let found: Vec<SocketAddr> = master.to_socket_addrs()?.collect();
    let v4 = found.iter().find(|a| a.is_ipv4()).or(found.first()).copied();
    v4.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the name has no address"))
}

fn unspecified(like: IpAddr) -> IpAddr {
    if like.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
}

/// Reads a caller's card. One of another job is told so and turned away.
fn greet(stream: &TcpStream, job: &str, limit: Deadline) -> io::Result<Card> {
    let card = Card::unpack(&fetch(stream, limit)?).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "an unreadable card"))?;
    if card.job == job {
        return Ok(card);
    }
    let what = format!("rank {} of another job ({:?}; here is {job:?})", card.rank, card.job);
    post(stream, &refusal(&format!("the master address serves another job: it turned away {what}")), limit)?;
    Err(io::Error::new(io::ErrorKind::PermissionDenied, what))
}

fn receive(me: &Tcp, deadline: Deadline) -> Result<(Table, TcpListener, Calls)> {
    let listener = listen(me.master, deadline)?;
    let broken = |e: io::Error| Error::Transport(format!("rank 0 at the master address {}: {e}", me.master));
    let own = TcpListener::bind(SocketAddr::new(listener.local_addr().map_err(broken)?.ip(), 0)).map_err(broken)?;
    let own_address = own.local_addr().map_err(broken)?;
    let job = me.job.to_string();
    let mut door = Door::new(listener, Arc::new(move |stream: &TcpStream, limit| greet(stream, &job, limit))).map_err(broken)?;
    let mut calls: BTreeMap<usize, (Card, TcpStream)> = BTreeMap::new();
    let refused = loop {
        if calls.len() + 1 == me.size {
            break check_alike(me, &calls);
        }
        if deadline.passed() {
            break Some(missing(me, &calls) + &door.strangers());
        }
        if let Some((card, stream)) = door.next().map_err(broken)?
            && let Some(refused) = enrol(me, &mut calls, card, stream)
        {
            break Some(refused);
        }
        if let Some(rank) = calls.iter().find(|(_, (_, stream))| hung_up(stream)).map(|(rank, _)| *rank) {
            break Some(format!("rank {rank} ended while the ranks were being brought together: its own log has the reason"));
        }
    };
    if let Some(text) = refused {
        refuse_all(calls.values().map(|(_, stream)| stream), &text);
        return transport(text);
    }
    let addresses = std::iter::once(me.announce.map_or(own_address, |ip| SocketAddr::new(ip, own_address.port())));
    let addresses = addresses.chain(calls.values().map(|(card, _)| card.address)).collect();
    // Keys of a RandomState come from the system's random numbers.
    let table = Table { session: RandomState::new().hash_one(me.job), addresses };
    let mut letter = Pack::default().num(1).num(table.session).num(u64::from(me.announce.is_some()));
    for address in &table.addresses {
        letter = letter.text(&address.to_string());
    }
    for (rank, (_, stream)) in &calls {
        if let Err(e) = post(stream, &letter.0, deadline) {
            let text = format!("rank {rank} ended while the ranks were being brought together: {e}");
            refuse_all(calls.values().map(|(_, stream)| stream), &text);
            return transport(text);
        }
    }
    Ok((table, own, Calls::Master(calls.into_iter().map(|(rank, (_, stream))| (rank, stream)).collect())))
}

/// Takes a caller in, or says why the job cannot start.
fn enrol(me: &Tcp, calls: &mut BTreeMap<usize, (Card, TcpStream)>, card: Card, stream: TcpStream) -> Option<String> {
    let Card { rank, size, address, .. } = card;
    let refused = match calls.get(&rank) {
        _ if size != me.size => format!("rank {rank} ({address}) was started for {size} ranks, rank 0 for {}", me.size),
        _ if rank >= me.size => format!("rank {rank} ({address}) called, but the job has ranks 0 to {}", me.size - 1),
        _ if rank == 0 => format!("two processes claim rank 0: the one at the master address and one at {address}"),
        Some((other, _)) => format!("two processes claim rank {rank}: one at {} and one at {address}", other.address),
        None => {
            calls.insert(rank, (card, stream));
            return None;
        }
    };
    refuse_all(std::iter::once(&stream), &refused);
    Some(refused)
}

/// All ranks must run the same, and reach each other's addresses.
fn check_alike(me: &Tcp, calls: &BTreeMap<usize, (Card, TcpStream)>) -> Option<String> {
    let mut runs: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    runs.entry(me.fingerprint).or_default().push(0);
    for (rank, (card, _)) in calls {
        runs.entry(&card.fingerprint).or_default().push(*rank);
    }
    if runs.len() > 1 {
        let list: Vec<String> = runs.iter().map(|(what, ranks)| format!("ranks {ranks:?} run {what:?}")).collect();
        return Some(format!("the ranks do not run the same: {}. Give all the same program and configuration", list.join(", ")));
    }
    let (near, far): (Vec<usize>, Vec<usize>) = calls.keys().partition(|rank| calls[rank].0.address.ip().is_loopback());
    if !near.is_empty() && !far.is_empty() {
        let example = &calls[&near[0]].0.address;
        return Some(format!(
            "ranks {near:?} have an address that only their own host reaches ({example}), ranks {far:?} are on other hosts. Set MASTER_ADDR to an \
             address of rank 0's host that all hosts reach (not localhost, nor a name that /etc/hosts maps to 127.0.1.1)"
        ));
    }
    None
}

fn missing(me: &Tcp, calls: &BTreeMap<usize, (Card, TcpStream)>) -> String {
    let missing: Vec<usize> = (1..me.size).filter(|rank| !calls.contains_key(rank)).collect();
    let after = me.patience.as_secs_f64();
    let alike = check_alike(me, calls).map(|text| format!(" Besides, {text}.")).unwrap_or_default();
    format!(
        "ranks {missing:?} of {} did not call at the master address {} within {after:.0} s: see whether they were started, and whether their hosts reach it.{alike}",
        me.size, me.master
    )
}

/// Whether a caller that should be waiting has gone.
fn hung_up(stream: &TcpStream) -> bool {
    if stream.set_nonblocking(true).is_err() {
        return true;
    }
    let peeked = stream.peek(&mut [0]);
    let gone = match peeked {
        Ok(n) => n == 0,
        Err(e) => !matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
    };
    gone | stream.set_nonblocking(false).is_err()
}

fn refuse_all<'a>(streams: impl Iterator<Item = &'a TcpStream>, text: &str) {
    for stream in streams {
        let _ = post(stream, &refusal(text), Deadline::after(Duration::from_secs(1))); // who is gone needs no telling
    }
}

// The other ranks.

/// Connects to rank 0, which may start later, or get its name later.
fn dial(me: &Tcp, deadline: Deadline) -> Result<TcpStream> {
    loop {
        let limit = deadline.left().clamp(Duration::from_millis(1), Duration::from_secs(5));
        let error = match resolve(me.master).and_then(|address| TcpStream::connect_timeout(&address, limit)) {
            Ok(stream) => return Ok(stream),
            Err(e) => e,
        };
        if deadline.passed() {
            return transport(format!(
                "rank {} did not reach rank 0 at the master address {} within {:.0} s: {error}. See whether rank 0 was started, and whether this host reaches it",
                me.rank,
                me.master,
                me.patience.as_secs_f64()
            ));
        }
        std::thread::sleep(RETRY);
    }
}

fn call(me: &Tcp, deadline: Deadline) -> Result<(Table, TcpListener, Calls)> {
    let stream = dial(me, deadline)?;
    let broken = |e: io::Error| Error::Transport(format!("rank {} at rank 0's master address {}: {e}", me.rank, me.master));
    stream.set_nodelay(true).map_err(broken)?;
    let here = stream.local_addr().map_err(broken)?.ip();
    let own = TcpListener::bind(SocketAddr::new(me.announce.map_or(here, unspecified), 0)).map_err(broken)?;
    let address = SocketAddr::new(me.announce.unwrap_or(here), own.local_addr().map_err(broken)?.port());
    let card = Card { rank: me.rank, size: me.size, job: me.job.into(), fingerprint: me.fingerprint.into(), address };
    post(&stream, &card.pack(), deadline).map_err(broken)?;
    let answer = answer(&stream, Deadline::after(deadline.left() + GRACE)).map_err(|e| in_words(me, e))?;
    let there = stream.peer_addr().map_err(broken)?.ip();
    let table = unpack_table(&answer, me.size, there)
        .ok_or_else(|| Error::Transport(format!("rank 0 at {} sent an unreadable table", me.master)))?;
    Ok((table, own, Calls::Caller(stream)))
}

/// Why rank 0 gave no answer.
enum NoAnswer {
    Refused(String),
    Broken(io::Error),
}

fn in_words(me: &Tcp, e: NoAnswer) -> Error {
    Error::Transport(match e {
        NoAnswer::Refused(text) => text,
        NoAnswer::Broken(e) => format!(
            "rank {} lost rank 0 at the master address {} while the ranks were being brought together: {e}. Rank 0's log has the reason",
            me.rank, me.master
        ),
    })
}

/// Rank 0's answer, behind its first number.
fn answer(stream: &TcpStream, deadline: Deadline) -> std::result::Result<Vec<u8>, NoAnswer> {
    let body = fetch(stream, deadline).map_err(NoAnswer::Broken)?;
    let mut x = Unpack(&body);
    match x.num() {
        Some(0) => Err(NoAnswer::Refused(x.text().unwrap_or_default())),
        _ => Ok(x.0.to_vec()),
    }
}

/// The table as rank 0 sent it; rank 0 itself is reached where it was `there`, unless it announced another address.
fn unpack_table(body: &[u8], size: usize, there: IpAddr) -> Option<Table> {
    let mut x = Unpack(body);
    let (session, announced) = (x.num()?, x.num()? == 1);
    let mut addresses: Vec<SocketAddr> = (0..size).map(|_| x.text()?.parse().ok()).collect::<Option<_>>()?;
    if !announced {
        addresses.first_mut()?.set_ip(there);
    }
    Some(Table { session, addresses })
}

impl Calls {
    /// Ends the start: waits until all ranks are linked, or passes on the failure of one of them to all.
    pub fn settle(self, me: &Tcp, linked: Result<()>, deadline: Deadline) -> Result<()> {
        match self {
            Calls::Master(calls) => {
                let mut outcome = linked;
                for (rank, stream) in &calls {
                    if outcome.is_err() {
                        break;
                    }
                    outcome = match answer(stream, Deadline::after(deadline.left() + GRACE)) {
                        Ok(_) => Ok(()),
                        Err(NoAnswer::Refused(text)) => transport(text),
                        Err(NoAnswer::Broken(e)) => transport(format!("rank {rank} ended while the ranks were being linked: {e}")),
                    };
                }
                let letter = outcome.as_ref().err().map_or(Pack::default().num(1).0, |e| refusal(&e.to_string()));
                for stream in calls.values() {
                    let _ = post(stream, &letter, Deadline::after(Duration::from_secs(1))); // its loss shows on the links
                }
                outcome
            }
            Calls::Caller(stream) => {
                let letter = linked.as_ref().err().map_or(Pack::default().num(1).0, |e| refusal(&e.to_string()));
                let limit = Deadline::after(deadline.left() + 2 * GRACE);
                let told = post(&stream, &letter, limit).map_err(NoAnswer::Broken);
                let answered = told.and_then(|()| answer(&stream, limit)).map(|_| ());
                linked.and(answered.map_err(|e| in_words(me, e)))
            }
        }
    }
}
