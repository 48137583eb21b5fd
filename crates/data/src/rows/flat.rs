//! Formats with one column a turn: alpaca, and prompt with completion.

use serde_json::{Map, Value};

use super::turns::{self, Names, answered};
use super::{Checked, plain, text};
use crate::{Message, Role, read};

/// `instruction` and `input` joined by a newline are the user's turn, `output` the assistant's, `history` comes before.
pub(super) fn alpaca(row: &mut Map<String, Value>) -> Checked<Vec<Message>> {
    let mut messages = history(row.remove("history"))?;
    let instruction = need(row, "instruction")?;
    let output = need(row, "output")?;
    let user = match text(row, "input")? {
        Some(input) if !input.is_empty() && !instruction.is_empty() => format!("{instruction}\n{input}"),
        Some(input) if !input.is_empty() => input,
        _ => instruction,
    };
    if user.trim().is_empty() {
        return Err("`instruction` and `input` are both empty".to_owned());
    }
    answered(&output, "`output`")?;
    messages.push(plain(Role::User, user));
    messages.push(plain(Role::Assistant, output));
    Ok(messages)
}

/// Earlier turns: a list of `[user, assistant]` pairs.
fn history(value: Option<Value>) -> Checked<Vec<Message>> {
    let list = match value {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(format!("`history` is {}; it must be a list of [user, assistant] pairs", read::kind(&other))),
    };
    let mut messages = Vec::with_capacity(2 * list.len());
    for (at, pair) in list.into_iter().enumerate() {
        let pair = match pair {
            Value::Array(pair) => <[Value; 2]>::try_from(pair).ok(),
            _ => None,
        };
        let Some([Value::String(user), Value::String(assistant)]) = pair else {
            return Err(format!("`history`, entry {}: not a [user, assistant] pair of texts", at + 1));
        };
        answered(&assistant, &format!("`history`, entry {}", at + 1))?;
        messages.push(plain(Role::User, user));
        messages.push(plain(Role::Assistant, assistant));
    }
    Ok(messages)
}

/// `prompt` and `response` or `completion`: texts, or lists of messages. Assistant turns inside a prompt are context
/// and not trained, unless they say so themselves.
pub(super) fn prompt(row: &mut Map<String, Value>) -> Checked<Vec<Message>> {
    let mut messages = side(row, "prompt", Role::User)?;
    for message in messages.iter_mut().filter(|message| message.role == Role::Assistant) {
        message.loss.get_or_insert(0.0);
    }
    let present = |key: &str| row.get(key).is_some_and(|value| !value.is_null());
    let key = match (present("response"), present("completion")) {
        (true, true) => return Err("both `response` and `completion` are given; keep one".to_owned()),
        (true, false) => "response",
        _ => "completion",
    };
    messages.extend(side(row, key, Role::Assistant)?);
    Ok(messages)
}

fn side(row: &mut Map<String, Value>, key: &'static str, role: Role) -> Checked<Vec<Message>> {
    if row.get(key).is_some_and(Value::is_array) {
        return turns::read(row.remove(key).unwrap_or_default(), key, Names::Openai);
    }
    let content = need(row, key)?;
    if role == Role::Assistant {
        answered(&content, &format!("`{key}`"))?;
    }
    Ok(vec![plain(role, content)])
}

fn need(row: &mut Map<String, Value>, key: &str) -> Checked<String> {
    text(row, key)?.ok_or_else(|| {
        let keys: Vec<&str> = row.keys().map(String::as_str).collect();
        format!("`{key}` is missing or null (other keys found: {})", keys.join(", "))
    })
}
