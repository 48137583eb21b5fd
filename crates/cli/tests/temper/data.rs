//! `temper data`: what is trained, what is left out, and the role-play builder.

use crate::support::Case;
use serde_json::{Value, json};
use std::fs;

#[test]
fn the_preview_of_a_step_is_what_the_step_trains() {
    let case = Case::tiny();
    case.sft("config.toml", &[]).ok();
    let steps = case.steps("run");
    for packing in ["data.packing=false", "data.packing=true"] {
        case.sft("config.toml", &[packing, "train.global_batch=2"]).ok();
        for (n, step) in (1..).zip(case.steps("run")) {
            let number = n.to_string();
            let args = ["data", "preview", "config.toml", "--json", "--set", packing, "--set", "train.global_batch=2", "--step", &number];
            let lines = case.temper(&args).ok().lines();
            let sum = |of: &dyn Fn(&Value) -> u64| lines.iter().map(of).sum::<u64>();
            assert_eq!(step["trained_tokens"], sum(&|l| l["trained_tokens"].as_u64().unwrap()), "step {n}, {packing}");
            assert_eq!(step["tokens"], sum(&|l| l["input_ids"].as_array().unwrap().len() as u64), "step {n}, {packing}");
        }
    }
    assert_eq!(steps.len(), 4);
    for step in ["0", "5"] {
        case.temper(&["data", "preview", "config.toml", "--step", step]).exits(2).says(&["steps 1 to 4"]);
    }
    let shown = case.temper(&["data", "preview", "config.toml", "--num", "2"]).ok();
    assert_eq!(shown.stdout.matches("── ").count(), 2);
    shown.says(&["⟦one end<|im_end|>⟧", "chat.jsonl:1"]);
}

#[test]
fn the_statistics_name_everything_that_is_counted() {
    let case = Case::tiny();
    let stats = case.temper(&["data", "stats", "config.toml", "--json"]).ok().json();
    let keys: Vec<&String> = stats.as_object().unwrap().keys().collect();
    let expected = [
        "sources",
        "rows",
        "bad_rows",
        "kept",
        "eval",
        "cut",
        "documents",
        "tokens",
        "trained_tokens",
        "trained_share",
        "lengths",
        "packing",
        "notices",
    ];
    assert_eq!(keys, expected.iter().collect::<Vec<_>>());
    assert_eq!((&stats["rows"], &stats["kept"], &stats["trained_tokens"]), (&12.into(), &12.into(), &546.into()));
    assert_eq!(stats["sources"][0]["cached"], false);
    let again = case.temper(&["data", "stats", "config.toml", "--json"]).ok().json();
    assert_eq!(again["sources"][0]["cached"], true);
    assert_eq!(again["lengths"], stats["lengths"]);
    case.temper(&["data", "stats", "config.toml"]).ok().says(&["trained tokens", "546", "chat.jsonl: 12 rows"]);
}

/// Three characters in English: scores 90, 70 and 95.
fn bench(case: &Case) {
    let dir = case.path("bench/data/en");
    fs::create_dir_all(&dir).unwrap();
    let table = |name: &str, rows: Vec<Value>| {
        let lines: Vec<String> = rows.iter().map(|r| format!("{r}\n")).collect();
        fs::write(dir.join(format!("{name}.jsonl")), lines.concat()).unwrap();
    };
    let people = [("1", "Ada", 90.0), ("2", "Bea", 70.0), ("3", "Cy", 95.0)];
    table("seeds", people.iter().map(|(id, name, _)| json!({"id": id, "ai_name": name, "ai_setting": format!("{name} is kind."), "user_name": "Guest", "user_setting": "A guest.", "ai_prologue": "Welcome.", "initial_user_input": "Hi"})).collect());
    let scores = ["basics", "logic", "knowledge", "diversity", "content_logic", "interaction"];
    table(
        "evaluations",
        people
            .iter()
            .map(|(id, _, score)| {
                let mut row = json!({"seed_id": id, "model_name": "m", "run_id": "run_1"});
                scores.iter().for_each(|s| row[format!("{s}_score")] = json!(score));
                row
            })
            .collect(),
    );
    let dialogue = json!([{"role": "ai", "text": "Welcome.", "round": 0}, {"role": "user", "text": "Hi", "round": 1}, {"role": "ai", "text": "Hello there", "round": 1}]);
    table(
        "dialogues",
        people
            .iter()
            .map(|(id, ..)| json!({"seed_id": id, "model_name": "m", "run_id": "run_1", "num_turns": 3, "dialogue": dialogue.to_string()}))
            .collect(),
    );
}

#[test]
fn a_benchmark_becomes_training_data() {
    let case = Case::tiny();
    bench(&case);
    let build = ["data", "build-roleplay", "--in", "bench", "--out", "roleplay.jsonl", "--val", "0"];
    let report = case.temper(&[&build[..], &["--json"]].concat()).ok().json();
    assert_eq!(report["train"], 2, "{report}");
    assert_eq!(report["removed"]["overall"], 1, "{report}");
    let text = case.read("roleplay.jsonl");
    assert!(text.contains("Ada is kind.") && text.contains("Cy is kind.") && !text.contains("Bea"), "{text}");
    case.temper(&[&build[..], &["--min-overall", "60", "--min-basics", "60"]].concat()).ok().says(&["training"]);
    assert!(case.read("roleplay.jsonl").contains("Bea"));
    case.sft("config.toml", &["data.train=[\"roleplay.jsonl\"]", "train.steps=1", "data.seq_len=512"]).ok();
    assert_eq!(case.events("run")[0]["samples"], 3);
    case.temper(&["data", "build-roleplay", "--in", "nowhere", "--out", "x.jsonl"]).exits(2).says(&["nowhere"]);
    assert!(!case.has("x.jsonl"));
}

#[test]
fn a_preview_marks_what_is_cut() {
    let case = Case::tiny();
    let preview = ["data", "preview", "config.toml", "--set", "data.seq_len=24"];
    let whole = case.temper(&preview[..3]).ok();
    assert!(!whole.stdout.contains("cut at"), "{whole:#?}");
    let with =
        |policy: &str, more: &[&str]| case.temper(&[&preview[..], &["--set", &format!("data.over_long={policy}")], more].concat()).ok();
    with("truncate", &[]).says(&["  24 tokens of ", " (cut at data.seq_len), "]);
    let lines = with("split", &["--json"]).lines();
    let first = lines.iter().filter(|l| l["row"] == 1);
    let (parts, of): (Vec<u64>, Vec<u64>) =
        first.map(|l| (l["input_ids"].as_array().unwrap().len() as u64, l["cut_from"].as_u64().unwrap())).unzip();
    assert!(parts.len() > 1 && of.iter().all(|n| *n >= *parts.iter().max().unwrap() && *n <= parts.iter().sum()), "{parts:?} of {of:?}");
}
