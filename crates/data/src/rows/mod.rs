//! Row formats: from one JSON object to a [`crate::Conversation`].

use serde::Serialize;

/// How the rows of a file spell a conversation; one format a file, found from the keys of its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RowFormat {
    /// `messages`: a list of `{role, content, ...}`.
    Messages,
    /// `conversations`: a list of `{from, value}`.
    Sharegpt,
    /// `instruction`, `output`, optional `input`, `system`, `history`.
    Alpaca,
    /// `prompt` with `response` or `completion`.
    Prompt,
}
