//! Stdout. A reader that has gone away (`temper ... | head`) is an error to pass on, where `println!` would panic.

use std::{
    fmt::Display,
    io::{self, Write},
};

/// Prints a line.
pub fn say(line: impl Display) -> io::Result<()> {
    writeln!(io::stdout().lock(), "{line}")
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
    serde_json::to_writer(&mut out, value)?;
    writeln!(out)
}
