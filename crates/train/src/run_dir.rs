//! The folder of a run: made only when everything else is known to be good, never mixed with an earlier run.

use crate::{Error, Result};
use std::{
    fs, io,
    path::{Path, PathBuf},
};
use temper_checkpoint::store::numbered;
use temper_config::Resolved;

/// What a run leaves in its folder besides checkpoints.
const CONFIG: &str = "config.resolved.json";
/// Held by the process that trains in the folder; the system lets go of it when that process ends, however it does.
const LOCK: &str = ".lock";
/// Files and folders by which an earlier run is recognised.
const TRACES: [&str; 4] = ["events.jsonl", "checkpoints", CONFIG, "hf"];

/// The system refuses something in the run folder, which the user can choose.
fn io_error(path: &Path) -> impl FnOnce(io::Error) -> Error {
    move |source| match is_of_the_path(&source) {
        true => Error::Input(format!("log.dir: {} cannot be written: {source}. Choose another log.dir", path.display())),
        false => Error::Io { path: path.to_path_buf(), source },
    }
}

/// Whether an error of the system is about the path that was given, and not about the state of a disk.
pub fn is_of_the_path(error: &io::Error) -> bool {
    use io::ErrorKind::*;
    let kinds = [NotFound, PermissionDenied, AlreadyExists, NotADirectory, IsADirectory, ReadOnlyFilesystem, InvalidFilename, InvalidInput];
    kinds.contains(&error.kind())
}

/// Whether a folder can be there: found out before hours of reading, and without making it.
///
/// # Errors
/// When something that is no folder is in its place, or above it.
pub fn check(dir: &Path) -> Result<()> {
    let there = dir.ancestors().find_map(|path| Some((path, fs::metadata(path).ok()?)));
    match there {
        Some((path, found)) if !found.is_dir() => Err(io_error(path)(io::ErrorKind::NotADirectory.into())),
        _ => Ok(()),
    }
}

/// Makes the folder of a new run. One that holds an earlier run is moved aside first; returns where to, if so.
/// It is not moved when some of the `inputs` lie in it: this run could no longer read them when it saves, nor the next one at all.
pub fn start(dir: &Path, inputs: &[&Path]) -> Result<Option<PathBuf>> {
    let held = TRACES.iter().any(|t| dir.join(t).exists());
    if let Some(input) = inputs.iter().find(|input| held && lies_in(input, dir)) {
        return Err(Error::Input(format!(
            "log.dir: {} holds an earlier run, which a new one would move aside together with {}. Choose another log.dir",
            dir.display(),
            input.display()
        )));
    }
    if held && dir.join(LOCK).exists() {
        drop(lock(dir)?);
    }
    let moved = if held { Some(move_aside(dir)?) } else { None };
    fs::create_dir_all(dir).map_err(io_error(dir))?;
    Ok(moved)
}

/// Takes the folder for this process, until the file is dropped.
///
/// # Errors
/// When another process trains in it.
pub fn lock(dir: &Path) -> Result<fs::File> {
    let path = dir.join(LOCK);
    let file = fs::File::options().create(true).truncate(false).write(true).open(&path).map_err(io_error(&path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => Err(Error::Input(format!(
            "log.dir: another process is training in {}. Wait for it to end, stop it, or choose another log.dir",
            dir.display()
        ))),
        Err(fs::TryLockError::Error(error)) => {
            tracing::warn!(%error, path = %path.display(), "this file system has no locks: do not start a second run in this folder");
            Ok(file)
        }
    }
}

fn lies_in(path: &Path, dir: &Path) -> bool {
    let real = |p: &Path| p.canonicalize().unwrap_or_else(|_| p.to_path_buf());
    real(path).starts_with(real(dir))
}

/// `run` becomes `run.1`, or the next free number.
fn move_aside(dir: &Path) -> Result<PathBuf> {
    let target = numbered(dir);
    fs::rename(dir, &target).map_err(|source| {
        Error::Input(format!(
            "log.dir: {} holds an earlier run and cannot be moved to {}: {source}. Choose another log.dir or use --resume",
            dir.display(),
            target.display()
        ))
    })?;
    Ok(target)
}

/// The newest earlier run that was moved aside from `dir` and holds checkpoints.
pub fn earlier_with_checkpoints(dir: &Path) -> Option<PathBuf> {
    let name = dir.file_name()?.to_string_lossy().into_owned();
    let moved = (1..).map(|n| dir.with_file_name(format!("{name}.{n}"))).take_while(|p| p.exists());
    moved.filter(|p| p.join("checkpoints").is_dir()).last()
}

/// Writes the resolved configuration, with the reason of every value that was chosen automatically.
pub fn write_config(dir: &Path, resolved: &Resolved) -> Result<()> {
    let path = dir.join(CONFIG);
    let temporary = dir.join(format!(".{CONFIG}.tmp"));
    let text = format!("{:#}\n", resolved.to_json());
    fs::write(&temporary, text).map_err(io_error(&temporary))?;
    fs::rename(&temporary, &path).map_err(io_error(&path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_earlier_run_is_moved_aside_and_nothing_is_lost() {
        let tmp = tempfile::tempdir().unwrap();
        let dir = tmp.path().join("run");
        assert_eq!(start(&dir, &[]).unwrap(), None);
        fs::write(dir.join("events.jsonl"), "one").unwrap();
        assert_eq!(start(&dir, &[]).unwrap(), Some(tmp.path().join("run.1")));
        fs::write(dir.join("events.jsonl"), "two").unwrap();
        assert_eq!(start(&dir, &[]).unwrap(), Some(tmp.path().join("run.2")));
        assert_eq!(fs::read_to_string(tmp.path().join("run.1/events.jsonl")).unwrap(), "one");
        assert_eq!(fs::read_to_string(tmp.path().join("run.2/events.jsonl")).unwrap(), "two");
        assert!(dir.is_dir() && !dir.join("events.jsonl").exists());
    }

    #[test]
    fn what_cannot_be_a_folder_is_the_user_s_fault() {
        let tmp = tempfile::tempdir().unwrap();
        let file = tmp.path().join("file");
        fs::write(&file, "").unwrap();
        for dir in [file.clone(), file.join("run")] {
            let found = [check(&dir).unwrap_err(), start(&dir, &[]).unwrap_err()];
            assert!(found.iter().all(|e| e.is_bad_input() && e.to_string().starts_with("log.dir: ")), "{found:?}");
        }
        assert!(check(&tmp.path().join("a/b/c")).is_ok() && !tmp.path().join("a").exists());
        assert!(!io_error(&file)(io::ErrorKind::StorageFull.into()).is_bad_input(), "a full disk is not");
    }

    #[test]
    fn a_folder_with_other_files_is_used_as_it_is() {
        let tmp = tempfile::tempdir().unwrap();
        fs::write(tmp.path().join("notes.txt"), "keep").unwrap();
        assert_eq!(start(tmp.path(), &[]).unwrap(), None);
        assert!(tmp.path().join("notes.txt").exists());
    }
}
