//! What one rank writes: its data file, block by block as buffers come, and the record of it.

use super::{
    BLOCK, FORMAT,
    agree::Stop,
    data_name,
    packing::{Intake, Packed},
    record::Record,
    resume::unshared,
};
use crate::{Error, Result, disk::Disk};
use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    sync::mpsc::RecvTimeoutError,
    time::Duration,
};

/// How often a writer without work looks whether it is still wanted.
const GLANCE: Duration = Duration::from_millis(100);

/// A file being written whose blocks are hashed on the way.
struct Blocks<'a> {
    disk: &'a Disk,
    path: PathBuf,
    file: fs::File,
    bytes: u64,
    hashes: Vec<blake3::Hash>,
}

impl<'a> Blocks<'a> {
    fn create(disk: &'a Disk, path: PathBuf) -> Result<Blocks<'a>> {
        let file = disk.perform("create", &path, || fs::File::create(&path))?;
        Ok(Blocks { disk, path, file, bytes: 0, hashes: Vec::new() })
    }

    /// Appends whole blocks; only the last buffer may end within one.
    fn write(&mut self, data: &[u8]) -> Result<()> {
        let (file, hashes) = (&mut self.file, &mut self.hashes);
        self.disk.perform("write", &self.path, || {
            let mut new = vec![blake3::Hash::from_bytes([0; 32]); data.len().div_ceil(BLOCK)];
            // A disk that is slow must not hold up a thread of the pool, on which training may count: only the hashing is done there.
            let written = rayon::in_place_scope(|scope| {
                for (block, hash) in data.chunks(BLOCK).zip(&mut new) {
                    scope.spawn(move |_| *hash = blake3::hash(block));
                }
                file.write_all(data)
            });
            hashes.extend(new);
            written
        })?;
        self.bytes += data.len() as u64;
        Ok(())
    }

    fn finish(self) -> Result<(u64, Vec<String>)> {
        self.disk.perform("sync", &self.path, || self.file.sync_all())?;
        Ok((self.bytes, self.hashes.iter().map(|h| h.to_hex().to_string()).collect()))
    }
}

/// Which rank of how many writes which step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Author {
    pub(crate) step: usize,
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
}

/// Writes what comes in, until all has come. Returns when it is on disk to stay.
pub(crate) fn write_rank(disk: &Disk, dir: &Path, author: Author, intake: &Intake, stop: &Stop) -> Result<()> {
    let Author { step, rank, ranks } = author;
    if !dir.is_dir() {
        return Err(unshared(dir));
    }
    let mut out = Blocks::create(disk, dir.join(data_name(rank)))?;
    let fragments = loop {
        if stop.is_set() {
            return Err(Error::bad(dir, "not finished, because another rank failed"));
        }
        match intake.next(GLANCE) {
            Ok(Packed::Buffer(buffer)) => {
                let written = out.write(buffer.filled());
                intake.give_back(buffer);
                written?;
            }
            Ok(Packed::End(fragments)) => break fragments,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(Error::bad(dir, "the save was given up before everything was handed over")),
        }
    };
    let (bytes, blocks) = out.finish()?;
    Record { format: FORMAT, step, rank, ranks, bytes, block: BLOCK, blocks, fragments }.write(disk, dir)?;
    disk.sync_dir(dir)
}
