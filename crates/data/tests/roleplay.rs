//! The role-play builder on a small benchmark of our own, every rule exercised, against a brute-force account.

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use support::bench::{Bench, Form, SCORES};
use temper_data::{Error, RoleplayOptions, RoleplayReport, build_roleplay, read_source};
use tempfile::TempDir;

/// A built benchmark: its report and the lines of both parts.
struct Built {
    folder: TempDir,
    report: RoleplayReport,
    train: Vec<Value>,
    validation: Vec<Value>,
}

impl Built {
    fn all(&self) -> impl Iterator<Item = &Value> {
        self.train.iter().chain(&self.validation)
    }

    fn ids(&self) -> BTreeSet<String> {
        self.all().map(id).collect()
    }
}

fn id(line: &Value) -> String {
    line["id"].as_str().unwrap().to_owned()
}

fn lines(path: &Path) -> Vec<Value> {
    match fs::read_to_string(path) {
        Ok(text) => text.lines().map(|line| serde_json::from_str(line).unwrap()).collect(),
        Err(_) => Vec::new(),
    }
}

fn build(bench: &Bench, form: Form, options: &RoleplayOptions) -> Result<Built, Error> {
    let folder = tempfile::tempdir().unwrap();
    bench.write(folder.path(), form);
    let out = folder.path().join("out/sft.jsonl");
    let report = build_roleplay(folder.path(), &out, options)?;
    assert_eq!(report.dialogues, report.removed.total() + report.train + report.validation, "every dialogue is accounted for");
    let (train, validation) = (lines(&out), lines(&folder.path().join("out/sft.val.jsonl")));
    assert_eq!((report.train, report.validation), (train.len() as u64, validation.len() as u64));
    let files: Vec<PathBuf> = fs::read_dir(out.parent().unwrap()).unwrap().map(|file| file.unwrap().path()).collect();
    assert!(files.iter().all(|file| file.extension().is_some_and(|extension| extension == "jsonl")), "no temporary file stays: {files:?}");
    Ok(Built { folder, report, train, validation })
}

fn keep_all() -> RoleplayOptions {
    RoleplayOptions { min_overall: 0.0, min_basics: 0.0, min_logic: 0.0, validation: 0.0, ..RoleplayOptions::default() }
}

/// Two good dialogues of one English seed, to which a test adds what it needs.
fn small() -> Bench {
    let mut bench = Bench::default();
    bench.seed("en", "s", "Mira");
    for run in ["run_1", "run_2"] {
        bench.evaluate("en", ["s", "m", run], [90.0; 6]);
        bench.dialogue("en", ["s", "m", run], &[("user", "Hello."), ("ai", "Good evening.")]);
    }
    bench
}

#[test]
fn the_overall_score_weighs_the_three_goals_and_thresholds_are_inclusive() {
    // basics, logic, knowledge, diversity, content_logic, interaction
    let cases = [
        ([85.0, 60.0, 95.0, 80.0, 80.0, 80.0], Some(80.0)),
        ([85.0, 59.9, 95.1, 80.0, 80.0, 80.0], None),
        ([84.9, 60.0, 95.1, 90.0, 90.0, 90.0], None),
        ([90.0, 90.0, 90.0, 100.0, 0.0, 90.0], Some(80.0)),
        ([90.0, 90.0, 90.0, 99.0, 0.0, 90.0], None),
        ([100.0, 100.0, 100.0, 0.0, 0.0, 100.0], None),
        ([100.0, 100.0, 100.0, 100.0, 100.0, 20.0], Some(80.0)),
        ([85.1, 85.1, 85.1, 74.9, 74.9, 74.9], Some(80.0)),
    ];
    let mut bench = Bench::default();
    bench.seed("zh", "1", "阿离");
    for (at, (scores, _)) in cases.iter().enumerate() {
        let run = format!("run_{at}");
        bench.evaluate("zh", ["1", "m", &run], *scores);
        bench.dialogue("zh", ["1", "m", &run], &[("user", "你好"), ("ai", "请进")]);
    }
    let options = RoleplayOptions { validation: 0.0, ..RoleplayOptions::default() };
    let built = build(&bench, Form::Jsonl, &options).unwrap();
    let kept: BTreeMap<String, f64> = built.all().map(|line| (id(line), line["overall"].as_f64().unwrap())).collect();
    for (at, (_, right)) in cases.iter().enumerate() {
        let found = kept.get(&format!("zh/1/m/run_{at}")).copied();
        assert_eq!(found.is_some(), right.is_some(), "case {at}");
        assert!(found.zip(*right).is_none_or(|(found, right)| (found - right).abs() < 1e-9));
    }
    let removed = &built.report.removed;
    assert_eq!((removed.overall, removed.basics, removed.logic, removed.total()), (2, 1, 1, 4));
}

#[test]
fn each_rule_counts_what_it_removes() {
    let mut bench = small();
    bench.seed("en", "s", "Copy of s");
    bench.rows("en", "seeds").push(json!({"id": "nameless", "ai_name": ""}));
    bench.dialogue("en", ["s", "m", "run_1"], &[("user", "again"), ("ai", "again")]);
    bench.dialogue("en", ["ghost", "m", "run_1"], &[("user", "u"), ("ai", "a")]);
    bench.dialogue("en", ["s", "unjudged", "run_1"], &[("user", "u"), ("ai", "a")]);
    bench.evaluate("en", ["s", "half", "run_1"], [90.0; 6]);
    bench.rows("en", "evaluations").last_mut().unwrap()["logic_score"] = Value::Null;
    bench.dialogue("en", ["s", "half", "run_1"], &[("user", "u"), ("ai", "a")]);
    bench.evaluate("en", ["s", "broken", "run_1"], [90.0; 6]);
    bench.text_dialogue("en", ["s", "broken", "run_1"], "[{\"role\": \"ai\", ");
    bench.evaluate("en", ["s", "narrator", "run_1"], [90.0; 6]);
    bench.dialogue("en", ["s", "narrator", "run_1"], &[("user", "u"), ("narrator", "a")]);
    bench.evaluate("en", ["s", "mute", "run_1"], [90.0; 6]);
    bench.dialogue("en", ["s", "mute", "run_1"], &[("ai", "prologue"), ("user", "u"), ("ai", " ")]);
    bench.evaluate("en", ["s", "lost", "run_1"], [90.0; 6]);
    bench.evaluate("en", ["s", "over", "run_1"], [101.0; 6]);
    bench.evaluate("en", ["s", "m", "run_1"], [10.0; 6]);
    bench.rows("en", "dialogues").push(json!({"seed_id": "s", "model_name": "m", "run_id": null, "dialogue": "[]"}));
    for form in [Form::Jsonl, Form::Parquet] {
        let built = build(&bench, form, &keep_all()).unwrap();
        let RoleplayReport { removed, tables, tidied, unmatched_evaluations, bad_rows, .. } = &built.report;
        assert_eq!(built.ids(), ["en/s/m/run_1", "en/s/m/run_2"].map(str::to_owned).into());
        assert_eq!((removed.duplicate, removed.missing_seed, removed.no_evaluation), (1, 1, 1));
        assert_eq!((removed.incomplete_scores, removed.bad_row, removed.empty), (1, 3, 1));
        assert_eq!(removed.total(), 8);
        assert_eq!(
            tables.iter().map(|t| (t.table, t.rows, t.bad_rows, t.duplicates)).collect::<Vec<_>>(),
            [("seeds", 3, 1, 1), ("evaluations", 9, 1, 1), ("dialogues", 10, 3, 1)]
        );
        assert_eq!(*unmatched_evaluations, 1);
        assert_eq!((tidied.empty_turns, tidied.leading_assistant, tidied.trailing_user), (1, 1, 1));
        let named: Vec<String> = bad_rows.iter().map(ToString::to_string).collect();
        let rows = [
            ("seeds", 3, "`ai_name`"),
            ("evaluations", 8, "101"),
            ("dialogues", 7, "`dialogue` is not JSON"),
            ("dialogues", 8, "narrator"),
            ("dialogues", 10, "`run_id` is missing"),
        ];
        assert_eq!(named.len(), rows.len());
        for (named, (table, row, says)) in named.iter().zip(rows) {
            assert!(named.contains(&format!("{table}.{}:{row}:", form.extension())) && named.contains(says), "{named}");
        }
        let shown = built.report.to_string();
        assert!(shown.contains("seed missing") && shown.contains("bad row: "), "{shown}");
        assert_eq!(serde_json::to_value(&built.report).unwrap()["removed"]["missing_seed"], 1);
    }
}

#[test]
fn turns_alternate_from_user_to_assistant() {
    let mut bench = small();
    let messy = [
        ("ai", "P"),
        ("ai", "Q"),
        ("user", "a"),
        ("user", ""),
        ("user", "b"),
        ("ai", "c"),
        ("user", "\n"),
        ("ai", "d"),
        ("user", "e"),
        ("ai", "f"),
        ("user", "g"),
    ];
    bench.evaluate("en", ["s", "messy", "r"], [90.0; 6]);
    bench.dialogue("en", ["s", "messy", "r"], &messy);
    let turns = |built: &Built| -> Vec<String> {
        let line = built.all().find(|line| line["id"] == "en/s/messy/r").unwrap();
        let messages = line["messages"].as_array().unwrap();
        messages.iter().skip(1).map(|m| format!("{}:{}", m["role"].as_str().unwrap(), m["content"].as_str().unwrap())).collect()
    };
    let built = build(&bench, Form::Jsonl, &keep_all()).unwrap();
    assert_eq!(turns(&built), ["user:a\nb", "assistant:c\nd", "user:e", "assistant:f"]);
    let tidied = built.report.tidied;
    assert_eq!((tidied.empty_turns, tidied.merged_turns, tidied.leading_assistant, tidied.trailing_user), (2, 3, 1, 1));
    assert_eq!(built.report.assistant_turns, 2 + 2);

    for most in [2, 3] {
        let built = build(&bench, Form::Jsonl, &RoleplayOptions { max_turns: Some(most), ..keep_all() }).unwrap();
        assert_eq!(turns(&built), ["user:a\nb", "assistant:c\nd"]);
        let tidied = built.report.tidied;
        assert_eq!((tidied.cut_dialogues, tidied.cut_turns), (1, 5 - most as u64));
    }
}

#[test]
fn the_card_becomes_the_system_message_in_its_language() {
    let mut bench = small();
    bench.seed("zh", "s", "阿离");
    bench.evaluate("zh", ["s", "m", "run_1"], [90.0; 6]);
    bench.dialogue("zh", ["s", "m", "run_1"], &[("user", "你好"), ("ai", "请进")]);
    let built = build(&bench, Form::Parquet, &keep_all()).unwrap();
    let system = |id: &str| {
        let line = built.all().find(|line| line["id"] == id).unwrap();
        assert_eq!(line["messages"][0]["role"], "system");
        line["messages"][0]["content"].as_str().unwrap().to_owned()
    };
    let (zh, en) = (system("zh/s/m/run_1"), system("en/s/m/run_1"));
    for (text, name, word) in [(&zh, "阿离", "角色扮演"), (&en, "Mira", "role-play")] {
        for part in [&format!("setting of {name}"), "Guest", "setting of the guest", &format!("prologue of {name}"), word] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
    assert!(en.is_ascii() && zh.contains("从这里开始"));
}

#[test]
fn models_are_filtered_and_misspelt_ones_reported() {
    let mut bench = small();
    bench.evaluate("en", ["s", "other", "run_1"], [95.0; 6]);
    bench.dialogue("en", ["s", "other", "run_1"], &[("user", "u"), ("ai", "a")]);
    let models = |list: &[&str]| list.iter().map(|model| (*model).to_owned()).collect::<Vec<_>>();
    let only = build(&bench, Form::Jsonl, &RoleplayOptions { include_models: models(&["other", "othre"]), ..keep_all() }).unwrap();
    assert_eq!(only.ids(), ["en/s/other/run_1".to_owned()].into());
    assert_eq!(only.report.removed.model, 2);
    assert!(only.report.warnings.len() == 1 && only.report.warnings[0].contains("`othre`") && only.report.warnings[0].contains("m, other"));
    let without = build(&bench, Form::Jsonl, &RoleplayOptions { exclude_models: models(&["other"]), ..keep_all() }).unwrap();
    assert_eq!((without.report.removed.model, without.report.train), (1, 2));
}

#[test]
fn the_cap_keeps_the_best_of_each_seed_and_language() {
    let mut bench = Bench::default();
    for language in ["zh", "en"] {
        bench.seed(language, "7", language);
        for (run, score) in [("a", 81.0), ("b", 99.0), ("c", 90.0), ("d", 90.0)] {
            bench.evaluate(language, ["7", "m", run], [score; 6]);
            bench.dialogue(language, ["7", "m", run], &[("user", "u"), ("ai", "a")]);
        }
    }
    let built = build(&bench, Form::Jsonl, &RoleplayOptions { max_per_seed: Some(2), ..keep_all() }).unwrap();
    assert_eq!(built.ids(), ["zh/7/m/b", "zh/7/m/c", "en/7/m/b", "en/7/m/c"].map(str::to_owned).into());
    assert_eq!(built.report.removed.seed_cap, 4);
}

#[test]
fn validation_takes_whole_characters_and_a_build_repeats() {
    let bench = Bench::random(11);
    let options = RoleplayOptions { validation: 0.2, ..keep_all() };
    let built = build(&bench, Form::Jsonl, &options).unwrap();
    let character = |line: &Value| {
        let seed = id(line).rsplitn(3, '/').nth(2).unwrap().to_owned();
        bench.character(&seed)
    };
    let (train, validation): (BTreeSet<_>, BTreeSet<_>) =
        (built.train.iter().map(character).collect(), built.validation.iter().map(character).collect());
    assert!(train.is_disjoint(&validation) && !validation.is_empty());
    let share = built.report.validation as f64 / (built.report.train + built.report.validation) as f64;
    assert!((0.1..=0.2).contains(&share), "{share}");
    assert_eq!((built.report.train_characters, built.report.validation_characters), (train.len() as u64, validation.len() as u64));

    let parquet = build(&bench, Form::Parquet, &options).unwrap();
    assert_eq!((&parquet.train, &parquet.validation), (&built.train, &built.validation), "both forms of the tables say the same");
    let mut turned = bench.clone();
    turned.reverse();
    let again = build(&turned, Form::Jsonl, &options).unwrap();
    assert_eq!((&again.train, &again.validation), (&built.train, &built.validation), "the order of the tables does not matter");
    let other = build(&bench, Form::Jsonl, &RoleplayOptions { seed: 1, ..options }).unwrap();
    assert_eq!(other.ids(), built.ids());
    assert_ne!(other.train.iter().map(id).collect::<Vec<_>>(), built.train.iter().map(id).collect::<Vec<_>>());
    let mixed = built.train.windows(2).filter(|pair| id(&pair[0])[..2] != id(&pair[1])[..2]).count();
    assert!(mixed > 4, "languages are mixed");

    let mut rows = 0;
    read_source(0, &built.folder.path().join("out/sft.jsonl"), &mut |row| {
        assert!(row.is_ok());
        rows += 1;
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_eq!(rows, built.report.train);
}

/// Every rule again in the plainest way, over random tables.
#[test]
fn random_benchmarks_agree_with_brute_force() {
    for seed in 0..12 {
        let bench = Bench::random(seed);
        let options = RoleplayOptions {
            min_overall: 50.0,
            min_basics: 40.0,
            min_logic: 30.0,
            exclude_models: vec!["m2".to_owned()],
            max_per_seed: (seed % 2 == 0).then_some(2),
            max_turns: (seed % 3 == 0).then_some(4),
            validation: 0.1,
            ..RoleplayOptions::default()
        };
        let right = brute_force(&bench, &options);
        let built = build(&bench, if seed % 4 < 2 { Form::Jsonl } else { Form::Parquet }, &options).unwrap();
        let found: BTreeMap<String, Turns> = built
            .all()
            .map(|line| {
                let text = |m: &Value, key: &str| m[key].as_str().unwrap().to_owned();
                let messages = line["messages"].as_array().unwrap()[1..].iter().map(|m| (text(m, "role"), text(m, "content")));
                (id(line), messages.collect())
            })
            .collect();
        assert_eq!(found, right, "benchmark {seed}");
    }
}

/// Role and text of each turn.
type Turns = Vec<(String, String)>;

/// A dialogue that the brute force keeps.
struct Kept {
    id: String,
    overall: f64,
    seed: String,
    turns: Turns,
}

fn brute_force(bench: &Bench, options: &RoleplayOptions) -> BTreeMap<String, Turns> {
    let mut kept: Vec<Kept> = Vec::new();
    for language in ["zh", "en"] {
        for row in bench.table(language, "dialogues") {
            let text = |key: &str| row[key].as_str().unwrap().to_owned();
            let (seed, model, run) = (text("seed_id"), text("model_name"), text("run_id"));
            let id = format!("{language}/{seed}/{model}/{run}");
            let known = bench.table(language, "seeds").iter().any(|s| s["id"] == seed);
            let same = |e: &&Value| e["seed_id"] == seed && e["model_name"] == model && e["run_id"] == run;
            let Some(evaluation) = bench.table(language, "evaluations").iter().find(same) else { continue };
            if !known || options.exclude_models.contains(&model) || kept.iter().any(|other| other.id == id) {
                continue;
            }
            let [basics, logic, knowledge, diversity, content, interaction] = SCORES.map(|score| evaluation[score].as_f64().unwrap());
            let overall = (basics + logic + knowledge) / 6.0 + (diversity + content) / 8.0 + interaction / 4.0;
            if overall < options.min_overall || basics < options.min_basics || logic < options.min_logic {
                continue;
            }
            let turns = alternate(&serde_json::from_str::<Vec<Value>>(row["dialogue"].as_str().unwrap()).unwrap(), options.max_turns);
            if !turns.is_empty() {
                kept.push(Kept { id, overall, seed: format!("{language}/{seed}"), turns });
            }
        }
    }
    let better = |a: &Kept, b: &Kept| a.seed == b.seed && (a.overall > b.overall || (a.overall == b.overall && a.id < b.id));
    let rank = |row: &Kept| kept.iter().filter(|other| better(other, row)).count();
    let within = kept.iter().filter(|row| options.max_per_seed.is_none_or(|most| rank(row) < most));
    within.map(|row| (row.id.clone(), row.turns.clone())).collect()
}

/// Turns as one text per speaker's stretch; a stretch counts only between a user's first word and the AI's last.
fn alternate(dialogue: &[Value], most: Option<usize>) -> Turns {
    let mut turns = Turns::new();
    for turn in dialogue {
        let (role, text) = (turn["role"].as_str().unwrap(), turn["text"].as_str().unwrap());
        let role = if role == "ai" { "assistant" } else { "user" };
        if text.trim().is_empty() || (turns.is_empty() && role == "assistant") {
            continue;
        }
        match turns.last_mut().filter(|last| last.0 == role) {
            Some(last) => last.1 = format!("{}\n{text}", last.1),
            None => turns.push((role.to_owned(), text.to_owned())),
        }
    }
    let whole = turns.len().min(most.unwrap_or(usize::MAX)) / 2 * 2;
    turns[..whole].to_vec()
}

#[test]
fn faults_are_named_and_nothing_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("sft.jsonl");
    let fails = |input: &Path, out: &Path, options: &RoleplayOptions| build_roleplay(input, out, options).unwrap_err().to_string();
    assert!(fails(folder.path(), &out, &keep_all()).contains("holds neither data/zh nor data/en"));
    let bench = folder.path().join("bench");
    small().write(&bench, Form::Jsonl);
    for (options, says) in [
        (RoleplayOptions { min_overall: f64::NAN, ..keep_all() }, "min_overall"),
        (RoleplayOptions { min_basics: 101.0, ..keep_all() }, "min_basics"),
        (RoleplayOptions { validation: 1.0, ..keep_all() }, "validation"),
        (RoleplayOptions { max_turns: Some(1), ..keep_all() }, "max_turns"),
        (RoleplayOptions { max_per_seed: Some(0), ..keep_all() }, "max_per_seed"),
        (RoleplayOptions { min_overall: 95.0, ..keep_all() }, "no dialogue is left of 2: 2 overall below threshold"),
    ] {
        assert!(fails(&bench, &out, &options).contains(says));
    }
    assert!(fails(&bench, &folder.path().join("sft.json"), &keep_all()).contains("ends in .jsonl"));
    fs::write(bench.join("data/en/seeds.jsonl"), "{\"name\": 1}\n").unwrap();
    assert!(fails(&bench, &out, &keep_all()).contains("not one of its 1 rows can be used"));
    fs::remove_file(bench.join("data/en/seeds.jsonl")).unwrap();
    assert!(fails(&bench, &out, &keep_all()).contains("has no table `seeds`"));
    assert!(!out.exists());
}

#[test]
fn an_older_validation_file_does_not_stay_beside_a_newer_build() {
    let built = build(&Bench::random(3), Form::Jsonl, &RoleplayOptions { validation: 0.2, ..keep_all() }).unwrap();
    let out = built.folder.path().join("out/sft.jsonl");
    assert!(built.report.validation_file.is_some());
    let report = build_roleplay(built.folder.path(), &out, &keep_all()).unwrap();
    assert_eq!((report.validation, report.validation_file), (0, None));
    assert!(!out.with_file_name("sft.val.jsonl").exists());
    assert!(report.warnings.iter().any(|warning| warning.contains("from an earlier build")));
}
