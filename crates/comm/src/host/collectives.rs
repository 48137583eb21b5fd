//! The operations of [`Comm`] made of messages. Every result is put together in the order of ranks, so all ranks get the same bits.
//!
//! Legend: n ranks of the group.

use super::mailbox::{Absence, Header};
use super::{Endpoint, bytes};
use crate::{Comm, Error, Operation, Pending, Reduce, Result, Ticket};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};
use temper_tensor::{View, ViewMut};

/// A group over an endpoint.
pub(crate) struct HostGroup {
    endpoint: Arc<Endpoint>,
    name: Arc<str>,
    /// The same on all members and no other group's.
    id: u64,
    members: Vec<usize>,
    rank: usize,
    collectives: AtomicU64,
    /// Messages sent to and received from each member.
    messages: Vec<[AtomicU64; 2]>,
}

/// One call of an operation.
struct Call<'g> {
    group: &'g HostGroup,
    header: Header,
    place: String,
    ticket: Ticket,
}

impl HostGroup {
    pub fn new(endpoint: Arc<Endpoint>, name: &str, members: Vec<usize>, rank: usize) -> HostGroup {
        // FNV-1a, 64 bit, over name and members.
        let bytes = name.bytes().chain(members.iter().flat_map(|m| (*m as u64).to_le_bytes()));
        let id = bytes.fold(0xcbf2_9ce4_8422_2325, |h: u64, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3));
        let messages = members.iter().map(|_| Default::default()).collect();
        HostGroup { endpoint, name: name.into(), id, members, rank, collectives: AtomicU64::new(0), messages }
    }

    /// A collective begins, on a buffer of `bytes`.
    fn collective(&self, operation: Operation, bytes: usize) -> Call<'_> {
        let number = self.collectives.fetch_add(1, Ordering::Relaxed);
        self.call(operation, number, None, bytes)
    }

    /// A message to or from member `with` begins.
    fn message(&self, operation: Operation, with: usize, bytes: usize) -> Result<Call<'_>> {
        let Some(counts) = self.messages.get(with).filter(|_| with != self.rank) else {
            let place = format!("rank {}, {} of group {} (ranks {:?})", self.endpoint.rank, operation.name(), self.name, self.members);
            return Err(Error::Call { place, what: format!("member {with} is no other member of {}", self.members.len()) });
        };
        let number = counts[usize::from(operation == Operation::Recv)].fetch_add(1, Ordering::Relaxed);
        Ok(self.call(operation, number, Some(self.members[with]), bytes))
    }

    fn call(&self, operation: Operation, number: u64, peer: Option<usize>, bytes: usize) -> Call<'_> {
        let (own, name, members) = (self.endpoint.rank, &self.name, &self.members);
        let place = format!("rank {own}, {} #{number} of group {name} (ranks {members:?})", operation.name());
        let ticket = self.endpoint.recorder.begin(&self.name, operation, number, peer, bytes);
        let on_the_way = if operation == Operation::Recv { Operation::Send } else { operation };
        Call { group: self, header: Header { operation: on_the_way, number }, place, ticket }
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        let (rank, size) = (self.rank, self.members.len());
        (1..size).map(move |i| (rank + i) % size)
    }
}

impl Call<'_> {
    /// The call is over and its buffers may be used.
    fn done<'a>(self) -> Result<Pending<'a>> {
        self.ticket.done();
        Ok(Pending::done())
    }

    fn absent(&self, from: usize, absence: Absence) -> Error {
        let (place, endpoint) = (self.place.clone(), &self.group.endpoint);
        match absence {
            Absence::Silent => Error::Timeout { place, from, after: endpoint.patience, found: endpoint.standing_of(from) },
            Absence::Gone(cause) => Error::Lost { place, from, cause },
        }
    }

    fn fault<T>(&self, what: impl Into<String>) -> Result<T> {
        Err(Error::Call { place: self.place.clone(), what: what.into() })
    }

    fn host<'a>(&self, x: View<'a>) -> Result<&'a [u8]> {
        bytes::of(x).map_or_else(|| self.fault("the buffer lies in device memory"), Ok)
    }

    fn host_mut<'a>(&self, x: ViewMut<'a>) -> Result<&'a mut [u8]> {
        bytes::of_mut(x).map_or_else(|| self.fault("the buffer lies in device memory"), Ok)
    }

    fn send(&self, to: usize, body: &[u8]) -> Result<()> {
        let to = self.group.members[to];
        let sent = self.group.endpoint.link.send(to, self.group.id, self.header, body.to_vec());
        sent.map_err(|absence| self.absent(to, absence))
    }

    fn receive(&self, from: usize, size: usize) -> Result<Vec<u8>> {
        let rank = self.group.members[from];
        let endpoint = &self.group.endpoint;
        let taken = endpoint.mailbox.take(rank, self.group.id, endpoint.patience);
        let (header, body) = taken.map_err(|absence| self.absent(rank, absence))?;
        if header != self.header {
            let found = format!("it is in {} #{}", header.operation.name(), header.number);
            return Err(Error::Mismatch { place: self.place.clone(), from: rank, found });
        }
        if body.len() != size {
            let found = format!("it sent {} bytes, {size} were expected", body.len());
            return Err(Error::Mismatch { place: self.place.clone(), from: rank, found });
        }
        Ok(body)
    }

    /// Adds up (or compares) part `rank` of everyone's `x`, whose elements are divided as `share` says.
    fn reduce_own_part(&self, x: ViewMut, op: Reduce) -> Result<()> {
        let (dtype, n, rank) = (x.dtype(), self.group.members.len(), self.group.rank);
        let (len, size) = (x.numel(), x.dtype().size());
        let x = self.host_mut(x)?;
        let part = |r: usize| {
            let share = bytes::share(len, r, n);
            share.start * size..share.end * size
        };
        for to in self.group.others() {
            self.send(to, &x[part(to)])?;
        }
        let mut parts: Vec<Vec<u8>> = Vec::with_capacity(n);
        for from in 0..n {
            parts.push(if from == rank { x[part(rank)].to_vec() } else { self.receive(from, part(rank).len())? });
        }
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        bytes::reduce(dtype, op, &parts, &mut x[part(rank)]);
        Ok(())
    }

    /// Sends part `rank` of `x` to all and receives theirs.
    fn gather_parts(&self, x: ViewMut) -> Result<()> {
        let n = self.group.members.len();
        let (len, size) = (x.numel(), x.dtype().size());
        let x = self.host_mut(x)?;
        let part = |r: usize| {
            let share = bytes::share(len, r, n);
            share.start * size..share.end * size
        };
        for to in self.group.others() {
            self.send(to, &x[part(self.group.rank)])?;
        }
        for from in self.group.others() {
            let body = self.receive(from, part(from).len())?;
            x[part(from)].copy_from_slice(&body);
        }
        Ok(())
    }

    fn divides(&self, whole: usize, part: usize) -> Result<()> {
        let n = self.group.members.len();
        if whole == part * n { Ok(()) } else { self.fault(format!("{whole} elements are not {n} times {part}")) }
    }
}

/// Bytes of a buffer.
fn len_of(x: View) -> usize {
    x.numel() * x.dtype().size()
}

impl Comm for HostGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn all_reduce<'a>(&self, mut x: ViewMut<'a>, op: Reduce) -> Result<Pending<'a>> {
        let call = self.collective(Operation::AllReduce, len_of(x.as_view()));
        call.reduce_own_part(x.reborrow(), op)?;
        call.gather_parts(x)?;
        call.done()
    }

    fn all_gather<'a>(&self, mut out: ViewMut<'a>, x: View<'a>) -> Result<Pending<'a>> {
        let call = self.collective(Operation::AllGather, len_of(out.as_view()));
        call.divides(out.numel(), x.numel())?;
        if out.dtype() != x.dtype() {
            return call.fault(format!("{} elements into {}", x.dtype(), out.dtype()));
        }
        let own = call.host(x)?;
        let start = self.rank * own.len();
        call.host_mut(out.reborrow())?[start..start + own.len()].copy_from_slice(own);
        call.gather_parts(out)?;
        call.done()
    }

    fn all_gather_in_place<'a>(&self, x: ViewMut<'a>) -> Result<Pending<'a>> {
        let call = self.collective(Operation::AllGather, len_of(x.as_view()));
        call.divides(x.numel(), x.numel() / self.size())?;
        call.gather_parts(x)?;
        call.done()
    }

    fn reduce_scatter<'a>(&self, out: ViewMut<'a>, x: View<'a>) -> Result<Pending<'a>> {
        let call = self.collective(Operation::ReduceScatter, len_of(x));
        call.divides(x.numel(), out.numel())?;
        if out.dtype() != x.dtype() {
            return call.fault(format!("{} elements into {}", x.dtype(), out.dtype()));
        }
        let dtype = x.dtype();
        let (x, out) = (call.host(x)?, call.host_mut(out)?);
        let part = |r: usize| r * out.len()..(r + 1) * out.len();
        for to in self.others() {
            call.send(to, &x[part(to)])?;
        }
        let mut parts: Vec<Vec<u8>> = Vec::with_capacity(self.size());
        for from in 0..self.size() {
            parts.push(if from == self.rank { x[part(from)].to_vec() } else { call.receive(from, out.len())? });
        }
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        bytes::reduce(dtype, Reduce::Sum, &parts, out);
        call.done()
    }

    fn reduce_scatter_in_place<'a>(&self, x: ViewMut<'a>) -> Result<Pending<'a>> {
        let call = self.collective(Operation::ReduceScatter, len_of(x.as_view()));
        call.divides(x.numel(), x.numel() / self.size())?;
        call.reduce_own_part(x, Reduce::Sum)?;
        call.done()
    }

    fn all_to_all<'a>(&self, out: ViewMut<'a>, receive: &[usize], x: View<'a>, send: &[usize]) -> Result<Pending<'a>> {
        let call = self.collective(Operation::AllToAll, len_of(x));
        let fits = |counts: &[usize], rows: usize| counts.len() == self.size() && counts.iter().sum::<usize>() == rows;
        if !fits(send, x.rows()) || !fits(receive, out.rows()) || x.dtype() != out.dtype() {
            let (sent, received) = (x.rows(), out.rows());
            return call.fault(format!("counts {send:?} of {sent} rows sent, {receive:?} of {received} rows received"));
        }
        let row = x.row_len() * x.dtype().size();
        let (x, out) = (call.host(x)?, call.host_mut(out)?);
        let ends = |counts: &[usize]| {
            let mut end = 0;
            counts
                .iter()
                .map(|n| {
                    end += n * row;
                    end - n * row..end
                })
                .collect::<Vec<_>>()
        };
        let (send, receive) = (ends(send), ends(receive));
        for to in self.others() {
            call.send(to, &x[send[to].clone()])?;
        }
        for from in 0..self.size() {
            if from == self.rank {
                out[receive[from].clone()].copy_from_slice(&x[send[from].clone()]);
            } else {
                out[receive[from].clone()].copy_from_slice(&call.receive(from, receive[from].len())?);
            }
        }
        call.done()
    }

    fn broadcast<'a>(&self, x: ViewMut<'a>, root: usize) -> Result<Pending<'a>> {
        let call = self.collective(Operation::Broadcast, len_of(x.as_view()));
        if root >= self.size() {
            return call.fault(format!("there is no member {root} of {}", self.size()));
        }
        let x = call.host_mut(x)?;
        if root == self.rank {
            for to in self.others() {
                call.send(to, x)?;
            }
        } else {
            x.copy_from_slice(&call.receive(root, x.len())?);
        }
        call.done()
    }

    fn send<'a>(&self, x: View<'a>, to: usize) -> Result<Pending<'a>> {
        let call = self.message(Operation::Send, to, len_of(x))?;
        call.send(to, call.host(x)?)?;
        call.done()
    }

    fn recv<'a>(&self, x: ViewMut<'a>, from: usize) -> Result<Pending<'a>> {
        let call = self.message(Operation::Recv, from, len_of(x.as_view()))?;
        let x = call.host_mut(x)?;
        x.copy_from_slice(&call.receive(from, x.len())?);
        call.done()
    }

    fn barrier(&self) -> Result<()> {
        let call = self.collective(Operation::Barrier, 0);
        for to in self.others() {
            call.send(to, &[])?;
        }
        for from in self.others() {
            call.receive(from, 0)?;
        }
        call.ticket.done();
        Ok(())
    }
}
