//! Exports: a whole model or nothing, with the end tokens that chat training taught.

use crate::safetensors;
use crate::support::{Case, contents, copy, names};
use serde_json::json;
use std::fs;

#[test]
fn an_export_over_an_older_model_replaces_it_whole_or_not_at_all() {
    let case = Case::new("41-export-over-old-files");
    case.sft("config.toml", &[]).ok();
    copy(&case.path("target"), &case.path("out"));
    let export = ["checkpoint", "export", "run", "--out", "out", "--dtype", "f32"];
    case.temper(&export).exits(2).says(&["out", "not empty", "--overwrite"]);
    let bytes = |dir: &str| contents(&case.path(dir)).into_iter().map(|(_, b)| b).collect::<Vec<_>>();
    assert_eq!(bytes("target"), bytes("out"));

    case.temper(&[&export[..], &["--overwrite"]].concat()).ok();
    assert_eq!(case.read("out/notes.txt"), case.read("target/notes.txt"));
    let old = ["model-0000", "model.safetensors.index.json", "pytorch_model.bin"];
    let left: Vec<String> = names(&case.path("out")).into_iter().filter(|n| old.iter().any(|o| n.starts_with(o))).collect();
    assert_eq!(left, Vec::<String>::new());
    for export in ["out", "run/hf"] {
        let (got, base) = (case.path(export), case.path("../common/tiny-qwen3"));
        assert_eq!(safetensors::read(&got.join("model.safetensors")), safetensors::read(&base.join("model.safetensors")), "lr is 0");
        for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
            assert_eq!(fs::read(got.join(file)).unwrap(), fs::read(base.join(file)).unwrap(), "{file}");
        }
        assert_eq!(case.json(&format!("{export}/generation_config.json"))["eos_token_id"], json!([302, 300]));
        let mut config = case.json(&format!("{export}/config.json"));
        assert_eq!(config["vocab_size"], 320);
        config.as_object_mut().unwrap().retain(|k, _| !k.ends_with("dtype"));
        let mut was = case.json("../common/tiny-qwen3/config.json");
        was.as_object_mut().unwrap().retain(|k, _| !k.ends_with("dtype"));
        assert_eq!(config, was);
        case.temper(&["generate", export, "--chat", "Say stop."]).ok().says(&["stop"]);
    }
}

#[test]
fn training_a_base_model_on_chats_adds_the_end_of_turn() {
    let case = Case::tiny();
    copy(&case.path("../common/tiny-qwen3"), &case.path("base"));
    fs::remove_file(case.path("base/generation_config.json")).unwrap();
    let variant = crate::generate::variants().join("base-model-eos");
    copy(&variant, &case.path("base"));
    case.sft("config.toml", &["model.path=base", "train.steps=1"]).ok();
    case.temper(&["checkpoint", "export", "run", "--out", "out"]).ok();
    for export in ["run/hf", "out"] {
        let eos = &case.json(&format!("{export}/generation_config.json"))["eos_token_id"];
        assert_eq!(*eos, json!([300, 302]), "{export}");
    }
    assert!(!case.has("base/generation_config.json"), "the base model is not touched");
}

#[test]
fn an_export_never_replaces_a_checkpoint_or_a_run() {
    let case = Case::tiny();
    case.sft("config.toml", &["train.steps=1"]).ok();
    let before = contents(&case.path("run"));
    for out in ["run", "run/checkpoints", "run/checkpoints/step-000001", "run/checkpoints/step-000001/new"] {
        case.temper(&["checkpoint", "export", "run", "--out", out, "--overwrite"]).exits(2).says(&["belongs to a run"]);
    }
    assert!(before == contents(&case.path("run")));
}

#[test]
fn a_bfloat16_export_comes_back_close() {
    let case = Case::tiny();
    case.sft("config.toml", &["train.steps=1", "optim.lr=0.0"]).ok();
    case.temper(&["checkpoint", "export", "run/checkpoints/step-000001", "--out", "half", "--dtype", "bf16"]).ok();
    let config = case.json("half/config.json");
    assert!(config.as_object().unwrap().iter().any(|(k, v)| k.ends_with("dtype") && v == "bfloat16"), "{config}");
    let half = safetensors::read(&case.path("half/model.safetensors"));
    let base = safetensors::read(&case.path("../common/tiny-qwen3/model.safetensors"));
    assert_eq!(half.keys().collect::<Vec<_>>(), base.keys().collect::<Vec<_>>());
    for (name, was) in &base {
        assert_eq!((half[name].dtype.as_str(), &half[name].shape), ("BF16", &was.shape));
        for (half, was) in half[name].bytes.chunks_exact(2).zip(was.floats()) {
            let got = f32::from_bits(u32::from(u16::from_le_bytes(half.try_into().unwrap())) << 16);
            assert!((got - was).abs() <= was.abs() / 256.0, "{name}: {got} and {was}"); // half of the last of 8 bits
        }
    }
    case.temper(&["generate", "half", "--chat", "Count to five."]).ok().says(&["one two three four five"]);

    let key = ["checkpoint.export_dtype=bfloat16", "train.steps=1", "optim.lr=0.0"];
    case.sft("config.toml", &key).ok();
    assert_eq!(fs::read(case.path("run/hf/model.safetensors")).unwrap(), fs::read(case.path("half/model.safetensors")).unwrap());
    // A model that came in bfloat16 goes out so, although its checkpoints are float32.
    case.sft("config.toml", &["model.path=half", "train.steps=1", "optim.lr=0.0"]).ok();
    case.temper(&["checkpoint", "export", "run", "--out", "again"]).ok();
    for export in ["run/hf", "again"] {
        assert!(safetensors::read(&case.path(export).join("model.safetensors")) == half, "{export}");
    }
    assert_eq!(safetensors::read(&case.path("run/checkpoints/step-000001/model.safetensors"))["lm_head.weight"].dtype, "F32");
    case.sft("config.toml", &["checkpoint.export=false", "train.steps=1"]).ok();
    assert!(!case.has("run/hf"));
}

#[test]
fn a_bfloat16_export_passes_a_loose_comparison() {
    let case = Case::new("25-safetensors-index");
    // A step at rate 0 on the golden model needs a tokenizer of at most its forty rows: see `models`.
    crate::models::seven_words(&case);
    case.sft("config.toml", &["model.path=good", "model.tokenizer=words", "train.steps=1", "optim.lr=0.0", "data.seq_len=64"]).ok();
    let verify = |model: &str, tol: &str| case.temper(&["verify", model, "--golden", "golden.safetensors", "--tol", tol]);
    verify("run/hf", "1e-5").ok();
    case.temper(&["checkpoint", "export", "run", "--out", "half", "--dtype", "bf16"]).ok();
    verify("half", "1e-4").exits(1);
    verify("half", "3e-2").ok();
}

#[test]
fn checkpoints_are_listed_and_verified() {
    let case = Case::tiny();
    case.sft("config.toml", &["checkpoint.every=2"]).ok();
    let list = case.temper(&["checkpoint", "list", "run", "--json"]).ok().json();
    let entries = list.as_array().unwrap();
    assert_eq!(entries.len(), 2);
    for (entry, step) in entries.iter().zip(["step-000002", "step-000004"]) {
        let path = case.path("run/checkpoints").join(step);
        assert_eq!(entry["path"], path.to_str().unwrap());
        assert_eq!(entry["whole"], true);
        let bytes: u64 = names(&path).iter().map(|n| path.join(n).metadata().unwrap().len()).sum();
        assert_eq!(entry["bytes"], bytes);
    }
    case.temper(&["checkpoint", "list", "run"]).ok().says(&["checkpoint", "step-000002", "whole"]);
    for path in ["run", "run/checkpoints", "run/checkpoints/step-000004"] {
        case.temper(&["checkpoint", "verify", path]).ok().says(&["step-000004", "good"]);
    }
    case.temper(&["checkpoint", "verify", "nowhere"]).exits(2).says(&["nowhere"]);
    case.temper(&["checkpoint", "list", "../common"]).exits(2).says(&["neither a run folder"]);
    case.temper(&["checkpoint", "export", "run", "--out", "config.toml"]).exits(2).says(&["config.toml", "is a file"]);
}
