//! [`EventLog`]: `events.jsonl`, one event a line.

use crate::losses::Losses;
use crate::{Result, at};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;
use temper_train::events::{Event, Sink};

/// Appends events to a file, each on its own line, written out at once: a kill loses at most the line being written.
pub struct EventLog {
    file: File,
    /// Length up to the last whole line.
    whole: u64,
    losses: Losses,
}

impl EventLog {
    /// Opens the log, made when absent; what is there stays. A last line that a kill cut short is repaired: completed when
    /// only its line break is missing, else taken away with a warning.
    ///
    /// # Errors
    /// When the file cannot be opened, read or repaired.
    pub fn open(path: &Path) -> Result<Self> {
        let mut file = File::options().create(true).read(true).append(true).open(path).map_err(at(path))?;
        let whole = repair(&mut file, path).map_err(at(path))?;
        Ok(Self { file, whole, losses: Losses::new(path) })
    }

    fn append(&mut self, line: &str) -> io::Result<()> {
        self.file.write_all(line.as_bytes()).and_then(|()| self.file.flush()).inspect_err(|_| {
            // Part of the line may have arrived: take it back, so that the next line stands alone.
            let _ = self.file.set_len(self.whole);
        })?;
        self.whole += line.len() as u64;
        Ok(())
    }
}

impl Sink for EventLog {
    fn event(&mut self, event: &Event) {
        let written = serde_json::to_string(event).map_err(io::Error::from).and_then(|line| self.append(&(line + "\n")));
        self.losses.note(written);
        if matches!(event, Event::End(_)) {
            self.losses.close();
        }
    }
}

/// Makes the file end in a whole line; returns its length.
fn repair(file: &mut File, path: &Path) -> io::Result<u64> {
    let length = file.metadata()?.len();
    let tail = unfinished(file, length)?;
    if tail.is_empty() {
        return Ok(length);
    }
    if serde_json::from_slice::<serde_json::Value>(&tail).is_ok_and(|value| value.is_object()) {
        file.write_all(b"\n")?;
        return Ok(length + 1);
    }
    let whole = length - tail.len() as u64;
    file.set_len(whole)?;
    tracing::warn!("{}: the last line was cut short ({} bytes) and is taken away", path.display(), tail.len());
    Ok(whole)
}

/// What stands after the last line break.
fn unfinished(file: &mut File, length: u64) -> io::Result<Vec<u8>> {
    const BLOCK: u64 = 64 << 10;
    let mut tail = Vec::new();
    let mut end = length;
    while end > 0 {
        let start = end.saturating_sub(BLOCK);
        let mut block = vec![0; (end - start) as usize];
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(&mut block)?;
        if let Some(newline) = block.iter().rposition(|byte| *byte == b'\n') {
            block.drain(..=newline);
            end = 0;
        } else {
            end = start;
        }
        block.append(&mut tail);
        tail = block;
    }
    Ok(tail)
}
