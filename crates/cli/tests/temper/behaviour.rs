//! What a user may rely on: the same seed gives the same run, settings that only move work around change nothing, and each
//! key of the configuration does what it says.

use crate::support::{Case, HERE, close, column, command, essences, finish, in_shell};
use serde_json::Value;
use std::{fs, path::Path};

/// The essence of a run's steps, and its weights.
fn outcome(case: &Case, args: &[&str]) -> (Vec<Vec<Value>>, Vec<u8>) {
    let args: Vec<&str> = args.iter().copied().chain(["--set", "log.dir=trial"]).collect();
    case.temper(&args).ok();
    (essences(&case.steps("trial")), fs::read(case.path("trial/hf/model.safetensors")).unwrap())
}

#[test]
fn the_same_seed_gives_the_same_run_whatever_the_threads() {
    let case = Case::tiny();
    let first = outcome(&case, &["sft", "config.toml"]);
    assert_eq!(first.0.len(), 4);
    assert!(first == outcome(&case, &["sft", "config.toml"]));
    for threads in ["1", "2", "3"] {
        assert!(first == outcome(&case, &["sft", "config.toml", "--threads", threads]), "{threads} threads");
    }
    assert!(first == outcome(&case, &["sft", "config.toml", "--set", "data.cache_dir="]), "without the cache");
    assert!(first == outcome(&case, &["sft", "config.toml", "--set", "data.workers=1"]), "one worker");
    assert!(first != outcome(&case, &["sft", "config.toml", "--set", "train.seed=6"]));
}

#[test]
fn recomputing_and_chunking_change_no_result() {
    let case = Case::tiny();
    case.sft("config.toml", &["log.dir=plain"]).ok();
    let plain = case.steps("plain");
    for set in ["memory.recompute=full", "memory.loss_chunk=7", "train.micro_batch=4", "train.micro_batch=1"] {
        case.sft("config.toml", &[set, "log.dir=other"]).ok();
        for key in ["loss", "grad_norm"] {
            close(&column(&case.steps("other"), key), &column(&plain, key), 1e-5);
        }
    }
    case.sft("config.toml", &["memory.recompute=full", "log.dir=full"]).ok();
    for key in ["loss", "grad_norm"] {
        close(&column(&case.steps("full"), key), &column(&plain, key), 1e-6);
    }
}

#[test]
fn a_packed_epoch_trains_on_the_same_tokens_in_fewer_sequences() {
    let case = Case::tiny();
    // All of the data in one step, so that both ways have the same tokens in it.
    case.sft("config.toml", &["train.global_batch=12", "train.micro_batch=12", "train.steps=2", "log.dir=plain"]).ok();
    let stats = |set: &str| case.temper(&["data", "stats", "config.toml", "--json", "--set", set]).ok().json();
    let packed = stats("data.packing=true");
    let sequences = packed["packing"]["sequences"].as_u64().unwrap();
    assert!((4..12).contains(&sequences), "{packed}");
    assert_eq!(packed["tokens"], stats("data.packing=false")["tokens"]);
    let batch = format!("train.global_batch={sequences}");
    case.sft("config.toml", &["data.packing=true", &batch, "train.micro_batch=1", "train.steps=2", "log.dir=packed"]).ok();
    let (plain, packed) = (case.steps("plain"), case.steps("packed"));
    assert_eq!(column(&plain, "trained_tokens"), [546.0; 2]);
    assert_eq!(column(&plain, "tokens"), column(&packed, "tokens"));
    assert_eq!(column(&plain, "trained_tokens"), column(&packed, "trained_tokens"));
    close(&column(&packed, "loss"), &column(&plain, "loss"), 1e-5);
    close(&column(&packed, "grad_norm"), &column(&plain, "grad_norm"), 1e-5);
}

const TWO_TURNS: &str = r#"{"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}, {"role": "assistant", "content": "four five"}]}"#;

/// Labels and weights of the only row of a data file.
fn preview(case: &Case, row: &str, set: &str) -> Value {
    case.write("rows.jsonl", &format!("{row}\n"));
    case.temper(&["data", "preview", "config.toml", "--json", "--set", "data.train=[\"rows.jsonl\"]", "--set", set]).ok().lines().remove(0)
}

#[test]
fn the_loss_covers_the_turns_it_is_told_to() {
    let case = Case::tiny();
    let trained = |set: &str| {
        let line = preview(&case, TWO_TURNS, set);
        let labels = line["labels"].as_array().unwrap();
        assert_eq!(line["trained_tokens"], labels.iter().filter(|l| **l != -100).count());
        (line["trained_tokens"].as_u64().unwrap(), labels.len() as u64)
    };
    let (assistant, tokens) = trained("data.loss=assistant");
    let (last, _) = trained("data.loss=last");
    let (all, _) = trained("data.loss=all");
    assert!(last < assistant && assistant < all && all <= tokens, "{last} {assistant} {all} {tokens}");

    let sets = ["data.train=[\"rows.jsonl\"]", "train.steps=1", "train.global_batch=1", "train.micro_batch=1"];
    let loss = |rule: &str| {
        case.sft("config.toml", &[&sets[..], &[rule]].concat()).ok();
        let step = case.steps("run").remove(0);
        (step["loss"].as_f64().unwrap(), step["trained_tokens"].as_u64().unwrap())
    };
    let (all_loss, counted) = loss("data.loss=all");
    assert!((all - 1..=all).contains(&counted), "nothing predicts the first token: {counted} of {all}");
    let (last_loss, counted) = loss("data.loss=last");
    assert_eq!(counted, last);
    assert_ne!(all_loss, last_loss);
}

#[test]
fn weights_of_messages_weigh_their_tokens() {
    let case = Case::tiny();
    let weighted = |first: &str, second: &str| {
        let row = TWO_TURNS
            .replace("\"content\": \"two\"", &format!("\"content\": \"two\", \"loss\": {first}"))
            .replace("\"content\": \"four five\"", &format!("\"content\": \"four five\", \"loss\": {second}"));
        case.write("rows.jsonl", &format!("{row}\n"));
        case.sft("config.toml", &["data.train=[\"rows.jsonl\"]", "train.steps=1", "train.global_batch=1", "train.micro_batch=1"]).ok();
        let step = case.steps("run").remove(0);
        (step["loss"].as_f64().unwrap(), step["trained_tokens"].as_f64().unwrap())
    };
    let ((first, n), (second, m)) = (weighted("1", "0"), weighted("0", "1"));
    close(&[weighted("1", "1").0], &[(first * n + second * m) / (n + m)], 1e-6);
    close(&[weighted("0.25", "1").0], &[(0.25 * first * n + second * m) / (0.25 * n + m)], 1e-6);
    close(&[weighted("1.0", "0.5").0], &[(first * n + 0.5 * second * m) / (n + 0.5 * m)], 1e-6);
    assert_eq!(weighted("true", "false"), (first, n));
    case.write("rows.jsonl", &TWO_TURNS.replace("\"content\": \"two\"", "\"content\": \"two\", \"loss\": 2"));
    case.sft("config.toml", &["data.train=[\"rows.jsonl\"]"]).exits(2).says(&["rows.jsonl:1", "`loss` is 2"]);
}

#[test]
fn evaluation_runs_before_during_and_after() {
    let case = Case::tiny();
    case.sft("config.toml", &["data.eval_split=0.25", "train.eval_every=2", "train.steps=5"]).ok();
    let evals: Vec<Value> = case.events("run").into_iter().filter(|e| e["event"] == "eval").collect();
    assert_eq!(evals.iter().map(|e| e["step"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 2, 4, 5]);
    for eval in &evals {
        close(&[eval["perplexity"].as_f64().unwrap()], &[eval["loss"].as_f64().unwrap().exp()], 1e-12);
        assert_eq!(eval["trained_tokens"], evals[0]["trained_tokens"]);
    }
    assert_eq!(case.events("run")[0]["samples"], 9);
    assert_ne!(evals[0]["loss"], evals[3]["loss"]);

    // The evaluation of a training file at rate 0 is the loss of an epoch of it.
    let sets = ["data.eval=[\"chat.jsonl\"]", "train.steps=1", "train.global_batch=12", "train.micro_batch=12", "optim.lr=0.0"];
    case.sft("config.toml", &sets).ok();
    let eval = case.events("run").into_iter().find(|e| e["event"] == "eval").unwrap();
    let step = &case.steps("run")[0];
    assert_eq!(eval["trained_tokens"], step["trained_tokens"]);
    close(&column(&[eval], "loss"), &column(std::slice::from_ref(step), "loss"), 1e-6);
}

#[test]
fn evaluation_of_nothing_is_not_passed_over() {
    let case = Case::tiny();
    case.write("masked.jsonl", &format!("{}\n", TWO_TURNS.replace("\"role\": \"assistant\"", "\"loss\": 0, \"role\": \"assistant\"")));
    case.sft("config.toml", &["data.eval=[\"masked.jsonl\"]"]).exits(2).says(&["data.eval: ", "data.seq_len = 256"]);
    assert!(!case.has("run"));
    case.sft("config.toml", &["data.eval_split=0.001"]).ok();
    let evals = case.events("run").iter().filter(|e| e["event"] == "eval").count();
    assert!(evals > 0 || case.notices("run").contains("data.eval_split = 0.001 holds no sample out"));
}

#[test]
fn samples_beyond_the_models_positions_are_mentioned() {
    let case = Case::tiny();
    let row = TWO_TURNS.replace("\"two\"", &format!("\"{}\"", "two ".repeat(300)));
    case.write("rows.jsonl", &format!("{row}\n"));
    let long = ["data.train=[\"rows.jsonl\"]", "data.seq_len=4096", "train.steps=1", "train.global_batch=1", "train.micro_batch=1"];
    case.sft("config.toml", &long).ok().says(&["the model was made for 512"]);
    case.sft("config.toml", &[&long[..], &["data.seq_len=512"]].concat()).ok();
    assert!(!case.notices("run").contains("made for"));
}

#[test]
fn a_prompt_that_cannot_be_answered_does_not_fail_the_run() {
    let case = Case::tiny();
    let prompt = format!("log.sample_prompt={}", "river ".repeat(600));
    case.sft("config.toml", &["train.steps=1", &prompt]).ok().says(&["log.sample_prompt is not answered", "512", "checkpoints"]);
}

#[test]
fn over_long_samples_follow_the_policy_and_are_counted() {
    let case = Case::tiny();
    let run = |policy: &str| {
        case.sft("config.toml", &["data.seq_len=60", &format!("data.over_long={policy}"), "train.steps=1"]).ok();
        (case.events("run")[0]["samples"].as_u64().unwrap(), case.notices("run"))
    };
    let stats = |policy: &str| {
        let policy = format!("data.over_long={policy}");
        case.temper(&["data", "stats", "config.toml", "--json", "--set", "data.seq_len=60", "--set", &policy]).ok().json()
    };
    let whole = case.temper(&["data", "stats", "config.toml", "--json"]).ok().json();
    for policy in ["truncate", "drop", "split"] {
        let (samples, notices) = run(policy);
        let stats = stats(policy);
        assert_eq!(stats["kept"], samples, "{policy}");
        let long = stats["cut"]["over_long"].as_u64().unwrap();
        assert!(long > 0, "{stats}");
        match policy {
            "drop" => {
                assert_eq!(samples, 12 - long);
                assert!(notices.contains(&format!("{long} over-long samples dropped")), "{notices}");
            }
            "truncate" => assert!(notices.contains("over-long samples truncated to data.seq_len"), "{notices}"),
            _ => {
                assert!(notices.contains(&format!("{long} over-long samples split")), "{notices}");
                assert_eq!(stats["trained_tokens"], whole["trained_tokens"], "a split loses nothing");
            }
        }
    }
}

#[test]
fn alpaca_and_sharegpt_files_are_trained_on() {
    let case = Case::tiny();
    case.write(
        "alpaca.json",
        r#"[{"instruction": "Say stop.", "input": "", "output": "stop"}, {"instruction": "Add.", "input": "1 and 2", "output": "3"}]"#,
    );
    case.write(
        "sharegpt.jsonl",
        "{\"conversations\": [{\"from\": \"human\", \"value\": \"Say stop.\"}, {\"from\": \"gpt\", \"value\": \"stop\"}]}\n",
    );
    let few = ["train.steps=2", "train.global_batch=2"];
    for (train, samples) in [
        ("data.train=[\"alpaca.json\"]", 2),
        ("data.train=[\"sharegpt.jsonl\"]", 1),
        ("data.train=[\"alpaca.json\", \"sharegpt.jsonl\"]", 3),
    ] {
        case.sft("config.toml", &[&few[..], &[train]].concat()).ok();
        assert_eq!(case.events("run")[0]["samples"], samples);
    }
    case.sft("config.toml", &[&few[..], &["data.train=[\"alpaca.json\"]", "data.template=alpaca"]].concat()).ok();
    let lines = case.temper(&[
        "data",
        "preview",
        "config.toml",
        "--json",
        "--set",
        "data.train=[\"alpaca.json\"]",
        "--set",
        "data.template=alpaca",
    ]);
    assert!(lines.ok().lines()[1]["text"].as_str().unwrap().contains("### Instruction:\nAdd.\n1 and 2"));
}

#[test]
fn random_weights_need_only_a_config_and_a_tokenizer() {
    let case = Case::tiny();
    fs::create_dir(case.path("bare")).unwrap();
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        fs::copy(case.path("../common/tiny-qwen3").join(file), case.path("bare").join(file)).unwrap();
    }
    case.sft("config.toml", &["model.path=bare"]).exits(2).says(&["bare", "model.init"]);
    for command in [&["verify", "bare", "--layout", "tp=2"][..], &["generate", "bare", "--prompt", "1 + 1 ="]] {
        let done = case.temper(command).exits(2).says(&["bare", "no model.safetensors", "Download the weights"]);
        assert!(!done.stderr.contains("model.init"), "a key of a configuration that there is not: {done:#?}");
    }
    let random = ["model.path=bare", "model.init=random"];
    case.sft("config.toml", &random).ok();
    let first = case.steps("run");
    // Random weights know nothing: the loss starts near that of a uniform guess among 320 rows.
    let guess = 320f64.ln();
    assert!((first[0]["loss"].as_f64().unwrap() - guess).abs() < 1.5, "{}", first[0]);
    case.sft("config.toml", &random).ok();
    assert_eq!(essences(&first), essences(&case.steps("run")));
    case.sft("config.toml", &[&random[..], &["train.seed=6"]].concat()).ok();
    assert_ne!(first[0]["loss"], case.steps("run")[0]["loss"]);
}

#[test]
fn epochs_may_be_fractions() {
    let case = Case::tiny();
    case.write("epochs.toml", &case.read("config.toml").replace("steps = 4", "epochs = 1.5"));
    case.sft("epochs.toml", &[]).ok();
    let steps = case.steps("run");
    close(&column(&steps, "epoch"), &[1.0 / 3.0, 2.0 / 3.0, 1.0, 4.0 / 3.0, 5.0 / 3.0][..steps.len()], 1e-9);
    assert_eq!(steps.len(), 5, "four and a half steps are rounded up");
    case.sft("epochs.toml", &["train.epochs=0.4"]).ok();
    assert_eq!(case.steps("run").len(), 2);
    case.sft("epochs.toml", &["train.steps=3"]).ok().says(&["train.epochs of the file is set aside"]);
    assert_eq!(case.steps("run").len(), 3);
    case.write("epochs.toml", &case.read("config.toml").replace("steps = 4", "steps = 4\nepochs = 1.5"));
    case.sft("epochs.toml", &[]).exits(2).says(&["train.epochs", "train.steps"]);
}

#[test]
fn the_quickstart_runs() {
    let case = Case::tiny();
    let quickstart = Path::new(HERE).join("../../examples/quickstart.toml").canonicalize().unwrap();
    let dir = format!("log.dir={}", case.path("run").display());
    case.sft(quickstart.to_str().unwrap(), &["train.steps=3", &dir]).ok().says(&["> What is temper?", "try it"]);
    let steps = case.steps("run");
    assert_eq!(steps.len(), 3);
    assert!(steps.iter().all(|s| s["aux_loss"].is_number()), "it is a mixture of experts: {steps:?}");
    let evals: Vec<Value> = case.events("run").into_iter().filter(|e| e["event"] == "eval").collect();
    assert!(evals[0]["loss"].as_f64() > evals[1]["loss"].as_f64(), "{evals:?}");
    case.temper(&["generate", "run/hf", "--chat", "Hello", "--max-tokens", "8"]).ok();
}

/// A full disk under stdout costs what would have been printed, and not the run: by one rank and by several alike.
#[test]
fn a_run_that_stdout_does_not_take_is_complete_and_says_so() {
    let case = Case::tiny();
    for ranks in ["1", "2"] {
        let dir = format!("log.dir=of-{ranks}");
        let args = Case::sft_args("config.toml", &[&dir], &["--ranks", ranks]);
        let done = finish(in_shell("exec \"$0\" \"$@\" > /dev/full", &command(&case.dir, &args))).ok();
        let done = done.says(&["warning: standard output could not be written: No space left on device", "The run itself is complete"]);
        assert!(done.stderr.contains(&format!("of-{ranks}/hf")) && case.has(&format!("of-{ranks}/hf/model.safetensors")), "{done:#?}");
        assert!(!done.stderr.contains("error:"), "{done:#?}");
    }
    let plan = command(&case.dir, &["bench", "comm", "--transport", "threads", "--max", "4K"]);
    let done = finish(in_shell("exec \"$0\" \"$@\" > /dev/full", &plan)).exits(1);
    done.says(&["error: standard output cannot be written: No space left on device"]);
}
