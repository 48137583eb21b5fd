//! Files to rows to conversations, streaming: memory is bounded by the longest row, never by the file.
//!
//! `container` opens a file, `lines`, `array` and `parquet` cut it into [`raw::RawRow`]s, which `json` parses in
//! parallel, a batch at a time; [`crate::rows`] turns the objects into conversations.

mod array;
mod container;
mod json;
mod lines;
mod parquet;
mod raw;
#[cfg(test)]
mod tests;

use std::io::{BufRead, Cursor, Read};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::Serialize;

use self::array::{ArrayFault, Elements};
use self::container::{Layout, Text};
use self::lines::Lines;
use self::parquet::ParquetRows;
use self::raw::RawRow;
use crate::rows::{self, RowFormat};
use crate::{BadRow, Conversation, Error};

pub(crate) use self::json::{kind, parse};
pub(crate) use self::raw::Object;

/// Longest row in bytes of text, unpacked; a longer one is a bad row. Bounds what a hostile archive can make us hold.
pub const MAX_ROW_BYTES: usize = 1 << 30;
/// Bytes of a first line that are looked at to tell an array from lines.
const MAX_SNIFF: u64 = 64 << 20;
/// A batch of rows is parsed in parallel; it closes at this many rows,
const BATCH_ROWS: usize = 4096;
/// or at this many bytes.
const BATCH_BYTES: usize = 8 << 20;

/// What a pass over one file saw.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SourceReport {
    /// Rows delivered, good and bad.
    pub rows: u64,
    /// Rows delivered as [`BadRow`].
    pub bad_rows: u64,
    /// Lines of white space only, skipped; never counted as rows.
    pub blank_lines: u64,
    /// The row format found.
    pub format: Option<RowFormat>,
    /// Things the user should know that are no fault of one row.
    pub warnings: Vec<String>,
}

/// Reads one file from the start and hands every row to `sink` in file order, until `sink` breaks.
///
/// The layout follows the name: `.jsonl`/`.ndjson`, `.json` (one array of objects, or lines), both also `.gz` or
/// `.zst`, and `.parquet`. Rows are parsed in parallel on rayon's pool; `sink` runs on the calling thread. The row
/// format is found from the keys of the first rows and holds for the file. `index` becomes [`crate::SampleId::source`].
///
/// # Errors
/// Faults of the file as a whole: missing, unknown extension, UTF-16, damaged compression, unknown keys, no rows.
/// Rows before the fault have been delivered by then.
pub fn read_source(
    index: u32,
    path: &Path,
    sink: &mut dyn FnMut(Result<Conversation, BadRow>) -> ControlFlow<()>,
) -> Result<SourceReport, Error> {
    let mut reader = Rows::open(path, rows::KNOWN_KEYS, MAX_ROW_BYTES)?;
    let mut report = SourceReport::default();
    let mut dropped_nulls = 0;
    'file: while let Some(objects) = reader.next_batch()? {
        let format = match report.format {
            Some(format) => format,
            None => match rows::detect(objects.iter().flatten().map(|object| &object.fields)) {
                Ok(Some(format)) => *report.format.insert(format),
                // Not one object yet: every row so far is bad by itself, whatever the format.
                Ok(None) => RowFormat::Messages,
                Err(found) => return Err(Error::file(path, found, rows::EXPECTED_KEYS)),
            },
        };
        dropped_nulls += objects.iter().flatten().map(|object| object.dropped_nulls).sum::<u64>();
        let conversations: Vec<_> = objects.into_par_iter().map(|object| rows::conversation(index, path, format, object?)).collect();
        for conversation in conversations {
            report.rows += 1;
            report.bad_rows += u64::from(conversation.is_err());
            if sink(conversation).is_break() {
                break 'file;
            }
        }
    }
    report.blank_lines = reader.blank_lines();
    if report.rows == 0 {
        return Err(Error::file(path, "holds no rows", "remove it from the configuration or fetch it again"));
    }
    if dropped_nulls > 0 {
        report.warnings.push(format!(
            "{}: {dropped_nulls} null arguments of tool calls were left out: Parquet cannot tell a null from a missing key; \
             store `arguments` as JSON text to keep nulls",
            path.display()
        ));
    }
    Ok(report)
}

/// The rows of a file as objects, in parallel batches.
pub(crate) struct Rows {
    path: PathBuf,
    splitter: Splitter,
    /// A fault met while a batch was being filled, kept until that batch has been delivered.
    fault: Option<Error>,
}

enum Splitter {
    Lines(Lines),
    Array(Elements),
    Parquet(Box<ParquetRows>),
}

impl Rows {
    /// Opens a file. `wanted` are the columns read from Parquet; text rows come whole.
    pub fn open(path: &Path, wanted: &[&str], max_row: usize) -> Result<Self, Error> {
        let splitter = match container::layout(path)? {
            Layout::Parquet => Splitter::Parquet(Box::new(ParquetRows::open(path, wanted)?)),
            layout => split_text(path, layout, max_row)?,
        };
        Ok(Self { path: path.to_path_buf(), splitter, fault: None })
    }

    /// Lines of white space seen so far.
    pub fn blank_lines(&self) -> u64 {
        match &self.splitter {
            Splitter::Lines(lines) => lines.blank,
            _ => 0,
        }
    }

    /// The next rows in file order, none at the end of the file.
    pub fn next_batch(&mut self) -> Result<Option<Vec<Result<Object, BadRow>>>, Error> {
        if let Some(fault) = self.fault.take() {
            return Err(fault);
        }
        let (mut batch, mut bytes) = (Vec::new(), 0);
        while batch.len() < BATCH_ROWS && bytes < BATCH_BYTES {
            match self.next_raw() {
                Ok(Some(row)) => {
                    bytes += row.size();
                    batch.push(row);
                }
                Ok(None) => break,
                Err(fault) if batch.is_empty() => return Err(fault),
                Err(fault) => {
                    self.fault = Some(fault);
                    break;
                }
            }
        }
        let path = &self.path;
        Ok((!batch.is_empty()).then(|| batch.into_par_iter().map(|row| row.parse(path)).collect()))
    }

    fn next_raw(&mut self) -> Result<Option<RawRow>, Error> {
        let path = &self.path;
        match &mut self.splitter {
            Splitter::Lines(lines) => lines.next().map_err(|source| container::read_fault(path, source)),
            Splitter::Array(elements) => elements.next().map_err(|fault| match fault {
                ArrayFault::Io(source) => container::read_fault(path, source),
                ArrayFault::Broken(found, remedy) => Error::file(path, found, remedy),
            }),
            Splitter::Parquet(rows) => rows.next(),
        }
    }
}

/// Chooses between lines and array by what the text is; the name decides only where both could be meant.
fn split_text(path: &Path, layout: Layout, max_row: usize) -> Result<Splitter, Error> {
    let Text { mut reader, skipped } = container::open_text(path)?;
    let fault = |source| container::read_fault(path, source);
    let first = reader.fill_buf().map_err(fault)?.trim_ascii_start().first().copied();
    match (layout, first) {
        (Layout::Lines, Some(b'[')) | (Layout::Array, Some(b'{')) => {}
        (Layout::Lines, _) => return Ok(Splitter::Lines(Lines::new(reader, skipped, max_row))),
        _ => return Ok(Splitter::Array(Elements::new(reader, skipped, max_row))),
    }
    // The name and the first byte disagree. The first line decides, and is put back in front afterwards.
    let mut head = Vec::new();
    while head.trim_ascii().is_empty() {
        if (&mut reader).take(MAX_SNIFF).read_until(b'\n', &mut head).map_err(fault)? == 0 {
            break;
        }
    }
    let complete = serde_json::from_slice::<serde::de::IgnoredAny>(&head).is_ok();
    let alone = reader.fill_buf().map_err(fault)?.trim_ascii().is_empty();
    let array = match layout {
        Layout::Lines => !complete || alone,
        _ if complete => false,
        _ => {
            let remedy = "a .json file must hold one array of objects ([{...}, {...}]); JSON lines belong into a .jsonl file";
            return Err(Error::file(path, "one object over several lines, or broken JSON lines, in a .json file", remedy));
        }
    };
    let reader = Box::new(Cursor::new(head).chain(reader));
    Ok(match array {
        true => Splitter::Array(Elements::new(reader, skipped, max_row)),
        false => Splitter::Lines(Lines::new(reader, skipped, max_row)),
    })
}
