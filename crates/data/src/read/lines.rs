//! Physical lines: only `\n` ends one, so U+2028, U+2029 and U+0085 inside a string stay where they are.

use std::io::{self, BufRead, Read};

use super::raw::RawRow;

/// Splits a text into its lines.
pub(crate) struct Lines {
    reader: Box<dyn BufRead + Send>,
    line: u64,
    offset: u64,
    max_row: usize,
    /// A fault met while looking past a good line, kept until that line has been delivered.
    fault: Option<io::Error>,
    /// Lines of white space only.
    pub blank: u64,
}

impl Lines {
    /// Lines of a text whose first byte is byte `offset` of the file; longer ones than `max_row` bytes are refused.
    pub fn new(reader: Box<dyn BufRead + Send>, offset: u64, max_row: usize) -> Self {
        Self { reader, line: 0, offset, max_row, fault: None, blank: 0 }
    }

    /// The next line that is not blank.
    pub fn next(&mut self) -> io::Result<Option<RawRow>> {
        if let Some(fault) = self.fault.take() {
            return Err(fault);
        }
        loop {
            let mut text = Vec::new();
            let read = (&mut self.reader).take(self.max_row as u64 + 1).read_until(b'\n', &mut text)?;
            if read == 0 {
                return Ok(None);
            }
            self.line += 1;
            let offset = self.offset;
            self.offset += read as u64;
            let whole = text.last() == Some(&b'\n');
            if !whole && read > self.max_row {
                drop(text);
                self.offset += self.reader.skip_until(b'\n')? as u64;
                let reason = format!("the line is longer than the limit of {} bytes", self.max_row);
                return Ok(Some(RawRow::Refused { row: self.line, reason }));
            }
            if whole {
                text.pop();
            }
            if text.trim_ascii().is_empty() {
                self.blank += 1;
                continue;
            }
            let last = match self.reader.fill_buf() {
                Ok(rest) => rest.is_empty(),
                Err(fault) => {
                    self.fault = Some(fault);
                    false
                }
            };
            return Ok(Some(RawRow::Line { row: self.line, offset, last, text }));
        }
    }
}
