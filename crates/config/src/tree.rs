//! A configuration file as a tree of values that know where they were written.

use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::path::Path;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

pub(crate) type Table = BTreeMap<String, Node>;

/// A value with the place it comes from.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub value: Value,
    pub place: Place,
}

/// Where a value was written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Place {
    /// This line of the file.
    Line(usize),
    /// This argument of `--set`.
    Set(String),
}

#[derive(Clone, Debug)]
pub(crate) enum Value {
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(String),
    /// A date or time: no key takes one.
    Date(String),
    List(Vec<Node>),
    Table(Table),
}

impl Value {
    /// The value in words, for errors.
    pub fn describe(&self) -> String {
        match self {
            Value::Bool(b) => format!("found {b}"),
            Value::Int(i) => format!("found the integer {i}"),
            Value::Float(f) => format!("found the number {f:?}"),
            Value::Text(s) => format!("found \"{}\"", shorten(s)),
            Value::Date(s) => format!("found the date {s}"),
            Value::List(items) => format!("found a list of {}", items.len()),
            Value::Table(_) => "found a table".to_string(),
        }
    }
}

fn shorten(text: &str) -> String {
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_string(),
    }
}

/// A configuration: the file with the `--set` arguments laid over it.
#[derive(Debug)]
pub(crate) struct Tree {
    /// What errors call the file.
    pub file: String,
    pub root: Table,
}

impl Tree {
    /// Parses TOML text; `file` is what errors call it.
    pub fn parse(text: &str, file: &Path) -> Result<Self> {
        let file = file.display().to_string();
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let lines = Lines::new(text);
        let parsed = DeTable::parse(text).map_err(|e| lines.syntax(&file, e.span(), e.message()))?;
        let mut root = table(parsed.get_ref(), &|offset| Place::Line(lines.of(offset)))
            .map_err(|(offset, message)| lines.syntax(&file, Some(offset..offset), &message))?;
        write_out_auto(&mut root);
        Ok(Self { file, root })
    }

    /// Lays one `--set key=value` over the tree.
    pub fn set(&mut self, argument: &str) -> Result<()> {
        let place = Place::Set(argument.to_string());
        let origin = self.origin(&place);
        let Some((key, text)) = argument.split_once('=') else {
            return Err(Error::Syntax { origin, message: "expected key=value, e.g. --set optim.lr=1e-5".to_string() });
        };
        let parts: Vec<&str> = key.split('.').map(str::trim).collect();
        let Some((last, parents)) = parts.split_last().filter(|_| parts.iter().all(|p| !p.is_empty())) else {
            return Err(Error::Syntax { origin, message: format!("\"{key}\" is not a dotted key like optim.lr") });
        };
        let value = parse_argument(text.trim(), &place).map_err(|message| Error::Syntax { origin: origin.clone(), message })?;
        let mut table = &mut self.root;
        for (depth, part) in parents.iter().enumerate() {
            let empty = || Node { value: Value::Table(Table::new()), place: place.clone() };
            let node = table.entry(part.to_string()).or_insert_with(empty);
            let found = node.value.describe();
            table = match &mut node.value {
                Value::Table(inner) => inner,
                _ => {
                    let key = parts[..=depth].join(".");
                    return Err(Error::Key { origin, key, found, remedy: "Only a table has keys below it.".to_string() });
                }
            };
        }
        if key == "parallel"
            && is_auto(&value)
            && let Some(Value::Table(axes)) = table.get_mut("parallel").map(|node| &mut node.value)
        {
            // Axes that are given, here or in the file, stay: the rest is chosen.
            axes.insert("auto".to_string(), Node { value: Value::Bool(true), place });
            return Ok(());
        }
        table.insert(last.to_string(), Node { value, place });
        write_out_auto(&mut self.root);
        Ok(())
    }

    /// The node under `section.key`.
    pub fn get(&self, section: &str, key: &str) -> Option<&Node> {
        match self.root.get(section).map(|node| &node.value) {
            Some(Value::Table(table)) => table.get(key),
            _ => None,
        }
    }

    /// Takes `section.key` out of the tree.
    pub fn remove(&mut self, section: &str, key: &str) {
        if let Some(Value::Table(table)) = self.root.get_mut(section).map(|node| &mut node.value) {
            table.remove(key);
        }
    }

    /// A place as errors write it: `run.toml:12` or `--set optim.lr=1`.
    pub fn origin(&self, place: &Place) -> String {
        match place {
            Place::Line(line) => format!("{}:{line}", self.file),
            Place::Set(argument) => format!("--set {}", shorten(argument)),
        }
    }
}

fn is_auto(value: &Value) -> bool {
    matches!(value, Value::Text(text) if text == "auto")
}

/// `parallel = "auto"` is short for a section with `auto = true`.
fn write_out_auto(root: &mut Table) {
    let Some(node) = root.get_mut("parallel") else { return };
    if is_auto(&node.value) {
        let auto = Node { value: Value::Bool(true), place: node.place.clone() };
        node.value = Value::Table(Table::from([("auto".to_string(), auto)]));
    }
}

/// A `--set` value: TOML, or the bare text when it is not TOML. An opened quote, list or table must be closed.
fn parse_argument(text: &str, place: &Place) -> std::result::Result<Value, String> {
    let line = format!("value = {text}");
    let error = match DeTable::parse(&line) {
        Ok(parsed) => {
            let mut parsed = table(parsed.get_ref(), &|_| place.clone()).map_err(|(_, message)| message)?;
            // A line break in the argument may have smuggled in a second key: that is text.
            match parsed.remove("value") {
                Some(node) if parsed.is_empty() => return Ok(node.value),
                _ => return Ok(Value::Text(text.to_string())),
            }
        }
        Err(e) => e,
    };
    if text.starts_with(['"', '\'', '[', '{']) {
        return Err(format!("the value is not TOML: {}", error.message()));
    }
    Ok(Value::Text(text.to_string()))
}

/// A fault at a byte offset of the text.
type Fault = (usize, String);

fn table(table: &DeTable, place: &dyn Fn(usize) -> Place) -> std::result::Result<Table, Fault> {
    let entry = |(key, value): (&Spanned<_>, &Spanned<DeValue>)| {
        let key: &Spanned<std::borrow::Cow<str>> = key;
        let node = Node { place: place(key.span().start), ..node(value, place)? };
        Ok((key.get_ref().to_string(), node))
    };
    table.iter().map(entry).collect()
}

fn node(value: &Spanned<DeValue>, place: &dyn Fn(usize) -> Place) -> std::result::Result<Node, Fault> {
    let at = value.span().start;
    let out_of_range = |text: &str| (at, format!("the number {} is out of range", shorten(text)));
    let converted = match value.get_ref() {
        DeValue::Boolean(b) => Value::Bool(*b),
        DeValue::Integer(i) => Value::Int(i128::from_str_radix(i.as_str(), i.radix()).map_err(|_| out_of_range(i.as_str()))?),
        DeValue::Float(f) => Value::Float(f.as_str().parse().map_err(|_| out_of_range(f.as_str()))?),
        DeValue::String(s) => Value::Text(s.to_string()),
        DeValue::Datetime(d) => Value::Date(d.to_string()),
        DeValue::Array(items) => Value::List(items.iter().map(|item| node(item, place)).collect::<std::result::Result<_, _>>()?),
        DeValue::Table(inner) => Value::Table(table(inner, place)?),
    };
    Ok(Node { value: converted, place: place(at) })
}

/// Line numbers of byte offsets.
struct Lines {
    starts: Vec<usize>,
}

impl Lines {
    fn new(text: &str) -> Self {
        Self { starts: std::iter::once(0).chain(text.match_indices('\n').map(|(i, _)| i + 1)).collect() }
    }

    fn of(&self, offset: usize) -> usize {
        self.starts.partition_point(|start| *start <= offset)
    }

    fn syntax(&self, file: &str, span: Option<std::ops::Range<usize>>, message: &str) -> Error {
        let origin = match span {
            Some(span) => format!("{file}:{}", self.of(span.start)),
            None => file.to_string(),
        };
        Error::Syntax { origin, message: message.to_string() }
    }
}
