//! What a key accepts: its type in words, its default, and how a written value becomes a Rust one.

use crate::tree::{Node, Value};
use std::ops::RangeInclusive;
use std::path::PathBuf;

/// Why a value is refused; the reader adds file, line and key.
pub(crate) struct Fault {
    /// What follows the key where the fault lies inside its value, e.g. `[1].weight`.
    pub within: String,
    pub found: String,
    pub remedy: String,
}

impl Fault {
    pub fn new(found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { within: String::new(), found: found.into(), remedy: remedy.into() }
    }
}

type Read<T> = Box<dyn Fn(&Node) -> Result<T, Fault>>;

/// One key's type, default and parser.
pub(crate) struct Spec<T> {
    /// Type and range in words, e.g. "integer from 1".
    pub kind: String,
    /// The default as TOML, or in words.
    pub default_text: String,
    /// None: the key must be given.
    pub default: Option<T>,
    /// The words it accepts with their meanings, where it is a choice.
    pub choices: Vec<(&'static str, &'static str)>,
    pub read: Read<T>,
}

/// A setting that is one of several words.
pub(crate) trait Choice: Copy + PartialEq + 'static {
    /// Value, its word (with other accepted spellings), what it does.
    const ALL: &'static [(Self, &'static [&'static str], &'static str)];

    fn word(self) -> &'static str {
        Self::ALL.iter().find(|(value, ..)| *value == self).and_then(|(_, words, _)| words.first()).copied().unwrap_or("")
    }
}

impl<T: 'static> Spec<T> {
    fn new(kind: impl Into<String>, default: Option<T>, default_text: impl Into<String>, read: Read<T>) -> Self {
        Self { kind: kind.into(), default_text: default_text.into(), default, choices: Vec::new(), read }
    }

    /// The same key, absent by default; `meaning` says what absence does.
    pub fn optional(self, meaning: &str) -> Spec<Option<T>> {
        let read = self.read;
        Spec { choices: self.choices, ..Spec::new(self.kind, Some(None), meaning, Box::new(move |node| read(node).map(Some))) }
    }

    /// Says in words what the default is, where it is not one fixed value.
    pub fn default_is(mut self, words: &str) -> Self {
        self.default_text = words.to_string();
        self
    }
}

fn refuse<T>(node: &Node, expected: &str) -> Result<T, Fault> {
    Err(Fault::new(node.value.describe(), format!("Expected {expected}.")))
}

/// An integer.
pub(crate) fn count(default: usize, range: RangeInclusive<usize>) -> Spec<usize> {
    integer(default, range)
}

/// An integer of 64 bits (seeds).
pub(crate) fn integer<N>(default: N, range: RangeInclusive<N>) -> Spec<N>
where
    N: TryFrom<i128> + PartialOrd + std::fmt::Display + Copy + 'static,
{
    let kind = format!("integer from {} to {}", range.start(), range.end());
    let expected = format!("an {kind}");
    let read = move |node: &Node| match node.value {
        Value::Int(i) => N::try_from(i).ok().filter(|n| range.contains(n)).map_or_else(|| refuse(node, &expected), Ok),
        _ => refuse(node, &expected),
    };
    Spec::new(kind, Some(default), default.to_string(), Box::new(read))
}

/// A range of numbers.
#[derive(Clone, Copy)]
pub(crate) struct Bounds {
    pub low: f64,
    pub high: f64,
    /// Whether `low` itself is outside.
    pub above: bool,
    /// Whether `high` itself is outside.
    pub below: bool,
}

impl Bounds {
    /// From `low` to `high`, both allowed.
    pub const fn within(low: f64, high: f64) -> Self {
        Self { low, high, above: false, below: false }
    }

    /// `low` allowed, `high` not.
    pub const fn below(low: f64, high: f64) -> Self {
        Self { low, high, above: false, below: true }
    }

    /// `low` not allowed, `high` is.
    pub const fn above(low: f64, high: f64) -> Self {
        Self { low, high, above: true, below: false }
    }

    fn contains(&self, x: f64) -> bool {
        (if self.above { x > self.low } else { x >= self.low }) && (if self.below { x < self.high } else { x <= self.high })
    }

    fn words(&self) -> String {
        let low = if self.above { "above" } else { "from" };
        let high = if self.below { "below" } else { "to" };
        format!("{low} {} {high} {}", self.low, self.high)
    }
}

fn number(node: &Node) -> Option<f64> {
    match node.value {
        Value::Int(i) => Some(i as f64),
        Value::Float(f) => Some(f),
        _ => None,
    }
}

/// A finite number; integers are numbers too.
pub(crate) fn float(default: f64, bounds: Bounds) -> Spec<f64> {
    let kind = format!("number {}", bounds.words());
    let expected = format!("a {kind}");
    let read = move |node: &Node| number(node).filter(|x| bounds.contains(*x)).map_or_else(|| refuse(node, &expected), Ok);
    Spec::new(kind, Some(default), show(default), Box::new(read))
}

/// A number as one would write it in TOML.
fn show(x: f64) -> String {
    if x != 0.0 && x.abs() < 1e-3 { format!("{x:e}") } else { format!("{x:?}") }
}

/// `true` or `false`.
pub(crate) fn flag(default: bool) -> Spec<bool> {
    let read = |node: &Node| match node.value {
        Value::Bool(b) => Ok(b),
        _ => refuse(node, "true or false"),
    };
    Spec::new("true or false", Some(default), default.to_string(), Box::new(read))
}

/// One of the words of `T`.
pub(crate) fn choice<T: Choice>(default: T) -> Spec<T> {
    let quoted = |word: &str| format!("\"{word}\"");
    let kind = T::ALL.iter().filter_map(|(_, words, _)| words.first()).map(|w| quoted(w)).collect::<Vec<_>>().join(", ");
    let expected = format!("one of {kind}");
    let read = move |node: &Node| {
        let Value::Text(text) = &node.value else { return refuse(node, &expected) };
        match T::ALL.iter().find(|(_, words, _)| words.contains(&text.as_str())) {
            Some((value, ..)) => Ok(*value),
            None => refuse(node, &expected),
        }
    };
    let choices = T::ALL.iter().filter_map(|(_, words, meaning)| Some((*words.first()?, *meaning))).collect();
    Spec { choices, ..Spec::new(kind, Some(default), quoted(default.word()), Box::new(read)) }
}

/// A choice, or a word that means none of them.
pub(crate) fn choice_or<T: Choice>(none: &'static str) -> Spec<Option<T>> {
    let inner = choice(T::ALL[0].0);
    let choices = inner.choices.clone();
    let kind = format!("\"{none}\", {}", inner.kind);
    let expected = format!("one of {kind}");
    let read = move |node: &Node| match &node.value {
        Value::Text(text) if text == none => Ok(None),
        _ => (inner.read)(node).map(Some).map_err(|fault| Fault { remedy: format!("Expected {expected}."), ..fault }),
    };
    Spec { choices, ..Spec::new(kind, Some(None), format!("\"{none}\""), Box::new(read)) }
}

/// Text. A `--set` value that happens to look like a number or a truth value is taken as written.
pub(crate) fn text() -> Spec<String> {
    let read = |node: &Node| match &node.value {
        Value::Text(text) if text.contains('\0') => Err(Fault::new("found a NUL character", "Remove it.")),
        Value::Text(text) => Ok(text.clone()),
        Value::Bool(_) | Value::Int(_) | Value::Float(_) | Value::Date(_) => match &node.place {
            crate::tree::Place::Set(argument) => Ok(argument.split_once('=').map_or("", |(_, v)| v).trim().to_string()),
            crate::tree::Place::Line(_) => refuse(node, "text in quotes"),
        },
        _ => refuse(node, "text in quotes"),
    };
    Spec::new("text", None, "must be given", Box::new(read))
}

/// Text that is not empty.
pub(crate) fn name() -> Spec<String> {
    let inner = text();
    let read =
        move |node: &Node| (inner.read)(node).and_then(|s| if s.is_empty() { refuse(node, "text that is not empty") } else { Ok(s) });
    Spec::new("text", None, "must be given", Box::new(read))
}

/// Text through `convert`, which returns what was expected when it does not understand it.
pub(crate) fn parsed<T: 'static>(kind: &str, default: T, default_text: &str, convert: fn(&str) -> Result<T, String>) -> Spec<T> {
    let inner = text();
    let read = move |node: &Node| {
        let text = (inner.read)(node)?;
        convert(&text).map_err(|expected| Fault::new(node.value.describe(), format!("Expected {expected}.")))
    };
    Spec::new(kind, Some(default), default_text, Box::new(read))
}

/// A path; the empty one stands for an automatic choice and cannot be written.
pub(crate) fn path() -> Spec<PathBuf> {
    let inner = name();
    Spec::new("path", Some(PathBuf::new()), "", Box::new(move |node| (inner.read)(node).map(PathBuf::from)))
}

/// Any value through `read`, for types of a single key.
pub(crate) fn special<T: 'static>(
    kind: &str,
    default: Option<T>,
    default_text: &str,
    read: impl Fn(&Node) -> Result<T, Fault> + 'static,
) -> Spec<T> {
    Spec::new(kind, default, default_text, Box::new(read))
}

/// A refusal for readers of [`special`] keys.
pub(crate) fn fault<T>(node: &Node, expected: &str) -> Result<T, Fault> {
    refuse(node, expected)
}
