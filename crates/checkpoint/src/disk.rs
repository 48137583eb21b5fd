//! Every change to the disk goes through here: one operation at a time, durable, and open to a hook with which
//! tests stop the work between any two of them.

use crate::{Error, Result};
use std::{
    fmt, fs,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

/// One change to the disk, about to happen.
#[derive(Clone, Copy, Debug)]
pub struct Op<'a> {
    /// What will be done: `create`, `write`, `sync`, `rename`, `exchange`, `link`, `remove`.
    pub action: &'static str,
    /// To which file or folder.
    pub path: &'a Path,
}

/// Called before every change to the disk. An error takes the place of the operation, as if the system had refused it;
/// a hook that refuses everything from some operation on leaves the disk as a kill at that moment would.
#[derive(Clone)]
pub struct Hook(Arc<dyn Fn(Op<'_>) -> io::Result<()> + Send + Sync>);

impl Hook {
    /// A hook from a function.
    pub fn new(f: impl Fn(Op<'_>) -> io::Result<()> + Send + Sync + 'static) -> Hook {
        Hook(Arc::new(f))
    }
}

impl fmt::Debug for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hook")
    }
}

/// The disk, seen through an optional hook.
#[derive(Clone, Debug, Default)]
pub(crate) struct Disk {
    pub(crate) hook: Option<Hook>,
}

impl Disk {
    /// One operation, unless the hook forbids it.
    pub(crate) fn perform<T>(&self, action: &'static str, path: &Path, f: impl FnOnce() -> io::Result<T>) -> Result<T> {
        let allowed = self.hook.as_ref().map_or(Ok(()), |h| (h.0)(Op { action, path }));
        allowed.and_then(|()| f()).map_err(Error::io(action, path))
    }

    /// Makes a folder and those above it.
    pub(crate) fn create_dir(&self, path: &Path) -> Result<()> {
        self.perform("create", path, || fs::create_dir_all(path))
    }

    /// Opens a new file for writing.
    pub(crate) fn create(&self, path: &Path) -> Result<Writer<'_>> {
        let file = self.perform("create", path, || fs::File::create(path))?;
        Ok(Writer { disk: self, path: path.to_path_buf(), file, hasher: blake3::Hasher::new(), bytes: 0 })
    }

    /// Writes a small file whole.
    pub(crate) fn write(&self, path: &Path, data: &[u8]) -> Result<Written> {
        let mut writer = self.create(path)?;
        writer.write(data)?;
        writer.finish()
    }

    /// Makes the entries of a folder durable.
    pub(crate) fn sync_dir(&self, path: &Path) -> Result<()> {
        // An empty path is the parent of a bare relative name.
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        self.perform("sync", path, || fs::File::open(path)?.sync_all())
    }

    /// Renames a file or folder.
    pub(crate) fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.perform("rename", to, || fs::rename(from, to))
    }

    /// A second name for a file; a copy where the file system has no hard links.
    pub(crate) fn link(&self, from: &Path, to: &Path) -> Result<()> {
        self.perform("link", to, || fs::hard_link(from, to).or_else(|_| fs::copy(from, to).map(|_| ())))
    }

    /// Removes a file, or a folder and everything in it.
    pub(crate) fn remove(&self, path: &Path) -> Result<()> {
        let is_dir = fs::symlink_metadata(path).map_err(Error::io("remove", path))?.is_dir();
        if !is_dir {
            return self.perform("remove", path, || fs::remove_file(path));
        }
        for entry in list(path)? {
            self.remove(&entry)?;
        }
        self.perform("remove", path, || fs::remove_dir(path))
    }

    /// Puts the folder `new` in the place of `old`, which may or may not exist, and removes what was there.
    ///
    /// Where the system can exchange two names (Linux, macOS) that happens in one step: at any moment `old` is either the
    /// one or the other. Elsewhere `old` is first renamed to `.replaced-NAME`, from where it can be taken back by hand.
    pub(crate) fn replace_dir(&self, new: &Path, old: &Path) -> Result<()> {
        let parent = old.parent().unwrap_or(Path::new(""));
        if !old.exists() {
            self.rename(new, old)?;
            return self.sync_dir(parent);
        }
        let aside = match self.perform("exchange", old, || exchange(new, old)) {
            Ok(()) => new.to_path_buf(),
            Err(Error::Io { cause, .. }) if is_unsupported(&cause) => {
                let aside = sibling(old, "replaced");
                if aside.exists() {
                    self.remove(&aside)?;
                }
                self.rename(old, &aside)?;
                self.rename(new, old)?;
                aside
            }
            Err(e) => return Err(e),
        };
        self.sync_dir(parent)?;
        // The new folder is in place; what is left of the old one is only a waste of space.
        if let Err(e) = self.remove(&aside) {
            tracing::warn!("{}: what was there before could not be removed: {e}", old.display());
        }
        Ok(())
    }
}

/// `.WHAT-NAME` beside a file or folder.
pub(crate) fn sibling(path: &Path, what: &str) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{what}-{name}"))
}

/// The entries of a folder, sorted.
pub(crate) fn list(path: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(path).and_then(|d| d.map(|e| Ok(e?.path())).collect::<io::Result<Vec<_>>>());
    let mut entries = entries.map_err(Error::io("list", path))?;
    entries.sort();
    Ok(entries)
}

#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
fn exchange(a: &Path, b: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    Ok(renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)?)
}

#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
fn exchange(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Some network file systems know no exchange and say so in one of these ways.
fn is_unsupported(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::Unsupported | io::ErrorKind::InvalidInput)
}

/// A file being written: hashed on the way, so that nothing is read back.
pub(crate) struct Writer<'a> {
    disk: &'a Disk,
    path: PathBuf,
    file: fs::File,
    hasher: blake3::Hasher,
    bytes: u64,
}

/// What was written to a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Written {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    pub(crate) blake3: blake3::Hash,
}

impl Writer<'_> {
    /// Appends bytes.
    pub(crate) fn write(&mut self, data: &[u8]) -> Result<()> {
        let (hasher, file) = (&mut self.hasher, &mut self.file);
        self.disk.perform("write", &self.path, || {
            let (written, _) = rayon::join(|| file.write_all(data), || hasher.update(data));
            written
        })?;
        self.bytes += data.len() as u64;
        Ok(())
    }

    /// Makes the file durable.
    pub(crate) fn finish(self) -> Result<Written> {
        self.disk.perform("sync", &self.path, || self.file.sync_all())?;
        let name = self.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Written { name, bytes: self.bytes, blake3: self.hasher.finalize() })
    }
}
