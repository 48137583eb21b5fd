//! Which part of a rendered conversation is trained.
//!
//! The convention, the same for every template: a turn is trained from just after its header up to and including
//! its end token. The header belongs to the prompt (the model is given it), white space after the end token belongs
//! to the next turn. Whatever the template writes in between (a think block, tool calls) is trained.

mod placeholder;
mod shape;
mod tokens;
mod turns;

use std::ops::Range;

use temper_config::LossOn;

use crate::template::TemplateError;
use crate::{ChatTemplate, Conversation, Message, Role};
use shape::TurnShape;
pub use tokens::TokenSpan;
pub(crate) use tokens::{TokenMask, token_mask};

/// A stretch of text and its weight in the loss; only weights above zero are kept.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// Bytes of the text.
    pub range: Range<usize>,
    /// Weight of each of its tokens.
    pub weight: f32,
}

/// A conversation as text, with what is trained of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Masked {
    /// The rendered conversation.
    pub text: String,
    /// What is trained, in order, not overlapping.
    pub spans: Vec<Span>,
}

/// Renders conversations and finds what is trained.
#[derive(Clone, Debug)]
pub struct Masker {
    template: ChatTemplate,
    loss: LossOn,
    shape: Option<TurnShape>,
}

impl Masker {
    /// Studies a template once. `added_tokens` are the tokenizer's, longest first; they tell where an end token ends.
    pub fn new(template: ChatTemplate, loss: LossOn, added_tokens: &[String]) -> Self {
        let shape = shape::of_template(&template, added_tokens);
        Self { template, loss, shape }
    }

    /// The template.
    pub fn template(&self) -> &ChatTemplate {
        &self.template
    }

    /// What the template puts behind an assistant turn (`<|im_end|>`); `None` where it has nothing of the kind.
    pub fn terminator(&self) -> Option<&str> {
        self.shape.as_ref().map(|s| s.terminator.as_str()).filter(|t| !t.is_empty())
    }

    /// Renders a conversation and finds what is trained.
    ///
    /// # Errors
    /// The reason why the row cannot be trained: the template refuses it, its mask cannot be determined, or it asks
    /// for a loss where none can be.
    pub fn mask(&self, conversation: &Conversation) -> Result<Masked, String> {
        let messages = &conversation.messages;
        let whole = self.loss == LossOn::All;
        for (i, m) in messages.iter().enumerate().filter(|(_, m)| m.role != Role::Assistant) {
            if m.loss.is_some_and(|w| (w > 0.0) != whole || (w != 1.0 && w != 0.0)) {
                return Err(format!("messages[{i}].loss: only assistant turns have a loss of their own; remove the key here"));
            }
        }
        let rendered = self.template.render(conversation).map_err(|e| e.to_string())?;
        if whole && messages.iter().all(|m| m.loss.is_none_or(|w| w == 1.0)) {
            let range = 0..rendered.text.len();
            return Ok(Masked { text: rendered.text, spans: vec![Span { range, weight: 1.0 }] });
        }
        let bodies = self.bodies(conversation, &rendered).ok_or_else(|| {
            format!("the mask cannot be determined for template {}; add {{% generation %}} blocks to it", self.template.name())
        })?;
        let weights = weights(messages, self.loss);
        let mut spans = Vec::new();
        let mut done = 0;
        for (range, weight) in bodies.into_iter().zip(weights) {
            if whole && range.start > done {
                spans.push(Span { range: done..range.start, weight: 1.0 });
            }
            done = range.end;
            if weight > 0.0 && !range.is_empty() {
                spans.push(Span { range, weight });
            }
        }
        if whole && done < rendered.text.len() {
            spans.push(Span { range: done..rendered.text.len(), weight: 1.0 });
        }
        Ok(Masked { text: rendered.text, spans })
    }

    /// Byte ranges of what the model writes, one for each assistant message, in order.
    fn bodies(&self, conversation: &Conversation, rendered: &crate::Rendered) -> Option<Vec<Range<usize>>> {
        let count = conversation.messages.iter().filter(|m| m.role == Role::Assistant).count();
        if rendered.generation.len() == count && self.template.marks_generation() {
            let clip = |r: &Range<usize>| self.shape.as_ref().map_or_else(|| r.clone(), |s| s.clip(&rendered.text, r.clone()));
            return Some(rendered.generation.iter().map(clip).collect());
        }
        if let Some(shape) = &self.shape {
            let found = turns::plain(shape, conversation, &rendered.text, count)
                .or_else(|| turns::with_placeholders(&self.template, shape, conversation, &rendered.text));
            if found.is_some() {
                return found;
            }
        }
        turns::by_prefix(&self.template, conversation, &rendered.text)
    }
}

/// Weight of each assistant message: its own, else what the rule gives it.
fn weights(messages: &[Message], loss: LossOn) -> Vec<f32> {
    let last = messages.iter().rposition(|m| m.role == Role::Assistant);
    let turns = messages.iter().enumerate().filter(|(_, m)| m.role == Role::Assistant);
    turns.map(|(i, m)| m.loss.unwrap_or(if loss != LossOn::Last || last == Some(i) { 1.0 } else { 0.0 })).collect()
}

/// A rendering that failed is no reason here, only a method that does not apply.
fn text(result: Result<crate::Rendered, TemplateError>) -> Option<String> {
    result.ok().map(|r| r.text)
}

#[cfg(test)]
mod tests;
