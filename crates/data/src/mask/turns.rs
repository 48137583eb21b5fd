//! Where the assistant turns lie in a rendered conversation, by three methods from cheap to general.

use std::ops::Range;

use super::placeholder::Placed;
use super::shape::TurnShape;
use super::text;
use crate::template::for_each_string_in_map;
use crate::{ChatTemplate, Conversation, Role};

/// For conversations that contain neither header nor end token: the headers found are the template's own, and each
/// turn ends at the first end token after its header. `None` when that is not certain.
pub fn plain(shape: &TurnShape, conversation: &Conversation, text: &str, count: usize) -> Option<Vec<Range<usize>>> {
    let TurnShape { header, terminator } = shape;
    if terminator.is_empty() {
        return None;
    }
    let mut clean = true;
    let mut check = |s: &str| clean &= !s.contains(header.as_str()) && !s.contains(terminator.as_str());
    conversation.messages.iter().for_each(|m| for_each_string_in_map(&m.fields, &mut check));
    if let Some(tools) = &conversation.tools {
        crate::template::for_each_string(tools, &mut check);
    }
    let headers: Vec<usize> = text.match_indices(header.as_str()).map(|(at, _)| at).collect();
    if !clean || headers.len() != count {
        return None;
    }
    let next = headers.iter().copied().skip(1).chain([text.len()]);
    let body = |(at, next): (&usize, usize)| {
        let start = at + header.len();
        let end = start + text.get(start..next)?.find(terminator.as_str())? + terminator.len();
        Some(start..end)
    };
    headers.iter().zip(next).map(body).collect()
}

/// For any content: the conversation is rendered again with its contents replaced by characters that occur nowhere,
/// so that text of the data cannot pass for the template's. A turn is then between its header, the first after the
/// message before it, and the last end token before the message after it.
pub fn with_placeholders(template: &ChatTemplate, shape: &TurnShape, conversation: &Conversation, text: &str) -> Option<Vec<Range<usize>>> {
    let placed = Placed::render(template, conversation, text)?;
    let mut bodies = Vec::new();
    for gap in placed.gaps()? {
        if gap.turns.is_empty() {
            continue;
        }
        let inside = placed.text.get(gap.range.clone())?;
        let mut starts: Vec<usize> =
            inside.match_indices(shape.header.as_str()).map(|(at, _)| gap.range.start + at + shape.header.len()).collect();
        if gap.turns.len() == 1 && !gap.foreign {
            starts.truncate(1);
        }
        if starts.len() != gap.turns.len() {
            return None;
        }
        for (i, (start, turn)) in starts.iter().zip(&gap.turns).enumerate() {
            let limit = starts.get(i + 1).map_or(gap.range.end, |next| next - shape.header.len());
            let said = placed.end_of(*turn).filter(|end| (*start..=limit).contains(end));
            let end = match (shape.terminator.as_str(), gap.foreign) {
                // Nothing ends the turn but its own text.
                ("", _) => said?,
                (t, false) => start + placed.text.get(*start..limit)?.rfind(t)? + t.len(),
                // The last end token may be another's, so it must be the first after the turn's own text.
                (t, true) => said? + placed.text.get(said?..limit)?.find(t)? + t.len(),
            };
            bodies.push(placed.original(*start)..placed.original(end));
        }
    }
    Some(bodies)
}

/// For templates whose turns only ever add to the text: a turn is what rendering one more message adds to a
/// rendering that ends in a generation prompt.
pub fn by_prefix(template: &ChatTemplate, conversation: &Conversation, full: &str) -> Option<Vec<Range<usize>>> {
    let messages = &conversation.messages;
    let mut bodies = Vec::new();
    for i in (0..messages.len()).filter(|i| messages[*i].role == Role::Assistant) {
        let before = text(template.render_messages(&messages[..i], conversation.tools.as_ref(), true))?;
        let after = text(template.render_messages(&messages[..=i], conversation.tools.as_ref(), false))?;
        let after = after.trim_end();
        if before.len() > after.len() || !after.starts_with(&before) || !full.starts_with(after) {
            return None;
        }
        bodies.push(before.len()..after.len());
    }
    Some(bodies)
}
