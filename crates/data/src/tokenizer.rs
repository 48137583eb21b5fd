//! The tokenizer of a Hugging Face folder: `tokenizer.json` with the special tokens of `tokenizer_config.json`.
//!
//! The text of a template is complete: nothing is added around it, cut from it or padded. Parallelism is the
//! caller's (rayon over samples); the library's own is switched off.

mod windows;

use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde_json::Value;
use tokenizers::{NormalizedString, Normalizer};

use crate::Error;

/// Token ids of a text and the bytes each stands for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoded {
    /// Token ids, `[T]`.
    pub ids: Vec<u32>,
    /// Byte range of each token in the text, `[T]`. Tokens that share a character share its range.
    pub offsets: Vec<(u32, u32)>,
}

/// A tokenizer and its special tokens.
#[derive(Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    folder: PathBuf,
    config: Value,
    /// What the library would put before a lone text (bos, for tokenizers that add it).
    prefix: Vec<u32>,
    added: Vec<String>,
    /// Whether long texts may be encoded in windows.
    windows: bool,
    rows: usize,
    digest: blake3::Hash,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("folder", &self.folder).field("rows", &self.rows).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Loads the tokenizer of a folder.
    ///
    /// # Errors
    /// No `tokenizer.json`, or a damaged one; a `tokenizer_config.json` that is not a JSON object.
    pub fn load(folder: &Path) -> Result<Self, Error> {
        tokenizers::parallelism::set_parallelism(false);
        let path = folder.join("tokenizer.json");
        if !path.is_file() {
            return Err(Error::file(
                folder,
                "there is no tokenizer.json",
                "set model.tokenizer to a folder that has one; slow tokenizers (vocab.json, tokenizer.model) must be converted by transformers first",
            ));
        }
        let bytes = std::fs::read(&path).map_err(|e| Error::io(&path, "reading the tokenizer", e))?;
        let text = std::str::from_utf8(&bytes).map_err(|e| Error::file(&path, e.to_string(), "download the file again"))?;
        let mut inner = tokenizers::Tokenizer::from_str(text)
            .map_err(|e| Error::file(&path, format!("not a tokenizer: {e}"), "download the file again"))?;
        let failed = |e: tokenizers::Error| Error::file(&path, e.to_string(), "download the file again");
        inner.with_truncation(None).map_err(failed)?;
        inner.with_padding(None);
        let bare = inner.encode("a", false).map_err(failed)?.get_ids().to_vec();
        let full = inner.encode("a", true).map_err(failed)?.get_ids().to_vec();
        let prefix = full.windows(bare.len().max(1)).position(|w| w == bare).map(|at| full[..at].to_vec()).unwrap_or_default();
        // Post-processors add special tokens and may trim offsets; both would spoil the mask.
        inner.with_post_processor(None::<tokenizers::PostProcessorWrapper>);
        let config = read_config(folder)?;
        let rows = inner.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
        let mut added: Vec<String> = inner.get_added_tokens_decoder().into_values().map(|t| t.content).collect();
        added.sort_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
        let (digest, windows) = (blake3::hash(&bytes), windows::applies(&inner));
        Ok(Self { inner, folder: folder.to_path_buf(), config, prefix, added, windows, rows, digest })
    }

    /// The folder it was loaded from.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Tokens of a text, exactly as it stands.
    ///
    /// # Errors
    /// The tokenizer's own (a character no token covers, without an unknown token).
    pub fn encode(&self, text: &str) -> Result<Encoded, Error> {
        let window = if self.windows { windows::WINDOW } else { windows::Window { bytes: text.len(), margin: 0 } };
        windows::encode(&self.inner, text, window).map_err(|e| self.failed(&e))
    }

    /// Tokens of a bare prompt (no chat template), with what this tokenizer puts in front of a text.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, Error> {
        let mut ids = self.prefix.clone();
        let bos = self.token_id("bos_token");
        if ids.is_empty() && self.config.get("add_bos_token") == Some(&Value::Bool(true)) {
            ids.extend(bos);
        }
        ids.extend(self.encode(text)?.ids);
        Ok(ids)
    }

    /// Text of tokens; special tokens are left out on request.
    ///
    /// # Errors
    /// The decoder's own.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, Error> {
        self.inner.decode(ids, skip_special).map_err(|e| self.failed(&e))
    }

    /// The text after the tokenizer's normalizer (Qwen: NFC), which is what decoding gives back.
    pub fn normalise(&self, text: &str) -> String {
        let mut normalised = NormalizedString::from(text);
        match self.inner.get_normalizer().map(|n| n.normalize(&mut normalised)) {
            Some(Ok(())) => normalised.get().to_string(),
            _ => text.to_string(),
        }
    }

    /// Rows an embedding needs: the largest id and one.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Checks that every token has a row in the model's embedding. More rows than tokens are common and fine.
    ///
    /// # Errors
    /// A tokenizer larger than the model, naming both sizes.
    pub fn check_model_rows(&self, model_rows: usize) -> Result<(), Error> {
        if self.rows <= model_rows {
            return Ok(());
        }
        Err(Error::file(
            &self.folder,
            format!("the tokenizer has {} tokens, but the model's embedding has only {model_rows} rows", self.rows),
            "use the model's own tokenizer, remove the added tokens, or enlarge the embedding before training",
        ))
    }

    /// Id of a token by its text.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Id of `bos_token`, `eos_token`, `pad_token` or `unk_token`.
    pub fn token_id(&self, key: &str) -> Option<u32> {
        self.special(key).and_then(|t| self.id_of(t))
    }

    /// Text of `bos_token`, `eos_token`, `pad_token` or `unk_token`.
    pub fn special(&self, key: &str) -> Option<&str> {
        let value = self.config.get(key)?;
        value.as_str().or_else(|| value.get("content")?.as_str())
    }

    /// Texts of all added tokens (`<|im_end|>` and the like), longest first.
    pub fn added_tokens(&self) -> &[String] {
        &self.added
    }

    /// The special tokens that are set, as a template's variables.
    pub(crate) fn special_variables(&self) -> Vec<(&str, &str)> {
        ["bos_token", "eos_token", "pad_token", "unk_token"].into_iter().filter_map(|k| Some((k, self.special(k)?))).collect()
    }

    /// The key `chat_template` of `tokenizer_config.json`: a text, or the entry `default` of a list of named ones.
    pub(crate) fn config_template(&self) -> Option<&str> {
        let value = self.config.get("chat_template")?;
        let named = |list: &'_ Vec<Value>| list.iter().position(|t| t.get("name").and_then(Value::as_str) == Some("default"));
        match value {
            Value::String(s) => Some(s),
            Value::Array(list) => list.get(named(list)?)?.get("template")?.as_str(),
            _ => None,
        }
    }

    /// Hash of `tokenizer.json`.
    pub fn digest(&self) -> blake3::Hash {
        self.digest
    }

    fn failed(&self, error: &tokenizers::Error) -> Error {
        Error::file(&self.folder.join("tokenizer.json"), error.to_string(), "use a tokenizer that covers all characters (byte level)")
    }
}

/// `tokenizer_config.json`, with `special_tokens_map.json` for keys it lacks; an empty object when neither exists.
fn read_config(folder: &Path) -> Result<Value, Error> {
    let mut config = Value::Object(serde_json::Map::new());
    for name in ["special_tokens_map.json", "tokenizer_config.json"] {
        let path = folder.join(name);
        if !path.is_file() {
            continue;
        }
        let bytes = std::fs::read(&path).map_err(|e| Error::io(&path, "reading the tokenizer's settings", e))?;
        let value: Value = serde_json::from_slice(&bytes).map_err(|e| Error::file(&path, e.to_string(), "correct the JSON"))?;
        match (value, &mut config) {
            (Value::Object(map), Value::Object(all)) => all.extend(map),
            _ => return Err(Error::file(&path, "not a JSON object", "download the file again")),
        }
    }
    Ok(config)
}

#[cfg(test)]
mod tests;
