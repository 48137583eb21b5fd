//! A [`Lane`]: the communicator of a group, its stream, and the operations under way on it.

use super::communicator::Communicator;
use super::stream::{Mark, SideStream};
use super::transport;
use crate::device::Device;
use crate::sys::driver::CUstream;
use crate::sys::nccl::{Comm, Nccl};
use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;
use temper_comm::{Error, Operation, Recorder, Result, Ticket};

/// An operation under way.
pub(super) struct Flight {
    pub operation: Operation,
    pub number: u64,
    /// The other rank of the job, for messages.
    pub peer: Option<usize>,
    pub began: Instant,
    /// Its end on the stream; none while NCCL is being called.
    mark: OnceLock<Mark>,
    ticket: Mutex<Option<Ticket>>,
}

impl Flight {
    /// Whether it is done.
    pub fn landed(&self) -> crate::Result<bool> {
        self.mark.get().map_or(Ok(false), Mark::passed)
    }

    /// What comes next on the compute stream comes after it.
    pub fn before_compute(&self) -> crate::Result<()> {
        self.mark.get().map_or(Ok(()), Mark::before_compute)
    }

    fn note_done(&self) {
        if let Some(ticket) = self.ticket.lock().unwrap_or_else(PoisonError::into_inner).take() {
            ticket.done();
        }
    }
}

/// What an operation is called for.
pub(super) struct Call {
    pub operation: Operation,
    pub number: u64,
    /// The other rank of the job, for messages.
    pub peer: Option<usize>,
    pub bytes: usize,
}

/// See the file's head.
pub(super) struct Lane {
    pub name: Arc<str>,
    /// Ranks of the job.
    pub members: Vec<usize>,
    /// This rank of the job.
    pub own: usize,
    pub communicator: Arc<Communicator>,
    stream: SideStream,
    /// Held while an operation is enqueued: their order here is that on the stream.
    order: Mutex<()>,
    flights: Mutex<VecDeque<Arc<Flight>>>,
}

impl Lane {
    pub fn new(name: &str, members: &[usize], own: usize, communicator: Communicator, device: &Arc<Device>) -> Result<Lane> {
        Ok(Lane {
            name: name.into(),
            members: members.to_vec(),
            own,
            communicator: Arc::new(communicator),
            stream: SideStream::new(device).map_err(transport)?,
            order: Mutex::default(),
            flights: Mutex::default(),
        })
    }

    fn flights(&self) -> MutexGuard<'_, VecDeque<Arc<Flight>>> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where this rank stands, for errors.
    pub fn place(&self, operation: Operation, number: u64) -> String {
        format!("rank {}, {} #{number} of group {} (ranks {:?})", self.own, operation.name(), self.name, self.members)
    }

    /// Enqueues an operation behind what is on the compute stream now. The error says whether the communicator is broken.
    pub fn launch(
        &self,
        call: Call,
        recorder: &Recorder,
        enqueue: impl FnOnce(&Nccl, Comm, CUstream) -> c_int,
    ) -> std::result::Result<Arc<Flight>, (Error, bool)> {
        let Call { operation, number, peer, bytes } = call;
        let _order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        let ticket = Mutex::new(Some(recorder.begin(&self.name, operation, number, peer, bytes)));
        let flight = Arc::new(Flight { operation, number, peer, began: Instant::now(), mark: OnceLock::new(), ticket });
        // Seen by the watchdog from now on: the call itself may wait for another rank, when connections are made.
        self.flights().push_back(flight.clone());
        let driver = |e: crate::Error| (Error::Call { place: self.place(operation, number), what: e.to_string() }, true);
        let launched = self.stream.after_compute().map_err(driver).and_then(|()| {
            let called = self.communicator.call(operation.name(), |library, comm| enqueue(library, comm, self.stream.raw()));
            called.map_err(|e| (e.broken, e.at(self.place(operation, number)))).map_err(|(broken, e)| (e, broken))?;
            self.stream.mark().map_err(driver)
        });
        match launched {
            Ok(mark) => {
                let _ = flight.mark.set(mark);
                Ok(flight)
            }
            Err(failed) => {
                self.flights().pop_back();
                Err(failed)
            }
        }
    }

    /// Takes note of operations that are done, and gives the oldest that is not.
    pub fn oldest(&self) -> crate::Result<Option<Arc<Flight>>> {
        loop {
            let Some(first) = self.flights().front().cloned() else { return Ok(None) };
            if !first.landed()? {
                return Ok(Some(first));
            }
            first.note_done();
            self.flights().pop_front();
        }
    }
}
