//! Many ranks go on from the same checkpoint: the newest that every one of them can read.

use super::{Checkpoint, agree};
use crate::{
    Class, Error, Result,
    store::{Store, manifest::verify_share},
};
use std::path::PathBuf;
use temper_comm::Comm;

impl Store {
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
    /// The same on all ranks, as [`Store::load`].
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

/// Rank 0's word when there is no checkpoint.
const NONE: &str = "none";
