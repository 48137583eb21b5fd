//! Architectures by a short name, where only the shape matters (benchmarks): the keys of their published `config.json`.

use crate::arch::Arch;
use crate::error::Result;
use serde_json::{Map, Value};
use std::path::Path;

/// `config.json` by name.
const SHAPES: &str = include_str!("shapes.json");

impl Arch {
    /// The architecture of a built-in name like `qwen3-8b`; none when the name is not known.
    ///
    /// # Errors
    /// As [`Arch::from_json`].
    pub fn named(name: &str) -> Option<Result<Arch>> {
        Some(Arch::from_json(&Arch::shape(name)?, Path::new(name)))
    }

    /// The `config.json` of a built-in name; none when the name is not known.
    pub fn shape(name: &str) -> Option<String> {
        shapes().remove(name).map(|shape| shape.to_string())
    }

    /// The names that [`Arch::named`] knows.
    pub fn names() -> Vec<String> {
        shapes().into_iter().map(|(name, _)| name).collect()
    }
}

fn shapes() -> Map<String, Value> {
    serde_json::from_str(SHAPES).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_is_read_without_a_remark() {
        let names = Arch::names();
        assert!(names.len() >= 10, "{names:?}");
        for name in names {
            let arch = Arch::named(&name).unwrap().unwrap();
            assert!(arch.notices.is_empty(), "{name}: {:?}", arch.notices);
        }
        assert!(Arch::named("qwen3-9b").is_none());
    }

    /// Against the published files, where they are at hand.
    #[test]
    fn shapes_are_those_of_the_published_files() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/facts/configs");
        for (name, file) in [
            ("qwen3-0.6b", "Qwen3-0.6B.config.json"),
            ("qwen3-1.7b", "Qwen3-1.7B.config.json"),
            ("qwen3-8b", "Qwen3-8B.config.json"),
            ("qwen3-30b-a3b", "Qwen3-30B-A3B.config.json"),
            ("qwen3-235b-a22b", "Qwen3-235B-A22B.config.json"),
        ] {
            let path = folder.join(file);
            let Ok(text) = std::fs::read_to_string(&path) else {
                println!("SKIPPED: {} is not there", path.display());
                continue;
            };
            let published = Arch::from_json(&text, &path).unwrap();
            let ours = Arch::named(name).unwrap().unwrap();
            let identity = Arch {
                bos: published.bos,
                eos: published.eos.clone(),
                dtype: published.dtype.clone(),
                notices: published.notices.clone(),
                ..ours
            };
            assert_eq!(identity, published, "{name}");
        }
    }
}
