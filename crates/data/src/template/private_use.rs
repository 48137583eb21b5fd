//! Characters that occur nowhere in a conversation, used as marks and placeholders.

use std::collections::HashSet;

use serde_json::{Map, Value};

use crate::Message;

/// First and last of Unicode's supplementary private use area A, which UTF-8 begins with byte 0xF3.
const FIRST: u32 = 0xF_0000;
const LAST: u32 = 0xF_FFFD;

/// A supply of private-use characters that a conversation does not contain.
#[derive(Clone, Debug)]
pub(crate) struct PrivateUse {
    used: HashSet<char>,
    next: u32,
}

impl PrivateUse {
    /// Characters in none of these messages and tools.
    pub fn avoiding(messages: &[Message], tools: Option<&Value>) -> Self {
        let mut used = HashSet::new();
        for message in messages {
            for_each_string_in_map(&message.fields, &mut |s| collect(s, &mut used));
        }
        if let Some(tools) = tools {
            for_each_string(tools, &mut |s| collect(s, &mut used));
        }
        Self { used, next: FIRST }
    }

    /// Another character. Repeats only after 65,534 of them, which no conversation needs.
    pub fn fresh(&mut self) -> char {
        loop {
            let c = char::from_u32(self.next).unwrap_or(char::REPLACEMENT_CHARACTER);
            self.next = if self.next >= LAST { FIRST } else { self.next + 1 };
            if !self.used.contains(&c) || self.used.len() as u32 > LAST - FIRST {
                return c;
            }
        }
    }
}

fn collect(text: &str, used: &mut HashSet<char>) {
    if text.as_bytes().contains(&0xF3) {
        used.extend(text.chars().filter(|c| (FIRST..=LAST).contains(&(*c as u32))));
    }
}

/// Calls `visit` with every string of `value`, keys included.
pub(crate) fn for_each_string(value: &Value, visit: &mut dyn FnMut(&str)) {
    match value {
        Value::String(s) => visit(s),
        Value::Array(items) => items.iter().for_each(|v| for_each_string(v, visit)),
        Value::Object(map) => for_each_string_in_map(map, visit),
        _ => {}
    }
}

/// As [`for_each_string`], for the fields of a message.
pub(crate) fn for_each_string_in_map(map: &Map<String, Value>, visit: &mut dyn FnMut(&str)) {
    for (key, value) in map {
        visit(key);
        for_each_string(value, visit);
    }
}
