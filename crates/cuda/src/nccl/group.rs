//! The operations of [`Comm`] as calls of NCCL.
//!
//! Legend: n ranks of the group.
#![allow(unsafe_code)] // calls into NCCL

use super::communicator::Communicator;
use super::failure::Failure;
use super::lane::{Call, Flight, Lane};
use super::transport;
use super::watchdog::Watchdog;
use crate::device::Device;
use crate::sys::driver::CUstream;
use crate::sys::nccl::{Comm as Handle, Nccl, dtype, reduce};
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use temper_comm::{Comm, Error, Operation, Pending, Reduce, Result, Work};
use temper_tensor::{DType, Slice, View, ViewMut};

/// A group whose ranks are GPUs.
pub(super) struct NcclGroup {
    lane: Arc<Lane>,
    rank: usize,
    /// The same ranks through host memory.
    host: Arc<dyn Comm>,
    watchdog: Arc<Watchdog>,
    collectives: AtomicU64,
    /// Messages sent to and received from each member.
    messages: Vec<[AtomicU64; 2]>,
}

/// Elements on the device.
#[derive(Clone, Copy)]
struct Part {
    address: u64,
    len: usize,
    dtype: DType,
}

impl Part {
    fn bytes(self) -> usize {
        self.len * self.dtype.size()
    }

    /// Elements from `start` on.
    fn at(self, start: usize, len: usize) -> Part {
        Part { address: self.address + (start * self.dtype.size()) as u64, len, ..self }
    }

    fn read(self) -> *const c_void {
        self.address as *const c_void
    }

    fn write(self) -> *mut c_void {
        self.address as *mut c_void
    }

    /// `ncclDataType_t`.
    fn code(self) -> c_int {
        match self.dtype {
            DType::F64 => dtype::FLOAT64,
            DType::F32 => dtype::FLOAT32,
            DType::BF16 => dtype::BFLOAT16,
            DType::F16 => dtype::FLOAT16,
            DType::I32 => dtype::INT32,
        }
    }
}

/// An operation that has been enqueued.
struct UnderWay {
    flight: Arc<Flight>,
    failure: Arc<Failure>,
    waited: bool,
}

impl Work for UnderWay {
    fn wait(mut self: Box<Self>) -> Result<()> {
        self.waited = true;
        self.failure.check()?;
        self.flight.before_compute().map_err(transport)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        // The buffers may be freed after this, in the order of the compute stream.
        if !self.waited
            && let Err(e) = self.flight.before_compute()
        {
            tracing::warn!(error = %e, "an operation that nobody waited for");
        }
    }
}

impl NcclGroup {
    pub fn new(
        name: &str,
        members: &[usize],
        host: Arc<dyn Comm>,
        communicator: Communicator,
        device: &Arc<Device>,
        watchdog: &Arc<Watchdog>,
    ) -> Result<NcclGroup> {
        let rank = host.rank();
        let lane = Arc::new(Lane::new(name, members, members[rank], communicator, device)?);
        watchdog.look_after(&lane);
        let messages = members.iter().map(|_| Default::default()).collect();
        Ok(NcclGroup { lane, rank, host, watchdog: watchdog.clone(), collectives: AtomicU64::new(0), messages })
    }

    fn fault<T>(&self, operation: Operation, what: String) -> Result<T> {
        let (own, name, members) = (self.lane.own, &self.lane.name, &self.lane.members);
        Err(Error::Call { place: format!("rank {own}, {} of group {name} (ranks {members:?})", operation.name()), what })
    }

    fn part(&self, operation: Operation, x: View) -> Result<Part> {
        match x.data {
            Slice::Device(address, len, dtype, _) => Ok(Part { address, len, dtype }),
            _ => self.fault(operation, "the buffer lies in host memory".into()),
        }
    }

    fn pair(&self, operation: Operation, out: &ViewMut, x: View) -> Result<(Part, Part)> {
        let (out, x) = (self.part(operation, out.as_view())?, self.part(operation, x)?);
        if out.dtype == x.dtype { Ok((out, x)) } else { self.fault(operation, format!("{} elements into {}", x.dtype, out.dtype)) }
    }

    /// Element counts of a whole and one of its n parts must fit.
    fn divides(&self, operation: Operation, whole: usize, part: usize) -> Result<()> {
        let n = self.size();
        if whole == part * n { Ok(()) } else { self.fault(operation, format!("{whole} elements are not {n} times {part}")) }
    }

    fn launch<'a>(&self, call: Call, enqueue: impl FnOnce(&Nccl, Handle, CUstream) -> c_int) -> Result<Pending<'a>> {
        self.watchdog.failure().check()?;
        match self.lane.launch(call, self.watchdog.recorder(), enqueue) {
            Ok(flight) => Ok(Pending::new(Box::new(UnderWay { flight, failure: self.watchdog.failure().clone(), waited: false }))),
            Err((error, broken)) => {
                // When the watchdog was faster, its error is the one that explains.
                self.watchdog.failure().check()?;
                if broken {
                    self.watchdog.fail(error.clone());
                }
                Err(error)
            }
        }
    }

    fn collective<'a>(
        &self,
        operation: Operation,
        bytes: usize,
        enqueue: impl FnOnce(&Nccl, Handle, CUstream) -> c_int,
    ) -> Result<Pending<'a>> {
        let number = self.collectives.fetch_add(1, Ordering::Relaxed);
        self.launch(Call { operation, number, peer: None, bytes }, enqueue)
    }

    fn message<'a>(
        &self,
        operation: Operation,
        with: usize,
        x: Part,
        enqueue: impl FnOnce(&Nccl, Handle, CUstream) -> c_int,
    ) -> Result<Pending<'a>> {
        let Some(counts) = self.messages.get(with).filter(|_| with != self.rank) else {
            return self.fault(operation, format!("member {with} is no other member of {}", self.size()));
        };
        let number = counts[usize::from(operation == Operation::Recv)].fetch_add(1, Ordering::Relaxed);
        if x.len == 0 {
            return Ok(Pending::done()); // on both sides alike
        }
        self.launch(Call { operation, number, peer: Some(self.lane.members[with]), bytes: x.bytes() }, enqueue)
    }

    fn gather<'a>(&self, out: Part, x: Part) -> Result<Pending<'a>> {
        self.collective(Operation::AllGather, out.bytes(), |nccl, comm, stream| unsafe {
            // SAFETY: both lie in device memory that is borrowed until the operation was waited for; the lengths were checked.
            (nccl.ncclAllGather)(x.read(), out.write(), x.len, x.code(), comm, stream)
        })
    }

    fn scatter<'a>(&self, out: Part, x: Part) -> Result<Pending<'a>> {
        self.collective(Operation::ReduceScatter, x.bytes(), |nccl, comm, stream| unsafe {
            // SAFETY: as in `gather`.
            (nccl.ncclReduceScatter)(x.read(), out.write(), out.len, x.code(), reduce::SUM, comm, stream)
        })
    }

    /// This rank's n-th of a buffer.
    fn own_share(&self, operation: Operation, x: Part) -> Result<Part> {
        let share = x.len / self.size();
        self.divides(operation, x.len, share)?;
        Ok(x.at(self.rank * share, share))
    }
}

impl Comm for NcclGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.lane.members.len()
    }

    fn all_reduce<'a>(&self, x: ViewMut<'a>, op: Reduce) -> Result<Pending<'a>> {
        let x = self.part(Operation::AllReduce, x.as_view())?;
        let op = if op == Reduce::Sum { reduce::SUM } else { reduce::MAX };
        self.collective(Operation::AllReduce, x.bytes(), |nccl, comm, stream| unsafe {
            // SAFETY: as in `gather`.
            (nccl.ncclAllReduce)(x.read(), x.write(), x.len, x.code(), op, comm, stream)
        })
    }

    fn all_gather<'a>(&self, out: ViewMut<'a>, x: View<'a>) -> Result<Pending<'a>> {
        let (out, x) = self.pair(Operation::AllGather, &out, x)?;
        self.divides(Operation::AllGather, out.len, x.len)?;
        self.gather(out, x)
    }

    fn all_gather_in_place<'a>(&self, x: ViewMut<'a>) -> Result<Pending<'a>> {
        let x = self.part(Operation::AllGather, x.as_view())?;
        self.gather(x, self.own_share(Operation::AllGather, x)?)
    }

    fn reduce_scatter<'a>(&self, out: ViewMut<'a>, x: View<'a>) -> Result<Pending<'a>> {
        let (out, x) = self.pair(Operation::ReduceScatter, &out, x)?;
        self.divides(Operation::ReduceScatter, x.len, out.len)?;
        self.scatter(out, x)
    }

    fn reduce_scatter_in_place<'a>(&self, x: ViewMut<'a>) -> Result<Pending<'a>> {
        let x = self.part(Operation::ReduceScatter, x.as_view())?;
        self.scatter(self.own_share(Operation::ReduceScatter, x)?, x)
    }

    fn all_to_all<'a>(&self, out: ViewMut<'a>, receive: &[usize], x: View<'a>, send: &[usize]) -> Result<Pending<'a>> {
        let fits = |counts: &[usize], rows: usize| counts.len() == self.size() && counts.iter().sum::<usize>() == rows;
        let (rows_in, rows_out, row) = (x.rows(), out.rows(), x.row_len());
        if !fits(send, rows_in) || !fits(receive, rows_out) || out.as_view().row_len() != row {
            let what = format!("counts {send:?} of {rows_in} rows sent, {receive:?} of {rows_out} rows received");
            return self.fault(Operation::AllToAll, what);
        }
        let (out, x) = self.pair(Operation::AllToAll, &out, x)?;
        self.collective(Operation::AllToAll, x.bytes(), |nccl, comm, stream| {
            // SAFETY: as in `gather`. The group makes all parts one operation, which cannot lock whatever the order within.
            let mut status = unsafe { (nccl.ncclGroupStart)() };
            if status != 0 {
                return status;
            }
            let (mut sent, mut received) = (0, 0);
            for peer in 0..send.len() {
                let (to, from) = (x.at(sent * row, send[peer] * row), out.at(received * row, receive[peer] * row));
                (sent, received) = (sent + send[peer], received + receive[peer]);
                // Both sides know the counts, and leave out the same.
                if status == 0 && to.len > 0 {
                    status = unsafe { (nccl.ncclSend)(to.read(), to.len, to.code(), peer as c_int, comm, stream) };
                }
                if status == 0 && from.len > 0 {
                    status = unsafe { (nccl.ncclRecv)(from.write(), from.len, from.code(), peer as c_int, comm, stream) };
                }
            }
            let ended = unsafe { (nccl.ncclGroupEnd)() };
            if status != 0 { status } else { ended }
        })
    }

    fn broadcast<'a>(&self, x: ViewMut<'a>, root: usize) -> Result<Pending<'a>> {
        let x = self.part(Operation::Broadcast, x.as_view())?;
        if root >= self.size() {
            return self.fault(Operation::Broadcast, format!("there is no member {root} of {}", self.size()));
        }
        self.collective(Operation::Broadcast, x.bytes(), |nccl, comm, stream| unsafe {
            // SAFETY: as in `gather`.
            (nccl.ncclBroadcast)(x.read(), x.write(), x.len, x.code(), root as c_int, comm, stream)
        })
    }

    fn send<'a>(&self, x: View<'a>, to: usize) -> Result<Pending<'a>> {
        let x = self.part(Operation::Send, x)?;
        self.message(Operation::Send, to, x, |nccl, comm, stream| unsafe {
            // SAFETY: as in `gather`.
            (nccl.ncclSend)(x.read(), x.len, x.code(), to as c_int, comm, stream)
        })
    }

    fn recv<'a>(&self, x: ViewMut<'a>, from: usize) -> Result<Pending<'a>> {
        let x = self.part(Operation::Recv, x.as_view())?;
        self.message(Operation::Recv, from, x, |nccl, comm, stream| unsafe {
            // SAFETY: as in `gather`.
            (nccl.ncclRecv)(x.write(), x.len, x.code(), from as c_int, comm, stream)
        })
    }

    /// Of the hosts; the GPUs' work may still be under way.
    fn barrier(&self) -> Result<()> {
        self.watchdog.failure().check()?;
        let done = self.host.barrier();
        self.watchdog.failure().check()?;
        done
    }
}
