//! What surrounds an assistant turn in a template, learnt from probe conversations.

use std::ops::Range;

use serde_json::{Map, Value};

use crate::template::PrivateUse;
use crate::{ChatTemplate, Message, Role};

/// How a template frames an assistant turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TurnShape {
    /// What stands before every assistant turn, and where a generation prompt ends (`<|im_start|>assistant\n`).
    pub header: String,
    /// What ends it (`<|im_end|>`); empty where the template has nothing of the kind.
    pub terminator: String,
}

impl TurnShape {
    /// A generation block's range, less the white space in front that belongs to the header and the white space after
    /// its end token; what else a template counts as generated (an opening `<think>`) is its own choice.
    pub fn clip(&self, text: &str, range: Range<usize>) -> Range<usize> {
        let Range { mut start, mut end } = range;
        let split = (1..=self.header.len()).rev().find(|k| {
            let at = self.header.len() - k;
            self.header.is_char_boundary(at)
                && self.header[at..].trim().is_empty()
                && text[start..end].starts_with(&self.header[at..])
                && text[..start].ends_with(&self.header[..at])
        });
        start += split.unwrap_or(0);
        let body = text[start..end].trim_end();
        if !self.terminator.is_empty() && body.ends_with(&self.terminator) {
            end = start + body.len();
        }
        start..end
    }
}

/// Learns the shape; `None` when the template is too unusual for it.
pub(crate) fn of_template(template: &ChatTemplate, added_tokens: &[String]) -> Option<TurnShape> {
    let mut marks = PrivateUse::avoiding(&[], None);
    let (ask1, say1, ask2, say2) = (marks.fresh(), marks.fresh(), marks.fresh(), marks.fresh());
    let question = [message(Role::User, ask1)];
    let talk = [message(Role::User, ask1), message(Role::Assistant, say1), message(Role::User, ask2), message(Role::Assistant, say2)];
    let render = |messages: &[Message], prompt: bool| super::text(template.render_messages(messages, None, prompt));

    let closed = render(&question, false)?;
    let closing = closed.split_once(ask1)?.1.to_string();
    let prompted = render(&question, true)?;
    let prompt = prompted.split_once(ask1)?.1;
    let full = render(&talk, false)?;
    let (_, rest) = full.split_once(ask1)?;
    let (first, rest) = rest.split_once(say1)?;
    let (between, rest) = rest.split_once(ask2)?;
    let (last, end) = rest.split_once(say2)?;

    // A template may end a text otherwise than a turn (eos where no prompt is asked for): what both share closes a turn.
    let closing = if prompt.starts_with(&closing) { closing } else { terminator(common_prefix(&closing, prompt), added_tokens) };
    // What closes the user's turn is no part of the header, unless the header is nothing else (`[/INST]`).
    let header = |text: &'_ str| match text.strip_prefix(closing.as_str()) {
        Some(own) if !own.trim().is_empty() => own.to_string(),
        _ => text.to_string(),
    };
    let mut common = common_prefix(&header(first), &header(last)).to_string();
    if prompt != closing || header(first) == first {
        common = common_prefix(&common, &header(prompt)).to_string();
    }
    let common = common.trim_start();
    if common.is_empty() {
        return None;
    }
    Some(TurnShape { header: common.to_string(), terminator: terminator(common_prefix(between, end), added_tokens) })
}

/// The end token at the beginning of what follows a turn: up to the first added token, else all but white space.
fn terminator(after: &str, added_tokens: &[String]) -> String {
    let ends = added_tokens.iter().filter(|t| !t.trim().is_empty()).filter_map(|t| Some((after.find(t.as_str())?, t.len())));
    match ends.min_by_key(|(at, length)| (*at, std::cmp::Reverse(*length))) {
        Some((at, length)) => after[..at + length].to_string(),
        None => after.trim_end().to_string(),
    }
}

fn message(role: Role, content: char) -> Message {
    let name = if role == Role::User { "user" } else { "assistant" };
    let mut fields = Map::new();
    fields.insert("role".into(), name.into());
    fields.insert("content".into(), Value::String(content.to_string()));
    Message { role, content: content.to_string(), fields, loss: None }
}

fn common_prefix<'a>(a: &'a str, b: &str) -> &'a str {
    let length = a.char_indices().zip(b.chars()).find(|((_, x), y)| x != y).map_or(a.len().min(b.len()), |((i, _), _)| i);
    &a[..length]
}
