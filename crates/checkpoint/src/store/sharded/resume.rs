//! Many ranks go on from the same checkpoint: the newest that every one of them can read.

use super::{Checkpoint, agree};
use crate::{
    Class, Error, Result,
    store::{Store, manifest::verify_share},
};
use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use temper_comm::Comm;

impl Store {
    /// Makes sure that all ranks see one run folder. Where rank 0 has none there is nothing to see yet.
    ///
    /// # Errors
    /// The same on all ranks: [`Error::Bad`] of the rank that sees another folder or none; that rank 0 cannot write in it.
    pub fn assure_shared(&self, comm: &dyn Comm) -> Result<()> {
        let lead = comm.rank() == 0;
        let token = format!("{PROBE}{}", std::process::id());
        let (_, name) = agree(comm, |_| Ok(((), if lead && self.run_dir.is_dir() { self.put_probe(token)? } else { String::new() })))?;
        if name.is_empty() {
            return Ok(());
        }
        let probe = self.run_dir.join(name);
        let seen = agree(comm, |_| if sees(&probe) { Ok(((), String::new())) } else { Err(unshared(&self.run_dir)) });
        if lead {
            self.disk.remove(&probe)?;
        }
        seen.map(|_| ())
    }

    fn put_probe(&self, name: String) -> Result<String> {
        self.disk.write(&self.run_dir.join(&name), &[]).map(|_| name)
    }

    /// Opens the newest checkpoint that is whole and has every rank read its part of it with `read`. When a rank finds damage, all
    /// go on to the next older one and `read` is called again. Returns what `read` gave, the checkpoint, and notices about
    /// those passed over; `None` when the run has no checkpoint at all. Nothing is deleted.
    ///
    /// `comm` is a group of all ranks that carries host memory, and no other operation may be under way on it.
    ///
    /// # Errors
    /// The same on all ranks: [`Error::NoneWhole`] when there are checkpoints and not one is whole; whatever else fails on a rank.
    pub fn resume<T>(
        &self,
        comm: &dyn Comm,
        mut read: impl FnMut(&Checkpoint) -> Result<T>,
    ) -> Result<Option<(T, Checkpoint, Vec<String>)>> {
        let mut notices: Vec<String> = self.leftover_notices()?;
        let mut bad = Vec::new();
        let mut below = None;
        loop {
            // Rank 0 chooses, so that all speak of one checkpoint even while a shared folder's listing is not the same everywhere.
            let (_, word) =
                agree(comm, |_| if comm.rank() == 0 { Ok(((), self.choose(below, &mut bad)?)) } else { Ok(((), String::new())) })?;
            let Ok(step) = word.parse::<usize>() else {
                return if word == NONE {
                    Ok(None)
                } else {
                    Err(Error::NoneWhole { dir: self.dir(), checkpoints: word.lines().map(str::to_string).collect() })
                };
            };
            match self.read_together(comm, self.step_dir(step), &mut read) {
                Ok((value, checkpoint)) => {
                    notices.extend(bad);
                    return Ok(Some((value, checkpoint, notices)));
                }
                Err(e) if e.class() == Class::NotWhole => {
                    bad.push(format!("checkpoint {} is passed over: {e}", self.step_dir(step).display()))
                }
                Err(e) => return Err(e),
            }
            below = Some(step);
        }
    }

    /// The checkpoint of a step, read by every rank with `read`.
    ///
    /// # Errors
    /// The same on all ranks: [`Error::Bad`] when there is none or it does not fit, [`Error::NotWhole`] when it is damaged.
    pub fn resume_step<T>(&self, comm: &dyn Comm, step: usize, mut read: impl FnMut(&Checkpoint) -> Result<T>) -> Result<(T, Checkpoint)> {
        agree(comm, |_| if comm.rank() == 0 { Ok(((), self.ensure_step(step).map(|_| String::new())?)) } else { Ok(((), String::new())) })?;
        self.read_together(comm, self.step_dir(step), &mut read)
    }

    /// The newest step below `below` that looks whole; or that there is none, and why, as lines.
    fn choose(&self, below: Option<usize>, bad: &mut Vec<String>) -> Result<String> {
        for listed in self.list()?.into_iter().rev().filter(|l| below.is_none_or(|b| l.step < b)) {
            match &listed.fault {
                None => return Ok(listed.step.to_string()),
                Some(why) => bad.push(format!("checkpoint {} is passed over, {why}", listed.path.display())),
            }
        }
        Ok(if bad.is_empty() { NONE.into() } else { bad.join("\n") })
    }

    fn read_together<T>(&self, comm: &dyn Comm, path: PathBuf, read: &mut impl FnMut(&Checkpoint) -> Result<T>) -> Result<(T, Checkpoint)> {
        agree(comm, |_| Ok((verify_share(&path, comm.rank(), comm.size())?, String::new())))?;
        let (found, _) = agree(comm, |_| {
            let checkpoint = Checkpoint::open(&path)?;
            Ok(((read(&checkpoint)?, checkpoint), String::new()))
        })?;
        Ok(found)
    }
}

/// How long a file of another host may take to be seen: network file systems remember for some seconds what was not there.
const SEEN: Duration = Duration::from_secs(5);
const GLANCE: Duration = Duration::from_millis(20);
/// Name of the file that rank 0 makes for the others to see.
const PROBE: &str = ".shared-";

fn sees(path: &Path) -> bool {
    let since = Instant::now();
    loop {
        match path.exists() {
            false if since.elapsed() < SEEN => std::thread::sleep(GLANCE),
            found => return found,
        }
    }
}

/// The error of a rank that does not see what rank 0 has made in a folder.
pub(super) fn unshared(dir: &Path) -> Error {
    let message =
        "rank 0 made this folder and this rank does not see it: the run folder (log.dir) must lie on a file system that all hosts share";
    Error::bad(dir, message)
}

/// Rank 0's word when there is no checkpoint.
const NONE: &str = "none";
