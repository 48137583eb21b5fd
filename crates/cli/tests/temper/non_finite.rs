//! What a NaN does to a run.

use crate::safetensors;
use crate::support::{Case, column, copy};

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
        case.sft("config.toml", &skip).exits(1).says(&[
            "Update skipped (3)",
            "the run has diverged",
            "No checkpoint is there that a later step has shown to be good",
        ]);
    }
}

#[test]
fn a_diverging_run_stops_before_its_weights_are_spoilt() {
    let case = Case::tiny();
    let stopped = case.sft("config.toml", &[&DIVERGING[..], &["checkpoint.every=1"]].concat()).exits(1);
    let steps = case.steps("run");
    let last = steps.len();
    assert!(last > 0 && last < 30);
    stopped.says(&[&format!("step {}: ", last + 1), "chat.jsonl:", "The last checkpoint that a later step has shown to be good is"]);
    assert!(steps.iter().all(|s| s["loss"].is_number() && s["grad_norm"].is_number()));
    assert_eq!(case.checkpoints("run").last(), Some(&last));
    case.temper(&["checkpoint", "verify", "run"]).ok();
}

#[test]
fn skipped_updates_are_counted_and_change_nothing() {
    let case = Case::tiny();
    let sets = ["train.on_non_finite=skip", "checkpoint.every=1", "checkpoint.keep_last=0"];
    let done = case.sft("config.toml", &[&DIVERGING[..], &sets].concat()).exits(1);
    let steps = case.steps("run");
    let skipped: Vec<usize> = (1..=steps.len()).filter(|n| steps[n - 1]["skipped"] == true).collect();
    let first = *skipped.first().expect("the run diverges");
    // Ten in a row are enough, and the run ends with the last checkpoint named that is not of them.
    assert_eq!(skipped, (first..first + 10).collect::<Vec<_>>());
    assert_eq!(steps.len(), first + 9);
    let done = done.says(&["the run has diverged: updates that had to be skipped, 10 steps in a row"]);
    // The last whose weights a later step showed to be good.
    let good = (1..first).rev().find(|n| steps[n - 1]["loss"].as_f64().unwrap() < 11.5).unwrap_or(0) - 1;
    assert!(good > 0 && done.stderr.contains(&format!("step-{good:06} (--resume {good})")), "{good}: {done:#?}");
    assert_eq!(case.notices("run").matches("Update skipped").count(), skipped.len());
    let weights = |step: usize| safetensors::read(&case.path(&format!("run/checkpoints/step-{step:06}/model.safetensors")));
    assert_eq!(weights(first - 1), weights(first));
    let state = case.json(&format!("run/checkpoints/step-{first:06}/state.json"));
    assert_eq!((&state["state"]["updates"], &state["state"]["skipped"]), (&(first - 1).into(), &1.into()));
}

/// A learning rate far too high: the losses stay numbers, and none of them is one of a model that knows anything. What was saved before
/// the first of them is named, though three newer checkpoints are there, of which it would have been removed.
#[test]
fn a_run_whose_loss_runs_away_fails_and_exports_nothing() {
    let case = Case::tiny();
    let sets = ["optim.warmup=0", "optim.schedule=constant", "optim.weight_decay=0", "checkpoint.every=1", "checkpoint.export=false"];
    case.sft("config.toml", &[&sets[..], &["train.steps=2"]].concat()).ok();
    let hot = [&sets[..4], &["train.steps=8", "optim.lr=10.0"]].concat();
    let done = case.resume("config.toml", &hot).exits(1);
    let done = done.says(&["the run has diverged: losses far beyond where they began", "Lower optim.lr"]);
    let losses = column(&case.steps("run"), "loss");
    assert!(losses.len() == 8 && losses[2] < 11.0 && losses[4..].iter().all(|l| *l > 12.0), "{losses:?}");
    // Step 3 began with good weights and left bad ones.
    assert!(done.stderr.contains("step-000002 (--resume 2)") && !case.has("run/hf"), "{done:#?}");
    assert_eq!(case.checkpoints("run"), [1, 2, 3, 4, 5, 6, 7]);
    // Who goes on from where it was lost is measured by where the run began, and not by what it had become.
    let lost = [&sets[..], &["train.steps=12", "optim.lr=10.0"]].concat();
    case.resume("config.toml", &lost).exits(1).says(&["the run has diverged", "the first was 5.950"]);
}
