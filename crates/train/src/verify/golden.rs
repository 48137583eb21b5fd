//! A golden file: the values of another program, laid out as transformers' are.

use super::questions::Rows;
use super::reference::Reference;
use crate::{Error, Result};
use std::path::Path;
use temper_checkpoint::safetensors::{File, Stored, TensorRef};
use temper_data::IGNORE;

/// A golden file, read into memory where it is small, mapped where it is large.
pub(crate) struct Golden {
    file: File,
    /// Its tokens, all rows of one length, and their targets.
    pub rows: Rows,
    /// Whether it has labels.
    pub labelled: bool,
    /// Tokens that greedy decoding gives.
    pub greedy: Option<Vec<i64>>,
}

impl Golden {
    /// Reads the tokens of a file for a model of `vocab` rows.
    ///
    /// # Errors
    /// Names the tensor that is missing, of another shape or type, or outside the vocabulary.
    pub fn open(path: &Path, vocab: usize) -> Result<Golden> {
        let file = File::open(path)?;
        let ids =
            file.tensor("input_ids").ok_or_else(|| bad(path, "has no tensor `input_ids`: see `temper verify --help` for the layout"))?;
        let len = match ids.shape[..] {
            [rows, len] if rows * len > 0 => len,
            _ => return Err(bad(path, &format!("input_ids has shape {:?}, expected [rows, tokens]", ids.shape))),
        };
        let shape = ids.shape.clone();
        let ids = integers(&ids).ok_or_else(|| bad(path, "input_ids is not an integer tensor"))?;
        let in_vocab = |id: &i64| (0..vocab as i64).contains(id);
        if let Some(id) = ids.iter().find(|id| !in_vocab(id)) {
            return Err(bad(path, &format!("input_ids holds {id}, but the model's vocabulary has {vocab} rows")));
        }
        let labels = match file.tensor("labels") {
            None => None,
            Some(l) if l.shape != shape => return Err(bad(path, &format!("labels has shape {:?}, input_ids {shape:?}", l.shape))),
            Some(l) => {
                let labels = integers(&l).ok_or_else(|| bad(path, "labels is not an integer tensor"))?;
                if let Some(l) = labels.iter().find(|l| **l != i64::from(IGNORE) && !in_vocab(l)) {
                    return Err(bad(path, &format!("labels holds {l}, outside the vocabulary of {vocab}")));
                }
                Some(labels)
            }
        };
        let greedy = file.tensor("greedy").and_then(|t| integers(&t));
        Ok(Golden { rows: rows(&ids, labels.as_deref(), len), labelled: labels.is_some(), greedy, file })
    }

    /// Whether the file has an item whose name begins so.
    pub fn has(&self, prefix: &str) -> bool {
        self.file.names().iter().any(|n| n.starts_with(prefix))
    }
}

impl Reference for Golden {
    fn names(&self) -> Vec<&str> {
        self.file.names().into_iter().filter(|n| !matches!(*n, "input_ids" | "labels")).collect()
    }

    fn floats(&self, name: &str) -> Result<Option<Vec<f64>>> {
        let Some(t) = self.file.tensor(name) else { return Ok(None) };
        Ok(Some(floats(&t).ok_or_else(|| bad(self.file.path(), &format!("{name} is not a float tensor")))?))
    }

    fn greedy(&self) -> usize {
        self.greedy.as_ref().map_or(0, Vec::len)
    }
}

/// Rows of `len` tokens, with labels (not shifted) as targets.
fn rows(ids: &[i64], labels: Option<&[i64]>, len: usize) -> Rows {
    let row = |(i, ids): (usize, &[i64])| {
        let labels = labels.map_or(&[][..], |l| &l[i * len..(i + 1) * len]);
        let targets = (0..len).map(|t| labels.get(t + 1).map_or(IGNORE, |l| *l as i32)).collect();
        (ids.iter().map(|id| *id as i32).collect(), targets)
    };
    ids.chunks(len).enumerate().map(row).collect()
}

fn bad(path: &Path, message: &str) -> Error {
    Error::Input(format!("{}: {message}", path.display()))
}

/// Integer elements; `None` for other types.
fn integers(t: &TensorRef) -> Option<Vec<i64>> {
    match t.dtype {
        Stored::I64 => Some(t.bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect()),
        Stored::I32 => Some(t.bytes.as_chunks::<4>().0.iter().map(|b| i64::from(i32::from_le_bytes(*b))).collect()),
        _ => None,
    }
}

/// Float elements; `None` for other types.
fn floats(t: &TensorRef) -> Option<Vec<f64>> {
    match t.dtype {
        Stored::F64 => Some(t.bytes.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect()),
        Stored::F32 => Some(t.bytes.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect()),
        Stored::BF16 => Some(halves(t.bytes)),
        _ => None,
    }
}

/// bf16 is the upper half of an f32.
fn halves(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks::<2>().0.iter().map(|b| f64::from(f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16))).collect()
}
