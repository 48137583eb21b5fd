//! The layout of a run before its ranks begin: chosen by the planner, or refused with the rule and the nearest that are legal.

use crate::support::{Case, Done};

const LONG: &[&str] = &["train.steps=2", "checkpoint.export=false"];

fn sft(case: &Case, parallel: &[&str], ranks: &str) -> Done {
    case.temper(&Case::sft_args("config.toml", &[LONG, parallel].concat(), &["--ranks", ranks]))
}

#[test]
fn a_layout_is_chosen_and_the_reason_kept() {
    let case = Case::tiny();
    case.write("config.toml", &format!("parallel = \"auto\"\n{}", case.read("config.toml")));
    sft(&case, &[], "2").ok();
    let resolved = case.json("run/config.resolved.json");
    let p = &resolved["config"]["parallel"];
    let axis = |name: &str| p[name].as_u64().unwrap();
    assert_eq!(axis("tp") * axis("pp") * axis("cp") * axis("dp"), 2, "{p}");
    assert!(resolved["reasons"]["parallel.tp"].as_str().unwrap().contains("fastest layout that fits"));
    assert_eq!(resolved["reasons"].get("parallel.auto"), None, "the file gives it");
    assert!(case.notices("run").contains("parallel.auto: "), "{}", case.notices("run"));

    // What is given stays.
    sft(&case, &["parallel.tp=2", "log.dir=tp"], "2").ok();
    let p = &case.json("tp/config.resolved.json")["config"]["parallel"];
    assert_eq!((p["tp"].as_u64(), p["dp"].as_u64()), (Some(2), Some(1)));
    let losses = |run: &str| case.steps(run).iter().map(|s| s["loss"].as_f64().unwrap()).collect::<Vec<_>>();
    crate::support::close(&losses("tp"), &losses("run"), 1e-5);
}

#[test]
fn where_no_layout_is_legal_the_rule_is_named() {
    let case = Case::tiny();
    // Two layers do not make three stages.
    let done = sft(&case, &["parallel.auto=true", "parallel.pp=3"], "3").exits(2);
    done.says(&["parallel.auto: no layout agrees", "pp 3 x vpp 1 stages for 2 layers"]);
    assert!(!case.has("run"));
}

#[test]
fn a_layout_that_breaks_a_rule_is_refused_before_any_rank_begins() {
    let case = Case::tiny();
    for (parallel, ranks, rule) in [
        (&["parallel.tp=3"][..], "3", "tp 3 does not divide"),
        (&["parallel.ep=2", "parallel.dp=2"], "2", "ep 2 and etp 1 on a dense model"),
        (&["parallel.pp=2", "train.global_batch=2", "train.micro_batch=2"], "2", "1 micro-batches for 2 stages"),
        (&["parallel.pp=4"], "4", "stages"),
    ] {
        let done = sft(&case, parallel, ranks).exits(2).says(&["error: [parallel]: ", "cannot be run", rule, "the nearest legal layouts:"]);
        assert_eq!(done.stderr.matches("error:").count(), 1, "{done:#?}");
        assert!(!case.has("run"));
    }
    // Replicas with different numbers of micro-batches are no fault.
    sft(&case, &["parallel.dp=3", "train.global_batch=4", "train.micro_batch=1"], "3").ok();
    assert!(!case.notices("run").contains("nothing to train"), "{}", case.notices("run"));
    sft(&case, &["parallel.dp=3", "train.global_batch=4", "train.micro_batch=2"], "3").ok();
    assert!(case.notices("run").contains("1 of 3 replicas have nothing to train: a step has 2 micro-batches"), "{}", case.notices("run"));
}

/// What a single rank cannot do is refused before an earlier run is moved aside.
#[test]
fn a_refusal_leaves_the_run_of_one_rank_alone() {
    let case = Case::tiny();
    sft(&case, &[], "1").ok();
    let before = crate::support::contents(&case.path("run"));
    sft(&case, &["parallel.vpp=2"], "1").exits(2).says(&["error: [parallel]: ", "vpp 2", "the nearest legal layouts:"]);
    assert_eq!(crate::support::contents(&case.path("run")), before);
    assert!(!case.has("run.1"));
}

#[test]
fn absurdly_many_ranks_are_not_started() {
    let case = Case::tiny();
    sft(&case, &["parallel.dp=5000", "train.micro_batch=1"], "5000").exits(2);
    let bench = ["bench", "step", "../common/tiny-qwen3", "--seq", "16", "--layout", "dp=5000"];
    case.temper(&bench).exits(2).says(&["5000 ranks: one host starts at most 1024"]);
}
