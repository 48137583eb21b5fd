//! The role-play builder: scored benchmark dialogues to chat training data.
//!
//! `tables` reads seeds, evaluations and dialogues of each language, `select` joins and filters them, `dialogue` and
//! `card` shape one conversation, `split` orders and divides the result, `output` writes it, `report` counts what every
//! rule did.

mod card;
mod dialogue;
mod output;
mod report;
mod select;
mod split;
mod tables;

use std::path::Path;

use serde::Serialize;

pub use self::report::{Removed, RoleplayReport, TableReport, Tidied};
use self::select::Select;
pub use self::tables::Language;
use crate::Error;

/// What to keep and how to divide it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RoleplayOptions {
    /// Least overall score (0 to 100): 0.5 Worlds + 0.25 Stories + 0.25 Preferences.
    pub min_overall: f64,
    /// Least `basics_score`.
    pub min_basics: f64,
    /// Least `logic_score`.
    pub min_logic: f64,
    /// Only dialogues of these models; empty means all.
    pub include_models: Vec<String>,
    /// No dialogues of these models.
    pub exclude_models: Vec<String>,
    /// At most this many dialogues of one seed, the best overall first.
    pub max_per_seed: Option<usize>,
    /// At most this many user and assistant turns of one dialogue, from its beginning.
    pub max_turns: Option<usize>,
    /// Share of the dialogues set aside for validation, whole characters at a time.
    pub validation: f64,
    /// Seed of the shuffle and of the choice of validation characters.
    pub seed: u64,
}

impl Default for RoleplayOptions {
    fn default() -> Self {
        Self {
            min_overall: 80.0,
            min_basics: 85.0,
            min_logic: 60.0,
            include_models: Vec::new(),
            exclude_models: Vec::new(),
            max_per_seed: None,
            max_turns: None,
            validation: 0.02,
            seed: 0,
        }
    }
}

impl RoleplayOptions {
    fn check(&self) -> Result<(), Error> {
        let wrong = |option, found: String, remedy: &str| Err(Error::Option { option, found, remedy: remedy.to_owned() });
        for (option, value) in [("min_overall", self.min_overall), ("min_basics", self.min_basics), ("min_logic", self.min_logic)] {
            if !(0.0..=100.0).contains(&value) {
                return wrong(option, value.to_string(), "scores lie in 0 to 100");
            }
        }
        if !(0.0..1.0).contains(&self.validation) {
            return wrong("validation", self.validation.to_string(), "give a share from 0 to below 1");
        }
        if self.max_per_seed == Some(0) {
            return wrong("max_per_seed", "0".to_owned(), "give at least 1, or leave it out for no limit");
        }
        if let Some(turns @ 0..=1) = self.max_turns {
            return wrong("max_turns", turns.to_string(), "give at least 2 (one question, one answer), or leave it out");
        }
        Ok(())
    }
}

/// Builds training data from a folder laid out like MiniMax's role-play-bench:
/// `data/{zh,en}/{seeds,dialogues,evaluations}` as `.parquet` or `.jsonl` (also `.jsonl.gz`, `.jsonl.zst`).
///
/// Writes `out` (JSON lines of `messages`, `id` and `overall`) and, for the validation part, `out` with `.val.jsonl`
/// for `.jsonl`. Each file is replaced whole or not at all. The same input and options give the same bytes.
///
/// # Errors
/// Options out of range, no table found, a table that cannot be read or has no usable row, nothing left to write, and
/// the system's refusals. Unusable rows are no errors: they are counted and named in the report.
pub fn build_roleplay(input: &Path, out: &Path, options: &RoleplayOptions) -> Result<RoleplayReport, Error> {
    options.check()?;
    let paths = output::Paths::of(out)?;
    let folders = Language::folders(input)?;
    let mut report = RoleplayReport::default();
    let mut samples = Vec::new();
    for (language, folder) in folders {
        let select = Select::new(
            language,
            options,
            tables::seeds(language, &folder, &mut report)?,
            tables::evaluations(language, &folder, &mut report)?,
        );
        samples.extend(select.run(&folder, &mut report)?);
    }
    report.check_models(options);
    let split = split::split(samples, options);
    if split.train.is_empty() {
        let remedy = "lower the thresholds or widen the filters";
        return Err(Error::file(input, format!("no dialogue is left of {}: {}", report.dialogues, report.removed), remedy));
    }
    report.count(&split);
    output::write(&paths, &split, &mut report)?;
    Ok(report)
}
