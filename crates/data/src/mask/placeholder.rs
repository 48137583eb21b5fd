//! A rendering in which contents are replaced by private-use characters, and the way back to the true one.

use std::ops::Range;

use super::text;
use crate::template::{PrivateUse, Turns};
use crate::{ChatTemplate, Conversation, Message, Role};

/// One content and the character that stands for it. White space around it stays, since templates trim.
struct Placeholder<'a> {
    message: usize,
    mark: char,
    core: &'a str,
}

/// A rendering with placeholders that gives the true text when they are put back.
pub struct Placed<'a> {
    /// The rendering.
    pub text: String,
    placeholders: Vec<Placeholder<'a>>,
    /// Every place of a placeholder in the text: byte, and index in `placeholders`; in order.
    places: Vec<(usize, usize)>,
    roles: Vec<Role>,
    tool_calls: Vec<bool>,
}

/// A stretch between two replaced messages that are not the assistant's, and the assistant messages within.
pub struct Gap {
    /// Bytes of the rendering with placeholders.
    pub range: Range<usize>,
    /// Indices of the assistant messages.
    pub turns: Vec<usize>,
    /// Whether contents of others could not be replaced and stand within.
    pub foreign: bool,
}

impl<'a> Placed<'a> {
    /// Replaces every content for which that is possible without another effect on the text; those that the template
    /// looks into (thinking, tool responses) stay.
    pub fn render(template: &ChatTemplate, conversation: &'a Conversation, truth: &str) -> Option<Self> {
        let mut marks = PrivateUse::avoiding(&conversation.messages, conversation.tools.as_ref());
        let all: Vec<usize> = (0..conversation.messages.len()).collect();
        if let Some(placed) = Self::with(template, conversation, truth, &all, &mut marks) {
            return Some(placed);
        }
        let alone = |i: &usize| Self::with(template, conversation, truth, &[*i], &mut marks).is_some();
        let replaceable: Vec<usize> = all.into_iter().filter(alone).collect();
        Self::with(template, conversation, truth, &replaceable, &mut marks)
    }

    fn with(
        template: &ChatTemplate,
        conversation: &'a Conversation,
        truth: &str,
        chosen: &[usize],
        marks: &mut PrivateUse,
    ) -> Option<Self> {
        let mut turns = Turns::of(&conversation.messages, conversation.tools.as_ref());
        let mut placeholders = Vec::new();
        for (i, m) in chosen.iter().filter_map(|i| Some((*i, conversation.messages.get(*i)?))) {
            // An empty content has a place too: it tells one message from the next.
            let core = m.content.trim();
            let mark = marks.fresh();
            turns.set_content(i, m, &around(m, core, mark));
            placeholders.push(Placeholder { message: i, mark, core });
        }
        let text = text(template.render_turns(&turns, false, marks))?;
        let places = text.char_indices().filter_map(|(at, c)| Some((at, placeholders.iter().position(|p| p.mark == c)?))).collect();
        let roles = conversation.messages.iter().map(|m| m.role).collect();
        let tool_calls = conversation.messages.iter().map(|m| m.fields.contains_key("tool_calls")).collect();
        let placed = Self { text, placeholders, places, roles, tool_calls };
        placed.restores(truth).then_some(placed)
    }

    /// Whether putting the contents back gives exactly `truth`.
    fn restores(&self, truth: &str) -> bool {
        let (mut at, mut rest) = (0, truth);
        for (place, p) in &self.places {
            let p = &self.placeholders[*p];
            let Some(after) = rest.strip_prefix(&self.text[at..*place]).and_then(|r| r.strip_prefix(p.core)) else { return false };
            rest = after;
            at = place + p.mark.len_utf8();
        }
        rest == &self.text[at..]
    }

    /// The stretches between the messages of others; `None` when the template reorders messages.
    pub fn gaps(&self) -> Option<Vec<Gap>> {
        let mut gaps = Vec::new();
        let (mut start, mut previous) = (0, None);
        let gap = |range, after: Option<usize>, before: usize| {
            let within = after.map_or(0, |i| i + 1)..before;
            let turns: Vec<usize> = within.clone().filter(|i| self.roles.get(*i) == Some(&Role::Assistant)).collect();
            Gap { range, foreign: turns.len() != within.len(), turns }
        };
        for (place, p) in &self.places {
            let p = &self.placeholders[*p];
            if self.roles.get(p.message) == Some(&Role::Assistant) {
                continue;
            }
            if previous.is_some_and(|i| p.message < i) {
                return None;
            }
            if previous != Some(p.message) {
                gaps.push(gap(start..*place, previous, p.message));
            }
            start = place + p.mark.len_utf8();
            previous = Some(p.message);
        }
        gaps.push(gap(start..self.text.len(), previous, self.roles.len()));
        Some(gaps)
    }

    /// Byte after the content of an assistant message, when it is replaced and no text of the data can follow it.
    pub fn end_of(&self, message: usize) -> Option<usize> {
        let (place, p) = self.places.iter().rev().find(|(_, p)| self.placeholders[*p].message == message)?;
        (!self.tool_calls.get(message)?).then(|| place + self.placeholders[*p].mark.len_utf8())
    }

    /// Byte of the true text for a byte of this one that is no placeholder's inside.
    pub fn original(&self, at: usize) -> usize {
        let before = self.places.iter().take_while(|(place, _)| *place < at);
        before.fold(at, |shifted, (_, p)| {
            let p = &self.placeholders[*p];
            shifted + p.core.len() - p.mark.len_utf8()
        })
    }
}

/// The content with `mark` in place of its core.
fn around(message: &Message, core: &str, mark: char) -> String {
    let lead = message.content.len() - message.content.trim_start().len();
    format!("{}{mark}{}", &message.content[..lead], &message.content[lead + core.len()..])
}
