//! `temper plan` as a user meets it.

use crate::support::{Case, shared};
use serde_json::Value;

const QWEN_235B: [&str; 13] = [
    "plan",
    "--model",
    "Qwen3-235B-A22B",
    "--gpus",
    "64",
    "--gpu",
    "h20",
    "--nodes",
    "8",
    "--global-batch",
    "32",
    "--layout",
    "tp=8,pp=2,ep=4,recompute=moe",
];

fn with<'a>(base: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [base, more].concat()
}

/// A number of a JSON answer.
#[track_caller]
fn number(json: &Value, pointer: &str) -> f64 {
    json.pointer(pointer).and_then(Value::as_f64).unwrap_or_else(|| panic!("{pointer} in {json}"))
}

#[test]
fn the_verdict_comes_first() {
    let case = Case::tiny();
    let done = case.temper(&QWEN_235B).ok().says(&[
        "235.09 B parameters",
        "47/47 layers a stage",
        "etp 8 x ep 4 x 1 replicas",
        "etp=1 shards better",
        "megatron's, in the backward pass of a layer",
    ]);
    assert!(done.stdout.starts_with("FITS with"), "{}", done.stdout);
    assert!(done.stdout.lines().all(|l| l.trim_end() == l), "no trailing blanks");
    let small = case.temper(&["plan", "--model", "qwen3-8b", "--gpus", "1", "--gpu", "l40s", "--layout", "tp=1,offload=none"]).ok();
    assert!(small.stdout.starts_with("DOES NOT FIT by"), "{}", small.stdout);
}

#[test]
fn json_has_the_published_figures() {
    let case = Case::tiny();
    let json = case.temper(&with(&QWEN_235B, &["--as", "megatron", "--json", "--steps", "100", "--measured", "100"])).ok().json();
    assert_eq!(number(&json, "/model/params"), 235_093_634_560.0);
    for (pointer, want, tolerance) in [
        ("/heaviest/params", 4.07e9, 0.002),
        ("/heaviest/peak_bytes", 79e9, 0.05),
        ("/checkpoint/bytes", 3.29e12, 0.002),
        ("/layout/dp", 4.0, 0.0),
        ("/layout/etp", 8.0, 0.0),
        ("/layout/expert_dp", 1.0, 0.0),
    ] {
        let got = number(&json, pointer);
        assert!((got - want).abs() <= tolerance * want, "{pointer}: {got}");
    }
    assert!(number(&json, "/step/time_s") > 0.0 && number(&json, "/days") > 0.0 && number(&json, "/measured/mfu") > 0.0);
    assert!(json["problems"].as_array().unwrap().iter().any(|p| p["remedy"].as_str().unwrap().contains("etp=1")));
}

#[test]
fn an_illegal_layout_exits_with_2_and_names_constraint_and_remedies() {
    let case = Case::tiny();
    let base = ["plan", "--model", "Qwen3-8B", "--gpus", "32", "--layout"];
    let done = case.temper(&with(&base, &["tp=1,pp=8"])).exits(2).says(&[
        "36 layers do not divide over pp 8",
        "split=4/4/4/5/5/5/5/4",
        "nearest legal layouts",
        "--layout tp=1,pp=8",
    ]);
    assert!(done.stdout.is_empty());
    case.temper(&with(&base, &["tp=1,pp=8,split=5/5/5/5/4/4/4/4"])).ok().says(&["5/5/5/5/4/4/4/4 layers a stage"]);
    let json = case.temper(&with(&base, &["ep=2", "--json"])).exits(2).json();
    assert_eq!(json["problems"][0]["rule"], "no_experts");
    assert_eq!(json["fits"], false);
    assert!(json["nearest"].as_array().unwrap().iter().all(|l| l["ep"] == 1));
    case.temper(&with(&base, &["tp=18446744073709551615,pp=18446744073709551615"])).exits(2).says(&["32 devices"]);
}

#[test]
fn the_best_layout_is_searched_and_the_next_ones_lose_for_a_reason() {
    let case = Case::tiny();
    let done = case.temper(&["plan", "--model", "Qwen3-30B-A3B", "--gpus", "8", "--gpu", "h200", "--global-batch", "32"]).ok();
    let done = done.says(&["the best of", "next best", "% time"]);
    assert!(done.stdout.starts_with("FITS"), "{}", done.stdout);
}

#[test]
fn a_training_configuration_is_planned() {
    let case = Case::tiny();
    let json = case.temper(&["plan", "config.toml", "--set", "train.micro_batch=4", "--json"]).ok().json();
    assert_eq!((number(&json, "/job/seq"), number(&json, "/job/global_batch"), number(&json, "/layout/micro_batch")), (256.0, 4.0, 4.0));
    assert_eq!(number(&json, "/job/steps"), 4.0);
    // The same model as a folder; its tied head and size are read from its own config.json.
    let folder = case.temper(&["plan", "--model", "../common/tiny-qwen3", "--json"]).ok().json();
    assert_eq!(folder["model"]["params"], json["model"]["params"]);
}

/// Everything in a configuration that decides memory or time is taken over: the plan is that of the same flags.
#[test]
fn a_configuration_and_the_same_flags_have_the_same_plan() {
    let case = Case::tiny();
    let devices = ["--gpus", "4", "--gpu", "h200", "--json"];
    let sets = [
        "train.micro_batch=4",
        "train.global_batch=16",
        "train.steps=100",
        "data.seq_len=512",
        "memory.recompute=selective",
        "memory.recompute_parts=[\"norm\",\"qkv\",\"mlp\"]",
        "memory.offload_optimizer=true",
        "memory.loss_chunk=96",
        "precision.grads=bfloat16",
        "precision.moments=bfloat16",
        "parallel.tp=2",
        "parallel.pp=2",
        "parallel.sequence=false",
    ];
    let args: Vec<&str> = sets.iter().flat_map(|s| ["--set", *s]).collect();
    let of = |args: &[&str]| {
        let mut json = case.temper(&[&["plan"][..], args, &devices].concat()).ok().json();
        json["model"]["name"] = Value::Null; // a path is another from another folder
        json["notes"] = Value::Null; // a configuration leaves more open
        json
    };
    let configured = of(&[&["config.toml"][..], &args].concat());
    let base = ["--model", "../common/tiny-qwen3", "--seq", "512", "--global-batch", "16", "--steps", "100"];
    let types = ["--grads", "bf16", "--moments", "bf16", "--loss-chunk", "96"];
    let layout = "tp=2,pp=2,etp=1,sequence=false,mb=4,recompute=norm+qkv+mlp,offload=optimizer";
    let asked = of(&[&base[..], &types, &["--layout", layout]].concat());
    assert_eq!(configured, asked);
    assert_eq!(configured["layout"]["recompute"], "norm+mlp+qkv");
    // Each of these decides something: without it the plan is another.
    for i in 0..sets.len() {
        let fewer: Vec<&str> = sets.iter().enumerate().filter(|(j, _)| *j != i).flat_map(|(_, s)| ["--set", *s]).collect();
        let other = case.temper(&[&["plan", "config.toml"][..], &fewer, &devices].concat());
        assert!(other.code != 0 || of(&[&["config.toml"][..], &fewer].concat()) != asked, "{}", sets[i]);
    }
    // The command line goes before the configuration.
    let json = of(&[&["config.toml"][..], &args, &["--moments", "f32", "--layout", "tp=1,recompute=full"]].concat());
    assert_eq!(
        (&json["layout"]["tp"], &json["layout"]["recompute"], &json["job"]["precision"]["moment_bytes"]),
        (&1.into(), &"full".into(), &4.into())
    );
    assert_eq!((&json["layout"]["micro_batch"], &json["layout"]["offload"]), (&4.into(), &"optimizer".into()));
}

/// "selective" means the same parts to the plan and to a run.
#[test]
fn selective_recomputation_is_that_of_a_run() {
    let case = Case::tiny();
    let resolved = ["plan", "config.toml", "--json", "--set", "memory.recompute=selective"];
    let named = ["plan", "config.toml", "--json", "--layout", "recompute=norm+act+moe"];
    let [a, b] = [&resolved[..], &named].map(|args| case.temper(args).ok().json());
    assert_eq!((&a["layout"]["recompute"], &a["heaviest"]), (&"selective".into(), &b["heaviest"]));
    assert_eq!(a["layout"]["recompute"], b["layout"]["recompute"]);
}

#[test]
fn figures_are_explained_and_drawn() {
    let case = Case::tiny();
    case.temper(&with(&QWEN_235B, &["--explain", "weights"])).ok().says(&[
        "parameters of the rank x bytes each",
        " x 2",
        "8,189,517,312 B (8.2 GB)",
    ]);
    let all = case.temper(&with(&QWEN_235B, &["--explain", "all", "--json"])).ok().json();
    assert!(all.as_array().unwrap().len() > 20);
    case.temper(&with(&QWEN_235B, &["--explain", "wieghts"])).exits(2).says(&["wieghts", "weights, gradients"]);
    case.temper(&with(&QWEN_235B, &["--svg", "memory.svg"])).ok();
    assert!(case.read("memory.svg").starts_with("<svg") && case.read("memory.svg").contains("pipeline stage"));
    case.temper(&with(&QWEN_235B, &["--svg", "none/memory.svg"])).exits(2).says(&["none/memory.svg"]);
}

#[test]
fn devices_of_ones_own_are_read() {
    let case = Case::tiny();
    case.write("mine.toml", "[[device]]\nname = \"p800\"\nmemory_mib = 65536\nbf16_tflops = 345.0\nmemory_tb_s = 1.6\nlink_gb_s = 200.0\nnetwork_gb_s = 25.0\nhost_gb_s = 26.0\n");
    let base = ["plan", "--model", "Qwen3-8B", "--gpus", "8", "--gpu-file"];
    case.temper(&with(&base, &["mine.toml", "--gpu", "p800"])).ok().says(&["8 x p800"]);
    case.temper(&with(&base, &["mine.toml", "--gpu", "p900"])).exits(2).says(&["p900", "p800", "h100"]);
    case.temper(&with(&base, &["none.toml"])).exits(2).says(&["none.toml"]);
    case.write("bad.toml", "[[device]]\nname = \"x\"\nmemory = 3\n");
    case.temper(&with(&base, &["bad.toml"])).exits(2).says(&["bad.toml", "memory"]);
}

/// The model of the tests is small enough that reading and saving it must be counted as small too.
#[test]
fn the_verdict_holds_for_every_moment_of_a_run() {
    let case = Case::tiny();
    let device = |mib: u64| {
        let rest = "bf16_tflops = 345.0\nmemory_tb_s = 1.6\nlink_gb_s = 200.0\nnetwork_gb_s = 25.0\nhost_gb_s = 26.0\n";
        case.write("mine.toml", &format!("[[device]]\nname = \"tiny\"\nmemory_mib = {mib}\n{rest}"));
        case.temper(&["plan", "config.toml", "--gpu-file", "mine.toml", "--gpu", "tiny", "--json"]).ok().json()
    };
    let roomy = device(700);
    assert_eq!(roomy["fits"], true);
    for phase in ["load", "first_step", "steady", "save", "resume"] {
        let needs = number(&roomy, &format!("/stages/0/phases/{phase}"));
        assert!(needs <= number(&roomy, "/fullest/bytes") && needs <= number(&roomy, "/limit_bytes"), "{phase}: {needs}");
    }
    // Rollout is none of it, and marked where it would not fit.
    let qwen = ["plan", "--model", "Qwen3-0.6B", "--gpu", "l40s", "--gpus", "1", "--seq", "40960", "--global-batch", "1"];
    let done = case.temper(&with(&qwen, &["--layout", "tp=1,recompute=full"])).ok();
    assert!(done.stdout.starts_with("FITS") && !done.stdout.contains("save (more"), "{}", done.stdout);
    let rollout = done.stdout.split("rollout ").nth(1).unwrap_or_default();
    assert!(rollout.split_once("GB ").is_some_and(|(_, rest)| rest.starts_with("(more than the device has)")), "{}", done.stdout);
}

#[cfg(target_os = "linux")]
#[test]
fn a_picture_that_cannot_be_written_tells_the_cause() {
    let case = Case::tiny();
    let svg = |path: &str| case.temper(&["plan", "--model", "Qwen3-0.6B", "--gpu", "h100", "--gpus", "1", "--svg", path]).exits(2);
    svg("/dev/full").says(&["--svg /dev/full", "No space left", "Free space there"]);
    svg("none/a.svg").says(&["--svg none/a.svg", "Give a file in a folder that exists"]);
    svg(".").says(&["--svg .", "Give a file that can be written"]);
    let dense = case.temper(&["plan", "--model", "Qwen3-8B", "--gpu", "h100", "--gpus", "2", "--svg", "a.svg", "--json"]).ok().json();
    let text = dense["layout"]["text"].as_str().unwrap();
    assert!(!text.contains("etp") && !case.read("a.svg").contains("etp"), "{text}");
}

#[test]
fn mistakes_are_told_with_their_remedy() {
    let case = Case::tiny();
    case.write("bad.json", "{\"model_type\": \"qwen3_5\", \"text_config\": {\"num_hidden_layers\": 2, \"hidden_size\": -1}}");
    for (args, said) in [
        (&["plan"][..], "Usage: temper plan"),
        (&["plan", "config.toml", "--model", "Qwen3-8B"], "cannot be used with"),
        (&["plan", "--model", "nonsense"], "Qwen3-235B-A22B"),
        (&["plan", "--model", "no/such-model"], "HF_HUB_OFFLINE"),
        (&["plan", "--model", "bad.json"], "hidden_size"),
        (&["plan", "--model", "Qwen3-8B", "--gpu", "tpu"], "h100"),
        (&["plan", "--model", "Qwen3-8B", "--gpus", "0"], "--gpus"),
        (&["plan", "--model", "Qwen3-8B", "--gpus", "99999999999"], "--gpus"),
        (&["plan", "--model", "Qwen3-8B", "--gpus", "12", "--nodes", "5"], "12 devices do not divide over 5 nodes"),
        (&["plan", "--model", "Qwen3-8B", "--layout", "tp=x"], "--layout: tp"),
        (&["plan", "--model", "Qwen3-8B", "--skew=-1"], "--skew"),
        (&["plan", "--model", "Qwen3-8B", "--skew", "nan"], "--skew"),
        (&["plan", "--model", "Qwen3-8B", "--mean-tokens", "9999"], "--mean-tokens"),
        (&["plan", "--model", "Qwen3-8B", "--network", "0"], "--network"),
        (&["plan", "--model", "Qwen3-8B", "--network", "1e-30"], "give a number from 0.001 to 1000000"),
        (&["plan", "--model", "Qwen3-8B", "--storage", "1e-30"], "--storage"),
        (&["plan", "--model", "Qwen3-8B", "--storage", "inf"], "--storage"),
        (&["plan", "--model", "Qwen3-8B", "--layout", "recompute=half"], "norm, act, moe, mlp, qkv"),
        (&["plan", "--model", "Qwen3-8B", "--seq", "0"], "--seq"),
        (&["plan", "--model", "Qwen3-8B", "--measured", "nan"], "--measured"),
        (&["plan", "absent.toml"], "absent.toml"),
    ] {
        case.temper(args).exits(2).says(&[said]);
    }
}

#[test]
fn models_that_are_not_trained_yet_are_planned_and_the_engine_still_refuses_them() {
    let case = Case::tiny();
    let args = [
        "plan",
        "--model",
        "Qwen3.6-35B-A3B",
        "--gpus",
        "40",
        "--gpu",
        "h20",
        "--seq",
        "49152",
        "--mean-tokens",
        "29000",
        "--global-batch",
        "80",
    ];
    let done = case.temper(&with(&args, &["--layout", "ep=8,recompute=full", "--grads", "bf16", "--measured", "482"])).ok();
    done.says(&["does not train it yet", "\"qwen3_5_moe\" is not yet supported", "8.2 % of the peak", "x 5 replicas", "logits +48"]);
    let Some(config) = shared("facts/configs/Qwen3.6-35B-A3B.config.json") else { return };
    std::fs::create_dir(case.path("hybrid")).unwrap();
    std::fs::copy(config, case.path("hybrid/config.json")).unwrap();
    let json = case.temper(&["plan", "--model", "hybrid", "--gpus", "8", "--json"]).ok().json();
    assert_eq!(number(&json, "/model/params"), 35_107_181_936.0);
    case.sft("config.toml", &["model.path=hybrid"]).exits(2).says(&["qwen3_5_moe", "not yet supported"]);
}

/// What a configuration leaves to its data is not needed, and said.
#[test]
fn a_configuration_is_planned_where_its_files_are_not() {
    let case = Case::tiny();
    let config = case.read("config.toml");
    case.write("away.toml", &config.replace("train = [\"", "train = [\"/data/of/the/cluster/"));
    case.temper(&["sft", "away.toml"]).exits(2).says(&["there is no file"]);
    let here = case.temper(&["plan", "config.toml", "--json"]).ok().json();
    let done = case.temper(&["plan", "away.toml", "--json"]).ok();
    let away = done.json();
    assert_eq!((&here["heaviest"], &here["step"], &here["layout"]), (&away["heaviest"], &away["step"], &away["layout"]));
    case.temper(&["plan", "away.toml"]).ok().says(&["note: not here, and not needed for a plan: /data/of/the/cluster/"]);
    // No number of steps without the data; and time for full sequences only.
    let epochs = config.replace("steps = 4", "epochs = 2.0");
    assert_ne!(epochs, config);
    case.write("epochs.toml", &epochs);
    case.temper(&["plan", "epochs.toml"]).ok().says(&[
        "train.epochs = 2 makes depends on the data",
        "--steps gives it",
        "--mean-tokens says",
    ]);
    let known = case.temper(&["plan", "epochs.toml", "--steps", "7"]).ok().says(&["the run takes"]);
    assert!(!known.stdout.contains("depends on the data"), "{}", known.stdout);
    // A model that is elsewhere too is planned by a name that is known.
    case.temper(&["plan", "away.toml", "--set", "model.path=models/of/ours"]).exits(2).says(&[
        "model.path models/of/ours",
        "--set model.path=NAME",
        "Qwen3-8B",
    ]);
    let named = case.temper(&["plan", "away.toml", "--set", "model.path=Qwen3-8B", "--json"]).ok().json();
    assert_eq!(number(&named, "/model/params"), 8_190_735_360.0);
}

#[test]
fn a_plan_searches_what_a_run_searches() {
    let case = Case::tiny();
    let devices = ["--gpus", "4", "--gpu", "h200", "--json"];
    let of = |sets: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|s| ["--set", *s]).collect();
        case.temper(&[&["plan", "config.toml"][..], &sets, &devices].concat()).ok().json()
    };
    for sets in [&["parallel.auto=true", "parallel.tp=2"][..], &["parallel.tp=2", "parallel=auto"], &["parallel=auto", "parallel.tp=2"]] {
        let json = of(sets);
        assert_eq!((&json["searched"], &json["layout"]["tp"]), (&true.into(), &2.into()), "{sets:?}");
        assert!(number(&json, "/tried") > 1.0);
    }
    case.write("tp.toml", &format!("{}\n[parallel]\ntp = 2\n", case.read("config.toml")));
    let done = case.temper(&["plan", "tp.toml", "--set", "parallel=auto", "--gpus", "4", "--gpu", "h200"]).ok();
    done.says(&["tried, tp=2 held)"]);
    // On the command line the word auto does it.
    case.temper(&["plan", "config.toml", "--layout", "tp=2,auto", "--gpus", "4", "--gpu", "h200"]).ok().says(&["tried, tp=2 held)"]);
    // Without it, axes left out are 1.
    assert_eq!(of(&["parallel.tp=2"])["searched"], false);
}

#[test]
fn what_does_not_divide_is_planned_with_its_waste() {
    let case = Case::tiny();
    let base = ["plan", "--model", "Qwen3-8B", "--gpu", "h200", "--gpus", "8", "--layout", "dp=8", "--global-batch"];
    case.temper(&with(&base, &["30"]))
        .ok()
        .says(&["4 micro-batches of 1 a replica", "2 of 32 are fillers of one token, which waste 6.2 % of the step"]);
    case.temper(&with(&base, &["3"])).ok().says(&["5 of 8 replicas have nothing to train: a step has 3 micro-batches"]);
    let long = ["plan", "--model", "Qwen3-8B", "--gpu", "h200", "--gpus", "8", "--layout", "tp=2,cp=2", "--seq", "4097"];
    case.temper(&long).ok().says(&["4,097 tokens of a micro-batch are filled up with 7"]);
}

#[test]
fn figures_have_units_that_suit_them() {
    let case = Case::tiny();
    let tiny = case.temper(&["plan", "config.toml", "--gpu", "h200", "--steps", "900000000000000"]).ok();
    tiny.says(&["memory, MB", "time, us", " kB", "years"]);
    let huge =
        ["plan", "--model", "Qwen3-235B-A22B", "--gpus", "131072", "--gpu", "l40s", "--seq", "16777216", "--global-batch", "16777216"];
    let huge = case.temper(&with(&huge, &["--layout", "tp=1", "--steps", "1000000"])).ok();
    assert!(huge.stdout.lines().all(|line| !line.contains("0000000")), "{}", huge.stdout);
    huge.says(&["years", " TB"]);
}

#[test]
fn devices_and_their_number_are_assumed_aloud() {
    let case = Case::tiny();
    let done = case.temper(&["plan", "--model", "Qwen3-0.6B"]).ok();
    done.says(&[
        "note: --gpu is not given and this machine has no NVIDIA GPU: planned for an NVIDIA H100",
        "note: --gpus is not given: planned for 1",
    ]);
    let json = case.temper(&["plan", "--model", "Qwen3-30B-A3B", "--gpu", "h200", "--layout", "tp=2,pp=2,ep=2,dp=2", "--json"]).ok().json();
    assert_eq!((number(&json, "/cluster/gpus"), number(&json, "/layout/etp")), (8.0, 2.0));
    assert!(json["notes"].to_string().contains("what the axes multiply to"), "{}", json["notes"]);
}

/// One meaning of a layout without etp, and the plan says which.
#[test]
fn etp_is_that_of_tp_and_said() {
    let case = Case::tiny();
    let base = ["plan", "--model", "Qwen3-30B-A3B", "--gpus", "8", "--gpu", "h200", "--global-batch", "32", "--layout"];
    case.temper(&with(&base, &["tp=2,pp=2,ep=2"])).ok().says(&["ep=2,etp=2,dp=2", "experts: etp 2 x ep 2 x 1 replicas, etp as tp;"]);
    case.temper(&with(&base, &["tp=2,pp=2,ep=2,etp=1"])).ok().says(&["ep=2,etp=1,dp=2", "experts: etp 1 x ep 2 x 2 replicas;"]);
    let dense = case.temper(&["plan", "--model", "Qwen3-8B", "--gpus", "8", "--gpu", "h200", "--layout", "tp=2"]).ok();
    assert!(!dense.stdout.contains("etp"), "{}", dense.stdout);
}

#[test]
fn a_reserve_is_kept_free() {
    let case = Case::tiny();
    let ask = ["plan", "--model", "Qwen3-8B", "--gpus", "2", "--gpu", "h100", "--global-batch", "8"];
    let of = |more: &[&str]| case.temper(&with(&ask, more)).ok();
    let json = of(&["--json"]).json();
    let (memory, peak) = (number(&json, "/limit_bytes"), number(&json, "/heaviest/peak_bytes"));
    assert!(peak <= 0.95 * memory && json["keeps_reserve"] == true, "{peak} of {memory}");
    // The settings of memory are held too, or others would be chosen that leave enough.
    let setting = |key: &str| json["layout"][key].as_str().unwrap().to_string();
    let axes: Vec<&str> = json["layout"]["text"]
        .as_str()
        .unwrap()
        .split(',')
        .filter(|part| !part.starts_with("recompute") && !part.starts_with("offload"))
        .collect();
    let layout = &format!("{},recompute={},offload={}", axes.join(","), setting("recompute"), setting("offload"));
    let share = format!("{}", 1.0 - 0.99 * peak / memory);
    of(&["--layout", layout, "--reserve", &share]).says(&["less than the reserve", "it fits, but leaves"]);
    of(&[]).says(&["kept free (5 %)"]);
    for wrong in ["1.5", "1", "nan"] {
        case.temper(&with(&ask, &["--reserve", wrong])).exits(2).says(&["--reserve", "from 0 to below 1"]);
    }
    // The same range wherever it is given.
    of(&["--reserve", "0.95"]);
    case.temper(&["plan", "config.toml", "--set", "parallel.reserve=0.95", "--gpu", "h200"]).ok().says(&["kept free (95 %)"]);
    case.temper(&["plan", "config.toml", "--set", "parallel.reserve=1"]).exits(2).says(&["--set parallel.reserve=1"]);
    // A configuration says the same with parallel.reserve.
    let set = case.temper(&["plan", "config.toml", "--set", "parallel.reserve=0.2", "--gpu", "h200", "--json"]).ok().json();
    assert!((number(&set, "/reserve_bytes") / number(&set, "/limit_bytes") - 0.2).abs() < 1e-9);
}

#[test]
fn a_model_in_the_place_of_a_configuration_is_recognised() {
    let case = Case::tiny();
    std::fs::create_dir(case.path("qwen")).unwrap();
    case.write("qwen/config.json", "{}");
    for model in ["Qwen3-8B", "qwen"] {
        case.temper(&["plan", model]).exits(2).says(&[&format!("temper plan --model {model}")]);
    }
    case.temper(&["plan", "absent.toml"]).exits(2).says(&["absent.toml"]);
}
