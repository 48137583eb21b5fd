//! A row as the file stores it, not yet parsed: what travels to the parsing threads.

use std::path::Path;

use ::parquet::record::Row;
use serde_json::{Map, Value};

use super::{json, parquet};
use crate::BadRow;

/// One row, unparsed. `row` is its number as the user sees it.
#[derive(Debug)]
pub(crate) enum RawRow {
    /// A physical line.
    Line { row: u64, offset: u64, last: bool, text: Vec<u8> },
    /// An element of a JSON array: `line` and `column` (from 1, bytes) of its first byte.
    Element { row: u64, offset: u64, line: u64, column: u64, text: Vec<u8> },
    /// A Parquet row.
    Columns { row: u64, columns: Row },
    /// A row that the splitter itself refused.
    Refused { row: u64, reason: String },
}

/// A row as a JSON object.
#[derive(Debug)]
pub(crate) struct Object {
    /// Its number.
    pub row: u64,
    /// Its keys in the row's order.
    pub fields: Map<String, Value>,
    /// Null members left out of tool-call arguments (Parquet only).
    pub dropped_nulls: u64,
}

impl RawRow {
    /// Bytes held, about.
    pub fn size(&self) -> usize {
        match self {
            Self::Line { text, .. } | Self::Element { text, .. } => text.len(),
            Self::Columns { columns, .. } => parquet::size(columns),
            Self::Refused { reason, .. } => reason.len(),
        }
    }

    /// Parses the row.
    pub fn parse(self, file: &Path) -> Result<Object, BadRow> {
        match self {
            Self::Line { row, offset, last, text } => {
                let bad = |column, reason| BadRow { file: file.to_path_buf(), row, column: Some(column), reason };
                let text = utf8(&text, offset).map_err(|(at, reason)| bad(at, reason))?;
                let end = if last { "file" } else { "line" };
                let value = json::parse(text, end).map_err(|fault| bad(fault.column, fault.reason))?;
                object(value).map(|fields| Object { row, fields, dropped_nulls: 0 }).map_err(|reason| bad(1, reason))
            }
            Self::Element { row, offset, line, column, text } => {
                let lines = text.iter().filter(|b| **b == b'\n').count() as u64;
                let bad = |at_line: u64, at: u64, reason: String| {
                    let column = if at_line == 1 { column + at - 1 } else { at };
                    let span = if lines == 0 { String::new() } else { format!(" (the element spans lines {line} to {})", line + lines) };
                    let reason = format!("line {}: {reason}{span}", line + at_line - 1);
                    BadRow { file: file.to_path_buf(), row, column: Some(column), reason }
                };
                let text = utf8(&text, offset).map_err(|(at, reason)| bad(1, at, reason))?;
                let value = json::parse(text, "the element").map_err(|fault| bad(fault.line, fault.column, fault.reason))?;
                object(value).map(|fields| Object { row, fields, dropped_nulls: 0 }).map_err(|reason| bad(1, 1, reason))
            }
            Self::Columns { row, columns } => {
                let (fields, dropped_nulls) =
                    parquet::object_of(columns).map_err(|reason| BadRow { file: file.to_path_buf(), row, column: None, reason })?;
                Ok(Object { row, fields, dropped_nulls })
            }
            Self::Refused { row, reason } => Err(BadRow { file: file.to_path_buf(), row, column: None, reason }),
        }
    }
}

/// The text, or the column of the first byte that is not UTF-8 and the reason.
fn utf8(text: &[u8], offset: u64) -> Result<&str, (u64, String)> {
    std::str::from_utf8(text).map_err(|error| {
        let at = error.valid_up_to() as u64;
        let byte = text.get(error.valid_up_to()).copied().unwrap_or_default();
        (at + 1, format!("invalid UTF-8: byte 0x{byte:02X} at byte offset {} of the file; convert the file to UTF-8", offset + at))
    })
}

/// The members of an object; anything else is no row.
fn object(value: Value) -> Result<Map<String, Value>, String> {
    match value {
        Value::Object(fields) => Ok(fields),
        other => Err(format!("{} where a row is expected; each row must be an object", json::kind(&other))),
    }
}
