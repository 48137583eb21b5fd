//! The two kinds of index: what one rank wrote (`rank-N.json`), and where every tensor lies (`tensors.json`).

use super::{super::Kind, BLOCK, FORMAT, Fragment, Named, TENSORS, record_name};
use crate::{
    Error, Result,
    disk::{Disk, Written},
    sidecar::float_named,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::path::Path;
use temper_tensor::DType;

/// An index larger than this is not one (the 64 ranks of a 235B model have 8 MB).
const MAX_INDEX: u64 = 1 << 30;

/// `rank-N.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) format: u32,
    pub(crate) step: usize,
    pub(crate) rank: usize,
    /// Ranks of the run.
    pub(crate) ranks: usize,
    /// Size of the data file.
    pub(crate) bytes: u64,
    /// Bytes to a checksum.
    pub(crate) block: usize,
    /// BLAKE3 of every block, in hexadecimal.
    pub(crate) blocks: Vec<String>,
    pub(crate) fragments: Vec<Named>,
}

/// `tensors.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Index {
    pub(crate) format: u32,
    pub(crate) step: usize,
    pub(crate) ranks: usize,
    /// In the order of the model.
    pub(crate) tensors: Vec<TensorEntry>,
}

/// One logical tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TensorEntry {
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: String,
    pub(crate) fragments: Vec<Fragment>,
}

impl Record {
    pub(crate) fn write(&self, disk: &Disk, dir: &Path) -> Result<Written> {
        write(disk, &dir.join(record_name(self.rank)), self)
    }

    /// Reads the record of a rank, which must be one of this step and number of ranks.
    pub(crate) fn read(dir: &Path, step: usize, rank: usize, ranks: usize) -> Result<Record> {
        let path = dir.join(record_name(rank));
        let record: Record = read(&path)?;
        let (is, should) = ((record.step, record.rank, record.ranks), (step, rank, ranks));
        if is != should {
            let words = |(step, rank, ranks): (usize, usize, usize)| format!("step {step}, rank {rank} of {ranks}");
            return Err(Error::bad(&path, format!("is that of {}, not of {}", words(is), words(should))));
        }
        let blocks = record.bytes.div_ceil(BLOCK as u64);
        if record.format != FORMAT || record.block != BLOCK || record.blocks.len() as u64 != blocks {
            let Record { format, block, .. } = record;
            return Err(Error::bad(
                &path,
                format!("format {format} with blocks of {block} bytes; this version of temper reads {FORMAT} with {BLOCK}"),
            ));
        }
        Ok(record)
    }

    /// The checksums.
    pub(crate) fn checks(&self, dir: &Path) -> Result<Vec<blake3::Hash>> {
        let parsed = self.blocks.iter().map(blake3::Hash::from_hex).collect::<std::result::Result<_, _>>();
        parsed.map_err(|e| Error::bad(&dir.join(record_name(self.rank)), format!("not a checksum: {e}")))
    }

    /// The tensors that lie in a block, for messages.
    pub(crate) fn tensors_in(&self, block: usize) -> Vec<String> {
        let (start, end) = (block as u64 * BLOCK as u64, (block as u64 + 1) * BLOCK as u64);
        let holds = |n: &&Named| {
            let size = float_named(&n.dtype).map_or(1, DType::size) as u64;
            n.fragment.at < end && n.fragment.at + n.fragment.len() as u64 * size > start
        };
        self.fragments.iter().filter(holds).map(|n| format!("{} of {}", n.kind, n.tensor)).collect()
    }
}

impl Index {
    pub(crate) fn write(&self, disk: &Disk, dir: &Path) -> Result<Written> {
        write(disk, &dir.join(TENSORS), self)
    }

    /// Reads and checks an index: every fragment must lie within its tensor and within the file of its rank, whose sizes are given.
    pub(crate) fn read(dir: &Path, step: usize, sizes: &[u64]) -> Result<Index> {
        let path = dir.join(TENSORS);
        let index: Index = read(&path)?;
        if (index.format, index.step, index.ranks) != (FORMAT, step, sizes.len()) {
            let Index { format, step: found, ranks, .. } = index;
            let message = format!("format {format}, step {found}, {ranks} ranks; the manifest says {FORMAT}, {step}, {}", sizes.len());
            return Err(Error::bad(&path, message));
        }
        for tensor in &index.tensors {
            let bad = |what: String| Error::bad(&path, format!("{} of {}: {what}", tensor.kind, tensor.name));
            let dtype = tensor.dtype()?;
            if tensor.shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)).is_none() {
                return Err(bad(format!("shape {:?} is too large", tensor.shape)));
            }
            let wrong = tensor.fragments.iter().find(|f| sizes.get(f.rank).is_none_or(|bytes| !f.fits(&tensor.shape, dtype, *bytes)));
            if let Some(wrong) = wrong {
                return Err(bad(format!("{wrong:?} does not fit shape {:?} and the files", tensor.shape)));
            }
        }
        Ok(index)
    }
}

impl TensorEntry {
    /// The element type.
    pub(crate) fn dtype(&self) -> Result<DType> {
        float_named(&self.dtype).ok_or_else(|| Error::bad(Path::new(TENSORS), format!("{}: unknown type {:?}", self.name, self.dtype)))
    }
}

fn write<T: Serialize>(disk: &Disk, path: &Path, value: &T) -> Result<Written> {
    let text = serde_json::to_vec(value).map_err(|e| Error::bad(path, e.to_string()))?;
    disk.write(path, &text)
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let length = std::fs::metadata(path).map_err(Error::io("read", path))?.len();
    if length > MAX_INDEX {
        return Err(Error::bad(path, format!("{length} bytes are too many for an index")));
    }
    let text = std::fs::read(path).map_err(Error::io("read", path))?;
    serde_json::from_slice(&text).map_err(|e| Error::bad(path, format!("not an index of a checkpoint: {e}")))
}
