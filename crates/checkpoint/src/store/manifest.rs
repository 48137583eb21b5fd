//! The manifest: what a checkpoint must consist of, byte for byte.

use super::sharded;
use crate::{
    Error, Result,
    disk::{Disk, Written},
};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::{
    fmt, fs,
    io::Read,
    path::{Component, Path},
};

pub(crate) const NAME: &str = "manifest.json";
/// A manifest larger than this is not one.
const MAX_MANIFEST: u64 = 64 << 20;
/// Version of the layout of a checkpoint folder.
pub(crate) const FORMAT: u32 = 1;
/// Bytes hashed at once.
const BLOCK: usize = 4 << 20;

/// `manifest.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of the layout.
    pub format: u32,
    /// The step.
    pub step: usize,
    /// All other files but those of tensors of several ranks.
    pub files: Vec<Entry>,
    /// The files of tensors of several ranks, by rank; their checksums are in `rank-N.json`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shards: Vec<ShardFile>,
}

/// A file of tensors that one of several ranks wrote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardFile {
    /// Path inside the folder.
    pub name: String,
    /// Size.
    pub bytes: u64,
}

/// One file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Path inside the folder.
    pub name: String,
    /// Size.
    pub bytes: u64,
    /// BLAKE3 of the content, in hexadecimal.
    pub blake3: String,
}

/// Why a checkpoint cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It was never finished: no manifest.
    Incomplete(String),
    /// It is not what it was when it was saved; one line for each file.
    Damaged(Vec<String>),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Incomplete(why) => write!(f, "incomplete: {why}"),
            Fault::Damaged(files) => write!(f, "damaged: {}", files.join("; ")),
        }
    }
}

/// Reads every byte of a checkpoint and compares it with the manifest. Returns the number of bytes read.
///
/// # Errors
/// What is wrong, naming each file.
pub fn verify(step_dir: &Path) -> std::result::Result<u64, Fault> {
    let manifest = Manifest::check(step_dir)?;
    let mut wrong = manifest.wrong_files(step_dir, |_| true);
    if wrong.is_empty() {
        wrong = sharded::verify_shards(step_dir, &manifest);
    }
    if wrong.is_empty() { Ok(manifest.bytes()) } else { Err(Fault::Damaged(wrong)) }
}

/// As [`verify`] of those files of a checkpoint of one rank that fall to one of several: each file to one of them. (Files of several
/// ranks are checked as they are read.)
pub(crate) fn verify_share(step_dir: &Path, rank: usize, ranks: usize) -> Result<()> {
    let not_whole = |fault| Error::NotWhole { path: step_dir.to_path_buf(), fault };
    let manifest = Manifest::check(step_dir).map_err(not_whole)?;
    if !manifest.shards.is_empty() {
        return Ok(());
    }
    let own: Vec<&Entry> = manifest.files.iter().skip(rank).step_by(ranks.max(1)).collect();
    let wrong: Vec<String> = own.into_par_iter().filter_map(|e| e.compare_content(step_dir).err()).collect();
    if wrong.is_empty() { Ok(()) } else { Err(not_whole(Fault::Damaged(wrong))) }
}

impl Manifest {
    /// Whether a folder has a manifest, whatever is in it.
    pub(crate) fn is_in(dir: &Path) -> bool {
        dir.join(NAME).is_file()
    }

    pub(crate) fn new(step: usize, files: Vec<Written>) -> Manifest {
        let files = files.into_iter().map(|w| Entry { name: w.name, bytes: w.bytes, blake3: w.blake3.to_hex().to_string() });
        Manifest { format: FORMAT, step, files: files.collect(), shards: Vec::new() }
    }

    /// The manifest of several ranks.
    pub(crate) fn new_sharded(step: usize, files: Vec<Written>, shards: Vec<ShardFile>) -> Manifest {
        Manifest { format: sharded::FORMAT, shards, ..Manifest::new(step, files) }
    }

    /// Bytes of all files but this.
    pub(crate) fn bytes(&self) -> u64 {
        self.files.iter().map(|f| f.bytes).chain(self.shards.iter().map(|s| s.bytes)).sum()
    }

    /// Reads the files that have a checksum here and are asked for. One line for each that is not what it was.
    pub(crate) fn wrong_files(&self, dir: &Path, asked: impl Fn(&str) -> bool + Sync) -> Vec<String> {
        self.files.par_iter().filter(|e| asked(&e.name)).filter_map(|e| e.compare_content(dir).err()).collect()
    }

    pub(crate) fn write(&self, disk: &Disk, dir: &Path) -> Result<Written> {
        let text = serde_json::to_string_pretty(self).map_err(|e| Error::bad(dir, format!("{NAME}: {e}")))?;
        disk.write(&dir.join(NAME), text.as_bytes())
    }

    /// Reads the manifest and looks whether every file is there with its size; contents are not read.
    pub(crate) fn check(dir: &Path) -> std::result::Result<Manifest, Fault> {
        let manifest = Manifest::read(dir)?;
        manifest.check_sizes(dir).map(|()| manifest)
    }

    /// Whether every file is there with its size.
    pub(crate) fn check_sizes(&self, dir: &Path) -> std::result::Result<(), Fault> {
        let files = self.files.iter().filter_map(|e| compare_size(dir, &e.name, e.bytes).err());
        let wrong: Vec<String> = files.chain(self.shards.iter().filter_map(|s| compare_size(dir, &s.name, s.bytes).err())).collect();
        if wrong.is_empty() { Ok(()) } else { Err(Fault::Damaged(wrong)) }
    }

    /// Reads the manifest, whatever became of the files that it names.
    pub(crate) fn read(dir: &Path) -> std::result::Result<Manifest, Fault> {
        let path = dir.join(NAME);
        let length = match fs::metadata(&path) {
            Ok(m) => m.len(),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Err(Fault::Incomplete(format!("{} is missing", path.display()))),
            Err(e) => return Err(Fault::Damaged(vec![format!("{}: {e}", path.display())])),
        };
        let damaged = |why: String| Fault::Damaged(vec![format!("{}: {why}", path.display())]);
        if length > MAX_MANIFEST {
            return Err(damaged(format!("{length} bytes are too many for a manifest")));
        }
        let text = fs::read(&path).map_err(|e| damaged(e.to_string()))?;
        let manifest: Manifest = serde_json::from_slice(&text).map_err(|e| damaged(format!("not a manifest: {e}")))?;
        let should = if manifest.shards.is_empty() { FORMAT } else { sharded::FORMAT };
        if manifest.format != should {
            let newest = sharded::FORMAT;
            return Err(damaged(format!(
                "format {}, this version of temper reads {FORMAT} and, of several ranks, {newest}",
                manifest.format
            )));
        }
        let folder = dir.file_name().and_then(|n| super::step_of(&n.to_string_lossy()));
        if folder.is_some_and(|step| step != manifest.step) {
            return Err(damaged(format!("it is the manifest of step {}", manifest.step)));
        }
        Ok(manifest)
    }
}

impl Entry {
    fn compare_content(&self, dir: &Path) -> std::result::Result<(), String> {
        let path = dir.join(&self.name);
        let hash = hash(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        if hash.to_hex().as_str() == self.blake3 {
            Ok(())
        } else {
            Err(format!("{} has other contents than when it was saved", path.display()))
        }
    }
}

/// Whether a file is there, inside the folder, with its size.
fn compare_size(dir: &Path, name: &str, bytes: u64) -> std::result::Result<(), String> {
    let path = dir.join(name);
    if !Path::new(name).components().all(|c| matches!(c, Component::Normal(_))) {
        return Err(format!("{NAME} names {name:?}, which is not inside the folder"));
    }
    match fs::metadata(&path) {
        Ok(m) if m.len() == bytes => Ok(()),
        Ok(m) => Err(format!("{} has {} bytes instead of {bytes}", path.display(), m.len())),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Err(format!("{} is missing", path.display())),
        Err(e) => Err(format!("{}: {e}", path.display())),
    }
}

/// Hashes a file, reading one block while the one before is hashed.
fn hash(path: &Path) -> std::io::Result<blake3::Hash> {
    let mut file = fs::File::open(path)?;
    let mut hasher = blake3::Hasher::new();
    let size = file.metadata()?.len().clamp(1, BLOCK as u64) as usize;
    let (mut now, mut next) = (vec![0; size], vec![0; size]);
    let mut n = fill(&mut file, &mut now)?;
    while n > 0 {
        let (read, _) = rayon::join(|| fill(&mut file, &mut next), || hasher.update(&now[..n]));
        n = read?;
        std::mem::swap(&mut now, &mut next);
    }
    Ok(hasher.finalize())
}

fn fill(file: &mut fs::File, block: &mut [u8]) -> std::io::Result<usize> {
    let mut n = 0;
    while n < block.len() {
        match file.read(&mut block[n..]) {
            Ok(0) => break,
            Ok(more) => n += more,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(n)
}
