//! Readers for keys whose values are neither a plain number nor a word.

use crate::choices::RecomputePart;
use crate::config::{Source, Span, Template};
use crate::spec::{Bounds, Fault, Spec, choice, fault, float, name, parsed, special, text};
use crate::tree::{Node, Value};
use std::path::PathBuf;

/// Built-in chat templates.
const TEMPLATES: [&str; 4] = ["chatml", "qwen3", "alpaca", "llama3"];

/// `model.revision`
pub(crate) fn revision() -> Spec<String> {
    let convert = |s: &str| if s.is_empty() { Err("a branch, tag or commit".to_string()) } else { Ok(s.to_string()) };
    parsed("text", "main".to_string(), "\"main\"", convert)
}

/// `data.template`
pub(crate) fn template() -> Spec<Template> {
    let convert = |s: &str| match s {
        "model" => Ok(Template::Model),
        _ if TEMPLATES.contains(&s) => Ok(Template::Named(s.to_string())),
        _ if [".jinja", ".jinja2", ".j2"].iter().any(|end| s.ends_with(end)) => Ok(Template::File(PathBuf::from(s))),
        _ => Err(format!("\"model\", one of {}, or a path that ends in .jinja", TEMPLATES.join(", "))),
    };
    parsed("\"model\", \"chatml\", \"qwen3\", \"alpaca\", \"llama3\", or a `.jinja` path", Template::Model, "\"model\"", convert)
}

/// `data.train` and `data.eval`
pub(crate) fn sources(required: bool) -> Spec<Vec<Source>> {
    let (default, default_text) = if required { (None, "must be given") } else { (Some(Vec::new()), "[]") };
    let read = move |node: &Node| match &node.value {
        Value::List(items) if items.is_empty() && required => fault(node, "at least one file"),
        Value::List(items) => items
            .iter()
            .enumerate()
            .map(|(i, item)| source(item).map_err(|f| Fault { within: format!("[{i}]{}", f.within), ..f }))
            .collect(),
        // One file needs no list.
        _ => source(node).map(|source| vec![source]),
    };
    special("list of paths or of `{ path, weight }`", default, default_text, read)
}

fn source(node: &Node) -> Result<Source, Fault> {
    let Value::Table(table) = &node.value else {
        return match node.value {
            Value::Text(_) => Ok(Source { path: PathBuf::from((name().read)(node)?), weight: 1.0 }),
            _ => fault(node, "a path, or { path = \"...\", weight = 1.0 }"),
        };
    };
    let within = |name: &str, fault: Fault| Fault { within: format!(".{name}{}", fault.within), ..fault };
    if let Some(other) = table.keys().find(|key| !["path", "weight"].contains(&key.as_str())) {
        return Err(within(other, Fault::new("unknown", "A data file has path and weight.")));
    }
    let Some(path) = table.get("path") else {
        return Err(within("path", Fault::new("missing", "Give the file: { path = \"...\", weight = 1.0 }.")));
    };
    let path = (name().read)(path).map_err(|f| within("path", f))?;
    let weight = match table.get("weight") {
        Some(weight) => (float(1.0, Bounds::above(0.0, 1e6)).read)(weight).map_err(|f| within("weight", f))?,
        None => 1.0,
    };
    Ok(Source { path: PathBuf::from(path), weight })
}

/// `data.template_args`
pub(crate) fn template_args() -> Spec<serde_json::Map<String, serde_json::Value>> {
    let read = |node: &Node| match json(node)? {
        serde_json::Value::Object(map) => Ok(map),
        _ => fault(node, "a table, e.g. { enable_thinking = false }"),
    };
    special("table", Some(serde_json::Map::new()), "{}", read)
}

fn json(node: &Node) -> Result<serde_json::Value, Fault> {
    let refused = || fault(node, "a value that JSON has (no dates, no NaN or infinity, integers of 64 bits)");
    Ok(match &node.value {
        Value::Bool(b) => (*b).into(),
        Value::Int(i) => match (i64::try_from(*i), u64::try_from(*i)) {
            (Ok(i), _) => i.into(),
            (_, Ok(u)) => u.into(),
            _ => return refused(),
        },
        Value::Float(f) => match serde_json::Number::from_f64(*f) {
            Some(number) => number.into(),
            None => return refused(),
        },
        Value::Text(s) => s.clone().into(),
        Value::Date(_) => return refused(),
        Value::List(items) => items.iter().map(json).collect::<Result<Vec<_>, _>>()?.into(),
        Value::Table(table) => {
            let entries = table.iter().map(|(key, node)| Ok((key.clone(), json(node)?)));
            serde_json::Value::Object(entries.collect::<Result<_, Fault>>()?)
        }
    })
}

/// `data.cache_dir`; the automatic default is filled in later.
pub(crate) fn cache_dir() -> Spec<Option<PathBuf>> {
    let read = |node: &Node| (text().read)(node).map(|s| if s.is_empty() { None } else { Some(PathBuf::from(s)) });
    special("path", Some(None), "`$XDG_CACHE_HOME/temper` or `~/.cache/temper`", read)
}

/// `optim.warmup` and `optim.decay`
pub(crate) fn span(default: Span) -> Spec<Span> {
    let default_text = match default {
        Span::Steps(n) => n.to_string(),
        Span::Fraction(f) => format!("{f:?}"),
    };
    let read = |node: &Node| match node.value {
        Value::Int(i) if (0..=1_000_000_000).contains(&i) => Ok(Span::Steps(i as usize)),
        Value::Float(f) if (0.0..1.0).contains(&f) => Ok(Span::Fraction(f)),
        _ => fault(node, "steps (an integer from 0), or a share of all steps (a fraction from 0.0, below 1)"),
    };
    special("integer (steps), or number from 0.0 below 1 (share)", Some(default), &default_text, read)
}

/// `optim.betas`
pub(crate) fn betas() -> Spec<[f64; 2]> {
    let read = |node: &Node| {
        let one = |node: &Node| (float(0.0, Bounds::below(0.0, 1.0)).read)(node);
        match &node.value {
            Value::List(items) => match items.as_slice() {
                [first, second] => Ok([one(first)?, one(second)?]),
                _ => fault(node, "two numbers, e.g. [0.9, 0.95]"),
            },
            _ => fault(node, "two numbers, e.g. [0.9, 0.95]"),
        }
    };
    special("two numbers from 0 below 1", Some([0.9, 0.95]), "[0.9, 0.95]", read)
}

/// `memory.recompute_parts`
pub(crate) fn recompute_parts() -> Spec<Vec<RecomputePart>> {
    let one = choice(RecomputePart::Norm);
    let (kind, choices) = (format!("list of {}", one.kind), one.choices.clone());
    let read = move |node: &Node| match &node.value {
        Value::List(items) if items.is_empty() => fault(node, "at least one part (or memory.recompute = \"none\")"),
        Value::List(items) => items.iter().map(|item| (one.read)(item)).collect(),
        _ => fault(node, "a list of parts, e.g. [\"norm\", \"act\"]"),
    };
    let default = RecomputePart::USUAL.to_vec();
    Spec { choices, ..special(&kind, Some(default), "[\"norm\", \"act\", \"moe\"]", read) }
}

/// `parallel.split`
pub(crate) fn split() -> Spec<Vec<usize>> {
    let one = |node: &Node| match node.value {
        Value::Int(i) if (1..=1_000_000).contains(&i) => Ok(i as usize),
        _ => fault(node, "a number of layers, at least 1"),
    };
    let read = move |node: &Node| match &node.value {
        Value::List(items) => items.iter().map(one).collect(),
        _ => fault(node, "a list with the layers of each stage, e.g. [47, 47]"),
    };
    special("list of integers", Some(Vec::new()), "[]", read)
}
