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

/// `parallel=auto` after an axis, or over one in the file, chooses the rest.
#[test]
fn given_axes_are_held_whatever_the_order() {
    let case = Case::tiny();
    case.write("config.toml", &format!("{}\n[parallel]\ntp = 2\n", case.read("config.toml")));
    for (i, parallel) in [&["parallel=auto"][..], &["parallel.pp=1", "parallel=auto"]].into_iter().enumerate() {
        let dir = format!("log.dir=run{i}");
        sft(&case, &[parallel, &[&dir]].concat(), "2").ok();
        let run = format!("run{i}");
        let p = &case.json(&format!("{run}/config.resolved.json"))["config"]["parallel"];
        assert_eq!((p["auto"].as_bool(), p["tp"].as_u64()), (Some(true), Some(2)), "{p}");
        assert!(case.notices(&run).contains("tp=2"), "{}", case.notices(&run));
    }
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
    assert!(case.notices("run").contains("2 of 6 are fillers of one token"), "{}", case.notices("run"));
    sft(&case, &["parallel.dp=3", "train.global_batch=4", "train.micro_batch=2"], "3").ok();
    assert!(case.notices("run").contains("1 of 3 replicas have nothing to train: a step has 2 micro-batches"), "{}", case.notices("run"));
}

const MOE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures/qwen3_moe");

/// Every way to a run refuses with every rule that is broken, and with what would be legal.
#[test]
fn all_refuse_in_the_same_words() {
    let case = Case::tiny();
    let model = format!("model.path={MOE}");
    let init = [&model, "model.init=random", "model.tokenizer=../common/tiny-qwen3"];
    let beyond = "etp 1 x ep 8 = 8 does not divide the 4 ranks of a stage (tp 1 x cp 1 x dp 4). Experts fold into the ranks of a stage and \
                  do not multiply them: take a smaller ep.";
    for (keys, rules) in [
        (&["ep=8"][..], &[beyond][..]),
        (&["ep=3"], &["ep 3 does not divide 8 experts", "etp 1 x ep 3 = 3 does not divide the 4 ranks"]),
        (&["dp=2", "ep=2", "etp=2"], &["tp 1 x cp 1 x dp 2 x pp 1 = 2 ranks on 4 devices", "etp 2 x ep 2 = 4 does not divide the 2 ranks"]),
        (&["dp=3"], &["tp 1 x cp 1 x dp 3 x pp 1 = 3 ranks on 4 devices. Take dp=4"]),
    ] {
        let sets: Vec<String> = keys.iter().map(|key| format!("parallel.{key}")).collect();
        let sets: Vec<&str> = init.into_iter().chain(sets.iter().map(String::as_str)).collect();
        let done = sft(&case, &sets, "4").exits(2);
        done.says(rules).says(&["error: [parallel]: ", "the nearest legal layouts:"]);
        let plan = case.temper(&["plan", "--model", MOE, "--gpus", "4", "--gpu", "h200", "--layout", &keys.join(",")]).exits(2);
        plan.says(rules).says(&["the nearest legal layouts:"]);
    }
}

/// Without dp a layout that stands by itself is the smallest, in whatever it is measured or compared.
#[test]
fn a_benchmark_completes_a_layout_as_verify_does() {
    let case = Case::tiny();
    let bench =
        |layout: &str| case.temper(&["bench", "step", MOE, "--seq", "16", "--steps", "1", "--warmup", "1", "--layout", layout, "--json"]);
    let report = bench("ep=2").ok().json();
    assert_eq!(report["plan"]["layout"], "tp=1,pp=1,ep=2,etp=1,dp=2,mb=1");
    bench("dp=2,ep=2,etp=2").exits(2).says(&["etp 2 x ep 2 = 4 does not divide the 2 ranks of a stage", "the nearest legal layouts:"]);
    bench("ep=3").exits(2).says(&["ep 3 does not divide 8 experts", "the nearest legal layouts:"]);
    // The micro-batch that --set gives is accumulated as often as without.
    let one = |sets: &[&str]| case.temper(&[&["bench", "step", MOE, "--seq", "16", "--steps", "1", "--warmup", "1"], sets].concat());
    one(&["--set", "train.micro_batch=2"]).ok();
    one(&["--set", "train.micro_batch=2", "--set", "train.global_batch=3"]).exits(2).says(&["--set train.global_batch=3"]);
    let far = one(&["--set", "foo=1"]).exits(2).says(&["foo", "the sections are"]);
    assert!(!far.stderr.contains("Did you mean"), "{far:#?}");
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

/// What cannot be divided is refused by the first process, in the words of sft.
#[test]
fn benchmarks_refuse_a_layout_before_any_rank_begins() {
    let case = Case::tiny();
    let bench = |layout: &str| case.temper(&["bench", "step", "../common/tiny-qwen3", "--seq", "16", "--layout", layout]).exits(2);
    for (layout, rule) in [
        ("tp=3", "tp 3 does not divide"),
        ("pp=4", "stages for 2 layers"),
        ("ep=2,dp=2", "ep 2 and etp 1 on a dense model"),
        ("pp=2,split=1+1", "split=1/1"),
        ("tp=2,auto", "nothing is searched here"),
    ] {
        let done = bench(layout).says(&["error: --layout: ", rule]);
        assert_eq!(done.stderr.matches("error:").count(), 1, "{done:#?}");
        assert!(!done.stderr.contains("rank 0"), "a rank began: {done:#?}");
        case.temper(&["bench", "step", "../common/tiny-qwen3", "--seq", "16", "--as-rank", "0", "--of", layout])
            .exits(2)
            .says(&["error: --of: ", rule]);
    }
    bench("tp=3").says(&["cannot be run", "the nearest legal layouts:"]);
    // Without a model the axes must still make up the ranks.
    let comm = |layout: &str| case.temper(&["bench", "comm", "--transport", "tcp", "--ranks", "2", "--layout", layout]).exits(2);
    comm("tp=3").says(&["does not make up 2 ranks"]);
    comm("tp=2,ep=2").says(&["ep 2 x etp 2 does not divide the 2 ranks", "or etp=1"]);
}

/// etp that is not given is tp in a run too, where the model has experts, and the run says so.
#[test]
fn etp_follows_tp() {
    let case = Case::tiny();
    let model = format!("model.path={MOE}");
    let init = ["model.init=random", "model.tokenizer=../common/tiny-qwen3", "parallel.tp=2"];
    let with = |more: &[&str], ranks: &str| sft(&case, &[&[model.as_str()][..], &init, more].concat(), ranks);
    with(&["parallel.ep=2"], "2").exits(2).says(&["etp 2 x ep 2 = 4 does not divide the 2 ranks of a stage", "etp=1"]);
    with(&[], "2").ok();
    let resolved = case.json("run/config.resolved.json");
    assert_eq!(resolved["config"]["parallel"]["etp"], 2);
    assert!(resolved["reasons"]["parallel.etp"].as_str().unwrap().contains("that of tp"), "{}", resolved["reasons"]["parallel.etp"]);
    with(&["parallel.etp=1", "parallel.ep=2", "log.dir=whole"], "2").ok();
    let losses = |run: &str| case.steps(run).iter().map(|s| s["loss"].as_f64().unwrap()).collect::<Vec<_>>();
    crate::support::close(&losses("whole"), &losses("run"), 1e-5);
}
