//! From the tensors of a training step to buffers for the writer: the only part of a save that training waits for.

use super::{BLOCK, Entry, Named, Saver, fragment::fragments};
use crate::{Error, Result, safetensors::TensorRef};
use rayon::prelude::*;
use std::{
    path::Path,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    time::{Duration, Instant},
};

/// Size of a buffer, some blocks.
pub(crate) const BUFFER: usize = 4 * BLOCK;
/// Where fragments begin: every element type divides it, so that no element straddles two blocks.
const ALIGN: usize = 8;
/// Bytes copied by one task.
const COPY: usize = 1 << 20;

/// Buffers that wander from the trainer to the writer and back, kept from save to save: fresh pages cost as much as a copy.
pub(crate) struct Pool {
    /// Most buffers in existence.
    limit: usize,
    state: Mutex<Buffers>,
    changed: Condvar,
}

/// Room for some blocks, filled up to a length. Its pages are touched once, by the first copy into them.
pub(crate) struct Buffer {
    bytes: Vec<u8>,
    len: usize,
}

impl Buffer {
    /// What has been put into it.
    pub(crate) fn filled(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Appends as much as fits, on all cores where that pays. Returns what does not fit.
    fn append<'b>(&mut self, bytes: &'b [u8]) -> &'b [u8] {
        let (now, later) = bytes.split_at(bytes.len().min(BUFFER - self.len));
        let room = &mut self.bytes[self.len..self.len + now.len()];
        if now.len() < 2 * COPY {
            room.copy_from_slice(now);
        } else {
            room.par_chunks_mut(COPY).zip(now.par_chunks(COPY)).for_each(|(to, from)| to.copy_from_slice(from));
        }
        self.len += now.len();
        later
    }

    fn align(&mut self) {
        let end = self.len.next_multiple_of(ALIGN);
        self.bytes[self.len..end].fill(0);
        self.len = end;
    }
}

#[derive(Default)]
struct Buffers {
    free: Vec<Buffer>,
    made: usize,
    /// The writer of the save under way is gone.
    closed: bool,
}

impl Pool {
    /// At most `bytes` of buffers, at least two.
    pub(crate) fn new(bytes: u64) -> Pool {
        let limit = usize::try_from(bytes / BUFFER as u64).unwrap_or(usize::MAX).max(2);
        Pool { limit, state: Mutex::default(), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Buffers> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An empty buffer; waits until there is one. `None` when the writer is gone.
    fn take(&self) -> Option<Buffer> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            if let Some(buffer) = state.free.pop() {
                return Some(buffer);
            }
            if state.made < self.limit {
                state.made += 1;
                return Some(Buffer { bytes: vec![0; BUFFER], len: 0 });
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn give(&self, mut buffer: Buffer) {
        buffer.len = 0;
        self.lock().free.push(buffer);
        self.changed.notify_all();
    }

    fn set_closed(&self, closed: bool) {
        self.lock().closed = closed;
        self.changed.notify_all();
    }
}

/// What goes from the trainer to the writer.
pub(crate) enum Packed {
    /// The next bytes of the file.
    Buffer(Buffer),
    /// That was all; what it consists of.
    End(Vec<Named>),
}

/// The writer's end. When it is dropped, whoever packs learns that nobody writes any more.
pub(crate) struct Intake {
    packed: Receiver<Packed>,
    pool: Arc<Pool>,
}

impl Intake {
    pub(crate) fn next(&self, patience: Duration) -> std::result::Result<Packed, RecvTimeoutError> {
        self.packed.recv_timeout(patience)
    }

    pub(crate) fn give_back(&self, buffer: Buffer) {
        self.pool.give(buffer);
    }
}

impl Drop for Intake {
    fn drop(&mut self) {
        self.pool.set_closed(true);
        while let Ok(Packed::Buffer(buffer)) = self.packed.try_recv() {
            self.pool.give(buffer);
        }
    }
}

/// The trainer's end.
pub(crate) struct Packer {
    rank: usize,
    pool: Arc<Pool>,
    out: Sender<Packed>,
    /// The one being filled.
    buffer: Option<Buffer>,
    /// Bytes of the file before `buffer`.
    sent: u64,
    fragments: Vec<Named>,
}

/// Both ends of a new save.
pub(crate) fn line(pool: &Arc<Pool>, rank: usize) -> (Packer, Intake) {
    let (out, packed) = channel();
    pool.set_closed(false);
    let packer = Packer { rank, pool: pool.clone(), out, buffer: None, sent: 0, fragments: Vec::new() };
    (packer, Intake { packed, pool: pool.clone() })
}

/// The writer is gone.
struct Closed;

impl Packer {
    fn push(&mut self, named: Vec<Named>, mut bytes: &[u8]) -> std::result::Result<(), Closed> {
        self.fragments.extend(named);
        while !bytes.is_empty() {
            let mut buffer = match self.buffer.take() {
                Some(buffer) => buffer,
                None => self.pool.take().ok_or(Closed)?,
            };
            bytes = buffer.append(bytes);
            if buffer.len == BUFFER { self.send(buffer)? } else { self.buffer = Some(buffer) }
        }
        Ok(())
    }

    /// Fills up to where a fragment may begin, and says where that is.
    fn align(&mut self) -> u64 {
        let len = self.buffer.as_mut().map_or(0, |buffer| {
            buffer.align();
            buffer.len
        });
        self.sent + len as u64
    }

    fn send(&mut self, buffer: Buffer) -> std::result::Result<(), Closed> {
        self.sent += buffer.len as u64;
        self.out.send(Packed::Buffer(buffer)).map_err(|unsent| {
            if let Packed::Buffer(buffer) = unsent.0 {
                self.pool.give(buffer);
            }
            Closed
        })
    }

    fn end(mut self) -> std::result::Result<(), Closed> {
        if let Some(buffer) = self.buffer.take() {
            self.send(buffer)?;
        }
        self.out.send(Packed::End(std::mem::take(&mut self.fragments))).map_err(|_| Closed)
    }
}

impl Drop for Packer {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.pool.give(buffer);
        }
    }
}

/// A save that takes in this rank's entries. Every rank makes one for the same step; to drop it before [`Snapshot::finish`] gives the
/// save up on all of them.
#[must_use = "a save that is not finished is given up"]
pub struct Snapshot<'s> {
    pub(crate) saver: &'s mut Saver,
    pub(crate) packer: Packer,
    pub(crate) since: Instant,
}

impl Snapshot<'_> {
    /// Copies an entry. Its data may be changed when this returns: a device's tensors need to be in host memory one at a time only.
    /// Waits for the disk only when the saver's buffers are all full.
    ///
    /// # Errors
    /// When the entry's elements do not fit it; when the save has failed meanwhile, with the reason.
    pub fn add(&mut self, entry: Entry<'_>) -> Result<()> {
        let Entry { param, range, data, .. } = &entry;
        let bad = |what: &str| Error::bad(Path::new(&param.name), format!("elements {range:?} {what} (a fault of this program)"));
        if range.start > range.end || range.end > param.numel() || data.numel() != range.len() {
            return Err(bad("are not those handed over"));
        }
        let bytes = TensorRef::of_view(*data, 0..range.len(), &[range.len()]).ok_or_else(|| bad("do not lie in host memory"))?.bytes;
        let named = fragments(&entry, self.packer.rank, self.packer.align());
        self.packer.push(named, bytes).or_else(|Closed| self.saver.ended_early())
    }

    /// Everything was added. The rest happens beside training; [`Saver::wait`] tells how it ended.
    ///
    /// # Errors
    /// When the save has failed meanwhile, with the reason.
    pub fn finish(self) -> Result<()> {
        let Snapshot { saver, packer, since } = self;
        match packer.end() {
            Ok(()) => {
                saver.note_pause(since.elapsed());
                Ok(())
            }
            Err(Closed) => saver.ended_early(),
        }
    }
}
