//! Which tokens end a text: several files of a model folder may say so.
//!
//! The rule: `eos_token_id` of generation_config.json; where it names none, that of config.json; where that names none
//! either, the tokenizer's `eos_token`. A chat also ends with what its template puts behind a turn, when that is a single
//! token: a base model tuned for chat often still has only `<|endoftext|>` in its configuration.

use crate::{Error, Result};
use serde_json::Value;
use std::path::Path;

/// Parsed files of a model folder; absent ones are `None`.
#[derive(Clone, Copy, Debug, Default)]
pub struct EndTokenFiles<'a> {
    /// generation_config.json
    pub generation_config: Option<&'a Value>,
    /// config.json
    pub config: Option<&'a Value>,
    /// tokenizer_config.json
    pub tokenizer_config: Option<&'a Value>,
}

/// The tokens that end a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndTokens {
    /// Their ids, without repeats, in the order found; all within the vocabulary.
    pub ids: Vec<u32>,
    /// What the user should know: ids left out, or that there are none.
    pub notices: Vec<String>,
}

/// Applies the rule. `token_id` looks a token up in the tokenizer; `turn_end` is the text that the chat template puts
/// behind a turn (`None` for plain continuation); `vocab` is the number of rows of the model's embedding.
///
/// # Errors
/// An `eos_token_id` that is neither an id nor a list of ids, or an `eos_token` that is no text; the message names file and key.
pub fn end_tokens(files: EndTokenFiles, token_id: &dyn Fn(&str) -> Option<u32>, turn_end: Option<&str>, vocab: usize) -> Result<EndTokens> {
    let mut found = EndTokens::default();
    for (file, json) in [("generation_config.json", files.generation_config), ("config.json", files.config)] {
        if found.ids.is_empty() {
            for id in listed_ids(file, json)? {
                found.add(id, file, vocab);
            }
        }
    }
    if found.ids.is_empty()
        && let Some(token) = tokenizer_eos(files.tokenizer_config)?
    {
        match token_id(&token) {
            Some(id) => found.add(u64::from(id), "tokenizer_config.json", vocab),
            None => found.notices.push(format!("tokenizer_config.json: eos_token {token:?} is not in the tokenizer; ignored")),
        }
    }
    if let Some(id) = turn_end.and_then(|text| token_id(text.trim_end())) {
        found.add(u64::from(id), "the chat template", vocab);
    }
    if found.ids.is_empty() {
        found.notices.push("the model names no end token: only the token limit or a stop string ends its texts".into());
    }
    Ok(found)
}

/// [`end_tokens`] of the files in a folder.
///
/// # Errors
/// Also when a file is present but cannot be read or is no JSON.
pub fn end_tokens_in(dir: &Path, token_id: &dyn Fn(&str) -> Option<u32>, turn_end: Option<&str>, vocab: usize) -> Result<EndTokens> {
    let [generation_config, config, tokenizer_config] =
        ["generation_config.json", "config.json", "tokenizer_config.json"].map(|name| read_json(&dir.join(name)));
    let (generation_config, config, tokenizer_config) = (generation_config?, config?, tokenizer_config?);
    let files = EndTokenFiles {
        generation_config: generation_config.as_ref(),
        config: config.as_ref(),
        tokenizer_config: tokenizer_config.as_ref(),
    };
    end_tokens(files, token_id, turn_end, vocab).map_err(|e| match e {
        Error::ModelFile { path, fault } => Error::ModelFile { path: dir.join(path), fault },
        other => other,
    })
}

impl EndTokens {
    fn add(&mut self, id: u64, source: &str, vocab: usize) {
        match u32::try_from(id) {
            Ok(small) if (small as usize) < vocab => {
                if !self.ids.contains(&small) {
                    self.ids.push(small);
                }
            }
            _ => self.notices.push(format!("{source}: end token {id} is outside the vocabulary of {vocab}; ignored")),
        }
    }
}

/// `eos_token_id` as a list; empty when absent, null or an empty list.
fn listed_ids(file: &str, json: Option<&Value>) -> Result<Vec<u64>> {
    let items = match json.and_then(|j| j.get("eos_token_id")) {
        None | Some(Value::Null) => &[],
        Some(Value::Array(items)) => items.as_slice(),
        Some(one) => std::slice::from_ref(one),
    };
    let id = |v: &Value| v.as_u64().ok_or_else(|| fault(file, format!("eos_token_id holds {v}; write a token id, a list of ids, or null")));
    items.iter().map(id).collect()
}

/// `eos_token`, which is text or an object with `content`.
fn tokenizer_eos(json: Option<&Value>) -> Result<Option<String>> {
    match json.and_then(|j| j.get("eos_token")) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(Value::Object(token)) if token.get("content").is_some_and(Value::is_string) => {
            Ok(token.get("content").and_then(Value::as_str).map(String::from))
        }
        Some(other) => Err(fault("tokenizer_config.json", format!("eos_token is {other}; write the token's text, or null"))),
    }
}

fn fault(file: &str, fault: String) -> Error {
    Error::ModelFile { path: file.into(), fault }
}

fn read_json(path: &Path) -> Result<Option<Value>> {
    let model_file = |fault: String| Error::ModelFile { path: path.into(), fault };
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(model_file(format!("cannot be read: {e}"))),
    };
    serde_json::from_slice(&bytes).map(Some).map_err(|e| model_file(format!("is no JSON: {e}; restore the file")))
}

#[cfg(test)]
mod tests;
