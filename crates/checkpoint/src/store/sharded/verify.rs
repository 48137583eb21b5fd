//! Looks at every byte of the ranks' files.

use super::{super::Manifest, BLOCK, data_name, record::Record};
use crate::error::some_of;
use rayon::prelude::*;
use std::{fs::File, os::unix::fs::FileExt, path::Path};

/// Compares the files of tensors with their checksums, whose own files the caller has checked. One line for each file that is not what
/// it was, with the tensors that are affected.
pub(crate) fn verify_shards(dir: &Path, manifest: &Manifest) -> Vec<String> {
    let ranks = manifest.shards.len();
    (0..ranks).into_par_iter().filter_map(|rank| verify_rank(dir, manifest, rank, ranks).err()).collect()
}

fn verify_rank(dir: &Path, manifest: &Manifest, rank: usize, ranks: usize) -> Result<(), String> {
    let path = dir.join(data_name(rank));
    let record = Record::read(dir, manifest.step, rank, ranks).map_err(|e| e.to_string())?;
    let checks = record.checks(dir).map_err(|e| e.to_string())?;
    let file = File::open(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let check = |buffer: &mut Vec<u8>, (block, should): (usize, &blake3::Hash)| {
        let start = block as u64 * BLOCK as u64;
        buffer.resize(record.bytes.saturating_sub(start).min(BLOCK as u64) as usize, 0);
        match file.read_exact_at(buffer, start) {
            Ok(()) if *should == blake3::hash(buffer) => None,
            Ok(()) => Some(Ok(block)),
            Err(e) => Some(Err(format!("{}: {e}", path.display()))),
        }
    };
    let wrong: Result<Vec<usize>, String> = checks.par_iter().enumerate().map_init(Vec::new, check).flatten().collect();
    let wrong = wrong?;
    if wrong.is_empty() { Ok(()) } else { Err(damage(&path, &record, &wrong)) }
}

/// Says what is damaged in a rank's file.
pub(crate) fn damage(path: &Path, record: &Record, blocks: &[usize]) -> String {
    let mut tensors: Vec<String> = blocks.iter().flat_map(|b| record.tensors_in(*b)).collect();
    tensors.dedup();
    let first = blocks.first().copied().unwrap_or(0) as u64 * BLOCK as u64;
    let end = (first + BLOCK as u64).min(record.bytes);
    let (wrong, of) = (blocks.len(), record.blocks.len());
    format!(
        "{} has other contents than when it was saved, in {wrong} of {of} blocks (first: bytes {first} to {end}), which hold {}",
        path.display(),
        some_of(&tensors)
    )
}
