//! Cubins kept on disk, named by a hash of everything that goes into them.

use super::{Compiler, HEADER, Source, Variant};
use crate::{Error, Result};
use std::io::Write;
use std::path::{Path, PathBuf};

/// A folder of cubins.
pub struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// The cache in `TEMPER_CACHE`, else in the user's cache folder.
    pub fn open() -> Result<Cache> {
        let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let root = var("TEMPER_CACHE")
            .or_else(|| var("XDG_CACHE_HOME").map(|d| d.join("temper")))
            .or_else(|| var("HOME").map(|d| d.join(".cache/temper")))
            .unwrap_or_else(|| std::env::temp_dir().join("temper"));
        let folder = root.join("kernels");
        std::fs::create_dir_all(&folder).map_err(|source| Error::Cache { path: folder.clone(), source })?;
        Ok(Cache { folder })
    }

    /// The file of a source in a variant: everything that changes the result is part of its name.
    pub fn path(&self, compiler: &Compiler, source: &Source, variant: Variant) -> PathBuf {
        let mut h = blake3::Hasher::new();
        for part in [source.text, HEADER.1, &format!("{:?}", compiler.version), &compiler.options(variant).join("\n")] {
            h.update(&(part.len() as u64).to_le_bytes());
            h.update(part.as_bytes());
        }
        let stem = source.file.trim_end_matches(".cu");
        self.folder.join(format!("{stem}-{}.cubin", &h.finalize().to_hex()[..32]))
    }

    /// Compiles, and stores the result; several processes may do so at once.
    pub fn fill(&self, compiler: &Compiler, source: &Source, variant: Variant) -> Result<Vec<u8>> {
        let path = self.path(compiler, source, variant);
        let compiled = compiler.compile(source, variant)?;
        write(&path, &compiled.cubin).map_err(|source| Error::Cache { path, source })?;
        Ok(compiled.cubin)
    }

    /// The cubin, from the disk when it is there.
    pub fn get(&self, compiler: &Compiler, source: &Source, variant: Variant) -> Result<Vec<u8>> {
        let path = self.path(compiler, source, variant);
        match std::fs::read(&path) {
            Ok(bytes) => Ok(bytes),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => self.fill(compiler, source, variant),
            Err(source) => Err(Error::Cache { path, source }),
        }
    }
}

/// Writes beside the file, then renames: a reader sees the whole or nothing.
fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|e| e.error)?;
    Ok(())
}
