//! Row formats: from one JSON object to a [`Conversation`].
//!
//! `turns` reads lists of turns (`messages`, `conversations`), `flat` the formats with one column a turn. A reason for
//! refusing a row is a plain string; the caller adds file and row.

mod flat;
mod turns;

use std::path::Path;

use serde::Serialize;
use serde_json::{Map, Value};

use crate::read::{self, Object};
use crate::{BadRow, Conversation, Message, Role, SampleId};

/// How the rows of a file spell a conversation; one format a file, found from the keys of its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RowFormat {
    /// `messages`: a list of `{role, content, ...}`; optional `tools`, `system`.
    Messages,
    /// `conversations`: a list of `{from, value}` (or `{role, content}`); optional `tools`, `system`.
    Sharegpt,
    /// `instruction`, `output`; optional `input`, `system`, `history` (pairs of earlier turns).
    Alpaca,
    /// `prompt` with `response` or `completion`, each a text or a list of messages; optional `system`.
    Prompt,
}

/// The columns that any format reads.
pub(crate) const KNOWN_KEYS: &[&str] =
    &["messages", "conversations", "instruction", "input", "output", "history", "prompt", "response", "completion", "system", "tools"];

/// The remedy for rows of no known format.
pub(crate) const EXPECTED_KEYS: &str = "rename them: a row needs `messages`, or `conversations`, or `instruction` with `output`, \
     or `prompt` with `response` or `completion`";

/// Result of reading a part of a row: the value, or the reason why the row is bad.
pub(crate) type Checked<T> = Result<T, String>;

/// The format of the first row that has one; none without rows; the keys found where no row has one.
pub(crate) fn detect<'a>(rows: impl Iterator<Item = &'a Map<String, Value>>) -> Result<Option<RowFormat>, String> {
    let mut keys: Option<Vec<&str>> = None;
    for row in rows {
        if let Some(format) = format_of(row) {
            return Ok(Some(format));
        }
        keys.get_or_insert_with(|| row.keys().map(String::as_str).collect());
    }
    keys.map_or(Ok(None), |keys| Err(format!("its rows have none of the known sets of keys (found: {})", keys.join(", "))))
}

fn format_of(row: &Map<String, Value>) -> Option<RowFormat> {
    let has = |key| row.get(key).is_some_and(|value| !value.is_null());
    Some(match () {
        () if has("messages") => RowFormat::Messages,
        () if has("conversations") => RowFormat::Sharegpt,
        () if has("instruction") && has("output") => RowFormat::Alpaca,
        () if has("prompt") && (has("response") || has("completion")) => RowFormat::Prompt,
        () => return None,
    })
}

/// The conversation of a row.
pub(crate) fn conversation(source: u32, file: &Path, format: RowFormat, object: Object) -> Result<Conversation, BadRow> {
    let Object { row, fields, .. } = object;
    build(format, fields)
        .map(|(messages, tools)| Conversation { id: SampleId { source, row, piece: 0 }, messages, tools })
        .map_err(|reason| BadRow { file: file.to_path_buf(), row, column: None, reason })
}

fn build(format: RowFormat, mut row: Map<String, Value>) -> Checked<(Vec<Message>, Option<Value>)> {
    let tools = tools(&mut row)?;
    let system = text(&mut row, "system")?.filter(|system| !system.is_empty());
    let mut messages = match format {
        RowFormat::Messages => turns::read(required(&mut row, "messages")?, "messages", turns::Names::Openai)?,
        RowFormat::Sharegpt => turns::read(required(&mut row, "conversations")?, "conversations", turns::Names::Sharegpt)?,
        RowFormat::Alpaca => flat::alpaca(&mut row)?,
        RowFormat::Prompt => flat::prompt(&mut row)?,
    };
    if let Some(system) = system {
        match messages.first() {
            Some(first) if first.role == Role::System && first.content == system => {}
            Some(first) if first.role == Role::System => {
                return Err("`system` and the first turn give two different system texts; keep one".to_owned());
            }
            _ => messages.insert(0, plain(Role::System, system)),
        }
    }
    if !messages.iter().any(|message| message.role == Role::Assistant) {
        return Err("no assistant turn: nothing to train".to_owned());
    }
    Ok((messages, tools))
}

/// A turn of role and text alone.
pub(crate) fn plain(role: Role, content: String) -> Message {
    let mut fields = Map::new();
    fields.insert("role".to_owned(), role.name().into());
    fields.insert("content".to_owned(), content.as_str().into());
    Message { role, content, fields, loss: None }
}

/// Takes a column that must be there.
fn required(row: &mut Map<String, Value>, key: &str) -> Checked<Value> {
    match row.remove(key) {
        Some(value) if !value.is_null() => Ok(value),
        found => {
            let keys: Vec<&str> = row.keys().map(String::as_str).collect();
            let what = if found.is_some() { "is null" } else { "is missing" };
            Err(format!("`{key}` {what}, though the file's other rows have it (keys found: {})", keys.join(", ")))
        }
    }
}

/// Takes a text column; null is as good as absent.
fn text(row: &mut Map<String, Value>, key: &str) -> Checked<Option<String>> {
    match row.remove(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => Err(format!("`{key}` is {}; it must be text", read::kind(&other))),
    }
}

/// Takes the row's `tools`: a list, or a list as JSON text. Empty ones are none.
fn tools(row: &mut Map<String, Value>) -> Checked<Option<Value>> {
    let tools = match row.remove("tools") {
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(None),
        Some(Value::String(text)) => {
            Some(read::parse(&text, "text").map_err(|fault| format!("`tools` is text but not JSON: {}", fault.reason))?)
        }
        tools => tools,
    };
    match tools {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Array(list)) if list.is_empty() => Ok(None),
        Some(Value::Array(list)) => {
            let list = Value::Array(list);
            exact(&list).map_err(|reason| format!("`tools`: {reason}"))?;
            Ok(Some(list))
        }
        Some(other) => Err(format!("`tools` is {}; it must be a list of tools", read::kind(&other))),
    }
}

/// Refuses whole numbers beyond 64 bits: they were rounded when read, and would be trained as other digits.
fn exact(value: &Value) -> Checked<()> {
    const TWO_63: f64 = 9_223_372_036_854_775_808.0;
    match value {
        Value::Number(number) if number.is_f64() => match number.as_f64() {
            Some(float) if float.abs() >= TWO_63 => Err(format!("the number {float:e} cannot be kept to the digit; write it as a string")),
            _ => Ok(()),
        },
        Value::Array(items) => items.iter().try_for_each(exact),
        Value::Object(members) => members.values().try_for_each(exact),
        _ => Ok(()),
    }
}
