//! Typed access to the keys of a `config.json`: every value is checked where it is read, every error names file and key.

use crate::error::{Error, Result};
use serde_json::{Map, Value};
use std::ops::RangeInclusive;
use std::path::Path;

/// The object of a `config.json`. A key that is `null` reads like an absent one, as in transformers.
pub(super) struct Keys<'a> {
    map: &'a Map<String, Value>,
    origin: &'a Path,
    /// What precedes a key in an error, e.g. `rope_parameters.`.
    prefix: &'a str,
}

impl<'a> Keys<'a> {
    pub fn new(map: &'a Map<String, Value>, origin: &'a Path) -> Self {
        Self { map, origin, prefix: "" }
    }

    /// The object under `key`, when it is there; `prefix` is what its keys are called in errors.
    pub fn object(&self, key: &str, prefix: &'a str) -> Result<Option<Keys<'a>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Keys { map, origin: self.origin, prefix })),
            Some(other) => Err(self.wrong(key, other, "an object")),
        }
    }

    /// The value of `key` unless it is absent or null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// Whether the key is written at all, null included.
    pub fn written(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// Names of all keys.
    pub fn names(&self) -> impl Iterator<Item = &'a String> {
        self.map.keys()
    }

    pub fn count(&self, key: &str, range: RangeInclusive<usize>) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        // Some writers put 2.0 for 2; a float that is not whole stays an error.
        let whole = value.as_u64().or_else(|| value.as_f64().filter(|f| f.fract() == 0.0 && (0.0..9e15).contains(f)).map(|f| f as u64));
        match whole.and_then(|n| usize::try_from(n).ok()).filter(|n| range.contains(n)) {
            Some(n) => Ok(Some(n)),
            None => Err(self.wrong(key, value, &format!("an integer from {} to {}", range.start(), range.end()))),
        }
    }

    /// A count without which there is no network.
    pub fn required(&self, key: &str, range: RangeInclusive<usize>) -> Result<usize> {
        match self.count(key, range)? {
            Some(n) => Ok(n),
            None => Err(self.error(key, "missing", "The network cannot be built without it: complete the config.json.")),
        }
    }

    pub fn float(&self, key: &str, range: RangeInclusive<f64>) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64().filter(|f| range.contains(f)) {
            Some(f) => Ok(Some(f)),
            None => Err(self.wrong(key, value, &format!("a number from {:e} to {:e}", range.start(), range.end()))),
        }
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(other) => Err(self.wrong(key, other, "true or false")),
        }
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(other) => Err(self.wrong(key, other, "a string")),
        }
    }

    pub fn list(&self, key: &str) -> Result<Option<&'a Vec<Value>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(self.wrong(key, other, "a list")),
        }
    }

    /// A value of the wrong type or out of range.
    pub fn wrong(&self, key: &str, found: &Value, expected: &str) -> Error {
        self.error(key, &format!("found {}", shorten(found)), &format!("Expected {expected}."))
    }

    pub fn error(&self, key: &str, found: &str, remedy: &str) -> Error {
        Error::Key {
            origin: self.origin.display().to_string(),
            key: format!("{}{key}", self.prefix),
            found: found.to_string(),
            remedy: remedy.to_string(),
        }
    }
}

/// The value as JSON, cut where it would flood a screen.
pub(super) fn shorten(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
