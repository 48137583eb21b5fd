//! [`section!`]: one declaration of a section gives its struct, its parser and its part of the reference.

use crate::error::{Error, Result};
use crate::spec::Spec;
use crate::suggest;
use crate::tree::{Node, Place, Tree, Value};
use serde::Serialize;

/// A key of the configuration file as the reference shows it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Key {
    /// Section, e.g. `optim`.
    pub section: &'static str,
    /// Name in the section, e.g. `lr`.
    pub name: &'static str,
    /// Type and range in words.
    pub kind: String,
    /// Default as TOML, or in words.
    pub default: String,
    /// What it does.
    pub meaning: String,
    /// The words it accepts with their meanings, where it is a choice.
    pub choices: Vec<(&'static str, &'static str)>,
}

impl Key {
    pub(crate) fn new<T>(section: &'static str, name: &'static str, doc: &[&str], spec: &Spec<T>) -> Self {
        let meaning = doc.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ");
        let (kind, default) = (spec.kind.clone(), spec.default_text.clone());
        Self { section, name, kind, default, meaning, choices: spec.choices.clone() }
    }

    /// The dotted key, e.g. `optim.lr`.
    pub fn path(&self) -> String {
        format!("{}.{}", self.section, self.name)
    }
}

/// A section of the configuration file; implemented by [`section!`].
pub(crate) trait Section: Sized {
    const NAME: &'static str;
    const ABOUT: &'static [&'static str];
    fn keys() -> Vec<Key>;
    fn read(reader: &Reader) -> Result<Self>;
}

/// Declares a section: `/// doc`, `"name" Type { /// meaning  key: Type = spec; ... }`.
macro_rules! section {
    ($(#[doc = $about:literal])+ $section:literal $type:ident {
        $($(#[doc = $meaning:literal])+ $key:ident: $value:ty = $spec:expr;)+
    }) => {
        $(#[doc = $about])+
        #[derive(Clone, Debug, PartialEq, Serialize)]
        pub struct $type { $($(#[doc = $meaning])+ pub $key: $value,)+ }

        impl Section for $type {
            const NAME: &'static str = $section;
            const ABOUT: &'static [&'static str] = &[$($about),+];

            fn keys() -> Vec<Key> {
                vec![$(Key::new($section, stringify!($key), &[$($meaning),+], &$spec)),+]
            }

            fn read(reader: &Reader) -> Result<Self> {
                Ok(Self { $($key: reader.key($section, stringify!($key), $spec)?,)+ })
            }
        }
    };
}
pub(crate) use section;

/// Reads keys from a tree.
pub(crate) struct Reader<'a> {
    pub tree: &'a Tree,
}

impl Reader<'_> {
    /// The value of a key, or its default.
    pub fn key<T>(&self, section: &str, name: &str, spec: Spec<T>) -> Result<T> {
        let key = format!("{section}.{name}");
        match (self.tree.get(section, name), spec.default) {
            (Some(node), _) => (spec.read)(node).map_err(|fault| {
                let origin = self.tree.origin(&node.place);
                Error::Key { origin, key: format!("{key}{}", fault.within), found: fault.found, remedy: fault.remedy }
            }),
            (None, Some(default)) => Ok(default),
            (None, None) => Err(Error::Key {
                origin: self.tree.file.clone(),
                key,
                found: "missing".to_string(),
                remedy: format!("Add `{name} = ...` ({}) under [{section}].", spec.kind),
            }),
        }
    }

    /// Whether the file or the command line gives the key.
    pub fn given(&self, section: &str, name: &str) -> bool {
        self.tree.get(section, name).is_some()
    }

    /// An error about a value that is well-formed but cannot be used.
    pub fn error(&self, section: &str, name: &str, found: impl Into<String>, remedy: impl Into<String>) -> Error {
        let origin = match self.tree.get(section, name) {
            Some(node) => self.tree.origin(&node.place),
            None => self.tree.file.clone(),
        };
        Error::Key { origin, key: format!("{section}.{name}"), found: found.into(), remedy: remedy.into() }
    }

    /// Refuses keys and sections that no one reads, with the nearest known one.
    pub fn refuse_unknown(&self, keys: &[Key]) -> Result<()> {
        for (section, node) in &self.tree.root {
            let known = keys.iter().any(|key| key.section == section);
            match &node.value {
                Value::Table(table) if known => {
                    let unknown = table.iter().find(|(name, _)| !keys.iter().any(|key| key.section == section && key.name == *name));
                    if let Some((name, node)) = unknown {
                        return Err(self.unknown(&format!("{section}.{name}"), &node.place, suggest::key(section, name, keys)));
                    }
                }
                _ if known => return Err(self.not_a_table(section, node)),
                _ if section == "rl" => {
                    return Err(self.unknown("rl", &node.place, "Reinforcement learning is not supported yet: remove [rl].".to_string()));
                }
                _ => return Err(self.unknown(section, &node.place, suggest::section(section, &node.value, keys))),
            }
        }
        Ok(())
    }

    fn unknown(&self, key: &str, place: &Place, remedy: String) -> Error {
        Error::Key { origin: self.tree.origin(place), key: key.to_string(), found: "unknown".to_string(), remedy }
    }

    fn not_a_table(&self, section: &str, node: &Node) -> Error {
        let or = if section == "parallel" { ", or parallel = \"auto\"" } else { "" };
        Error::Key {
            origin: self.tree.origin(&node.place),
            key: section.to_string(),
            found: node.value.describe(),
            remedy: format!("It is a section: write [{section}] with its keys below{or}."),
        }
    }
}
