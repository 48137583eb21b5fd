//! Strict JSON: a key given twice is refused at any depth, and faults are told in the user's words.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::error::Category;
use serde_json::map::Entry;
use serde_json::{Map, Number, Value};

/// Where a text stopped being JSON, and why. Line and column count from 1 within the text, the column in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub line: u64,
    pub column: u64,
    pub reason: String,
}

/// Parses one value; `end` says what ends the text (`file`, `line`, ...).
pub(crate) fn parse(text: &str, end: &str) -> Result<Value, Fault> {
    serde_json::from_str::<Strict>(text).map(|strict| strict.0).map_err(|error| explain(text, &error, end))
}

/// What a value is, for messages.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true/false",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// A [`Value`] whose objects had no key twice; serde_json alone keeps the last one silently.
struct Strict(Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(StrictVisitor).map(Strict)
    }
}

struct StrictVisitor;

impl<'de> Visitor<'de> for StrictVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("number out of range"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(Strict(item)) = seq.next_element()? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            match map.entry(key) {
                Entry::Occupied(entry) => {
                    return Err(A::Error::custom(format!("the key `{}` is given twice in one object", entry.key())));
                }
                Entry::Vacant(entry) => {
                    entry.insert(entries.next_value::<Strict>()?.0);
                }
            }
        }
        Ok(Value::Object(map))
    }
}

/// Turns serde_json's error into a reason that names the usual cause and the remedy.
fn explain(text: &str, error: &serde_json::Error, end: &str) -> Fault {
    let (line, column) = (error.line().max(1), error.column().max(1));
    let full = error.to_string();
    let message = full.rfind(" at line ").map_or(full.as_str(), |at| &full[..at]);
    let reason = match error.classify() {
        Category::Eof if text.trim().is_empty() => "nothing where a value is expected".to_owned(),
        Category::Eof => format!("end of {end} inside a value"),
        _ => explain_syntax(text, position(text, line, column), message),
    };
    Fault { line: line as u64, column: column as u64, reason }
}

/// The reason for a fault at a byte of the text.
fn explain_syntax(text: &str, at: usize, message: &str) -> String {
    let bytes = text.as_bytes();
    // serde_json points at the faulty byte, or just behind the last one it took.
    let near = |word: &str| {
        (at.saturating_sub(word.len())..=at).any(|from| bytes.get(from..).is_some_and(|rest| rest.starts_with(word.as_bytes())))
    };
    let found = bytes.get(at).copied().unwrap_or(b' ');
    match message {
        "trailing characters" if found == b',' => "a comma after the value; remove it".to_owned(),
        "trailing characters" if matches!(found, b'{' | b'[') => "a second value after the first; write one object a row".to_owned(),
        "trailing characters" => "text after the value".to_owned(),
        "recursion limit exceeded" => "nested more than 128 levels deep".to_owned(),
        _ if message.starts_with("control character") => {
            "a raw control character inside a string; write it as an escape such as \\t or \\n".to_owned()
        }
        "expected value" | "expected ident" | "invalid number" | "key must be a string" => {
            if found == b'\'' {
                return "single quotes: this is a Python dict, not JSON; write rows with json.dumps".to_owned();
            }
            for word in ["NaN", "Infinity"] {
                if near(word) {
                    return format!("{word} is not JSON; write null or leave the key out");
                }
            }
            for word in ["None", "True", "False"] {
                if near(word) {
                    return format!("{word} is Python, not JSON; write rows with json.dumps");
                }
            }
            message.to_owned()
        }
        _ => message.to_owned(),
    }
}

/// Byte offset of a line and column, both from 1.
fn position(text: &str, line: usize, column: usize) -> usize {
    let start: usize = text.split_inclusive('\n').take(line - 1).map(str::len).sum();
    start + column - 1
}
