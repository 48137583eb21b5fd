//! Every architecture through training, checkpoint, resume and export.

use crate::models::{FIXTURES, fixture};
use crate::safetensors;
use crate::support::{Case, close, column, essences};
use std::fs;

/// The tiny data for a model of 320 rows, with micro-batches of several sequences.
fn model(name: &str) -> [String; 2] {
    [format!("model.path={}", fixture(name).display()), "model.tokenizer=../common/tiny-tokenizer".into()]
}

fn sets<'a>(model: &'a [String; 2], more: &[&'a str]) -> Vec<&'a str> {
    model.iter().map(String::as_str).chain(more.iter().copied()).collect()
}

#[test]
fn an_export_after_training_at_rate_0_is_the_model_that_came_in() {
    let case = Case::tiny();
    for name in FIXTURES {
        case.sft("config.toml", &sets(&model(name), &["train.steps=1", "optim.lr=0.0"])).ok();
        let (base, hf) =
            (safetensors::read(&fixture(name).join("model.safetensors")), safetensors::read(&case.path("run/hf/model.safetensors")));
        assert!(base == hf, "{name}: {:?} and {:?}", base.keys(), hf.keys());
        let golden = fixture(name).join("golden.safetensors");
        case.temper(&["verify", "run/hf", "--golden", golden.to_str().unwrap()]).ok();
    }
}

#[test]
fn a_resume_is_bitwise_in_every_architecture() {
    let case = Case::tiny();
    for name in FIXTURES {
        let model = model(name);
        let whole = sets(&model, &["data.packing=true", "train.global_batch=2", "checkpoint.every=2"]);
        case.sft("config.toml", &whole).ok();
        let undisturbed = case.steps("run");
        let weights = fs::read(case.path("run/hf/model.safetensors")).unwrap();
        fs::remove_dir_all(case.path("run/checkpoints/step-000004")).unwrap();
        fs::remove_dir_all(case.path("run/hf")).unwrap();
        case.temper(&Case::sft_args("config.toml", &whole, &["--resume", "--threads", "1"])).ok();
        let events = case.steps("run");
        assert_eq!(essences(&undisturbed[2..]), essences(&events[4..]), "{name}");
        assert!(weights == fs::read(case.path("run/hf/model.safetensors")).unwrap(), "{name}");
        if name.contains("moe") {
            assert_eq!(column(&undisturbed[2..], "aux_loss"), column(&events[4..], "aux_loss"), "{name}");
        }
    }
}

#[test]
fn recomputing_changes_no_result_in_any_architecture() {
    let case = Case::tiny();
    for name in FIXTURES {
        let model = model(name);
        case.sft("config.toml", &sets(&model, &["log.dir=plain"])).ok();
        case.sft("config.toml", &sets(&model, &["log.dir=again", "memory.recompute=full"])).ok();
        for key in ["loss", "grad_norm"] {
            close(&column(&case.steps("again"), key), &column(&case.steps("plain"), key), 1e-6);
        }
    }
}

#[test]
fn auxiliary_losses_are_those_that_are_asked_for() {
    let case = Case::tiny();
    let model = model("qwen3_moe");
    let first = |more: &[&str]| {
        case.sft("config.toml", &sets(&model, &[&["train.steps=1"], more].concat())).ok();
        case.steps("run").remove(0)
    };
    let (auto, none, megatron) = (first(&[]), first(&["train.aux_loss=none"]), first(&["train.aux_loss=megatron"]));
    // Two experts a token: Hugging Face's, all layers pooled, is 2 when balanced; Megatron's is 1 for each of the three layers.
    let aux = |step: &serde_json::Value| step["aux_loss"].as_f64().unwrap();
    assert!((2.0..3.0).contains(&aux(&auto)) && (3.0..5.0).contains(&aux(&megatron)), "{auto} {megatron}");
    assert!(none["aux_loss"].is_null() && none["z_loss"].is_null());
    assert_eq!(auto["loss"], none["loss"], "the reported loss is without them");
    assert_ne!(auto["grad_norm"], none["grad_norm"]);
    let z = first(&["train.z_loss_coef=0.01"]);
    assert!(z["z_loss"].as_f64().unwrap() > 0.0 && z["grad_norm"] != auto["grad_norm"], "{z}");
    assert_eq!(first(&["train.aux_loss_coef=0.0", "train.aux_loss=hf"])["grad_norm"], none["grad_norm"]);
}
