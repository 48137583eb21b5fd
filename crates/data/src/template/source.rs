//! Where a template comes from: the tokenizer's folder, our own named ones, or a file.

use std::path::Path;

use temper_config::Template;

use super::ChatTemplate;
use crate::Error;
use crate::tokenizer::Tokenizer;

/// The templates temper brings along.
const NAMED: [(&str, &str); 4] = [
    ("chatml", include_str!("builtin/chatml.jinja")),
    ("qwen3", include_str!("builtin/qwen3.jinja")),
    ("alpaca", include_str!("builtin/alpaca.jinja")),
    ("llama3", include_str!("builtin/llama3.jinja")),
];

/// Variables that every rendering sets.
const RESERVED: [&str; 3] = ["messages", "tools", "add_generation_prompt"];

impl ChatTemplate {
    /// The template that `data.template` chooses, with the tokenizer's special tokens as variables.
    ///
    /// # Errors
    /// A missing or unreadable file, an unknown name, a tokenizer folder without a template, a syntax error.
    pub fn load(choice: &Template, arguments: &serde_json::Map<String, serde_json::Value>, tokenizer: &Tokenizer) -> Result<Self, Error> {
        if let Some(name) = arguments.keys().find(|k| RESERVED.contains(&k.as_str())) {
            return Err(Error::Option {
                option: "data.template_args",
                found: format!("{name:?} is what a template calls the conversation itself"),
                remedy: "choose another name".into(),
            });
        }
        let (name, source) = match choice {
            Template::Model => of_folder(tokenizer)?,
            Template::Named(name) => named(name)?,
            Template::File(path) => (path.display().to_string(), read(path)?),
        };
        Ok(Self::compile(&name, &source, arguments, &tokenizer.special_variables())?)
    }
}

fn named(name: &str) -> Result<(String, String), Error> {
    match NAMED.iter().find(|(n, _)| *n == name) {
        Some((_, source)) => Ok((name.to_string(), (*source).to_string())),
        None => Err(Error::Option {
            option: "data.template",
            found: format!("there is no template {name:?}"),
            remedy: "use chatml, qwen3, alpaca or llama3, a .jinja file, or leave the key out for the model's own".into(),
        }),
    }
}

/// `chat_template.jinja` before the key of `tokenizer_config.json`, as transformers reads them.
fn of_folder(tokenizer: &Tokenizer) -> Result<(String, String), Error> {
    let file = tokenizer.folder().join("chat_template.jinja");
    if file.is_file() {
        return Ok((file.display().to_string(), read(&file)?));
    }
    let config = tokenizer.folder().join("tokenizer_config.json");
    match tokenizer.config_template() {
        Some(source) => Ok((config.display().to_string(), source.to_string())),
        None => Err(Error::file(
            tokenizer.folder(),
            "no chat template: neither chat_template.jinja nor the key chat_template of tokenizer_config.json",
            "set data.template to chatml, qwen3, alpaca, llama3 or a .jinja file",
        )),
    }
}

fn read(path: &Path) -> Result<String, Error> {
    let bytes = std::fs::read(path).map_err(|e| Error::io(path, "reading the template", e))?;
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Error::file(path, format!("invalid UTF-8 at byte {at}"), "save the template as UTF-8")
    })
}
