//! Material that several test modules share.

use std::path::PathBuf;
use std::sync::OnceLock;

use serde_json::Value;

use crate::{Conversation, Message, Role, SampleId, Tokenizer};

/// A folder of the shared material beside the repository, or `None` with a printed reason.
pub fn shared(path: &str) -> Option<PathBuf> {
    let full = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared")).join(path);
    if full.exists() {
        return Some(full);
    }
    eprintln!("skipped: ../shared/{path} is not here");
    None
}

/// The real Qwen3 tokenizer, where it is; loaded once.
pub fn qwen3() -> Option<&'static Tokenizer> {
    static TOKENIZER: OnceLock<Option<Tokenizer>> = OnceLock::new();
    TOKENIZER.get_or_init(|| Some(Tokenizer::load(&shared("tokenizers/qwen3")?).unwrap())).as_ref()
}

/// Our own tokenizer of 303 tokens (byte-level BPE, ChatML), from the test inputs.
pub fn tiny() -> Tokenizer {
    Tokenizer::load(&PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cases/common/tiny-tokenizer"))).unwrap()
}

/// A conversation of messages as a row has them.
pub fn conversation(messages: &Value) -> Conversation {
    let messages = messages.as_array().unwrap().iter().map(message).collect();
    Conversation { id: SampleId { source: 0, row: 1, piece: 0 }, messages, tools: None }
}

fn message(value: &Value) -> Message {
    let mut fields = value.as_object().unwrap().clone();
    let role = match fields["role"].as_str().unwrap() {
        "system" => Role::System,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        _ => Role::Tool,
    };
    let loss = fields.shift_remove("loss").map(|l| l.as_f64().unwrap_or_else(|| f64::from(u8::from(l == Value::Bool(true)))) as f32);
    let content = fields.get("content").and_then(Value::as_str).unwrap_or_default().to_string();
    fields.insert("content".into(), content.clone().into());
    Message { role, content, fields, loss }
}

/// A folder of our own test inputs.
pub fn case(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cases")).join(name)
}

/// A configuration as if it stood in a folder, with these lines under `[data]` and `[train]`. Nothing is cached.
pub fn config(folder: &std::path::Path, data: &str, train: &str) -> temper_config::Config {
    let text = format!("[model]\npath = \".\"\n[data]\ncache_dir = \"\"\n{data}\n[train]\n{train}\n");
    temper_config::Config::from_toml(&text, &folder.join("config.toml"), &[]).unwrap().config
}

/// The template of a tokenizer's folder.
pub fn own_template(tokenizer: &Tokenizer) -> crate::ChatTemplate {
    crate::ChatTemplate::load(&temper_config::Template::Model, &serde_json::Map::new(), tokenizer).unwrap()
}
