//! `docs/CONFIG.md`, generated from the declarations of the sections.

use crate::config::Config;
use crate::section::Key;
use std::fmt::Write;

/// The reference of the configuration file, as Markdown.
pub fn reference() -> String {
    let mut page = String::from(HEAD);
    for (section, about, keys) in Config::sections() {
        // Writing to a String cannot fail.
        let _ = write!(page, "\n## `[{section}]`\n{about}\n\n| key | type | default | meaning |\n|---|---|---|---|\n");
        for key in keys {
            let _ = writeln!(page, "| `{}` | {} | {} | {} |", key.name, cell(&key.kind), cell(&default(&key)), cell(&meaning(&key)));
        }
    }
    page
}

const HEAD: &str = "\
# The configuration file

A TOML file, given to `temper sft CONFIG.toml`. Required are `model.path` and `data.train`; everything else has a default.

- Paths are relative to the folder of the configuration file; `~/` is the home folder.
- `--set section.key=value` changes one value: the value is TOML, or plain text when it is not TOML.
- An unknown key or section is an error that names the nearest known one.
- Every value of a run, with the reason for those that the file does not give, is in `config.resolved.json` of its folder.

This page is generated from the declarations in `crates/config/src/config.rs`
(`TEMPER_WRITE_DOCS=1 cargo test -p temper-config reference` rewrites it).
";

/// A default in code style, unless it is in words.
fn default(key: &Key) -> String {
    let words = key.default.contains('`') || key.default.contains(' ') && !key.default.starts_with('[');
    if words { key.default.clone() } else { format!("`{}`", key.default) }
}

fn meaning(key: &Key) -> String {
    let choices: Vec<String> = key.choices.iter().map(|(word, meaning)| format!("`{word}`: {}", meaning.trim())).collect();
    [vec![key.meaning.clone()], choices].concat().join("<br>")
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}
