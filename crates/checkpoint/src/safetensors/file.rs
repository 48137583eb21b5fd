//! A safetensors file mapped into memory.

use super::{Entry, Header, Stored};
use crate::{Error, Result};
use memmap2::Mmap;
use std::{
    collections::HashMap,
    ops::Range,
    path::{Path, PathBuf},
};

/// A file open for reading. Its tensors' bytes are read from disk when they are touched.
pub struct File {
    path: PathBuf,
    file: std::fs::File,
    map: Mmap,
    header: Header,
}

/// A tensor in a file, or some of its rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorRef<'a> {
    /// Element type on disk.
    pub dtype: Stored,
    /// Shape.
    pub shape: Vec<usize>,
    /// The elements, little-endian and row-major, at any alignment.
    pub bytes: &'a [u8],
}

impl File {
    /// Opens and maps a file and checks its header; no tensor is read.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be opened, [`Error::Bad`] when it is malformed (see [`Header::parse`]).
    pub fn open(path: &Path) -> Result<File> {
        let file = std::fs::File::open(path).map_err(Error::io("open", path))?;
        let length = file.metadata().map_err(Error::io("open", path))?.len();
        if length == 0 {
            return Err(Error::bad(path, "the file is empty. Download or copy it again"));
        }
        // SAFETY: the mapping is private and read-only. Another process that shortens the file while it is mapped can
        // kill this one (SIGBUS), as with every mapped file; nothing in this project writes to a file in place.
        #[allow(unsafe_code)]
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io("map", path))?;
        let header = Header::parse(&map).map_err(|message| Error::bad(path, message))?;
        Ok(File { path: path.to_path_buf(), file, map, header })
    }

    /// Where the file lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The free-form metadata.
    pub fn metadata(&self) -> &HashMap<String, String> {
        &self.header.metadata
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.header.tensors.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    /// Names of all tensors in the order of their bytes.
    pub fn names_in_order(&self) -> Vec<&str> {
        let mut names = self.names();
        names.sort_by_key(|n| self.header.tensors.get(*n).map_or((0, 0), |e| (e.bytes.start, e.bytes.end)));
        names
    }

    /// Whether the file holds this tensor.
    pub fn contains(&self, name: &str) -> bool {
        self.header.tensors.contains_key(name)
    }

    /// A tensor by name.
    pub fn tensor(&self, name: &str) -> Option<TensorRef<'_>> {
        let Entry { dtype, shape, bytes } = self.header.tensors.get(name)?;
        let data = self.map.get(self.header.data_start..)?;
        Some(TensorRef { dtype: *dtype, shape: shape.clone(), bytes: data.get(bytes.clone())? })
    }

    /// The byte of the file at which a tensor begins.
    pub(crate) fn offset(&self, name: &str) -> Option<u64> {
        self.header.tensors.get(name).map(|e| (self.header.data_start + e.bytes.start) as u64)
    }

    /// For reads past the map.
    pub(crate) fn handle(&self) -> &std::fs::File {
        &self.file
    }

    /// Size of the file.
    pub(crate) fn len(&self) -> u64 {
        self.map.len() as u64
    }

    /// Bytes of all tensors together, without the header.
    pub fn data_len(&self) -> usize {
        self.map.len() - self.header.data_start
    }
}

impl<'a> TensorRef<'a> {
    /// Rows `range` of dim 0; `None` when there are fewer, when it is a scalar, or when rows are not whole bytes.
    pub fn rows(&self, range: Range<usize>) -> Option<TensorRef<'a>> {
        let rows = *self.shape.first()?;
        let bits = self.shape.iter().skip(1).product::<usize>().checked_mul(self.dtype.bits() as usize)?;
        if range.start > range.end || range.end > rows || bits % 8 != 0 {
            return None;
        }
        let mut shape = self.shape.clone();
        shape[0] = range.len();
        Some(TensorRef { dtype: self.dtype, shape, bytes: self.bytes.get(range.start * bits / 8..range.end * bits / 8)? })
    }
}
