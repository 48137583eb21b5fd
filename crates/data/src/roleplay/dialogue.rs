//! One dialogue: from the benchmark's JSON to turns that alternate user, assistant, ..., assistant.

use serde::Serialize;
use serde_json::Value;

use super::report::Tidied;
use crate::read;

/// A turn as it is written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Turn {
    pub role: &'static str,
    pub content: String,
}

pub(super) const USER: &str = "user";
pub(super) const ASSISTANT: &str = "assistant";

/// Reads the `dialogue` column: JSON text (or JSON itself) of a list of `{role: "ai"|"user", text}`.
pub(super) fn parse(dialogue: Value) -> Result<Vec<Turn>, String> {
    let list = match dialogue {
        Value::Null => return Err("`dialogue` is missing".to_owned()),
        Value::String(text) => read::parse(&text, "text")
            .map_err(|fault| format!("`dialogue` is not JSON: line {}, column {}: {}", fault.line, fault.column, fault.reason))?,
        other => other,
    };
    let Value::Array(list) = list else {
        return Err(format!("`dialogue` is {}; it must be a list of turns", read::kind(&list)));
    };
    list.into_iter().enumerate().map(|(at, turn)| one(turn).map_err(|reason| format!("`dialogue`, turn {}: {reason}", at + 1))).collect()
}

fn one(turn: Value) -> Result<Turn, String> {
    let Value::Object(mut turn) = turn else {
        return Err(format!("{} where a turn is expected", read::kind(&turn)));
    };
    let role = match turn.get("role").and_then(Value::as_str) {
        Some("ai") => ASSISTANT,
        Some("user") => USER,
        Some(other) => return Err(format!("unknown role `{other}`; allowed: ai, user")),
        None => return Err("no `role`".to_owned()),
    };
    match turn.remove("text") {
        Some(Value::String(content)) => Ok(Turn { role, content }),
        None | Some(Value::Null) => Ok(Turn { role, content: String::new() }),
        Some(other) => Err(format!("`text` is {}; it must be text", read::kind(&other))),
    }
}

/// Removes empty turns, merges neighbours of one role, drops a leading assistant's turn (it repeats the prologue, which
/// stands in the system message) and a trailing user's, and cuts at `max_turns`. May leave nothing.
pub(super) fn tidy(turns: &mut Vec<Turn>, max_turns: Option<usize>, tidied: &mut Tidied) {
    let before = turns.len();
    turns.retain(|turn| !turn.content.trim().is_empty());
    tidied.empty_turns += (before - turns.len()) as u64;

    let before = turns.len();
    turns.dedup_by(|next, kept| {
        let same = next.role == kept.role;
        if same {
            kept.content.push('\n');
            kept.content.push_str(&next.content);
        }
        same
    });
    tidied.merged_turns += (before - turns.len()) as u64;

    if turns.first().is_some_and(|turn| turn.role == ASSISTANT) {
        turns.remove(0);
        tidied.leading_assistant += 1;
    }
    if let Some(most) = max_turns.filter(|most| turns.len() > *most) {
        tidied.cut_dialogues += 1;
        tidied.cut_turns += (turns.len() - most) as u64;
        turns.truncate(most);
    }
    if turns.last().is_some_and(|turn| turn.role == USER) {
        turns.pop();
        tidied.trailing_user += 1;
    }
}
