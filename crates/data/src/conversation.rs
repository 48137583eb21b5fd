//! A conversation as every reader delivers it and every template takes it.

use crate::SampleId;
use serde_json::{Map, Value};

/// Who speaks. Other names are bad rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Instructions to the model.
    System,
    /// The person.
    User,
    /// The model: what is trained.
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl Role {
    /// The name that templates know.
    pub fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// One turn.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// The text; empty where the row had `null` beside tool calls.
    pub content: String,
    /// All keys of the message as the template sees them, in the row's order: `role` and `content` normalised
    /// to strings, `loss` removed, everything else (tool_calls, reasoning_content, name) untouched.
    pub fields: Map<String, Value>,
    /// Weight of this turn in the loss; `None` is the default of the loss rule, 0 masks it.
    pub loss: Option<f32>,
}

impl Message {
    /// A turn of plain text.
    pub fn new(role: Role, content: &str) -> Message {
        let fields = [("role", role.name()), ("content", content)].map(|(k, v)| (k.to_string(), Value::from(v)));
        Message { role, content: content.to_string(), fields: fields.into_iter().collect(), loss: None }
    }
}

/// One row of a data file.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversation {
    /// File and row.
    pub id: SampleId,
    /// The turns, at least one, at least one of them the assistant's.
    pub messages: Vec<Message>,
    /// The row's `tools`, for templates that render them.
    pub tools: Option<Value>,
}
