//! The checkpoints of a run. Those of one rank are laid out as follows, those of several as [`sharded`] says.
//!
//! ```text
//! RUN/checkpoints/step-000050/
//!   model.safetensors        the weights under their Hugging Face names, in the type they are trained in; sharded at 5 GB
//!   config.json, tokenizer…  what makes the folder a model that any program loads, and an export need nothing else
//!   optimizer.safetensors    exp_avg.NAME and exp_avg_sq.NAME for every weight NAME
//!   state.json               the step and whatever the caller needs to go on from it
//!   manifest.json            size and BLAKE3 of every other file; written last
//! ```
//!
//! A checkpoint is made as `.tmp-step-000050-PID`, synced, and renamed. A folder without a manifest is incomplete, one that
//! differs from its manifest is damaged, and neither is ever loaded or deleted. The checkpoints of steps that a resumed run has left, because
//! it went on from an earlier one, lie in `RUN/checkpoints.1` (or the next number).

mod kind;
mod load;
mod manifest;
mod save;
pub mod sharded;

pub use kind::Kind;
pub(crate) use load::base_dtype;
pub use manifest::{Fault, Manifest, verify};
pub use save::Saved;
pub use sharded::{Checkpoint, Committed, Entry, Request, Saver, Snapshot, on_first, own_ranges};

use crate::{
    Error, Result,
    disk::{Disk, Hook, list},
};
use std::{
    path::{Path, PathBuf},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

/// The checkpoints of one run.
#[derive(Debug)]
pub struct Store {
    run_dir: PathBuf,
    disk: Disk,
    /// The step saved last, plus one; 0 when none has been.
    last_saved: AtomicUsize,
    /// The temporary folder of a save that goes on beside training.
    under_way: Mutex<Option<PathBuf>>,
}

/// A checkpoint folder and what a look at it (without reading every byte) says.
#[derive(Debug)]
pub struct Listed {
    /// Its step.
    pub step: usize,
    /// Its folder.
    pub path: PathBuf,
    /// Bytes of its files.
    pub bytes: u64,
    /// How many ranks saved it; none where no manifest tells.
    pub ranks: Option<usize>,
    /// Nothing, or why it is not whole.
    pub fault: Option<Fault>,
}

/// What a path given by a user is.
#[derive(Debug)]
pub enum Located {
    /// A run folder or its `checkpoints` folder.
    Run(Store),
    /// One checkpoint.
    Step(PathBuf),
}

impl Store {
    /// The checkpoints under a run folder. Nothing is read or written yet.
    pub fn new(run_dir: &Path) -> Store {
        Store { run_dir: run_dir.to_path_buf(), disk: Disk::default(), last_saved: AtomicUsize::new(0), under_way: Mutex::default() }
    }

    /// For tests: calls `hook` before every change to the disk.
    pub fn with_hook(mut self, hook: Hook) -> Store {
        self.disk.hook = Some(hook);
        self
    }

    /// Finds out whether a path is a run or one of its checkpoints.
    ///
    /// # Errors
    /// [`Error::Bad`] when it is neither.
    pub fn locate(path: &Path) -> Result<Located> {
        let path = path
            .canonicalize()
            .map_err(|e| Error::bad(path, format!("{e}. Give the folder of a run (its log.dir), or one of its checkpoints")))?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.join(manifest::NAME).is_file() || step_of(&name).is_some() {
            return Ok(Located::Step(path));
        }
        match path.parent() {
            _ if path.join(FOLDER).is_dir() => Ok(Located::Run(Store::new(&path))),
            Some(run) if name == FOLDER => Ok(Located::Run(Store::new(run))),
            _ if path.join("events.jsonl").is_file() => {
                Err(Error::bad(&path, "the run has saved no checkpoint yet (checkpoint.every says when it does)"))
            }
            _ => Err(Error::bad(
                &path,
                format!("neither a run folder (it has no {FOLDER}/) nor a checkpoint (it has no {})", manifest::NAME),
            )),
        }
    }

    /// The folder that holds the checkpoints.
    pub fn dir(&self) -> PathBuf {
        self.run_dir.join(FOLDER)
    }

    /// Where the checkpoint of a step lies or will lie.
    pub fn step_dir(&self, step: usize) -> PathBuf {
        self.dir().join(format!("{PREFIX}{step:06}"))
    }

    /// All checkpoint folders by step, each with what a quick look says (files present, sizes right).
    ///
    /// # Errors
    /// [`Error::Io`] when the folder exists but cannot be read.
    pub fn list(&self) -> Result<Vec<Listed>> {
        let mut found = Vec::new();
        for path in self.entries()? {
            let Some(step) = path.file_name().and_then(|n| step_of(&n.to_string_lossy())) else { continue };
            found.push(Listed { step, ..look(path) });
        }
        found.sort_by_key(|l| l.step);
        Ok(found)
    }

    /// Moves the checkpoints of later steps than `step` out of the way, for a run that goes on from there: they are not of its past, and a later
    /// look for the newest must not find them. They go to `checkpoints.1` beside this folder, or the next free number, damaged ones too; incomplete
    /// ones stay. Returns where to and which, if there were any.
    ///
    /// # Errors
    /// [`Error::Io`]. What is not moved by then are the earlier ones.
    pub fn set_aside_after(&self, step: usize) -> Result<Option<(PathBuf, Vec<usize>)>> {
        let finished = |l: &Listed| !matches!(l.fault, Some(Fault::Incomplete(_)));
        let later: Vec<Listed> = self.list()?.into_iter().filter(|l| l.step > step && finished(l)).collect();
        if later.is_empty() {
            return Ok(None);
        }
        let aside = numbered(&self.dir());
        self.disk.create_dir(&aside)?;
        // The newest first: cut short, the folder is as if the run had been resumed from one of them.
        for l in later.iter().rev() {
            self.disk.rename(&l.path, &aside.join(l.path.file_name().unwrap_or_default()))?;
        }
        Ok(Some((aside, later.into_iter().map(|l| l.step).collect())))
    }

    /// Temporary folders that a killed save left behind.
    pub fn leftovers(&self) -> Result<Vec<PathBuf>> {
        let temporary = |p: &PathBuf| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(TEMPORARY));
        Ok(self.entries()?.into_iter().filter(temporary).collect())
    }

    fn entries(&self) -> Result<Vec<PathBuf>> {
        let dir = self.dir();
        if dir.exists() { list(&dir) } else { Ok(Vec::new()) }
    }

    /// Removes old checkpoints: all but the newest `keep_last` (0: none are removed) and those whose step is a multiple of
    /// `keep_every` (0: no exception). The checkpoint that this store saved last always stays, and so does what is not whole.
    /// Before this store has saved one, none is removed: a look at sizes does not prove that another is good.
    /// Returns notices about leftovers of killed saves, which are removed too.
    pub fn prune(&self, keep_last: usize, keep_every: usize) -> Result<Vec<String>> {
        let notices = self.clean()?;
        let whole: Vec<Listed> = self.list()?.into_iter().filter(|l| l.fault.is_none()).collect();
        let Some(just_saved) = self.last_saved.load(Ordering::Relaxed).checked_sub(1) else { return Ok(notices) };
        let old = if keep_last == 0 { 0 } else { whole.len().saturating_sub(keep_last) };
        for l in whole.into_iter().take(old) {
            if l.step != just_saved && !(keep_every > 0 && l.step.is_multiple_of(keep_every)) {
                // Renamed first, so that a kill leaves no folder that looks like a damaged checkpoint.
                let doomed = self.temporary(l.step);
                self.disk.rename(&l.path, &doomed)?;
                self.disk.remove(&doomed)?;
            }
        }
        Ok(notices)
    }

    /// Removes the leftovers of killed saves, except those of processes that are still running.
    fn clean(&self) -> Result<Vec<String>> {
        let mut notices = Vec::new();
        for path in self.leftovers()? {
            if !belongs_to_another(&path) && self.lock_under_way().as_ref() != Some(&path) {
                self.disk.remove(&path)?;
                notices.push(format!("{}: left behind by a save that was cut short; removed", path.display()));
            }
        }
        Ok(notices)
    }

    /// Makes the temporary folder of a save of several ranks and returns its name.
    fn make_temporary(&self, step: usize) -> Result<String> {
        let path = self.temporary(step);
        if path.exists() {
            self.disk.remove(&path)?;
        }
        *self.lock_under_way() = Some(path.clone());
        self.disk.create_dir(&path)?;
        Ok(path.file_name().unwrap_or_default().to_string_lossy().into_owned())
    }

    /// The save in this temporary folder has ended; what is there after a failure is removed.
    fn forget_temporary(&self, path: &Path, failed: bool) {
        if failed && path.exists() {
            // Best effort: the error to report is the first one, and the next clean-up tries again.
            let _ = self.disk.remove(path);
        }
        *self.lock_under_way() = None;
    }

    fn lock_under_way(&self) -> MutexGuard<'_, Option<PathBuf>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A checkpoint of this step has been committed.
    fn note_saved(&self, step: usize) {
        self.last_saved.store(step + 1, Ordering::Relaxed);
    }

    fn temporary(&self, step: usize) -> PathBuf {
        self.dir().join(format!("{TEMPORARY}{step:06}-{}", std::process::id()))
    }
}

/// Where a folder goes that is moved aside: `run` to `run.1`, or the next free number.
pub fn numbered(dir: &Path) -> PathBuf {
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    let mut names = (1u64..).map(|n| dir.with_file_name(format!("{name}.{n}")));
    names.find(|path| !path.exists()).unwrap_or_else(|| dir.with_extension("old"))
}

/// A quick look at a checkpoint's folder: files present, sizes right.
pub fn look(path: PathBuf) -> Listed {
    let step = path.file_name().and_then(|n| step_of(&n.to_string_lossy())).unwrap_or(0);
    let (ranks, fault) = match Manifest::read(&path) {
        Ok(manifest) => (Some(manifest.shards.len().max(1)), manifest.check_sizes(&path).err()),
        Err(fault) => (None, Some(fault)),
    };
    Listed { step, bytes: size(&path), path, ranks, fault }
}

/// Name of the folder of checkpoints in a run folder.
const FOLDER: &str = "checkpoints";
const PREFIX: &str = "step-";
const TEMPORARY: &str = ".tmp-step-";

fn step_of(name: &str) -> Option<usize> {
    let digits = name.strip_prefix(PREFIX)?;
    digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok())?
}

/// Whether a temporary folder's process id is that of another process that lives.
fn belongs_to_another(path: &Path) -> bool {
    let pid = path.file_name().and_then(|n| n.to_string_lossy().rsplit_once('-').and_then(|(_, pid)| pid.parse::<u32>().ok()));
    // `.tmp-step-000012` without an id ends in its step.
    let named = path.file_name().is_some_and(|n| n.to_string_lossy().matches('-').count() == 3);
    pid.is_some_and(|pid| named && pid != std::process::id() && lives(pid))
}

/// In a container whose first process collects no orphans, one that was killed stays in the table as a zombie.
fn lives(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name, which is in brackets and may hold anything.
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}

fn size(dir: &Path) -> u64 {
    let of = |p: &PathBuf| if p.is_dir() { size(p) } else { p.metadata().map_or(0, |m| m.len()) };
    list(dir).unwrap_or_default().iter().map(of).sum()
}
