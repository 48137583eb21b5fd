//! The configuration of a benchmark: defaults with `--set` arguments laid over them, no files.

use crate::check;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::resolve::Resolved;
use crate::section::Reader;
use crate::tree::{Place, Tree, Value};
use std::path::{Path, PathBuf};

/// Stands for the keys that a configuration must have and a benchmark does not use.
const PLACEHOLDERS: &str = "[model]\npath = \"benchmark\"\n[data]\ntrain = [\"synthetic\"]\n";

/// Keys that change what a benchmark measures; those of `precision` and `memory` all do.
const MEANINGFUL: [&str; 14] = [
    "data.seq_len",
    "train.global_batch",
    "train.micro_batch",
    "train.seed",
    "train.deterministic",
    "train.loss_reduction",
    "train.aux_loss",
    "train.aux_loss_coef",
    "train.z_loss_coef",
    "optim.lr",
    "optim.betas",
    "optim.eps",
    "optim.weight_decay",
    "optim.clip",
];

impl Config {
    /// A configuration from `--set` arguments alone. Model and data are placeholders.
    ///
    /// # Errors
    /// As [`Config::load`]; also for keys that mean nothing where there are neither files nor a schedule.
    pub fn for_benchmark(sets: &[String]) -> Result<Resolved> {
        let mut tree = Tree::parse(PLACEHOLDERS, Path::new("benchmark"))?;
        for argument in sets {
            tree.set(argument)?;
        }
        let reader = Reader { tree: &tree };
        let keys = Config::keys();
        reader.refuse_unknown(&keys)?;
        refuse_idle(&tree)?;
        let config = Config::read(&reader)?;
        let notices = check::check(&config, &reader)?;
        Ok(Resolved { config, reasons: Vec::new(), notices, absent: Vec::new(), origin: PathBuf::from("benchmark") })
    }
}

fn refuse_idle(tree: &Tree) -> Result<()> {
    for (section, node) in &tree.root {
        let Value::Table(table) = &node.value else { continue };
        for (name, node) in table {
            let key = format!("{section}.{name}");
            let meant = section == "precision" || section == "memory" || MEANINGFUL.contains(&key.as_str());
            if matches!(node.place, Place::Set(_)) && !meant {
                let remedy = format!("Remove it; it takes precision.*, memory.*, {}.", MEANINGFUL.join(", "));
                return Err(Error::Key { origin: tree.origin(&node.place), key, found: "means nothing in a benchmark".into(), remedy });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choices::{FloatType, Recompute};

    #[test]
    fn sets_lie_over_the_defaults() {
        let sets = ["memory.recompute=full", "precision.grads=bfloat16", "data.seq_len=4096", "train.aux_loss=hf"].map(String::from);
        let config = Config::for_benchmark(&sets).unwrap().config;
        assert_eq!((config.memory.recompute, config.precision.grads), (Recompute::Full, FloatType::Bfloat16));
        assert_eq!((config.data.seq_len, config.optim.clip), (4096, 1.0));
    }

    #[test]
    fn what_means_nothing_is_refused() {
        for (set, said) in [
            ("train.steps=4", "means nothing"),
            ("model.path=x", "means nothing"),
            ("log.every=2", "means nothing"),
            ("memory.recmpute=full", "memory.recompute"),
            ("data.seq_len=1", "data.seq_len"),
        ] {
            let error = Config::for_benchmark(&[set.to_string()]).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}
