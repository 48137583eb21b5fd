//! Tokenised files on disk, found by the hash of everything they were made from.
//!
//! One file per source: magic, length of a JSON header, the header (counts, bad rows, sizes of the columns), the
//! columns in little-endian, and a BLAKE3 hash of all before it. A file that is cut, changed or foreign is not used
//! but made again, with a notice. Files are written beside their place and renamed, so concurrent runs are safe.

use std::fs;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use bytemuck::{AnyBitPattern, NoUninit, pod_collect_to_vec};
use serde::{Deserialize, Serialize};

use crate::dataset::Samples;
use crate::stats::SourceStats;
use crate::{BadRow, Error, TokenSpan};

/// Raised whenever rendering, masks, or this format change.
const VERSION: u32 = 1;
const MAGIC: &[u8; 8] = b"temperds";

/// Counts of a source and sizes of its columns. Paths stay out: the same content may lie elsewhere.
#[derive(Serialize, Deserialize)]
struct Header {
    version: u32,
    format: Option<String>,
    rows: u64,
    bad_rows: u64,
    bad_examples: Vec<(u64, Option<u64>, String)>,
    blank_lines: u64,
    mask_mismatches: u64,
    border_tokens: u64,
    warnings: Vec<String>,
    samples: u64,
    tokens: u64,
    spans: u64,
}

/// Where the samples of a file are cached, for an encoder with this digest.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn place(folder: &Path, source: &Path, encoder: blake3::Hash) -> Result<PathBuf, Error> {
    let mut file = fs::File::open(source).map_err(|e| Error::io(source, "opening", e))?;
    let mut content = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer).map_err(|e| Error::io(source, "reading", e))? {
            0 => break,
            n => content.update(&buffer[..n]),
        };
    }
    let mut key = blake3::Hasher::new();
    key.update(&VERSION.to_le_bytes());
    key.update(env!("CARGO_PKG_VERSION").as_bytes());
    key.update(encoder.as_bytes());
    key.update(content.finalize().as_bytes());
    // The extension decides how the content is read.
    key.update(source.file_name().map_or("", |n| n.to_str().unwrap_or("").split_once('.').map_or("", |(_, e)| e)).as_bytes());
    Ok(folder.join(format!("{}.tokens", key.finalize().to_hex())))
}

/// Reads a cached source; `Ok(None)` where there is none.
///
/// # Errors
/// Why the file that is there cannot be used.
pub(crate) fn load(place: &Path, source: &Path) -> Result<Option<(Samples, SourceStats)>, String> {
    let bytes = match fs::read(place) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e.to_string()),
    };
    let (content, hash) = bytes.split_last_chunk::<32>().ok_or("it is cut")?;
    if blake3::hash(content).as_bytes() != hash {
        return Err("its checksum is wrong".into());
    }
    let mut rest = content.strip_prefix(MAGIC).ok_or("it is of another kind")?;
    let length = u64::from_le_bytes(*take(&mut rest, 8)?.first_chunk::<8>().ok_or("it is cut")?);
    let header: Header = serde_json::from_slice(take(&mut rest, length)?).map_err(|e| e.to_string())?;
    if header.version != VERSION {
        return Err(format!("it has version {}, not {VERSION}", header.version));
    }
    let samples = Samples {
        rows: column(&mut rest, header.samples)?,
        ends: column(&mut rest, header.samples)?,
        span_ends: column(&mut rest, header.samples)?,
        ids: column(&mut rest, header.tokens)?,
        spans: column::<[u32; 3]>(&mut rest, header.spans)?
            .into_iter()
            .map(|[start, end, weight]| TokenSpan { start, end, weight: f32::from_bits(weight) })
            .collect(),
    };
    if !rest.is_empty() || !samples.consistent() {
        return Err("its columns do not fit".into());
    }
    Ok(Some((samples, stats(header, source))))
}

fn stats(header: Header, source: &Path) -> SourceStats {
    let bad = |(row, column, reason)| BadRow { file: source.to_path_buf(), row, column, reason };
    SourceStats {
        file: source.to_path_buf(),
        format: header.format,
        rows: header.rows,
        bad_rows: header.bad_rows,
        bad_examples: header.bad_examples.into_iter().map(bad).collect(),
        blank_lines: header.blank_lines,
        mask_mismatches: header.mask_mismatches,
        border_tokens: header.border_tokens,
        warnings: header.warnings,
        cached: true,
    }
}

/// Writes a source to its place, whole or not at all.
///
/// # Errors
/// The system's; the data set does not depend on it.
pub(crate) fn store(place: &Path, samples: &Samples, stats: &SourceStats) -> std::io::Result<()> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let header = Header {
        version: VERSION,
        format: stats.format.clone(),
        rows: stats.rows,
        bad_rows: stats.bad_rows,
        bad_examples: stats.bad_examples.iter().map(|b| (b.row, b.column, b.reason.clone())).collect(),
        blank_lines: stats.blank_lines,
        mask_mismatches: stats.mask_mismatches,
        border_tokens: stats.border_tokens,
        warnings: stats.warnings.clone(),
        samples: samples.len() as u64,
        tokens: samples.ids.len() as u64,
        spans: samples.spans.len() as u64,
    };
    let header = serde_json::to_vec(&header)?;
    let spans: Vec<[u32; 3]> = samples.spans.iter().map(|s| [s.start, s.end, s.weight.to_bits()]).collect();
    let columns: [&[u8]; 8] = [
        MAGIC,
        &(header.len() as u64).to_le_bytes(),
        &header,
        bytemuck::cast_slice(&samples.rows),
        bytemuck::cast_slice(&samples.ends),
        bytemuck::cast_slice(&samples.span_ends),
        bytemuck::cast_slice(&samples.ids),
        bytemuck::cast_slice(&spans),
    ];
    if let Some(folder) = place.parent() {
        fs::create_dir_all(folder)?;
    }
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let temporary = place.with_extension(format!("{}-{number}.tmp", std::process::id()));
    let write = || {
        let mut file = fs::File::create(&temporary)?;
        let mut hash = blake3::Hasher::new();
        for column in columns {
            hash.update(column);
            file.write_all(column)?;
        }
        file.write_all(hash.finalize().as_bytes())?;
        fs::rename(&temporary, place)
    };
    write().inspect_err(|_| drop(fs::remove_file(&temporary)))
}

fn take<'a>(rest: &mut &'a [u8], length: u64) -> Result<&'a [u8], String> {
    let length = usize::try_from(length).map_err(|e| e.to_string())?;
    let (head, tail) = rest.split_at_checked(length).ok_or("it is cut")?;
    *rest = tail;
    Ok(head)
}

fn column<T: AnyBitPattern + NoUninit>(rest: &mut &[u8], count: u64) -> Result<Vec<T>, String> {
    let bytes = count.checked_mul(size_of::<T>() as u64).ok_or("its sizes overflow")?;
    Ok(pod_collect_to_vec(take(rest, bytes)?))
}

#[cfg(test)]
mod tests;
