//! Files to conversations: the reported faults of other tools (tests/cases), containers, row formats, bad rows.

use std::fs;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use temper_data::{BadRow, Conversation, Error, Role, RowFormat, SourceReport, read_source};

type Rows = Vec<Result<Conversation, BadRow>>;

fn read(path: &Path) -> Result<(Rows, SourceReport), Error> {
    let mut rows = Vec::new();
    let report = read_source(7, path, &mut |row| {
        rows.push(row);
        ControlFlow::Continue(())
    })?;
    assert_eq!(report.rows, rows.len() as u64);
    assert_eq!(report.bad_rows, rows.iter().filter(|row| row.is_err()).count() as u64);
    Ok((rows, report))
}

fn case(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases").join(name)
}

fn read_case(name: &str) -> (Rows, SourceReport) {
    read(&case(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Writes `bytes` to a file of that name and reads it.
fn read_bytes(name: &str, bytes: &[u8]) -> Result<(Rows, SourceReport), Error> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    fs::write(&path, bytes).unwrap();
    read(&path)
}

fn read_text(text: &str) -> Rows {
    read_bytes("data.jsonl", text.as_bytes()).unwrap().0
}

/// The one conversation of a one-row file.
fn one(row: Value) -> Conversation {
    read_text(&row.to_string()).remove(0).unwrap_or_else(|bad| panic!("{bad}"))
}

/// Why the one row of a file is bad.
fn reason(row: Value) -> String {
    read_text(&row.to_string()).remove(0).expect_err("the row must be bad").reason
}

fn error(name: &str, bytes: &[u8]) -> String {
    read_bytes(name, bytes).expect_err("the file must be refused").to_string()
}

fn kept(rows: &Rows) -> Vec<u64> {
    rows.iter().flatten().map(|conversation| conversation.id.row).collect()
}

fn bad(rows: &Rows) -> Vec<u64> {
    rows.iter().filter_map(|row| row.as_ref().err()).map(|bad| bad.row).collect()
}

fn turns(conversation: &Conversation) -> Vec<(&str, &str)> {
    conversation.messages.iter().map(|message| (message.role.name(), message.content.as_str())).collect()
}

/// Role and body of every ChatML turn of a rendered sample, the thinking block that Qwen3's template adds removed.
fn chatml(sample: &Value) -> Vec<(String, String)> {
    let text = sample["text"].as_str().unwrap();
    let turns = text.split("<|im_start|>").skip(1).map(|turn| {
        let (role, body) = turn.split_once('\n').unwrap();
        let body = body.strip_suffix("<|im_end|>\n").unwrap();
        (role.to_owned(), body.strip_prefix("<think>\n\n</think>\n\n").unwrap_or(body).to_owned())
    });
    turns.collect()
}

fn expected(name: &str) -> Value {
    serde_json::from_slice(&fs::read(case(name)).unwrap()).unwrap()
}

fn assert_renders(rows: &Rows, samples: &Value) {
    let rows: Vec<&Conversation> = rows.iter().flatten().collect();
    let samples = samples.as_array().unwrap();
    assert_eq!(rows.len(), samples.len());
    for (row, sample) in rows.iter().zip(samples) {
        let found: Vec<(String, String)> = turns(row).into_iter().map(|(role, text)| (role.to_owned(), text.to_owned())).collect();
        assert_eq!(found, chatml(sample));
    }
}

mod files;
mod rows;
