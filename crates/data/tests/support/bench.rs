//! A small role-play benchmark in the published layout, as JSON lines or Parquet.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

use parquet::data_type::{ByteArray, ByteArrayType, DoubleType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::{Value, json};

/// The score columns in the order of the tests.
pub const SCORES: [&str; 6] =
    ["basics_score", "logic_score", "knowledge_score", "diversity_score", "content_logic_score", "interaction_score"];

/// How the tables are written.
#[derive(Clone, Copy)]
pub enum Form {
    /// JSON lines.
    Jsonl,
    /// Parquet.
    Parquet,
}

impl Form {
    /// The files' extension.
    pub fn extension(self) -> &'static str {
        match self {
            Self::Jsonl => "jsonl",
            Self::Parquet => "parquet",
        }
    }
}

/// The tables by language and name.
#[derive(Clone, Default)]
pub struct Bench(BTreeMap<(String, String), Vec<Value>>);

impl Bench {
    /// The rows of a table, to add to.
    pub fn rows(&mut self, language: &str, table: &str) -> &mut Vec<Value> {
        self.0.entry((language.to_owned(), table.to_owned())).or_default()
    }

    /// The rows of a table.
    pub fn table(&self, language: &str, table: &str) -> &[Value] {
        self.0.get(&(language.to_owned(), table.to_owned())).map_or(&[], Vec::as_slice)
    }

    /// Adds a seed.
    pub fn seed(&mut self, language: &str, id: &str, name: &str) {
        self.rows(language, "seeds").push(json!({
            "id": id, "ai_name": name, "ai_setting": format!("setting of {name}"), "user_name": "Guest",
            "user_setting": "setting of the guest", "ai_prologue": format!("prologue of {name}"), "initial_user_input": "unused",
        }));
    }

    /// Adds an evaluation of seed, model, run.
    pub fn evaluate(&mut self, language: &str, key: [&str; 3], scores: [f64; 6]) {
        let mut row = json!({"seed_id": key[0], "model_name": key[1], "run_id": key[2]});
        for (column, score) in SCORES.iter().zip(scores) {
            row[*column] = json!(score);
        }
        self.rows(language, "evaluations").push(row);
    }

    /// Adds a dialogue of seed, model, run.
    pub fn dialogue(&mut self, language: &str, key: [&str; 3], turns: &[(&str, &str)]) {
        let turns: Vec<Value> =
            turns.iter().zip(0..).map(|((role, text), at)| json!({"role": role, "text": text, "round": at / 2})).collect();
        self.text_dialogue(language, key, &Value::Array(turns).to_string());
    }

    /// Adds a dialogue given as text.
    pub fn text_dialogue(&mut self, language: &str, key: [&str; 3], text: &str) {
        let row = json!({"seed_id": key[0], "model_name": key[1], "run_id": key[2], "dialogue": text});
        self.rows(language, "dialogues").push(row);
    }

    /// Name and language of a seed's character, given as `language/seed`.
    pub fn character(&self, seed: &str) -> (String, String) {
        let (language, id) = seed.split_once('/').unwrap();
        let seed = self.table(language, "seeds").iter().find(|row| row["id"] == id).unwrap();
        (language.to_owned(), seed["ai_name"].as_str().unwrap().to_owned())
    }

    /// Turns every table upside down.
    pub fn reverse(&mut self) {
        self.0.values_mut().for_each(|rows| rows.reverse());
    }

    /// Random tables in both languages: 9 seeds of 8 characters, three models, two runs, some evaluations missing.
    pub fn random(seed: u64) -> Self {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut next = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        let mut bench = Self::default();
        for language in ["zh", "en"] {
            for id in 0..9 {
                let id = id.to_string();
                bench.seed(language, &id, &format!("{language}{}", if id == "8" { "0" } else { &id }));
                for model in ["m0", "m1", "m2"] {
                    for run in ["run_1", "run_2"] {
                        let key = [id.as_str(), model, run];
                        if next(10) > 0 {
                            // Quarters: sums are exact, ties occur.
                            bench.evaluate(language, key, SCORES.map(|_| 20.0 + next(320) as f64 / 4.0));
                        }
                        let texts = ["", " ", "one", "两", "three\nfour"];
                        let turns: Vec<_> = (0..next(9))
                            .map(|_| (["ai", "user"][next(2) as usize], texts[next(5) as usize]))
                            .chain([("user", "so"), ("ai", "yes")])
                            .collect();
                        bench.dialogue(language, key, if next(12) == 0 { &turns[..1] } else { &turns });
                    }
                }
            }
        }
        bench
    }

    /// Writes the tables below `folder/data`.
    pub fn write(&self, folder: &Path, form: Form) {
        for ((language, table), rows) in &self.0 {
            let folder = folder.join("data").join(language);
            fs::create_dir_all(&folder).unwrap();
            let path = folder.join(format!("{table}.{}", form.extension()));
            match form {
                Form::Jsonl => {
                    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
                    fs::write(path, lines).unwrap();
                }
                Form::Parquet => write_parquet(&path, rows),
            }
        }
    }
}

/// Writes flat rows; score columns are doubles, the others texts, all nullable. Three rows a row group at most.
fn write_parquet(path: &Path, rows: &[Value]) {
    let columns: Vec<&String> = rows[0].as_object().unwrap().keys().collect();
    let fields: String = columns
        .iter()
        .map(|name| if name.ends_with("_score") { format!("optional double {name};") } else { format!("optional binary {name} (UTF8);") })
        .collect();
    let schema = Arc::new(parse_message_type(&format!("message row {{ {fields} }}")).unwrap());
    let mut writer = SerializedFileWriter::new(File::create(path).unwrap(), schema, Arc::new(WriterProperties::default())).unwrap();
    for rows in rows.chunks(3) {
        let mut group = writer.next_row_group().unwrap();
        for name in &columns {
            let cells: Vec<&Value> = rows.iter().map(|row| &row[name.as_str()]).collect();
            let levels: Vec<i16> = cells.iter().map(|cell| i16::from(!cell.is_null())).collect();
            let mut column = group.next_column().unwrap().unwrap();
            if name.ends_with("_score") {
                let values: Vec<f64> = cells.iter().filter_map(|cell| cell.as_f64()).collect();
                column.typed::<DoubleType>().write_batch(&values, Some(&levels), None).unwrap();
            } else {
                let values: Vec<ByteArray> = cells.iter().filter_map(|cell| cell.as_str()).map(ByteArray::from).collect();
                column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).unwrap();
            }
            column.close().unwrap();
        }
        group.close().unwrap();
    }
    writer.close().unwrap();
}
