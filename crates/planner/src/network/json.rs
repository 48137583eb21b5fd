//! Checked reads from a JSON object, for the keys that only the planner reads.

use crate::error::{Error, Result};
use serde_json::{Map, Value};

/// Largest size that is accepted; small enough that products of a few fit into 64 bits.
pub(super) const MAX_SIZE: usize = 1 << 24;

/// An object of a `config.json`, with what precedes its keys in errors.
pub(super) struct Object<'a> {
    pub map: &'a Map<String, Value>,
    pub origin: String,
    pub prefix: &'static str,
}

impl<'a> Object<'a> {
    /// The value of `key` unless it is absent or null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// A count in `1..=max`; `default` when absent, an error when there is none.
    pub fn count(&self, key: &str, max: usize, default: Option<usize>) -> Result<usize> {
        let Some(value) = self.get(key) else {
            return default.ok_or_else(|| self.error(key, "missing", "The network cannot be counted without it."));
        };
        let count = value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| (1..=max).contains(n));
        count.ok_or_else(|| self.error(key, found(value), format!("Expected an integer from 1 to {max}.")))
    }

    /// The object under `key`, if it is there.
    pub fn object(&self, key: &str, prefix: &'static str) -> Result<Option<Object<'a>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Object { map, origin: self.origin.clone(), prefix })),
            Some(other) => Err(self.error(key, found(other), "Expected an object.")),
        }
    }

    /// A flag; `default` when absent.
    pub fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(other) => Err(self.error(key, found(other), "Expected true or false.")),
        }
    }

    /// The items of a list; `None` when absent.
    pub fn list(&self, key: &str) -> Result<Option<&'a Vec<Value>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(self.error(key, found(other), "Expected a list.")),
        }
    }

    pub fn error(&self, key: &str, found: impl Into<String>, remedy: impl Into<String>) -> Error {
        Error::key(&self.origin, &format!("{}{key}", self.prefix), found, remedy)
    }
}

/// A value in an error, cut where it would flood a screen.
pub(super) fn found(value: &Value) -> String {
    let text: String = value.to_string().chars().take(80).collect();
    format!("found {text}")
}
