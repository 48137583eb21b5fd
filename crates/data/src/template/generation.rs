//! `{% generation %}` and `{% endgeneration %}`, which the engine does not know.
//!
//! Each tag becomes two block tags around an expression, so that the white-space control of the original (`-`, `+`,
//! `trim_blocks`, `lstrip_blocks`) acts on exactly the same neighbours: `{%- generation -%}` is rewritten to
//! `{%- if true %}{{ MARK }}{% if true -%}`, on the same line.

use super::Rendered;

/// Variable that renders as the mark of a block's beginning.
pub const START: &str = "_temper_generation_start";
/// Variable that renders as the mark of a block's end.
pub const END: &str = "_temper_generation_end";

/// Rewrites the tags. Returns the new source and whether there were any, or the line and text of an error.
pub fn rewrite(source: &str) -> Result<(String, bool), (usize, String)> {
    if !source.contains("generation") {
        return Ok((source.to_string(), false));
    }
    let mut out = String::with_capacity(source.len() + 256);
    let (mut rest, mut open, mut found) = (source, 0_usize, false);
    while let Some(at) = rest.find("{%").into_iter().chain(rest.find("{{")).chain(rest.find("{#")).min() {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let length = construct_length(tag);
        let (tag, after) = tag.split_at(length);
        let line = || source[..source.len() - rest.len() + at].matches('\n').count() + 1;
        match generation_tag(tag) {
            Some((left, true, right)) => {
                open += 1;
                found = true;
                out.push_str(&format!("{{%{left} if true %}}{{{{ {START} }}}}{{% if true {right}%}}"));
            }
            Some((left, false, right)) => {
                open = open.checked_sub(1).ok_or_else(|| (line(), "endgeneration without generation".to_string()))?;
                out.push_str(&format!("{{%{left} endif %}}{{{{ {END} }}}}{{% endif {right}%}}"));
            }
            None => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    match open {
        0 => Ok((out, found)),
        _ => Err((source.lines().count(), "generation block without endgeneration".to_string())),
    }
}

/// Bytes of the comment, expression or statement that `tag` begins with; a raw block is one construct.
fn construct_length(tag: &str) -> usize {
    let close = match tag.as_bytes().get(1) {
        Some(b'#') => return tag.find("#}").map_or(tag.len(), |i| i + 2),
        Some(b'%') => "%}",
        _ => "}}",
    };
    let mut quote = None;
    let mut escaped = false;
    let mut length = tag.len();
    for (i, c) in tag.char_indices().skip(2) {
        match quote {
            Some(q) => {
                if !escaped && c == q {
                    quote = None;
                }
                escaped = c == '\\' && !escaped;
            }
            None if c == '\'' || c == '"' => quote = Some(c),
            None if tag[i..].starts_with(close) => {
                length = i + 2;
                break;
            }
            None => {}
        }
    }
    if tag_word(&tag[..length]) == Some("raw") {
        let mut from = length;
        while let Some(at) = tag[from..].find("{%") {
            let end = tag[from + at..].find("%}").map_or(tag.len(), |e| from + at + e + 2);
            if tag_word(&tag[from + at..end]) == Some("endraw") {
                return end;
            }
            from = end;
        }
    }
    length
}

/// The only word of a statement tag.
fn tag_word(tag: &str) -> Option<&str> {
    let inner = tag.strip_prefix("{%")?.strip_suffix("%}")?;
    Some(inner.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim())
}

/// Left control, whether it opens, and right control of a generation tag.
fn generation_tag(tag: &str) -> Option<(&str, bool, &str)> {
    let opens = match tag_word(tag)? {
        "generation" => true,
        "endgeneration" => false,
        _ => return None,
    };
    let inner = tag.strip_prefix("{%")?.strip_suffix("%}")?;
    let left = if inner.starts_with(['-', '+']) { &inner[..1] } else { "" };
    let right = if inner.ends_with(['-', '+']) { &inner[inner.len() - 1..] } else { "" };
    Some((left, opens, right))
}

/// Takes the marks out of the text; `None` when they do not alternate.
pub fn strip(text: &str, start: char, end: char) -> Option<Rendered> {
    let mut out = Rendered { text: String::with_capacity(text.len()), generation: Vec::new() };
    let mut open = None;
    let mut rest = text;
    while let Some(at) = rest.find([start, end]) {
        out.text.push_str(&rest[..at]);
        let mark = rest[at..].chars().next()?;
        rest = &rest[at + mark.len_utf8()..];
        match (open, mark == start) {
            (None, true) => open = Some(out.text.len()),
            (Some(from), false) => {
                out.generation.push(from..out.text.len());
                open = None;
            }
            _ => return None,
        }
    }
    out.text.push_str(rest);
    open.is_none().then_some(out)
}
