//! Going on with a run: the same numbers to the last bit as if nothing had happened, or a refusal that says why.

use crate::support::{Case, close, column, command, contents, copy, essences, names};
use std::{
    fs,
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

#[test]
fn a_resume_in_mid_epoch_repeats_and_skips_nothing() {
    let case = Case::new("33-resume-data-and-lr");
    case.sft("config.toml", &[]).ok();
    assert_eq!(case.checkpoints("run-a"), [7, 12]);
    copy(&case.path("run-a"), &case.path("run-b"));
    fs::remove_dir_all(case.path("run-b/checkpoints/step-000012")).unwrap();
    case.write("run-b/events.jsonl", "");
    case.resume("config.toml", &["log.dir=run-b"]).ok();

    let (undisturbed, resumed) = (case.steps("run-a"), case.steps("run-b"));
    assert_eq!(essences(&undisturbed[7..]), essences(&resumed));
    let trained = column(&undisturbed, "trained_tokens");
    assert_eq!(trained.chunks(3).map(|epoch| epoch.iter().sum()).collect::<Vec<f64>>(), [546.0; 4]);
    let expected = case.json("expected.json");
    let lr: Vec<f64> = expected["lr_if_first_update_uses_schedule(1)"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
    close(&column(&undisturbed, "lr"), &lr, 1e-6);
    for file in ["hf/model.safetensors", "checkpoints/step-000012/optimizer.safetensors"] {
        assert_eq!(fs::read(case.path("run-a").join(file)).unwrap(), fs::read(case.path("run-b").join(file)).unwrap(), "{file}");
    }
}

const TWENTY: [&str; 4] = ["train.steps=20", "optim.schedule=linear", "checkpoint.every=5", "checkpoint.keep_last=0"];

/// Starts a run and kills it while it saves a checkpoint after the first one. False when the save was over too soon.
fn kill_in_a_save(case: &Case, run: &str) -> bool {
    let sets: Vec<&str> = TWENTY.iter().copied().chain([run]).collect();
    let mut child =
        command(&case.dir, &Case::sft_args("config.toml", &sets, &[])).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let checkpoints = case.path(run.strip_prefix("log.dir=").unwrap()).join("checkpoints");
    let start = Instant::now();
    let saving = |dir| {
        fs::read_dir(dir).is_ok_and(|found| {
            let names: Vec<String> = found.filter_map(|e| e.ok()?.file_name().into_string().ok()).collect();
            names.iter().any(|n| n.starts_with("step-")) && names.iter().any(|n| n.starts_with(".tmp-step-"))
        })
    };
    while !saving(&checkpoints) && child.try_wait().unwrap().is_none() && start.elapsed() < Duration::from_secs(60) {
        thread::sleep(Duration::from_micros(200));
    }
    let _ = child.kill(); // SIGKILL
    child.wait().unwrap();
    names(&checkpoints).iter().any(|n| n.starts_with(".tmp-step-"))
}

#[test]
fn a_run_killed_in_the_middle_of_a_save_goes_on_as_if_nothing_had_happened() {
    let case = Case::tiny();
    case.sft("config.toml", &[&TWENTY[..], &["log.dir=whole"]].concat()).ok();
    let killed = (1..=20).map(|n| format!("log.dir=killed-{n}")).find(|run| kill_in_a_save(&case, run)).expect("no kill hit a save");
    let run = killed.strip_prefix("log.dir=").unwrap();
    let left = case.checkpoints(run);
    assert!(!left.is_empty() && left.len() < 4, "{left:?}");

    case.resume("config.toml", &[&TWENTY[..], &[&killed]].concat()).ok();
    assert!(case.notices(run).contains("left behind by a save that was cut short"), "{}", case.notices(run));
    assert_eq!(case.checkpoints(run), [5, 10, 15, 20]);
    assert!(!names(&case.path(run).join("checkpoints")).iter().any(|n| n.starts_with('.')));

    let (whole, events) = (case.steps("whole"), case.steps(run));
    assert_eq!(whole.len(), 20);
    let from = *left.last().unwrap();
    let resumed = &events[events.len() - (20 - from)..];
    assert_eq!(essences(&whole[from..]), essences(resumed));
    assert_eq!(essences(&whole[..from]), essences(&events[..from]));
    for step in [5, 10, 15, 20] {
        for file in ["model.safetensors", "optimizer.safetensors"] {
            let at = |run: &str| fs::read(case.path(run).join(format!("checkpoints/step-{step:06}")).join(file)).unwrap();
            assert_eq!(at("whole"), at(run), "step {step}: {file}");
        }
    }
    let export = |run: &str| contents(&case.path(run).join("hf")).into_iter().map(|(_, bytes)| bytes).collect::<Vec<_>>();
    assert_eq!(export("whole"), export(run));
}

#[test]
fn a_resume_needs_a_checkpoint() {
    let case = Case::tiny();
    case.resume("config.toml", &[]).exits(2).says(&["run/checkpoints", "no checkpoint to resume from"]);
    assert!(!case.has("run"));
    case.temper(&Case::sft_args("config.toml", &[], &["--resume", "soon"])).exits(2).says(&["--resume soon"]);
}

#[test]
fn what_decides_the_batches_may_not_change() {
    let case = Case::tiny();
    case.sft("config.toml", &["train.steps=2", "checkpoint.every=1"]).ok();
    let before = contents(&case.path("run"));
    case.write("other.jsonl", &case.read("chat.jsonl").replacen("Row a", "Row z", 1));
    for (set, said) in [
        ("train.seed=6", "train.seed was 5 and is now 6"),
        ("train.shuffle=false", "train.shuffle was true and is now false"),
        ("train.global_batch=2", "train.global_batch was 4 and is now 2"),
        ("train.loss_reduction=microbatch", "train.loss_reduction was token and is now microbatch"),
        ("data.packing=true", "data.packing was false and is now true"),
        ("data.seq_len=200", "data.seq_len was 256 and is now 200"),
        ("data.train=[\"other.jsonl\"]", "the data (files, tokenizer, template or loss rule)"),
        ("data.loss=all", "the data (files, tokenizer, template or loss rule)"),
    ] {
        case.resume("config.toml", &[set]).exits(2).says(&[said, "step-000002"]);
    }
    assert!(before == contents(&case.path("run")), "a refused resume changes nothing");
}

#[test]
fn the_model_may_not_change_under_a_run() {
    let case = Case::tiny();
    case.sft("config.toml", &["train.steps=2", "checkpoint.every=1"]).ok();
    copy(&case.path("../common/tiny-qwen3"), &case.path("other"));
    let config = case.read("other/config.json").replace("\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": 0.1");
    case.write("other/config.json", &config);
    case.resume("config.toml", &["model.path=other"]).exits(2).says(&["norm_eps", "and is now 0.1"]);
}

#[test]
fn a_changed_optimizer_is_told_and_a_checkpoint_past_the_end_refused() {
    let case = Case::tiny();
    case.sft("config.toml", &["train.steps=2", "checkpoint.every=1"]).ok();
    case.resume("config.toml", &["train.steps=1", "optim.warmup=0"]).exits(2).says(&["at step 2, past the 1 steps"]);
    case.resume("config.toml", &["train.steps=3", "optim.lr=0.5"]).ok().says(&["optim.lr was", "and is now 0.5", "planned for 2 steps"]);
}

#[test]
fn a_resume_from_a_given_step_repeats_the_rest() {
    let case = Case::tiny();
    let sets = ["checkpoint.every=1", "checkpoint.keep_last=0"];
    case.sft("config.toml", &sets).ok();
    let first = case.steps("run");
    case.temper(&Case::sft_args("config.toml", &sets, &["--resume", "2"])).ok();
    assert_eq!(essences(&case.steps("run")[4..]), essences(&first[2..]));
    case.temper(&Case::sft_args("config.toml", &sets, &["--resume", "9"])).exits(2).says(&["no checkpoint of step 9", "1, 2, 3, 4"]);
}

#[test]
fn a_finished_run_says_so() {
    let case = Case::tiny();
    case.sft("config.toml", &[]).ok();
    let export = fs::read(case.path("run/hf/model.safetensors")).unwrap();
    fs::remove_dir_all(case.path("run/hf")).unwrap();
    case.resume("config.toml", &[]).ok().says(&["already at its last step, 4"]);
    assert_eq!(case.steps("run").len(), 4);
    assert_eq!(fs::read(case.path("run/hf/model.safetensors")).unwrap(), export);
}

#[test]
fn a_longer_plan_goes_on_and_says_so() {
    let case = Case::tiny();
    case.sft("config.toml", &["optim.schedule=constant", "optim.warmup=0"]).ok();
    case.resume("config.toml", &["optim.schedule=constant", "optim.warmup=0", "train.steps=6"]).ok();
    assert!(case.notices("run").contains("planned for 4 steps and is now for 6"));
    case.sft("config.toml", &["optim.schedule=constant", "optim.warmup=0", "train.steps=6", "log.dir=six"]).ok();
    assert_eq!(essences(&case.steps("run")), essences(&case.steps("six")));
}

#[test]
fn a_new_run_moves_an_older_one_aside() {
    let case = Case::tiny();
    case.sft("config.toml", &["train.steps=1"]).ok();
    let old = contents(&case.path("run"));
    case.sft("config.toml", &["train.steps=2"]).ok().says(&["held an earlier run", "run.1"]);
    assert_eq!(case.steps("run").len(), 2);
    assert_eq!(case.steps("run.1").len(), 1);
    assert_eq!(old.len(), contents(&case.path("run.1")).len());
    case.sft("config.toml", &["train.steps=1"]).ok().says(&["run.2"]);
    assert_eq!(case.steps("run.2").len(), 2);
}

/// Training further from a run's own export, or with the data in the run folder: moving it aside would take them along.
#[test]
fn a_run_folder_with_the_inputs_in_it_is_not_moved_aside() {
    let case = Case::tiny();
    case.sft("config.toml", &["train.steps=1"]).ok();
    copy(&case.path("chat.jsonl"), &case.path("run/chat.jsonl"));
    let before = contents(&case.path("run"));
    for (set, said) in [("model.path=run/hf", "run/hf"), ("data.train=[\"run/chat.jsonl\"]", "run/chat.jsonl")] {
        case.sft("config.toml", &[set]).exits(2).says(&["log.dir", "move aside", said]);
    }
    assert!(before == contents(&case.path("run")) && !case.has("run.1"));
    case.sft("config.toml", &["model.path=run/hf", "log.dir=further", "train.steps=1"]).ok();

    case.sft("config.toml", &["log.dir=.", "train.steps=1"]).ok();
    case.sft("config.toml", &["log.dir=.", "train.steps=1"]).exits(2).says(&["log.dir", "config.toml"]);
}

#[test]
fn the_newest_checkpoints_and_multiples_are_kept() {
    let case = Case::tiny();
    let sets = ["train.steps=9", "checkpoint.every=1", "checkpoint.keep_last=2", "checkpoint.keep_every=4"];
    case.sft("config.toml", &sets).ok();
    assert_eq!(case.checkpoints("run"), [4, 8, 9]);
    case.sft("config.toml", &["train.steps=6", "checkpoint.every=2"]).ok();
    assert_eq!(case.checkpoints("run"), [2, 4, 6]);
}

/// As a scheduler ends a job, or a user a run: the step under way is finished and saved, and a resume goes on from it.
#[test]
fn a_run_that_is_asked_to_stop_saves_and_goes_on_later() {
    let case = Case::tiny();
    let common = "--set optim.schedule=constant --set optim.warmup=0 --set checkpoint.every=0";
    let script = format!(
        "$TEMPER sft config.toml {common} --set train.steps=100000 --set log.dir=stopped & pid=$!
         tries=0
         while ! grep -q '\"step\":3,' stopped/events.jsonl 2>/dev/null; do
             tries=$((tries + 1)); [ $tries -lt 600 ] || break
             sleep 0.1
         done
         kill -TERM $pid; wait $pid"
    );
    case.shell(&script).exits(1).says(&["interrupted after step", "--resume"]);
    let saved = case.checkpoints("stopped");
    assert_eq!(saved.len(), 1, "{saved:?}");
    let steps = format!("train.steps={}", saved[0] + 2);
    let sets = ["optim.schedule=constant", "optim.warmup=0", "checkpoint.every=0", &steps];
    case.resume("config.toml", &[&sets[..], &["log.dir=stopped"]].concat()).ok();
    case.sft("config.toml", &[&sets[..], &["log.dir=whole"]].concat()).ok();
    assert_eq!(essences(&case.steps("stopped")), essences(&case.steps("whole")));
}

/// Where nobody reads stdout and stderr any more, training goes on to its end.
#[test]
fn a_run_outlives_whoever_watches_it() {
    let case = Case::tiny();
    let script = "( $TEMPER sft config.toml --set train.steps=6 --set log.every=1; echo $? > code ) 2>&1 | true";
    case.shell(script);
    assert_eq!(case.read("code").trim(), "0");
    assert!(case.has("run/hf/model.safetensors"));
}

#[test]
fn a_resume_without_a_checkpoint_points_to_the_run_that_has_one() {
    let case = Case::tiny();
    case.sft("config.toml", &["train.steps=2"]).ok();
    case.sft("config.toml", &["train.steps=2"]).ok();
    fs::remove_dir_all(case.path("run/checkpoints")).unwrap();
    case.resume("config.toml", &["train.steps=2"]).exits(2).says(&["no checkpoint to resume from", "run.1"]);
    case.temper(&["checkpoint", "list", "run"]).says(&["has saved no checkpoint yet"]);
    case.temper(&["generate", "run", "--chat", "Hello"]).exits(2).says(&["is a run folder", "hf/"]);
}

/// A second run in a folder where one is training would mix with it.
#[test]
fn a_folder_belongs_to_one_run_at_a_time() {
    let case = Case::tiny();
    let script = "$TEMPER sft config.toml --set train.steps=100000 & pid=$!
         tries=0
         while ! grep -q '\"step\":2,' run/events.jsonl 2>/dev/null; do
             tries=$((tries + 1)); [ $tries -lt 600 ] || break
             sleep 0.1
         done
         $TEMPER sft config.toml --set train.steps=2; echo second $?
         kill -TERM $pid; wait $pid; echo first $?";
    let done = case.shell(script).says(&["another process is training", "second 2", "first 1"]);
    assert!(!case.has("run.1"), "{done:?}");
    case.sft("config.toml", &["train.steps=2"]).ok();
    assert!(case.has("run.1"), "once it has ended, a new run moves it aside");
}

/// A run that went on from an earlier step has left what came after it: neither a resume nor the pruning goes by those checkpoints.
#[test]
fn a_resume_goes_on_with_the_branch_that_was_resumed_last() {
    let case = Case::tiny();
    let sets = |steps, more: &[&'static str]| [&[steps, "checkpoint.every=3", "log.dir=run"][..], more].concat();
    case.sft("config.toml", &sets("train.steps=12", &["checkpoint.keep_last=0"])).ok();
    assert_eq!(case.checkpoints("run"), [3, 6, 9, 12]);

    let other = &["checkpoint.keep_last=2", "optim.lr=5e-4"];
    case.temper(&Case::sft_args("config.toml", &sets("train.steps=5", other), &["--resume", "3"])).ok();
    assert_eq!(case.checkpoints("run"), [3, 5]);
    assert_eq!(names(&case.path("run/checkpoints.1")), ["step-000006", "step-000009", "step-000012"]);
    assert!(case.notices("run").contains("checkpoints of later steps (6, 9, 12) are now in"), "{}", case.notices("run"));
    case.temper(&["checkpoint", "verify", "run/checkpoints.1/step-000012"]).ok();

    case.resume("config.toml", &sets("train.steps=8", other)).ok();
    let steps: Vec<u64> = case.steps("run").iter().map(|e| e["step"].as_u64().unwrap()).collect();
    assert_eq!(steps[12..], [4, 5, 6, 7, 8]);
    assert_eq!(case.checkpoints("run"), [6, 8]);
}
