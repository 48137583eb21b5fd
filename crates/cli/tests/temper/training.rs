//! Training runs whose faults people reported in other tools: data, masks, normalisation, vocabulary.

use crate::safetensors;
use crate::support::{Case, close, column, shared};

#[test]
fn the_end_token_is_trained_where_padding_is_the_same_token() {
    let case = Case::new("08-pad-equals-eos");
    case.sft("config.toml", &[]).ok();
    let steps = case.steps("run");
    assert_eq!(steps.len(), 1);
    assert_eq!(steps[0]["trained_tokens"], 19);
    close(&column(&steps, "loss"), &[7.728395], 1e-5);
}

#[test]
fn a_run_without_a_trainable_token_does_not_start() {
    let case = Case::new("09-truncation");
    case.sft("all-long.toml", &[]).exits(2).says(&["seq_len", "no trainable token is left"]);
    assert!(!case.has("run"));
}

#[test]
fn unusual_roles_stop_a_run_and_name_their_rows() {
    let case = Case::new("13-role-order-and-names");
    case.config("data.jsonl");
    let rows = [5, 6, 7, 8, 9].map(|n| format!("data.jsonl:{n}"));
    let mut said: Vec<&str> = rows.iter().map(String::as_str).collect();
    said.extend(["data.max_bad_rows", "5 of 9 rows", "bot", "Assistant"]);
    case.sft("config.toml", &[]).exits(2).says(&said);
    assert!(!case.has("run"));

    case.sft("config.toml", &["data.max_bad_rows=0.6", "train.steps=1"]).ok();
    let notices = case.notices("run");
    assert!(notices.contains("5 bad rows left out") && notices.contains("data.jsonl:6"), "{notices}");
    assert_eq!(case.events("run")[0]["samples"], 4);
}

#[test]
fn malformed_lines_stop_a_run_and_name_their_place() {
    let case = Case::new("17-broken-json");
    case.config("");
    for (file, bad) in [
        ("trailing-comma.jsonl", &[2, 3][..]),
        ("truncated-last.jsonl", &[3]),
        ("two-on-a-line.jsonl", &[2]),
        ("duplicate-keys.jsonl", &[2, 3]),
        ("nan.jsonl", &[2, 3]),
        ("not-objects.jsonl", &[2, 3, 4, 5]),
        ("control-char.jsonl", &[2]),
        ("deep.jsonl", &[2]),
        ("python-dict.jsonl", &[2]),
    ] {
        let train = format!("data.train=[\"{file}\"]");
        let rows: Vec<String> = bad.iter().map(|n| format!("{file}:{n}:")).collect();
        let mut said: Vec<&str> = rows.iter().map(String::as_str).collect();
        said.push("data.max_bad_rows");
        case.sft("config.toml", &[&train]).exits(2).says(&said);
        assert!(!case.has("run"), "{file}");
    }
    for file in ["array.jsonl", "lines.json"] {
        case.sft("config.toml", &[&format!("data.train=[\"{file}\"]"), "train.steps=1"]).ok();
        assert_eq!(case.events("run")[0]["samples"], 2, "{file}");
    }
}

/// A row of a megabyte is longer than any block that a reader takes at once.
#[test]
fn a_very_long_row_is_read_whole_and_in_little_memory() {
    let case = Case::tiny();
    let row = |text: &str| {
        format!("{{\"messages\": [{{\"role\": \"user\", \"content\": \"{text}\"}}, {{\"role\": \"assistant\", \"content\": \"ok\"}}]}}\n")
    };
    case.write("long.jsonl", &[row("before"), row(&"words ".repeat(170_000)), row("after")].concat());
    let train = "data.train=[\"long.jsonl\"]";
    let stats = case.temper(&["data", "stats", "config.toml", "--json", "--set", train]).ok().json();
    assert_eq!(stats["rows"], 3);
    assert_eq!(stats["kept"], 2);
    assert_eq!(stats["cut"]["dropped_no_trained_token"], 1);
    assert!(stats["lengths"]["max"].as_u64().unwrap() > 170_000, "{stats}");

    case.sft("config.toml", &[train, "train.steps=1", "train.global_batch=2"]).ok();
    let step = &case.steps("run")[0];
    assert!(step["mem_peak_bytes"].as_u64().unwrap() < 400_000_000, "{step}");
    assert!(case.notices("run").contains("1 samples dropped because no token of theirs is trained"));
}

#[test]
fn loss_and_gradient_do_not_depend_on_micro_batches_or_packing() {
    let case = Case::new("22-gradient-accumulation");
    let expected = case.json("expected.json");
    for (config, sets, key) in [
        ("mb1.toml", &[][..], "token_mean"),
        ("mb2.toml", &[], "token_mean"),
        ("mb4.toml", &[], "token_mean"),
        ("mb1.toml", &["data.packing=true"], "token_mean"),
        ("mb2.toml", &["data.packing=true"], "token_mean"),
        ("mb4.toml", &["data.packing=true"], "token_mean"),
        ("megatron.toml", &[], "microbatch_1"),
        ("one-masked.toml", &[], "one_masked_token_mean"),
        ("one-masked.toml", &["data.packing=true"], "one_masked_token_mean"),
    ] {
        case.sft(config, sets).ok();
        let (steps, want) = (case.steps("run"), &expected[key]);
        for step in &steps {
            assert_eq!(step["trained_tokens"], want["trained_tokens"], "{config} {sets:?}");
        }
        let want = want["steps"].as_array().unwrap();
        close(&column(&steps, "loss"), &column(want, "loss"), 1e-5);
        close(&column(&steps, "grad_norm"), &column(want, "grad_norm"), 1e-4);
    }
}

#[test]
fn the_vocabulary_of_the_model_survives() {
    let case = Case::new("23-vocabulary-sizes");
    case.sft("padded.toml", &[]).ok();
    case.temper(&["checkpoint", "export", "run", "--out", "out"]).ok();
    let base = safetensors::read(&case.path("../common/tiny-qwen3/model.safetensors"));
    for export in ["run/hf", "out"] {
        assert_eq!(case.json(&format!("{export}/config.json"))["vocab_size"], 320);
        let tensors = safetensors::read(&case.path(&format!("{export}/model.safetensors")));
        assert_eq!(tensors["lm_head.weight"].shape, [320, 32]);
        let (embed, was) = (&tensors["model.embed_tokens.weight"], &base["model.embed_tokens.weight"]);
        assert_eq!(embed.shape, [320, 32]);
        let row = 32 * was.width();
        assert_eq!(embed.bytes[303 * row..], was.bytes[303 * row..], "rows past the tokenizer are not trained");
        assert_ne!(embed.bytes[..303 * row], was.bytes[..303 * row]);
    }
    for config in ["added-tokens-fit.toml", "uses-extra.toml"] {
        case.sft(config, &["log.dir=fits"]).ok();
    }
    let ids = case.temper(&["data", "preview", "uses-extra.toml", "--json"]).ok().lines();
    assert!(ids[0]["input_ids"].as_array().unwrap().contains(&308.into()), "{ids:?}");
}

#[test]
fn a_tokenizer_with_more_tokens_than_the_model_has_rows_is_refused() {
    let case = Case::new("23-vocabulary-sizes");
    case.sft("added-tokens.toml", &[]).exits(2).says(&["323", "320"]);
    if let Some(tokenizer) = shared("tokenizers/qwen3") {
        case.sft("padded.toml", &[&format!("model.tokenizer={}", tokenizer.display())]).exits(2).says(&["151669", "320"]);
    }
    assert!(!case.has("run"));
}

#[test]
fn a_run_that_would_train_nothing_is_refused() {
    let case = Case::tiny();
    let thin = "data.train=[{path=\"chat.jsonl\", weight=0.001}]";
    case.sft("config.toml", &[thin, "train.epochs=1"]).exits(2).says(&["train.epochs", "no step at all"]);
    assert!(!case.has("run"));
}
