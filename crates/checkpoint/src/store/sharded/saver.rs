//! Saves by many ranks, beside training: one at a time, in a thread of its own, over a group of its own.

use super::{
    Snapshot, agree,
    cover::{self, Declared},
    data_name,
    packing::{Intake, Pool, line},
    record::Record,
    record_name,
    write::{Author, write_rank},
};
use crate::{
    Class, Error, Result, Sidecar,
    disk::Written,
    store::{Saved, Store, manifest},
};
use serde_json::Value;
use std::{
    path::Path,
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};
use temper_comm::Comm;
use temper_model::param::Param;
use temper_tensor::DType;

/// What a save consists of besides the entries. Every rank gives the same.
pub struct Request<'a> {
    /// The step.
    pub step: usize,
    /// The declaration of the whole model ([`temper_model::declare`] of its architecture), against which the entries are checked.
    pub whole: &'a [Param],
    /// Whatever the caller needs to go on from this step.
    pub state: Value,
    /// The files that make a folder a model; read by rank 0.
    pub sidecar: Sidecar,
}

/// A committed save.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// The checkpoint. Its size is that of all ranks' files.
    pub saved: Saved,
    /// How long this rank's training stood still for it.
    pub paused: Duration,
    /// From its begin to its commit.
    pub took: Duration,
}

/// Saves one checkpoint at a time while training goes on.
pub struct Saver {
    store: Arc<Store>,
    comm: Arc<dyn Comm>,
    pool: Arc<Pool>,
    running: Option<Running>,
    /// Why no further save is possible: the ranks can no longer agree.
    broken: Option<String>,
}

struct Running {
    /// Gives also how long it took.
    thread: JoinHandle<(Result<Saved>, Duration)>,
    paused: Duration,
}

/// What a save's thread needs.
struct Task {
    store: Arc<Store>,
    comm: Arc<dyn Comm>,
    step: usize,
    declared: Vec<Declared>,
    state: Value,
    sidecar: Sidecar,
}

impl Saver {
    /// Saves into `store`, the same folder on all ranks. `comm` is a group of all ranks for this purpose alone, that carries host
    /// memory; its rank 0 commits. `host_bytes` bounds the buffers in which a snapshot waits for the disk: with as much as this rank
    /// saves, training pauses for the copy only; with less, for a part of the writing too.
    pub fn new(store: Arc<Store>, comm: Arc<dyn Comm>, host_bytes: u64) -> Saver {
        Saver { store, comm, pool: Arc::new(Pool::new(host_bytes)), running: None, broken: None }
    }

    /// Begins a save after the one before is done. Every rank calls this at the same step, [`Snapshot::add`]s its entries and
    /// [`Snapshot::finish`]es.
    ///
    /// # Errors
    /// That of the save before, if nobody has waited for it; that the ranks can no longer agree.
    pub fn begin(&mut self, request: Request<'_>) -> Result<Snapshot<'_>> {
        self.wait()?;
        if let Some(why) = &self.broken {
            let message = format!("no further checkpoint can be saved after an earlier failure: {why}");
            return Err(Error::OfRank { rank: self.comm.rank(), class: Class::Lost, message });
        }
        let since = Instant::now();
        let Request { step, whole, state, sidecar } = request;
        let declared = if self.comm.rank() == 0 { cover::declared(whole) } else { Vec::new() };
        let (packer, intake) = line(&self.pool, self.comm.rank());
        let task = Task { store: self.store.clone(), comm: self.comm.clone(), step, declared, state, sidecar };
        let thread = std::thread::Builder::new().name("checkpoint".into()).spawn(move || (task.run(intake), since.elapsed()));
        let thread = thread.map_err(Error::io("start a thread for", &self.store.step_dir(step)))?;
        self.running = Some(Running { thread, paused: Duration::ZERO });
        Ok(Snapshot { saver: self, packer, since })
    }

    /// Waits for the save under way; `None` when there is none.
    ///
    /// # Errors
    /// The first failure of any rank. Earlier checkpoints are as they were.
    pub fn wait(&mut self) -> Result<Option<Committed>> {
        let Some(Running { thread, paused }) = self.running.take() else { return Ok(None) };
        let panicked =
            || Error::OfRank { rank: self.comm.rank(), class: Class::Failed, message: "the saving thread panicked; see its log".into() };
        let (result, took) = thread.join().unwrap_or_else(|_| (Err(panicked()), Duration::ZERO));
        if let Err(e) = &result
            && e.class() == Class::Lost
        {
            self.broken = Some(e.to_string());
        }
        Ok(Some(Committed { saved: result?, paused, took }))
    }

    /// As [`Saver::wait`] when the save under way is done; `None` at once when it is not.
    pub fn poll(&mut self) -> Result<Option<Committed>> {
        if self.running.as_ref().is_some_and(|r| r.thread.is_finished()) { self.wait() } else { Ok(None) }
    }

    pub(crate) fn note_pause(&mut self, paused: Duration) {
        if let Some(running) = &mut self.running {
            running.paused = paused;
        }
    }

    /// The reason why a writer stopped taking in.
    pub(crate) fn ended_early(&mut self) -> Result<()> {
        match self.wait() {
            Err(e) => Err(e),
            Ok(_) => Err(Error::bad(&self.store.dir(), "the save ended before everything was handed over (a fault of this program)")),
        }
    }
}

impl Drop for Saver {
    /// A save that is complete but for the disk is brought to its end.
    fn drop(&mut self) {
        if let Err(e) = self.wait() {
            tracing::error!("the last checkpoint was not saved: {e}");
        }
    }
}

impl Task {
    /// The three stages of a save.
    fn run(self, intake: Intake) -> Result<Saved> {
        let Task { store, comm, step, .. } = &self;
        let (comm, lead) = (&**comm, comm.rank() == 0);
        let ((), name) = agree(comm, |_| Ok(((), if lead { store.make_temporary(*step)? } else { String::new() })))?;
        let temporary = store.dir().join(name);
        let author = Author { step: *step, rank: comm.rank(), ranks: comm.size() };
        let written = agree(comm, |stop| {
            // Dropped here, so that whoever still hands things over is not left waiting.
            let intake = intake;
            write_rank(&store.disk, &temporary, author, &intake, stop)?;
            Ok(((), String::new()))
        });
        let committed = written
            .and_then(|_| agree(comm, |_| if lead { Ok(((), self.commit(&temporary)?.to_string())) } else { Ok(((), String::new())) }));
        if let Err(e) = &committed
            && e.class() != Class::Lost
        {
            // No rank has the folder in hand any more when all have answered once more.
            let _ = agree(comm, |_| Ok(((), String::new())));
        }
        if lead {
            store.forget_temporary(&temporary, committed.is_err());
        }
        let ((), bytes) = committed?;
        Ok(Saved { step: *step, path: store.step_dir(*step), bytes: bytes.parse().unwrap_or(0) })
    }

    /// Checks what all ranks wrote, adds what makes it a checkpoint, and puts it in its place. Returns its size.
    fn commit(&self, dir: &Path) -> Result<u64> {
        let Task { store, step, declared, state, sidecar, comm } = self;
        let disk = &store.disk;
        let records = (0..comm.size()).map(|rank| Record::read(dir, *step, rank, comm.size())).collect::<Result<Vec<_>>>()?;
        let index = cover::index(*step, declared, &records)
            .map_err(|why| Error::bad(dir, format!("the ranks' parts do not make up the model: {why} (a fault of this program)")))?;
        let dtype = match index.tensors.first() {
            Some(tensor) => tensor.dtype()?,
            None => DType::F32,
        };
        let mut files = sidecar.write(disk, dir, dtype)?;
        files.push(crate::store::save::write_state(disk, dir, *step, sidecar, state)?);
        files.push(index.write(disk, dir)?);
        let mut shards = Vec::with_capacity(records.len());
        for record in &records {
            files.push(of_file(&dir.join(record_name(record.rank)))?);
            let path = dir.join(data_name(record.rank));
            let found = std::fs::metadata(&path).map_err(Error::io("find", &path))?.len();
            if found != record.bytes {
                return Err(Error::bad(
                    &path,
                    format!("{found} bytes, of {} that its rank wrote; is the file system shared by all hosts?", record.bytes),
                ));
            }
            shards.push(manifest::ShardFile { name: data_name(record.rank), bytes: record.bytes });
        }
        let total = files.iter().map(|f| f.bytes).chain(shards.iter().map(|s| s.bytes)).sum::<u64>();
        let last = manifest::Manifest::new_sharded(*step, files, shards).write(disk, dir)?;
        disk.sync_dir(dir)?;
        disk.replace_dir(dir, &store.step_dir(*step))?;
        store.note_saved(*step);
        Ok(total + last.bytes)
    }
}

/// Name, size and hash of a file that another rank wrote.
fn of_file(path: &Path) -> Result<Written> {
    let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(Written { name, bytes: bytes.len() as u64, blake3: blake3::hash(&bytes) })
}
