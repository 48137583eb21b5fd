//! What a NaN does to a run.

use crate::safetensors;
use crate::support::{Case, copy};

/// A copy of the tiny model, as `broken/`, with one weight that is not a number.
fn broken(name: &str) -> Case {
    let case = Case::tiny();
    copy(&case.path("../common/tiny-qwen3"), &case.path("broken"));
    let file = case.path("broken/model.safetensors");
    let mut tensors = safetensors::read(&file);
    tensors.get_mut(name).unwrap().bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    safetensors::write(&file, &tensors);
    case
}

/// One weight decay of 100 times the weight a step: f32 overflows within twenty steps.
const DIVERGING: [&str; 5] = ["train.steps=30", "optim.lr=10.0", "optim.weight_decay=10.0", "optim.schedule=constant", "optim.warmup=0"];

#[test]
fn a_nan_stops_the_run_and_is_located() {
    let case = broken("model.layers.1.mlp.down_proj.weight");
    let done = case.sft("config.toml", &["model.path=broken", "train.shuffle=false"]).exits(1);
    done.says(&["step 1: ", "layers.1", "chat.jsonl:1,", "chat.jsonl:2.", "train.on_non_finite"]);
    assert_eq!(case.steps("run").len(), 0);
    assert!(!case.has("run/hf"));
    assert!(!case.has("run/checkpoints"));
}

/// A rank of another stage, and one of two that share each matrix, has the weight; all tell the same, and none waits for another.
#[test]
fn ranks_locate_a_nan_together() {
    let case = broken("model.layers.1.mlp.down_proj.weight");
    for (layout, dir) in [("parallel.pp=2", "log.dir=pp"), ("parallel={tp=2,pp=2}", "log.dir=tp")] {
        let sets = ["model.path=broken", "train.shuffle=false", layout, dir];
        let done = case.sft("config.toml", &sets).exits(1);
        done.says(&["step 1: ", "first in weight model.layers.1.mlp.down_proj.weight", "chat.jsonl:1,"]);
        let skip = [&sets[..], &["train.on_non_finite=skip", "train.steps=3", "checkpoint.export=false"]].concat();
        case.sft("config.toml", &skip).ok().says(&["Update skipped (3)"]);
    }
}

#[test]
fn a_diverging_run_stops_before_its_weights_are_spoilt() {
    let case = Case::tiny();
    let stopped = case.sft("config.toml", &[&DIVERGING[..], &["checkpoint.every=1"]].concat()).exits(1);
    let steps = case.steps("run");
    let last = steps.len();
    assert!(last > 0 && last < 30);
    stopped.says(&[&format!("step {}: ", last + 1), "chat.jsonl:"]);
    assert!(steps.iter().all(|s| s["loss"].is_number() && s["grad_norm"].is_number()));
    assert_eq!(case.checkpoints("run").last(), Some(&last));
    case.temper(&["checkpoint", "verify", "run"]).ok();
}

#[test]
fn skipped_updates_are_counted_and_change_nothing() {
    let case = Case::tiny();
    case.sft("config.toml", &[&DIVERGING[..], &["train.on_non_finite=skip", "checkpoint.every=1", "checkpoint.keep_last=0"]].concat()).ok();
    let steps = case.steps("run");
    assert_eq!(steps.len(), 30);
    let skipped: Vec<usize> = (1..=30).filter(|n| steps[n - 1]["skipped"] == true).collect();
    let first = *skipped.first().expect("the run diverges");
    let end = case.events("run").pop().unwrap();
    assert_eq!((&end["event"], &end["skipped"]), (&"end".into(), &skipped.len().into()));
    assert_eq!(case.notices("run").matches("Update skipped").count(), skipped.len());
    let weights = |step: usize| safetensors::read(&case.path(&format!("run/checkpoints/step-{step:06}/model.safetensors")));
    assert_eq!(weights(first - 1), weights(first));
    let state = case.json(&format!("run/checkpoints/step-{first:06}/state.json"));
    assert_eq!((&state["state"]["updates"], &state["state"]["skipped"]), (&(first - 1).into(), &1.into()));
}
