//! The operations of [`Comm`] made of messages. Every result is put together in the order of ranks, so all ranks get the same bits.
//!
//! Legend: n ranks of the group.

use super::mailbox::{Header, Kind, Nothing};
use super::{Endpoint, bytes};
use crate::{Comm, Error, Pending, Reduce, Result};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};
use temper_tensor::{View, ViewMut};

/// A group over an endpoint.
pub(crate) struct HostGroup {
    endpoint: Arc<Endpoint>,
    name: String,
    /// The same on all members and no other group's.
    id: u64,
    members: Vec<usize>,
    rank: usize,
    calls: AtomicU64,
}

/// One call of an operation.
struct Call<'g> {
    group: &'g HostGroup,
    header: Header,
}

impl HostGroup {
    pub fn new(endpoint: Arc<Endpoint>, name: &str, members: Vec<usize>, rank: usize) -> HostGroup {
        // FNV-1a, 64 bit, over name and members.
        let bytes = name.bytes().chain(members.iter().flat_map(|m| (*m as u64).to_le_bytes()));
        let id = bytes.fold(0xcbf2_9ce4_8422_2325, |h: u64, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3));
        HostGroup { endpoint, name: name.into(), id, members, rank, calls: AtomicU64::new(0) }
    }

    fn call(&self, kind: Kind) -> Call<'_> {
        let number = if kind == Kind::Point { 0 } else { self.calls.fetch_add(1, Ordering::Relaxed) };
        Call { group: self, header: Header { kind, number } }
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        let (rank, size) = (self.rank, self.members.len());
        (1..size).map(move |i| (rank + i) % size)
    }
}

impl Call<'_> {
    fn place(&self) -> String {
        let Call { group, header } = self;
        let number = if header.kind == Kind::Point { String::new() } else { format!(" #{}", header.number) };
        format!("rank {}, {}{number} of group {} (ranks {:?})", group.endpoint.rank, header.kind.name(), group.name, group.members)
    }

    fn fault<T>(&self, what: impl Into<String>) -> Result<T> {
        Err(Error::Call { place: self.place(), what: what.into() })
    }

    fn host<'a>(&self, x: View<'a>) -> Result<&'a [u8]> {
        bytes::of(x).map_or_else(|| self.fault("the buffer lies in device memory"), Ok)
    }

    fn host_mut<'a>(&self, x: ViewMut<'a>) -> Result<&'a mut [u8]> {
        bytes::of_mut(x).map_or_else(|| self.fault("the buffer lies in device memory"), Ok)
    }

    fn send(&self, to: usize, body: &[u8]) -> Result<()> {
        let from = self.group.members[to];
        let sent = self.group.endpoint.link.send(from, self.group.id, self.header, body.to_vec());
        sent.map_err(|cause| Error::Lost { place: self.place(), from, cause })
    }

    fn receive(&self, from: usize, size: usize) -> Result<Vec<u8>> {
        let rank = self.group.members[from];
        let endpoint = &self.group.endpoint;
        let (header, body) = endpoint.mailbox.take(rank, self.group.id, endpoint.patience).map_err(|nothing| match nothing {
            Nothing::Timeout => Error::Timeout { place: self.place(), from: rank, after: endpoint.patience },
            Nothing::Gone(cause) => Error::Lost { place: self.place(), from: rank, cause },
        })?;
        if header != self.header {
            let found = format!("it is in {} #{}", header.kind.name(), header.number);
            return Err(Error::Mismatch { place: self.place(), from: rank, found });
        }
        if body.len() != size {
            let found = format!("it sent {} bytes, {size} were expected", body.len());
            return Err(Error::Mismatch { place: self.place(), from: rank, found });
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

impl Comm for HostGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn all_reduce<'a>(&self, mut x: ViewMut<'a>, op: Reduce) -> Result<Pending<'a>> {
        let call = self.call(Kind::AllReduce);
        call.reduce_own_part(x.reborrow(), op)?;
        call.gather_parts(x)?;
        Ok(Pending::done())
    }

    fn all_gather<'a>(&self, mut out: ViewMut<'a>, x: View<'a>) -> Result<Pending<'a>> {
        let call = self.call(Kind::AllGather);
        call.divides(out.numel(), x.numel())?;
        if out.dtype() != x.dtype() {
            return call.fault(format!("{} elements into {}", x.dtype(), out.dtype()));
        }
        let own = call.host(x)?;
        let start = self.rank * own.len();
        call.host_mut(out.reborrow())?[start..start + own.len()].copy_from_slice(own);
        call.gather_parts(out)?;
        Ok(Pending::done())
    }

    fn all_gather_in_place<'a>(&self, x: ViewMut<'a>) -> Result<Pending<'a>> {
        let call = self.call(Kind::AllGather);
        call.divides(x.numel(), x.numel() / self.size())?;
        call.gather_parts(x)?;
        Ok(Pending::done())
    }

    fn reduce_scatter<'a>(&self, out: ViewMut<'a>, x: View<'a>) -> Result<Pending<'a>> {
        let call = self.call(Kind::ReduceScatter);
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
        Ok(Pending::done())
    }

    fn reduce_scatter_in_place<'a>(&self, x: ViewMut<'a>) -> Result<Pending<'a>> {
        let call = self.call(Kind::ReduceScatter);
        call.divides(x.numel(), x.numel() / self.size())?;
        call.reduce_own_part(x, Reduce::Sum)?;
        Ok(Pending::done())
    }

    fn all_to_all<'a>(&self, out: ViewMut<'a>, receive: &[usize], x: View<'a>, send: &[usize]) -> Result<Pending<'a>> {
        let call = self.call(Kind::AllToAll);
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
        Ok(Pending::done())
    }

    fn broadcast<'a>(&self, x: ViewMut<'a>, root: usize) -> Result<Pending<'a>> {
        let call = self.call(Kind::Broadcast);
        let x = call.host_mut(x)?;
        if root == self.rank {
            for to in self.others() {
                call.send(to, x)?;
            }
        } else {
            x.copy_from_slice(&call.receive(root, x.len())?);
        }
        Ok(Pending::done())
    }

    fn send<'a>(&self, x: View<'a>, to: usize) -> Result<Pending<'a>> {
        let call = self.call(Kind::Point);
        call.send(to, call.host(x)?)?;
        Ok(Pending::done())
    }

    fn recv<'a>(&self, x: ViewMut<'a>, from: usize) -> Result<Pending<'a>> {
        let call = self.call(Kind::Point);
        let x = call.host_mut(x)?;
        x.copy_from_slice(&call.receive(from, x.len())?);
        Ok(Pending::done())
    }

    fn barrier(&self) -> Result<()> {
        let call = self.call(Kind::Barrier);
        for to in self.others() {
            call.send(to, &[])?;
        }
        for from in self.others() {
            call.receive(from, 0)?;
        }
        Ok(())
    }
}
