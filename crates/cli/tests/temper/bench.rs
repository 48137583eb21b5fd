//! `temper bench` and traces.

use crate::models::fixture;
use crate::support::{Case, Done};
use serde_json::Value;

const TINY: &str = "../common/tiny-qwen3";

fn step(case: &Case, model: &str, more: &[&str]) -> Done {
    let small = ["--seq", "32", "--micro-batch", "2", "--steps", "2", "--warmup", "1"];
    case.temper(&[&["bench", "step", model][..], &small, more].concat())
}

/// Every event of a trace file, checked to be complete.
fn trace(text: &str) -> Vec<Value> {
    let value: Value = serde_json::from_str(text).unwrap();
    let events = value["traceEvents"].as_array().unwrap().clone();
    for event in events.iter().filter(|e| e["ph"] == "X") {
        assert!(event["ts"].as_f64().unwrap() >= 0.0 && event["dur"].as_f64().unwrap() >= 0.0, "{event}");
    }
    events
}

fn named(events: &[Value], name: &str) -> usize {
    events.iter().filter(|e| e["name"] == name).count()
}

#[test]
fn a_step_is_measured_and_told_in_words() {
    let case = Case::tiny();
    step(&case, TINY, &["--ops"]).ok().says(&[
        "backend     cpu",
        "1 micro-batch(es) of 2 x 32 tokens = 64 tokens",
        "tokens/s",
        "model TFLOP/s",
        "median of 2 steps after 1",
        "weights ",
        "gradients ",
        "optimizer ",
        "activations ",
        "losses",
        "forward",
        "head",
        "backward",
        "grad_norm",
        "optimizer",
        "gemm",
        "attention_grad",
        "adamw",
    ]);
}

#[test]
fn the_same_as_json_with_consistent_figures() {
    let case = Case::tiny();
    let report = step(&case, TINY, &["--json", "--ops", "--accumulate", "3", "--doc-len", "20"]).ok().json();
    let number = |key: &str| report[key].as_f64().unwrap();
    assert_eq!(report["work"]["tokens"], 192);
    assert_eq!(report["losses"].as_array().unwrap().len(), 3);
    // The vocabulary has 320 rows, so that a random model starts near ln(320).
    let loss = report["losses"][0].as_f64().unwrap();
    assert!((loss - 320f64.ln()).abs() < 0.2, "{loss}");
    let seconds = report["step_ms"]["median"].as_f64().unwrap() / 1e3;
    assert!((number("tokens_per_s") * seconds / 192.0 - 1.0).abs() < 1e-9);
    assert!(report.get("mfu").is_none(), "a processor has no known peak");
    // Phases of the device lie within the step of the host.
    let phases: f64 = report["phases"].as_array().unwrap().iter().map(|p| p["ms"]["min"].as_f64().unwrap()).sum();
    assert!(phases > 0.0 && phases <= report["step_ms"]["max"].as_f64().unwrap(), "{report}");

    let peak = |purpose: &str| report["memory"]["peak"][purpose].as_u64().unwrap();
    let params = report["model"]["params"].as_u64().unwrap();
    for (purpose, bytes) in [("weights", 4 * params), ("gradients", 4 * params), ("optimizer", 8 * params)] {
        // Beside the moments are two sums of squares and a factor.
        assert!((bytes..=bytes + 32).contains(&peak(purpose)), "{purpose}: {} of {bytes}", peak(purpose));
    }
    // Three forward passes of the head a step, in as many chunks; AdamW once a parameter.
    let rows = report["operations"].as_array().unwrap();
    let calls = |name: &str| rows.iter().filter(|r| r["name"] == name).map(|r| r["calls"].as_u64().unwrap()).sum::<u64>();
    assert_eq!(calls("cross_entropy"), 3);
    assert!(calls("attention") == calls("attention_grad") && calls("attention") % 3 == 0, "{rows:?}");
    assert!(calls("adamw") > 10 && calls("gemm") > 30);
}

/// The figure of docs/NUMERICS.md, worked out here from the shape alone: 6 x active + 6 x layers x heads x head_dim x length.
#[test]
fn model_flops_are_those_of_the_documentation() {
    let case = Case::tiny();
    let report = step(&case, "smollm2-135m", &["--json", "--layers", "1"]).ok().json();
    let attention = 576 * 576 * 2 + 576 * 192 * 2;
    let active = 49152 * 576 + attention + 3 * 576 * 1536 + 3 * 576;
    assert_eq!(report["model"]["params"], active, "tied: the embedding is the head");
    let flops = 6.0 * active as f64 + 6.0 * 9.0 * 64.0 * 32.0;
    let per_token = report["model_tflops"].as_f64().unwrap() * 1e12 / report["tokens_per_s"].as_f64().unwrap();
    assert!((per_token / flops - 1.0).abs() < 1e-9, "{per_token} {flops}");
    assert!(report["losses"].as_array().unwrap().len() == 3 && report["model"]["layers"] == 1);
}

#[test]
fn experts_and_recomputation_are_measured_too() {
    let case = Case::tiny();
    let moe = fixture("qwen3_moe").join("config.json");
    let report = step(&case, moe.to_str().unwrap(), &["--json", "--ops", "--recompute", "full"]).ok().json();
    let calls = |name: &str| {
        let rows = report["operations"].as_array().unwrap().iter().filter(|r| r["name"] == name);
        rows.map(|r| r["calls"].as_u64().unwrap()).sum::<u64>()
    };
    // Forward runs twice, backward once.
    assert_eq!(calls("attention"), 2 * calls("attention_grad"));
    assert_eq!(calls("router"), 2 * calls("router_grad"));
    assert!(calls("grouped_gemm") > 0);
    let more = report["model"]["params"].as_u64() > report["model"]["active_params"].as_u64();
    assert!(more, "{}", report["model"]);
}

#[test]
fn operations_alone_come_once_a_shape() {
    let case = Case::tiny();
    let subject = ["bench", "ops", TINY, "--seq", "32"];
    let rows = case.temper(&[&subject[..], &["--json", "--only", "rms_norm"]].concat()).ok().json();
    let rows = rows.as_array().unwrap();
    assert!(rows.iter().all(|r| r["name"].as_str().unwrap().contains("rms_norm") && r["calls"] == 1), "{rows:?}");
    assert!(rows.iter().any(|r| r["name"] == "add_rms_norm"));
    case.temper(&[&subject[..], &["--only", "swiglu"]].concat()).ok().says(&["swiglu_grad", "GB/s", "32x"]);
    case.temper(&[&subject[..], &["--only", "flash"]].concat()).exits(2).says(&["--only flash"]);
}

#[test]
fn wrong_sizes_are_refused_before_anything_is_allocated() {
    let case = Case::tiny();
    for (args, said) in [
        (&["qwen3-9b"][..], &["qwen3-9b", "qwen3-8b", "smollm2-135m"][..]),
        (&["config.toml"], &["config.toml"]),
        (&[TINY, "--layers", "0"], &["--layers 0", "give 1 to"]),
        (&[TINY, "--layers", "99"], &["--layers 99"]),
        (&[TINY, "--layers", "-1"], &["-1"]),
        (&[TINY, "--seq", "0"], &["--seq", "2..=16777216"]),
        (&[TINY, "--seq", "99999999999"], &["--seq"]),
        (&[TINY, "--micro-batch", "0"], &["--micro-batch"]),
        (&[TINY, "--micro-batch", "1000000", "--seq", "1000000"], &["tokens a step"]),
        (&[TINY, "--accumulate", "0"], &["--accumulate"]),
        (&[TINY, "--accumulate", "18446744073709551615"], &["--accumulate"]),
        (&[TINY, "--accumulate", "1048576", "--micro-batch", "2"], &["train.global_batch"]),
        (&[TINY, "--doc-len", "0"], &["--doc-len 0"]),
        (&[TINY, "--seq", "64", "--doc-len", "65"], &["--doc-len 65", "64"]),
        (&[TINY, "--steps", "0"], &["--steps"]),
        (&[TINY, "--recompute", "half"], &["memory.recompute", "half"]),
        (&[TINY, "--dtype", "bf16"], &["precision.dtype", "bfloat16"]),
        (&[TINY, "--set", "train.steps=3"], &["train.steps", "means nothing in a benchmark"]),
        (&[TINY, "--set", "memory.recmpute=full"], &["memory.recompute"]),
        (&[TINY, "--trace", "nowhere/trace.json"], &["nowhere/trace.json"]),
        (&["qwen3-235b-a22b"], &["GiB", "--layers"]),
        // Weights take little: it is what the layers keep that does not fit.
        (
            &["qwen3-0.6b", "--layers", "2", "--seq", "8192", "--micro-batch", "1024"],
            &["the plan needs", "activations", "--recompute full"],
        ),
    ] {
        let done = case.temper(&[&["bench", "step"][..], args].concat()).exits(2).says(said);
        assert!(done.stdout.is_empty(), "{done:?}");
    }
}

#[test]
fn a_trace_of_a_benchmark_holds_steps_phases_and_operations() {
    let case = Case::tiny();
    step(&case, TINY, &["--trace", "trace.json"]).ok();
    let events = trace(&case.read("trace.json"));
    for (name, times) in [("step 4", 2), ("forward", 2), ("head", 2), ("optimizer", 2), ("cross_entropy", 2)] {
        assert_eq!(named(&events, name), times, "{name}");
    }
    let gemm = events.iter().find(|e| e["name"] == "gemm").unwrap();
    assert!(gemm["args"]["flops"].as_f64().unwrap() > 0.0 && gemm["args"]["shape"].is_string(), "{gemm}");
}

#[test]
fn a_run_traces_the_steps_it_is_told_and_trains_the_same() {
    let case = Case::tiny();
    case.sft("config.toml", &[]).ok();
    case.temper(&["sft", "config.toml", "--set", "log.dir=traced", "--trace", "t.json", "--trace-steps", "2..3"]).ok();
    let losses = |run: &str| case.steps(run).iter().map(|s| s["loss"].clone()).collect::<Vec<_>>();
    assert_eq!(losses("run"), losses("traced"));
    let events = trace(&case.read("t.json"));
    let steps = ["step 1", "step 2", "step 3", "step 4"].map(|name| named(&events, name));
    assert_eq!(steps, [0, 2, 2, 0]);
    for (steps, said) in [("0", "--trace-steps 0"), ("3..2", "--trace-steps 3..2"), ("x", "--trace-steps x"), ("4..9", "from step 1 to 4")]
    {
        let set = format!("log.dir=bad{}", steps.len());
        case.temper(&["sft", "config.toml", "--set", &set, "--trace", "u.json", "--trace-steps", steps]).exits(2).says(&[said]);
    }
    case.temper(&["sft", "config.toml", "--trace-steps", "2"]).exits(2).says(&["--trace"]);
}

/// Rank 0 of each transport prints every operation and size once; the bus bandwidth is nccl-tests' multiple of the algorithm's.
#[test]
fn the_exchange_between_ranks_is_measured_over_every_transport_on_hosts() {
    let case = Case::tiny();
    for transport in ["threads", "tcp"] {
        let common = ["bench", "comm", "--transport", transport, "--ranks", "2", "--min", "4K", "--max", "16K", "--json"];
        let rows = case.temper(&common).ok().json();
        let rows = rows.as_array().unwrap();
        assert_eq!(rows.len(), 12, "six operations in two sizes");
        for row in rows {
            let factor = row["bus_gb_per_s"].as_f64().unwrap() / row["algorithm_gb_per_s"].as_f64().unwrap();
            let want = match row["operation"].as_str().unwrap() {
                "all_gather" | "reduce_scatter" | "all_to_all" => 0.5,
                _ => 1.0,
            };
            assert!((factor - want).abs() < 1e-9 && row["us"].as_f64().unwrap() > 0.0 && row["axis"] == "all", "{row}");
        }
    }
}

/// The axis of stages is measured over all of them, as every other.
#[test]
fn the_exchange_between_stages() {
    let case = Case::tiny();
    for layout in ["tp=2,pp=2", "pp=4"] {
        let done =
            case.temper(&["bench", "comm", "--transport", "threads", "--ranks", "4", "--layout", layout, "--max", "4K", "--json"]).ok();
        let rows: Vec<serde_json::Value> = serde_json::from_str(&done.stdout).unwrap();
        let stages: Vec<_> = rows.iter().filter(|row| row["axis"] == "pp").collect();
        assert!(
            stages.iter().any(|row| row["operation"] == "all_reduce") && stages.iter().any(|row| row["operation"] == "send"),
            "{rows:?}"
        );
        assert!(stages.iter().all(|row| row["ranks"] == if layout == "pp=4" { 4 } else { 2 }), "{rows:?}");
    }
}

#[test]
fn the_exchange_along_the_axes_of_a_layout() {
    let case = Case::tiny();
    let done = case.temper(&["bench", "comm", "--ranks", "4", "--layout", "tp=2", "--max", "4K", "--only", "gather", "--json"]);
    let rows = done.ok().json();
    let axes: Vec<&str> = rows.as_array().unwrap().iter().map(|r| r["axis"].as_str().unwrap()).collect();
    assert_eq!(axes, ["tp", "dp x cp", "expert dp"]);
    case.temper(&["bench", "comm", "--ranks", "4", "--layout", "tp=2", "--max", "4K", "--only", "gather"])
        .ok()
        .says(&["4.0 KiB", "bus GB/s", "tp"]);
}

#[test]
fn what_cannot_be_measured_is_refused_by_name() {
    let case = Case::tiny();
    let comm = |more: &[&str]| case.temper(&[&["bench", "comm"][..], more].concat());
    comm(&["--layout", "tp=3", "--ranks", "4"]).exits(2).says(&["layout tp=3", "does not make up 4 ranks"]);
    for word in ["vpp=2", "recompute=full", "sequence=false", "mb=2", "offload=none", "split=1/1", "auto"] {
        let layout = format!("pp=2,{word}");
        let key = word.split('=').next().unwrap();
        comm(&["--layout", &layout, "--ranks", "2"]).exits(2).says(&[&format!("{key} changes no group of ranks"), "leave it out"]);
    }
    comm(&["--transport", "tcp"]).exits(2).says(&["--ranks N", "mpirun"]);
    comm(&["--only", "gossip"]).exits(2).says(&["gossip", "all_reduce", "send"]);
    comm(&["--min", "8K", "--max", "4K"]).exits(2).says(&["--max is smaller"]);
    comm(&["--min", "4X"]).exits(2).says(&["not a unit"]);
}
