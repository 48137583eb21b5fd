//! The three tables of one language.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Map, Value};

use super::report::{RoleplayReport, TableReport};
use crate::read::{self, MAX_ROW_BYTES, Rows};
use crate::{BadRow, Error};

/// Languages that the benchmark is written in, and that system messages are worded in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Language {
    /// Chinese.
    Zh,
    /// English.
    En,
}

impl Language {
    /// The folder's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Zh => "zh",
            Self::En => "en",
        }
    }

    /// The folders of the languages present under `input` or `input/data`.
    pub(super) fn folders(input: &Path) -> Result<Vec<(Self, PathBuf)>, Error> {
        for base in [input.join("data"), input.to_path_buf()] {
            let folders = [Self::Zh, Self::En].map(|language| (language, base.join(language.name())));
            let present: Vec<_> = folders.into_iter().filter(|(_, folder)| folder.is_dir()).collect();
            if !present.is_empty() {
                return Ok(present);
            }
        }
        let remedy = "point it at the benchmark's folder: data/{zh,en}/{seeds,dialogues,evaluations}.{parquet,jsonl}";
        Err(Error::file(input, "holds neither data/zh nor data/en", remedy))
    }
}

/// A character card with its scene.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seed {
    pub ai_name: String,
    pub ai_setting: String,
    pub user_name: String,
    pub user_setting: String,
    pub prologue: String,
}

/// The six scores of a dialogue, 0 to 100.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Scores {
    pub basics: f64,
    pub logic: f64,
    knowledge: f64,
    diversity: f64,
    content_logic: f64,
    interaction: f64,
}

impl Scores {
    /// 0.5 Worlds + 0.25 Stories + 0.25 Preferences, as the benchmark weighs its three goals.
    pub fn overall(&self) -> f64 {
        let worlds = (self.basics + self.logic + self.knowledge) / 3.0;
        let stories = (self.diversity + self.content_logic) / 2.0;
        0.5 * worlds + 0.25 * stories + 0.25 * self.interaction
    }
}

/// What joins the tables within one language.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Key {
    pub seed: String,
    pub model: String,
    pub run: String,
}

/// Takes a row; false for one whose key was met before, an error for a bad one.
type Take<'a> = dyn FnMut(&mut Map<String, Value>) -> Result<bool, String> + 'a;

/// An evaluation; `None` where a score is missing.
pub(super) type Evaluations = HashMap<Key, Option<Scores>>;

const SEED_COLUMNS: &[&str] = &["id", "ai_name", "ai_setting", "user_name", "user_setting", "ai_prologue"];
const SCORE_COLUMNS: &[&str] = &[
    "seed_id",
    "model_name",
    "run_id",
    "basics_score",
    "logic_score",
    "knowledge_score",
    "diversity_score",
    "content_logic_score",
    "interaction_score",
];
const DIALOGUE_COLUMNS: &[&str] = &["seed_id", "model_name", "run_id", "dialogue"];

/// The seeds by id; of two with one id the first counts.
pub(super) fn seeds(language: Language, folder: &Path, report: &mut RoleplayReport) -> Result<HashMap<String, Seed>, Error> {
    let mut seeds = HashMap::new();
    let table = each_row(folder, "seeds", SEED_COLUMNS, report, &mut |row| {
        let id = id(row, "id")?;
        let seed = Seed {
            ai_name: text(row, "ai_name")?,
            ai_setting: text(row, "ai_setting")?,
            user_name: text(row, "user_name")?,
            user_setting: text(row, "user_setting")?,
            prologue: text(row, "ai_prologue")?,
        };
        if seed.ai_name.is_empty() {
            return Err("`ai_name` is missing or empty".to_owned());
        }
        Ok(insert_first(&mut seeds, id, seed))
    })?;
    report.tables.push(TableReport { language, table: "seeds", ..table });
    Ok(seeds)
}

/// The evaluations by seed, model and run; of two with one key the first counts.
pub(super) fn evaluations(language: Language, folder: &Path, report: &mut RoleplayReport) -> Result<Evaluations, Error> {
    let mut evaluations = HashMap::new();
    let table = each_row(folder, "evaluations", SCORE_COLUMNS, report, &mut |row| {
        let scores = [
            score(row, "basics_score")?,
            score(row, "logic_score")?,
            score(row, "knowledge_score")?,
            score(row, "diversity_score")?,
            score(row, "content_logic_score")?,
            score(row, "interaction_score")?,
        ];
        let scores = match scores {
            [Some(basics), Some(logic), Some(knowledge), Some(diversity), Some(content_logic), Some(interaction)] => {
                Some(Scores { basics, logic, knowledge, diversity, content_logic, interaction })
            }
            _ => None,
        };
        Ok(insert_first(&mut evaluations, key(row)?, scores))
    })?;
    report.tables.push(TableReport { language, table: "evaluations", ..table });
    Ok(evaluations)
}

/// Hands every readable dialogue to `sink`: its key and its `dialogue` column. What `sink` refuses is named
/// among the bad rows; `sink` says whether it met the key for the first time.
pub(super) fn dialogues(
    language: Language,
    folder: &Path,
    report: &mut RoleplayReport,
    sink: &mut dyn FnMut(Key, Value) -> Result<bool, String>,
) -> Result<(), Error> {
    let table = each_row(folder, "dialogues", DIALOGUE_COLUMNS, report, &mut |row| {
        let key = key(row)?;
        sink(key, row.remove("dialogue").unwrap_or_default())
    })?;
    report.dialogues += table.rows;
    report.tables.push(TableReport { language, table: "dialogues", ..table });
    Ok(())
}

/// Reads a table row by row.
fn each_row(folder: &Path, name: &str, columns: &[&str], report: &mut RoleplayReport, take: &mut Take<'_>) -> Result<TableReport, Error> {
    let path = find(folder, name)?;
    let mut rows = Rows::open(&path, columns, MAX_ROW_BYTES)?;
    let mut table = TableReport::of(&path);
    let mut first_bad = None;
    while let Some(batch) = rows.next_batch()? {
        for object in batch {
            table.rows += 1;
            let taken = object.and_then(|mut object| {
                let number = object.row;
                take(&mut object.fields).map_err(|reason| BadRow { file: path.clone(), row: number, column: None, reason })
            });
            match taken {
                Ok(true) => {}
                Ok(false) => table.duplicates += 1,
                Err(bad) => {
                    table.bad_rows += 1;
                    first_bad.get_or_insert_with(|| bad.to_string());
                    report.name_bad_row(bad);
                }
            }
        }
    }
    match first_bad {
        Some(bad) if table.bad_rows == table.rows => {
            Err(Error::file(&path, format!("not one of its {} rows can be used (the first: {bad})", table.rows), "correct the table"))
        }
        None if table.rows == 0 => Err(Error::file(&path, "holds no rows", "fetch it again")),
        _ => Ok(table),
    }
}

/// The table's file; Parquet, the form the benchmark is published in, wins where several are there.
fn find(folder: &Path, name: &str) -> Result<PathBuf, Error> {
    let names = ["parquet", "jsonl", "jsonl.gz", "jsonl.zst", "json"].map(|extension| folder.join(format!("{name}.{extension}")));
    names.into_iter().find(|path| path.is_file()).ok_or_else(|| {
        Error::file(folder, format!("has no table `{name}`"), format!("it must hold {name}.parquet or {name}.jsonl; fetch it again"))
    })
}

fn insert_first<K: std::hash::Hash + Eq, V>(map: &mut HashMap<K, V>, key: K, value: V) -> bool {
    match map.entry(key) {
        std::collections::hash_map::Entry::Occupied(_) => false,
        std::collections::hash_map::Entry::Vacant(entry) => {
            entry.insert(value);
            true
        }
    }
}

fn key(row: &Map<String, Value>) -> Result<Key, String> {
    Ok(Key { seed: id(row, "seed_id")?, model: id(row, "model_name")?, run: id(row, "run_id")? })
}

/// An identifier: text or a whole number, so that both spellings join.
fn id(row: &Map<String, Value>, column: &str) -> Result<String, String> {
    match row.get(column) {
        Some(Value::String(id)) if !id.trim().is_empty() => Ok(id.trim().to_owned()),
        Some(Value::Number(id)) if !id.is_f64() => Ok(id.to_string()),
        None | Some(Value::Null) => Err(format!("`{column}` is missing")),
        Some(other) => Err(format!("`{column}` is {}; it must be a text or a whole number", shown(other))),
    }
}

/// A text column without the white space around it; missing and null are empty.
fn text(row: &Map<String, Value>, column: &str) -> Result<String, String> {
    match row.get(column) {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.trim().to_owned()),
        Some(other) => Err(format!("`{column}` is {}; it must be text", read::kind(other))),
    }
}

fn score(row: &Map<String, Value>, column: &str) -> Result<Option<f64>, String> {
    match row.get(column) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Number(score)) => match score.as_f64() {
            Some(score) if (0.0..=100.0).contains(&score) => Ok(Some(score)),
            _ => Err(format!("`{column}` is {score}; scores lie in 0 to 100")),
        },
        Some(other) => Err(format!("`{column}` is {}; it must be a number", read::kind(other))),
    }
}

fn shown(value: &Value) -> &'static str {
    match value {
        Value::String(_) => "an empty text",
        Value::Number(_) => "a fraction",
        other => read::kind(other),
    }
}
