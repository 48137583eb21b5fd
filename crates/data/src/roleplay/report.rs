//! What the builder read, removed, tidied and kept.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::RoleplayOptions;
use super::select::Sample;
use super::split::Split;
use super::tables::Language;
use crate::BadRow;

/// Bad rows named in the report; the rest is only counted.
const NAMED_BAD_ROWS: usize = 100;

/// One table read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TableReport {
    /// Its language.
    pub language: Language,
    /// `seeds`, `evaluations` or `dialogues`.
    pub table: &'static str,
    /// The file read.
    pub file: PathBuf,
    /// Rows in it.
    pub rows: u64,
    /// Rows that cannot be used.
    pub bad_rows: u64,
    /// Rows whose key was there before; the first counts.
    pub duplicates: u64,
}

impl TableReport {
    pub(super) fn of(file: &Path) -> Self {
        Self { language: Language::Zh, table: "", file: file.to_path_buf(), rows: 0, bad_rows: 0, duplicates: 0 }
    }
}

/// Dialogues removed, each counted under the first rule that removed it, in this order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Removed {
    /// Seed, model and run were there before.
    pub duplicate: u64,
    /// The seed is not in the table of seeds.
    pub missing_seed: u64,
    /// No evaluation of this seed, model and run.
    pub no_evaluation: u64,
    /// The evaluation lacks one of the six scores.
    pub incomplete_scores: u64,
    /// The model is excluded or not included.
    pub model: u64,
    /// Overall score below the threshold.
    pub overall: u64,
    /// `basics_score` below the threshold.
    pub basics: u64,
    /// `logic_score` below the threshold.
    pub logic: u64,
    /// Unreadable: no key, or a `dialogue` that is not JSON of known turns.
    pub bad_row: u64,
    /// No answered turn is left after tidying.
    pub empty: u64,
    /// Over the cap of its seed.
    pub seed_cap: u64,
}

impl Removed {
    fn rules(&self) -> [(&'static str, u64); 11] {
        [
            ("duplicate", self.duplicate),
            ("seed missing", self.missing_seed),
            ("no evaluation", self.no_evaluation),
            ("score missing", self.incomplete_scores),
            ("model filter", self.model),
            ("overall below threshold", self.overall),
            ("basics below threshold", self.basics),
            ("logic below threshold", self.logic),
            ("unreadable", self.bad_row),
            ("empty after tidying", self.empty),
            ("over the seed's cap", self.seed_cap),
        ]
    }

    /// Sum over the rules.
    pub fn total(&self) -> u64 {
        self.rules().iter().map(|(_, count)| count).sum()
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.duplicate += other.duplicate;
        self.missing_seed += other.missing_seed;
        self.no_evaluation += other.no_evaluation;
        self.incomplete_scores += other.incomplete_scores;
        self.model += other.model;
        self.overall += other.overall;
        self.basics += other.basics;
        self.logic += other.logic;
        self.bad_row += other.bad_row;
        self.empty += other.empty;
        self.seed_cap += other.seed_cap;
    }
}

impl fmt::Display for Removed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counted: Vec<String> =
            self.rules().iter().filter(|(_, count)| *count > 0).map(|(rule, count)| format!("{count} {rule}")).collect();
        f.write_str(&counted.join(", "))
    }
}

/// What was changed inside the dialogues that passed the scores.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tidied {
    /// Empty turns removed.
    pub empty_turns: u64,
    /// Turns merged into the one of the same role before them.
    pub merged_turns: u64,
    /// Leading assistant turns dropped.
    pub leading_assistant: u64,
    /// Trailing user turns dropped.
    pub trailing_user: u64,
    /// Dialogues longer than the turn cap.
    pub cut_dialogues: u64,
    /// Turns cut off by the turn cap.
    pub cut_turns: u64,
}

impl Tidied {
    pub(super) fn add(&mut self, other: &Self) {
        self.empty_turns += other.empty_turns;
        self.merged_turns += other.merged_turns;
        self.leading_assistant += other.leading_assistant;
        self.trailing_user += other.trailing_user;
        self.cut_dialogues += other.cut_dialogues;
        self.cut_turns += other.cut_turns;
    }
}

/// The whole account. `dialogues == removed.total() + train + validation`. Displays as a table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RoleplayReport {
    /// The tables read.
    pub tables: Vec<TableReport>,
    /// Dialogues read.
    pub dialogues: u64,
    /// Evaluations without a dialogue.
    pub unmatched_evaluations: u64,
    /// Dialogues removed, by rule.
    pub removed: Removed,
    /// Changes inside dialogues.
    pub tidied: Tidied,
    /// Dialogues written for training.
    pub train: u64,
    /// Dialogues written for validation.
    pub validation: u64,
    /// Turns of the assistant written, both parts.
    pub assistant_turns: u64,
    /// Characters in the training part.
    pub train_characters: u64,
    /// Characters in the validation part.
    pub validation_characters: u64,
    /// Dialogues written by `language` and by model, both parts.
    pub kept_by_language: BTreeMap<&'static str, u64>,
    /// See `kept_by_language`.
    pub kept_by_model: BTreeMap<String, u64>,
    /// The training file.
    pub train_file: PathBuf,
    /// The validation file, where there is one.
    pub validation_file: Option<PathBuf>,
    /// The first bad rows of all tables.
    pub bad_rows: Vec<BadRow>,
    /// Things to know that removed nothing.
    pub warnings: Vec<String>,
    /// Models met, to tell misspelt filters.
    #[serde(skip)]
    pub(super) models: BTreeSet<String>,
}

impl RoleplayReport {
    pub(super) fn name_bad_row(&mut self, bad: BadRow) {
        if self.bad_rows.len() < NAMED_BAD_ROWS {
            self.bad_rows.push(bad);
        }
    }

    /// Warns of filters that name a model which no dialogue has.
    pub(super) fn check_models(&mut self, options: &RoleplayOptions) {
        for model in options.include_models.iter().chain(&options.exclude_models) {
            if !self.models.contains(model) {
                let known: Vec<&str> = self.models.iter().map(String::as_str).collect();
                self.warnings.push(format!("no dialogue is of the model `{model}` named in a filter (models: {})", known.join(", ")));
            }
        }
    }

    pub(super) fn count(&mut self, split: &Split) {
        let characters =
            |samples: &[Sample]| samples.iter().map(|s| (s.language, s.character.clone())).collect::<BTreeSet<_>>().len() as u64;
        self.train = split.train.len() as u64;
        self.validation = split.validation.len() as u64;
        self.train_characters = characters(&split.train);
        self.validation_characters = characters(&split.validation);
        for sample in split.train.iter().chain(&split.validation) {
            *self.kept_by_language.entry(sample.language.name()).or_default() += 1;
            *self.kept_by_model.entry(sample.key.model.clone()).or_default() += 1;
            // Turns alternate and end with the assistant.
            self.assistant_turns += sample.turns.len() as u64 / 2;
        }
    }
}

impl fmt::Display for RoleplayReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for table in &self.tables {
            let TableReport { language, table: name, rows, bad_rows, duplicates, file } = table;
            let row = format!("{} {name}", language.name());
            writeln!(f, "{row:<28}{rows:>8} rows, {bad_rows} bad, {duplicates} repeated  {}", file.display())?;
        }
        let mut line = |label: &str, count: u64| writeln!(f, "{label:<28}{count:>8}");
        line("evaluations unmatched", self.unmatched_evaluations)?;
        line("dialogues", self.dialogues)?;
        for (rule, count) in self.removed.rules() {
            line(&format!("  - {rule}"), count)?;
        }
        line("training", self.train)?;
        line("  characters", self.train_characters)?;
        line("validation", self.validation)?;
        line("  characters", self.validation_characters)?;
        for (language, count) in &self.kept_by_language {
            line(&format!("  of {language}"), *count)?;
        }
        for (model, count) in &self.kept_by_model {
            line(&format!("  of {model}"), *count)?;
        }
        line("assistant turns", self.assistant_turns)?;
        let Tidied { empty_turns, merged_turns, leading_assistant, trailing_user, cut_dialogues, cut_turns } = self.tidied;
        line("  empty turns removed", empty_turns)?;
        line("  turns merged", merged_turns)?;
        line("  leading assistant dropped", leading_assistant)?;
        line("  trailing user dropped", trailing_user)?;
        line("  dialogues cut", cut_dialogues)?;
        line("  turns cut", cut_turns)?;
        for warning in &self.warnings {
            writeln!(f, "warning: {warning}")?;
        }
        let total: u64 = self.tables.iter().map(|table| table.bad_rows).sum();
        for bad in &self.bad_rows {
            writeln!(f, "bad row: {bad}")?;
        }
        match total.saturating_sub(self.bad_rows.len() as u64) {
            0 => Ok(()),
            more => writeln!(f, "and {more} more bad rows"),
        }
    }
}
