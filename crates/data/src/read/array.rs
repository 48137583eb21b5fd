//! Elements of one JSON array, cut out one by one so that the file never has to be held whole.

use std::io::{self, BufRead};

use super::raw::RawRow;

/// Why an array cannot be cut further.
#[derive(Debug)]
pub(crate) enum ArrayFault {
    /// The system or the decompressor failed.
    Io(io::Error),
    /// What was found and the remedy.
    Broken(String, &'static str),
}

impl From<io::Error> for ArrayFault {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Where the reader stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    BeforeArray,
    BeforeElement,
    AfterComma,
    Done,
}

/// Cuts an array into the texts of its elements. Strings are respected, the rest is left to the parser.
pub(crate) struct Elements {
    reader: Box<dyn BufRead + Send>,
    place: Place,
    row: u64,
    line: u64,
    column: u64,
    offset: u64,
    max_row: usize,
}

/// What the scanner knows between two blocks of one element.
#[derive(Default)]
struct Scan {
    depth: u64,
    in_string: bool,
    escaped: bool,
}

impl Scan {
    /// Bytes of `block` that belong to the element, and the byte that ends it where it does end.
    fn take(&mut self, block: &[u8]) -> (usize, Option<u8>) {
        for (at, &byte) in block.iter().enumerate() {
            if self.in_string {
                match byte {
                    _ if self.escaped => self.escaped = false,
                    b'\\' => self.escaped = true,
                    b'"' => self.in_string = false,
                    _ => {}
                }
                continue;
            }
            match byte {
                b'"' => self.in_string = true,
                b',' | b']' if self.depth == 0 => return (at, Some(byte)),
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
        }
        (block.len(), None)
    }
}

impl Elements {
    /// Elements of an array whose first byte is byte `offset` of the file; longer ones than `max_row` bytes are refused.
    pub fn new(reader: Box<dyn BufRead + Send>, offset: u64, max_row: usize) -> Self {
        Self { reader, place: Place::BeforeArray, row: 0, line: 1, column: 1, offset, max_row }
    }

    /// The next element.
    pub fn next(&mut self) -> Result<Option<RawRow>, ArrayFault> {
        if self.place == Place::BeforeArray {
            match self.peek()? {
                Some(b'[') => self.advance(1)?,
                None => return Ok(None),
                Some(_) => return Err(self.broken("no JSON array", "a .json file must hold one array of objects")),
            }
            self.place = Place::BeforeElement;
        }
        if self.place == Place::Done {
            return Ok(None);
        }
        let after_comma = self.place == Place::AfterComma;
        match self.peek()? {
            None => Err(self.broken(&format!("the array is cut after element {}", self.row), "fetch or write the file again")),
            Some(b']') => {
                self.advance(1)?;
                self.finish()?;
                self.row += 1;
                let reason = format!("line {}: a comma before the end of the array; remove it", self.line);
                Ok(after_comma.then_some(RawRow::Refused { row: self.row, reason }))
            }
            Some(_) => self.element().map(Some),
        }
    }

    /// Reads one element and the comma or bracket behind it.
    fn element(&mut self) -> Result<RawRow, ArrayFault> {
        self.row += 1;
        let (row, line, column, offset) = (self.row, self.line, self.column, self.offset);
        let (mut text, mut scan, mut too_long) = (Vec::new(), Scan::default(), false);
        loop {
            let block = self.reader.fill_buf()?;
            if block.is_empty() {
                let found = format!("end of file inside a value: element {row}, which starts at line {line}, column {column}, never ends");
                return Err(ArrayFault::Broken(found, "the file was cut or a quote or bracket is missing there; fetch or write it again"));
            }
            let (taken, end) = scan.take(block);
            too_long |= text.len() + taken > self.max_row;
            if too_long {
                text = Vec::new();
            } else {
                text.extend_from_slice(&block[..taken]);
            }
            self.advance(taken)?;
            let Some(end) = end else { continue };
            self.advance(1)?;
            match end {
                b',' => self.place = Place::AfterComma,
                _ => self.finish()?,
            }
            if too_long {
                return Ok(RawRow::Refused { row, reason: format!("the element is longer than the limit of {} bytes", self.max_row) });
            }
            text.truncate(text.trim_ascii_end().len());
            return Ok(RawRow::Element { row, offset, line, column, text });
        }
    }

    /// After the closing bracket only white space may follow.
    fn finish(&mut self) -> Result<(), ArrayFault> {
        self.place = Place::Done;
        match self.peek()? {
            None => Ok(()),
            Some(_) => Err(self.broken("text after the end of the array", "a .json file must hold one array; remove the rest")),
        }
    }

    /// The next byte that is not white space, not consumed.
    fn peek(&mut self) -> Result<Option<u8>, ArrayFault> {
        loop {
            let block = self.reader.fill_buf()?;
            if block.is_empty() {
                return Ok(None);
            }
            let blank = block.len() - block.trim_ascii_start().len();
            let found = block.get(blank).copied();
            self.advance(blank)?;
            if found.is_some() {
                return Ok(found);
            }
        }
    }

    /// Consumes bytes of the current block, keeping the position.
    fn advance(&mut self, count: usize) -> Result<(), ArrayFault> {
        let block = self.reader.fill_buf()?;
        let taken = &block[..count.min(block.len())];
        match taken.iter().rposition(|b| *b == b'\n') {
            None => self.column += taken.len() as u64,
            Some(last) => {
                self.line += taken.iter().filter(|b| **b == b'\n').count() as u64;
                self.column = (taken.len() - last) as u64;
            }
        }
        let taken = taken.len();
        self.offset += taken as u64;
        self.reader.consume(taken);
        Ok(())
    }

    fn broken(&self, found: &str, remedy: &'static str) -> ArrayFault {
        ArrayFault::Broken(format!("line {}, column {}: {found}", self.line, self.column), remedy)
    }
}
