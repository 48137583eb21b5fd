//! Whatever bytes a file holds, reading it ends with rows or an error, never with a panic.

use std::fs;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;

use proptest::prelude::*;
use serde_json::{Map, Value};
use temper_data::read_source;

/// Reads the bytes as a file of that name; every row must carry its number.
fn survives(name: &str, bytes: &[u8]) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    fs::write(&path, bytes).unwrap();
    let mut last = 0;
    let result = read_source(0, &path, &mut |row| {
        let number = row.as_ref().map_or_else(|bad| bad.row, |conversation| conversation.id.row);
        assert!(number > last, "rows are numbered upwards");
        last = number;
        if let Ok(conversation) = row {
            assert!(!conversation.messages.is_empty());
        }
        ControlFlow::Continue(())
    });
    if let Err(error) = result {
        assert!(error.to_string().contains(name), "{error}");
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Bytes that look like JSON often enough to get past the first token.
fn jsonish() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        Just(b"{\"messages\":[{\"role\":\"assistant\",\"content\":\"a\"}]}".to_vec()),
        Just(b"{\"conversations\":".to_vec()),
        Just(b"\n".to_vec()),
        Just(b",".to_vec()),
        prop::sample::select(b"[]{}\":,\\ \n0eE+-.ntf'\xEF\xBB\xBF\xFF".to_vec()).prop_map(|byte| vec![byte]),
        prop::collection::vec(any::<u8>(), 0..8),
    ];
    prop::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
}

/// Rows built from the keys and values that the formats look at.
fn tree() -> impl Strategy<Value = Value> {
    const WORDS: [&str; 24] = [
        "messages",
        "conversations",
        "instruction",
        "input",
        "output",
        "history",
        "prompt",
        "response",
        "completion",
        "system",
        "tools",
        "role",
        "content",
        "from",
        "value",
        "loss",
        "weight",
        "tool_calls",
        "function",
        "name",
        "assistant",
        "function_call",
        "type",
        "text",
    ];
    let word = prop::sample::select(WORDS.to_vec());
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        word.clone().prop_map(Value::from),
        ".{0,6}".prop_map(Value::from),
    ];
    leaf.prop_recursive(6, 48, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::Array),
            prop::collection::vec((word.clone(), inner), 0..6)
                .prop_map(|members| Value::Object(members.into_iter().map(|(key, value)| (key.to_owned(), value)).collect::<Map<_, _>>())),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_bytes_as_text(bytes in jsonish()) {
        for name in ["a.jsonl", "a.json"] {
            survives(name, &bytes);
        }
    }

    #[test]
    fn any_bytes_packed(bytes in jsonish(), cut in any::<prop::sample::Index>(), flip in any::<prop::sample::Index>(), with in any::<u8>()) {
        for (name, mut packed) in [("a.jsonl.gz", gzip(&bytes)), ("a.json.zst", zstd::encode_all(&bytes[..], 1).unwrap())] {
            survives(name, &packed);
            let at = flip.index(packed.len());
            packed[at] ^= with;
            survives(name, &packed);
            packed.truncate(cut.index(packed.len()));
            survives(name, &packed);
            survives(name, &bytes);
        }
    }

    #[test]
    fn any_tree_as_a_row(row in tree()) {
        survives("a.jsonl", row.to_string().as_bytes());
        survives("a.json", format!("[{row},{row}]").as_bytes());
    }

    /// Damage to a good Parquet file: some bytes overwritten, or the tail lost.
    #[test]
    fn damaged_parquet(
        file in prop::sample::select(vec!["tools", "sharegpt", "parts", "alpaca", "text-arguments"]),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases/parquet").join(format!("{file}.parquet"));
        let mut bytes = fs::read(path).unwrap();
        for (at, with) in damage {
            let at = at.index(bytes.len());
            bytes[at] = with;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        survives("a.parquet", &bytes);
    }

    #[test]
    fn any_bytes_as_parquet(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        survives("a.parquet", &bytes);
        survives("a.parquet", &[b"PAR1", &bytes[..], b"PAR1"].concat());
    }
}
