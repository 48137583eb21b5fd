//! The limit on the length of a row, with a limit small enough to test.

use std::fs;
use std::io::Write;

use super::Rows;

/// Row numbers and, for bad rows, reasons under a limit of 32 bytes a row.
fn read(name: &str, bytes: &[u8]) -> Vec<(u64, Option<String>)> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    fs::write(&path, bytes).unwrap();
    let mut rows = Rows::open(&path, &[], 32).unwrap();
    let mut found = Vec::new();
    while let Some(batch) = rows.next_batch().unwrap() {
        found.extend(batch.into_iter().map(|row| match row {
            Ok(object) => (object.row, None),
            Err(bad) => (bad.row, Some(bad.reason)),
        }));
    }
    found
}

/// A line of `length` bytes without its newline.
fn object(length: usize) -> String {
    format!("{{\"a\":\"{}\"}}", "x".repeat(length - 8))
}

#[test]
fn a_line_over_the_limit_is_a_bad_row_and_the_next_is_read() {
    let text = format!("{}\n{}\n{}\n{}", object(32), object(33), object(9), object(3000));
    let found = read("a.jsonl", text.as_bytes());
    assert_eq!(found.iter().map(|(row, bad)| (*row, bad.is_some())).collect::<Vec<_>>(), [(1, false), (2, true), (3, false), (4, true)]);
    assert_eq!(found[1].1.as_deref(), Some("the line is longer than the limit of 32 bytes"));
}

#[test]
fn an_element_over_the_limit_is_a_bad_row_and_the_next_is_read() {
    let text = format!("[{},\n{} , {}]", object(32), object(40), object(9));
    let found = read("a.json", text.as_bytes());
    assert_eq!(found.iter().map(|(row, bad)| (*row, bad.is_some())).collect::<Vec<_>>(), [(1, false), (2, true), (3, false)]);
}

#[test]
fn a_bomb_of_one_line_holds_no_memory() {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    for _ in 0..64 {
        encoder.write_all(&vec![b'['; 1 << 20]).unwrap();
    }
    encoder.write_all(format!("\n{}\n", object(10)).as_bytes()).unwrap();
    let bytes = encoder.finish().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bomb.ndjson.gz");
    fs::write(&path, bytes).unwrap();
    // `[` first: taken for an array, whose one element never ends and is dropped as it grows.
    assert!(Rows::open(&path, &[], 32).unwrap().next_batch().is_err_and(|error| error.to_string().contains("never ends")));
}
