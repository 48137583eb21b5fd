//! Stdout. A reader that has gone away (`temper ... | head`) is an error to pass on, where `println!` would panic.

use std::{
    fmt::Display,
    io::{self, Write},
    sync::OnceLock,
};

/// What the first failed write to stdout was answered.
static LOST: OnceLock<String> = OnceLock::new();

/// Stdout, for everything that is written there: it remembers that a write has failed.
pub struct Stdout;

impl Stdout {
    /// Why something of stdout is lost, if anything is. A reader that has gone away wanted no more: to it nothing is lost.
    pub fn lost() -> Option<&'static str> {
        LOST.get().map(String::as_str)
    }

    fn note<T>(result: io::Result<T>) -> io::Result<T> {
        result.inspect_err(|e| {
            if !matches!(e.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::Interrupted) {
                let _ = LOST.set(e.to_string());
            }
        })
    }
}

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Stdout::note(io::stdout().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Stdout::note(io::stdout().flush())
    }
}

/// Prints a line.
pub fn say(line: impl Display) -> io::Result<()> {
    Stdout::note(writeln!(io::stdout().lock(), "{line}"))
}

/// Prints a line to stderr. Where nobody listens any more, nothing is lost but the line: `eprintln!` would panic.
pub fn tell(line: impl Display) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// Shows text in the place of what was shown before, on a terminal's stderr: how far something is that takes long.
pub fn show(text: impl Display) {
    let mut err = io::stderr().lock();
    let _ = write!(err, "\r\x1b[2K{text}").and_then(|()| err.flush());
}

/// Prints a value as one line of JSON.
pub fn say_json(value: &impl serde::Serialize) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let written = serde_json::to_writer(&mut out, value).map_err(io::Error::from);
    Stdout::note(written.and_then(|()| writeln!(out)))
}
