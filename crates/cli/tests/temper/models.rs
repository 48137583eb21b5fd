//! Model folders: golden values of every architecture, and the config and weight layouts that other tools misread.

use crate::safetensors::{self, Tensors};
use crate::support::{Case, Done, HERE, names};
use serde_json::Value;
use std::path::PathBuf;

/// Models of all architectures, each of 320 rows, with the values of transformers.
pub const FIXTURES: [&str; 6] = ["llama", "qwen2", "qwen3_dense", "qwen3_dense_tied", "qwen3_moe", "qwen3_moe_sparse_step"];

/// The folder of one of them.
pub fn fixture(name: &str) -> PathBuf {
    PathBuf::from(HERE).join("../model/tests/fixtures").join(name)
}

fn compare(case: &Case, model: &str, golden: &str, more: &[&str]) -> Done {
    let args: Vec<&str> = ["verify", model, "--golden", golden].into_iter().chain(more.iter().copied()).collect();
    case.temper(&args)
}

/// The names of the items compared, up to the first `/`.
fn kinds(report: &Value) -> Vec<String> {
    let names = report["items"].as_array().unwrap().iter().map(|i| i["name"].as_str().unwrap().split('/').next().unwrap().to_string());
    let mut kinds: Vec<String> = names.collect();
    kinds.dedup();
    kinds
}

#[test]
fn every_architecture_equals_its_golden_values() {
    let case = Case::tiny();
    for name in FIXTURES {
        let (model, golden) = (fixture(name), fixture(name).join("golden.safetensors"));
        let report = compare(&case, model.to_str().unwrap(), golden.to_str().unwrap(), &["--tol", "1e-4", "--json"]).ok().json();
        assert_eq!(report["passes"], true, "{name}");
        let kinds = kinds(&report);
        for kind in ["logits", "loss", "grad", "step_loss", "step_grad_norm", "trained", "greedy"] {
            assert!(kinds.iter().any(|k| k == kind), "{name}: {kind} is not compared: {kinds:?}");
        }
        assert_eq!(kinds.iter().any(|k| k == "aux_loss"), name.contains("moe"), "{name}: {kinds:?}");
    }
}

/// Compares with the golden values of a mixture-of-experts model, changed by `change` and written where the case can give them to the
/// binary.
fn changed(case: &Case, change: impl FnOnce(&mut Tensors)) -> Done {
    changed_with(case, &[], change)
}

/// As [`changed`], with more arguments.
pub fn changed_with(case: &Case, more: &[&str], change: impl FnOnce(&mut Tensors)) -> Done {
    let model = fixture("qwen3_moe");
    let mut golden = safetensors::read(&model.join("golden.safetensors"));
    change(&mut golden);
    safetensors::write(&case.path("changed.safetensors"), &golden);
    compare(case, model.to_str().unwrap(), "changed.safetensors", &[&["--json"], more].concat())
}

#[test]
fn one_wrong_golden_number_is_found() {
    let case = Case::tiny();
    for (item, at) in [
        ("logits", 1234),
        ("loss", 0),
        ("aux_loss", 0),
        ("grad/model.layers.1.self_attn.k_norm.weight", 3),
        ("step_loss", 4),
        ("step_grad_norm", 2),
        ("trained/model.norm.weight", 7),
        ("greedy", 5),
    ] {
        let report = changed(&case, |golden| {
            let tensor = golden.get_mut(item).unwrap();
            let width = tensor.width();
            // The second byte from the top of a float changes it by a quarter at least; the lowest of an integer by one.
            let byte = if tensor.dtype.starts_with('I') { at * width } else { (at + 1) * width - 2 };
            tensor.bytes[byte] ^= if tensor.dtype.starts_with('I') { 1 } else { 0x40 };
        });
        let report = report.exits(1).json();
        let wrong: Vec<&str> = report["items"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|i| i["error"].as_f64().is_none_or(|e| e > 1e-4))
            .map(|i| i["name"].as_str().unwrap())
            .collect();
        assert_eq!(wrong, [item]);
    }
}

#[test]
fn a_golden_gradient_that_the_model_lacks_is_a_difference() {
    let case = Case::tiny();
    let report = changed(&case, |golden| {
        let norm = golden.remove("grad/model.norm.weight").unwrap();
        golden.insert("grad/model.norm.bias".into(), norm);
    });
    report.exits(1).says(&["grad/model.norm.bias (the model has no such parameter)"]);
}

#[test]
fn a_golden_file_may_hold_any_subset() {
    let case = Case::tiny();
    for kind in ["logits", "loss", "greedy", "trained", "step_loss", "step_grad_norm", "grad", "aux_loss"] {
        let needed = |name: &str| ["input_ids", "labels"].contains(&name) || name.split('/').next() == Some(kind);
        let report = changed(&case, |golden| golden.retain(|name, _| needed(name))).ok().json();
        assert_eq!(kinds(&report), [kind]);
    }
    let nothing = changed(&case, |golden| golden.retain(|name, _| ["input_ids", "labels"].contains(&name.as_str())));
    assert_eq!(nothing.exits(1).json()["passes"], false);
    compare(&case, "../common/tiny-qwen3", "absent.safetensors", &[]).exits(2).says(&["--golden absent.safetensors"]);
    changed(&case, |golden| golden.retain(|name, _| name == "logits")).exits(2).says(&["changed.safetensors", "input_ids"]);
}

#[test]
fn files_that_the_index_does_not_name_are_not_read_and_missing_ones_are_named() {
    let case = Case::new("25-safetensors-index");
    for name in ["good", "stale-single-file", "stale-third-shard", "wrong-total-size"] {
        compare(&case, name, "golden.safetensors", &[]).ok();
    }
    compare(&case, "unknown-extra-tensor", "golden.safetensors", &[]).ok().says(&["model.layers.7"]);
    for (name, said) in [
        ("missing-shard", "model-00002-of-00002.safetensors"),
        ("tensor-in-no-shard", "lm_head.weight"),
        ("index-points-to-wrong-shard", "model-0000"),
        ("path-escape", "model.safetensors.index.json"),
        ("index-not-json", "model.safetensors.index.json"),
        ("no-weights", "no-weights"),
    ] {
        compare(&case, name, "golden.safetensors", &[]).exits(2).says(&[said]);
    }
}

/// A tokenizer of seven words, so that the models of forty rows can be trained.
const WORDS: &str = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
 "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
 "model": {"type": "WordLevel", "unk_token": "?", "vocab": {"?": 0, "user:": 1, "assistant:": 2, "one": 3, "two": 4, "three": 5, ".": 6}}}"#;
const TEMPLATE: &str =
    "{% for m in messages %}{{ m.role }}: {{ m.content }} .\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}";

/// Writes that tokenizer as `words/`, two chats, and a `config.toml` for them.
pub fn seven_words(case: &Case) {
    case.config("chat.jsonl");
    std::fs::create_dir(case.path("words")).unwrap();
    case.write("words/tokenizer.json", WORDS);
    case.write("words/tokenizer_config.json", "{\"eos_token\": \".\"}");
    case.write("words/chat_template.jinja", TEMPLATE);
    let row = r#"{"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two three"}]}"#;
    case.write("chat.jsonl", &format!("{row}\n{row}\n"));
}

#[test]
fn training_starts_from_good_shards_only() {
    let case = Case::new("25-safetensors-index");
    seven_words(&case);
    for name in names(&case.dir).iter().filter(|n| case.has(&format!("{n}/config.json"))) {
        let good = ["good", "stale-single-file", "stale-third-shard", "wrong-total-size", "unknown-extra-tensor"].contains(&name.as_str());
        let run = format!("log.dir=run-{name}");
        let done =
            case.sft("config.toml", &[&format!("model.path={name}"), "model.tokenizer=words", "train.steps=1", "data.seq_len=64", &run]);
        done.exits(if good { 0 } else { 2 });
        assert_eq!(case.has(&format!("run-{name}")), good, "{name}");
    }
}

#[test]
fn the_rope_base_is_found_in_every_layout() {
    let case = Case::new("27-rope-config-forms");
    let (new, old) = ("golden-theta-500000.safetensors", "golden-theta-10000.safetensors");
    for form in ["new", "old", "both-agree", "scaling-default"] {
        compare(&case, form, new, &[]).ok();
        compare(&case, form, old, &[]).exits(1);
    }
    compare(&case, "conflict", new, &[]).ok().says(&["rope_theta", "500000", "10000"]);
    compare(&case, "absent", old, &[]).ok();
    compare(&case, "absent", new, &[]).exits(1);
    for (form, kind) in [("yarn-old", "yarn"), ("yarn-new", "yarn"), ("linear", "linear")] {
        compare(&case, form, new, &[]).exits(2).says(&[kind]);
    }
}

#[test]
fn experts_and_head_dims_are_found_under_every_name() {
    let case = Case::new("29-moe-and-head-dim-names");
    for form in ["old-per-expert", "new-per-expert", "new-fused", "head-dim-absent", "head-dim-null"] {
        compare(&case, form, "golden-normalised.safetensors", &[]).ok();
        compare(&case, form, "golden-not-normalised.safetensors", &[]).exits(1);
    }
    compare(&case, "norm-absent", "golden-not-normalised.safetensors", &[]).ok();
    let dense = "golden-dense.safetensors";
    compare(&case, "both-names-disagree", dense, &[]).exits(2).says(&["num_experts", "num_local_experts"]);
    compare(&case, "one-expert-missing", dense, &[]).exits(2).says(&["model.layers.1.mlp.experts.3.gate_proj.weight"]);
    compare(&case, "dense-head-dim-wrong", dense, &[]).exits(2).says(&["head_dim", "16", "[16, 16]"]);
    compare(&case, "dense-head-dim-null", dense, &[]).ok();
    compare(&case, "dense-head-dim-absent", dense, &[]).exits(2).says(&["head_dim", "[16, 16]"]);
}
