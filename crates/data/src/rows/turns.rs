//! Lists of turns: `messages` as OpenAI writes them, `conversations` as ShareGPT does.

use serde_json::{Map, Value, json};

use super::{Checked, exact};
use crate::{Message, Role, read};

/// Whose names for roles and keys a list uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Names {
    /// `role` and `content`.
    Openai,
    /// `from` and `value`, or as [`Names::Openai`].
    Sharegpt,
}

/// What a role name means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Speaker {
    /// A role.
    Is(Role),
    /// The assistant, its text being the JSON of a tool call.
    FunctionCall,
}

impl Names {
    fn role_keys(self) -> &'static [&'static str] {
        match self {
            Self::Openai => &["role"],
            Self::Sharegpt => &["from", "role"],
        }
    }

    fn text_keys(self) -> &'static [&'static str] {
        match self {
            Self::Openai => &["content"],
            Self::Sharegpt => &["value", "content"],
        }
    }

    /// `developer` is OpenAI's newer name of `system`; the templates served here know only that one.
    fn roles(self) -> &'static [(&'static str, Speaker)] {
        use Speaker::{FunctionCall, Is};
        const ROLES: [(&str, Speaker); 9] = [
            ("system", Is(Role::System)),
            ("user", Is(Role::User)),
            ("assistant", Is(Role::Assistant)),
            ("tool", Is(Role::Tool)),
            ("developer", Is(Role::System)),
            ("human", Is(Role::User)),
            ("gpt", Is(Role::Assistant)),
            ("observation", Is(Role::Tool)),
            ("function_call", FunctionCall),
        ];
        match self {
            Self::Openai => ROLES.split_at(5).0,
            Self::Sharegpt => &ROLES,
        }
    }

    fn speaker(self, name: &str) -> Checked<Speaker> {
        let roles = self.roles();
        roles.iter().find(|(known, _)| *known == name).map(|(_, speaker)| *speaker).ok_or_else(|| {
            let names: Vec<&str> = roles.iter().map(|(known, _)| *known).collect();
            format!("unknown role `{name}`; allowed: {}", names.join(", "))
        })
    }
}

/// Reads a list of turns, given as JSON or as JSON text (a column of text in Parquet, say).
pub(super) fn read(list: Value, column: &str, names: Names) -> Checked<Vec<Message>> {
    let list = match list {
        Value::String(text) => read::parse(&text, "text").map_err(|fault| format!("`{column}` is text but not JSON: {}", fault.reason))?,
        other => other,
    };
    let Value::Array(list) = list else {
        return Err(format!("`{column}` is {}; it must be a list of turns", read::kind(&list)));
    };
    let turns = list.into_iter().enumerate();
    turns.map(|(at, turn)| message(turn, names).map_err(|reason| format!("turn {}: {reason}", at + 1))).collect()
}

fn message(turn: Value, names: Names) -> Checked<Message> {
    let Value::Object(turn) = turn else {
        return Err(format!("{} where a turn is expected; each turn must be an object", read::kind(&turn)));
    };
    let role_key = one_key(&turn, names.role_keys())?.ok_or_else(|| lacks(&turn, names.role_keys()))?;
    let speaker = match turn.get(role_key) {
        Some(Value::String(name)) => names.speaker(name)?,
        other => return Err(format!("`{role_key}` is {}; it must be the name of a role", other.map_or("absent", read::kind))),
    };
    let text_key = one_key(&turn, names.text_keys())?;
    let given = match text_key.and_then(|key| turn.get(key)) {
        Some(value) => text_of(value).map_err(|reason| format!("`{}` {reason}", text_key.unwrap_or_default()))?,
        None => None,
    };
    let loss = loss(&turn)?;
    let (role, given, call) = match speaker {
        Speaker::Is(role) => (role, given, None),
        Speaker::FunctionCall => (Role::Assistant, Some(String::new()), Some(function_call(given.as_deref())?)),
    };
    let calling = has_tool_calls(&turn)? || call.is_some();
    let content = match given {
        Some(content) => content,
        None if calling && role == Role::Assistant => String::new(),
        None => return Err(lacks(&turn, names.text_keys())),
    };
    if role == Role::Assistant && !calling && loss != Some(0.0) {
        answered(&content, "the assistant's turn")?;
    }
    let fields = fields(turn, (role_key, role), (text_key, &content), call);
    fields.values().try_for_each(exact)?;
    Ok(Message { role, content, fields, loss })
}

/// The message as templates see it, in the row's order: role and content normalised, the loss switch taken out.
fn fields(turn: Map<String, Value>, role: (&str, Role), content: (Option<&str>, &str), call: Option<Value>) -> Map<String, Value> {
    let mut fields = Map::new();
    for (key, value) in turn {
        match key.as_str() {
            key if key == role.0 => fields.insert("role".to_owned(), role.1.name().into()),
            key if Some(key) == content.0 => fields.insert("content".to_owned(), content.1.into()),
            "loss" | "weight" => None,
            _ => fields.insert(key, value),
        };
    }
    if content.0.is_none() {
        fields.insert("content".to_owned(), content.1.into());
    }
    if let Some(call) = call {
        fields.insert("tool_calls".to_owned(), call);
    }
    fields
}

/// The one of several names that a turn uses; using two is ambiguous.
fn one_key(turn: &Map<String, Value>, names: &[&'static str]) -> Checked<Option<&'static str>> {
    let mut present = names.iter().filter(|name| turn.contains_key(**name));
    match (present.next(), present.next()) {
        (Some(one), Some(two)) => Err(format!("both `{one}` and `{two}` are given; keep one")),
        (first, _) => Ok(first.copied()),
    }
}

fn lacks(turn: &Map<String, Value>, names: &[&str]) -> String {
    let keys: Vec<&str> = turn.keys().map(String::as_str).collect();
    let null = names.iter().any(|name| turn.get(*name).is_some_and(Value::is_null));
    let what = if null { "is null" } else { "is missing" };
    format!("`{}` {what} (keys found: {})", names.join("` or `"), keys.join(", "))
}

/// The text of a turn: a string, or the text parts of a list joined without a separator; none for null.
fn text_of(value: &Value) -> Checked<Option<String>> {
    let parts = match value {
        Value::Null => return Ok(None),
        Value::String(text) => return Ok(Some(text.clone())),
        Value::Array(parts) => parts,
        other => return Err(format!("is {}; it must be text (a structured result goes in as JSON text)", read::kind(other))),
    };
    if parts.is_empty() {
        return Err("is a list without any part".to_owned());
    }
    let mut joined = String::new();
    for (at, part) in parts.iter().enumerate() {
        let kind = part.get("type").and_then(Value::as_str);
        match (part, kind, part.get("text")) {
            (Value::String(text), ..) | (_, Some("text") | None, Some(Value::String(text))) => joined.push_str(text),
            (_, Some(kind), _) if kind != "text" => {
                return Err(format!("part {} is of type `{kind}`; only text can be trained: remove the part or the row", at + 1));
            }
            _ => return Err(format!("part {} has no text; write {{\"type\": \"text\", \"text\": \"...\"}}", at + 1)),
        }
    }
    Ok(Some(joined))
}

/// The turn's weight in the loss, from `loss` or OpenAI's `weight`: false, true, or 0 to 1.
fn loss(turn: &Map<String, Value>) -> Checked<Option<f32>> {
    let Some(key) = one_key(turn, &["loss", "weight"])? else { return Ok(None) };
    match turn.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Bool(on)) => Ok(Some(f32::from(u8::from(*on)))),
        Some(Value::Number(number)) => match number.as_f64() {
            Some(weight) if (0.0..=1.0).contains(&weight) => Ok(Some(weight as f32)),
            _ => Err(format!("`{key}` is {number}; it must lie in 0 to 1")),
        },
        Some(other) => Err(format!("`{key}` is {}; it must be false, true or a number from 0 to 1", read::kind(other))),
    }
}

/// Whether the turn calls tools; each call must name its function, the rest of it is left as it is.
fn has_tool_calls(turn: &Map<String, Value>) -> Checked<bool> {
    let calls = match turn.get("tool_calls") {
        None | Some(Value::Null) => return Ok(false),
        Some(Value::Array(calls)) => calls,
        Some(other) => return Err(format!("`tool_calls` is {}; it must be a list", read::kind(other))),
    };
    for (at, call) in calls.iter().enumerate() {
        let function = call.get("function").unwrap_or(call);
        if !function.get("name").is_some_and(Value::is_string) {
            return Err(format!("`tool_calls`, entry {}: no function name", at + 1));
        }
    }
    Ok(!calls.is_empty())
}

/// The `tool_calls` that ShareGPT's `function_call` turn spells as JSON text: one `{name, arguments}` or a list of them.
fn function_call(text: Option<&str>) -> Checked<Value> {
    let text = text.ok_or("the function call has no text")?;
    let value = read::parse(text, "text").map_err(|fault| format!("the function call is not JSON: {}", fault.reason))?;
    let calls = match value {
        Value::Array(calls) => calls,
        one => vec![one],
    };
    if calls.is_empty() {
        return Err("the function call is an empty list".to_owned());
    }
    let calls = calls.into_iter().map(|call| match call.get("name") {
        Some(Value::String(_)) => Ok(json!({"type": "function", "function": call})),
        _ => Err("the function call has no `name`; write {\"name\": ..., \"arguments\": {...}}".to_owned()),
    });
    Ok(Value::Array(calls.collect::<Checked<_>>()?))
}

/// An assistant turn without text would train the model to say nothing.
pub(super) fn answered(content: &str, what: &str) -> Checked<()> {
    if content.trim().is_empty() {
        return Err(format!("{what} is empty: it would train the model to answer nothing; remove it or set its `loss` to 0"));
    }
    Ok(())
}
