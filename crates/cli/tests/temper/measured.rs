//! The plan beside the measurement: `bench step` on the CPU, whose account of tensors the plan meets within 3 % in every purpose.

use crate::support::{Case, Done, command, finish};
use serde_json::Value;
use std::process::Command;

/// What a plan may be off.
const TOLERANCE: f64 = 0.03;

const DENSE: &str = r#"{"model_type":"qwen3","hidden_size":128,"num_hidden_layers":4,"num_attention_heads":8,"num_key_value_heads":2,"head_dim":16,
    "intermediate_size":384,"vocab_size":1000,"tie_word_embeddings":false}"#;
const TIED: &str = r#"{"model_type":"llama","hidden_size":96,"num_hidden_layers":2,"num_attention_heads":6,"num_key_value_heads":6,
    "intermediate_size":250,"vocab_size":3001,"tie_word_embeddings":true}"#;
const EXPERTS: &str = r#"{"model_type":"qwen3_moe","hidden_size":128,"num_hidden_layers":4,"num_attention_heads":8,"num_key_value_heads":2,"head_dim":16,
    "intermediate_size":384,"moe_intermediate_size":96,"num_experts":16,"num_experts_per_tok":4,"vocab_size":1000,"tie_word_embeddings":false}"#;
/// Every token goes to every expert, so that no rank gets more rows than another.
const ALL_EXPERTS: &str = r#"{"model_type":"qwen3_moe","hidden_size":128,"num_hidden_layers":4,"num_attention_heads":8,"num_key_value_heads":2,"head_dim":16,
    "intermediate_size":384,"moe_intermediate_size":96,"num_experts":4,"num_experts_per_tok":4,"vocab_size":1000,"tie_word_embeddings":false}"#;
/// Experts in every other layer, as wide dense layers between them.
const MIXED: &str = r#"{"model_type":"qwen3_moe","hidden_size":128,"num_hidden_layers":4,"num_attention_heads":8,"num_key_value_heads":2,"head_dim":16,
    "intermediate_size":512,"moe_intermediate_size":96,"num_experts":8,"num_experts_per_tok":2,"decoder_sparse_step":2,"vocab_size":1000,
    "tie_word_embeddings":false}"#;

fn models(case: &Case) {
    for (name, text) in
        [("dense.json", DENSE), ("tied.json", TIED), ("experts.json", EXPERTS), ("all.json", ALL_EXPERTS), ("mixed.json", MIXED)]
    {
        case.write(name, text);
    }
}

fn step(case: &Case, model: &str, more: &[&str]) -> Done {
    let small = ["--threads", "1", "bench", "step", model, "--seq", "96", "--micro-batch", "2", "--steps", "1", "--warmup", "1"];
    case.temper(&[&small[..], more].concat()).ok()
}

/// Every figure of memory is within the tolerance; returns the whole report.
#[track_caller]
fn agrees(case: &Case, model: &str, more: &[&str]) -> Value {
    agrees_in(case, model, more, &["weights", "gradients", "optimizer", "activations", "tensors"])
}

/// The figures of these names are.
#[track_caller]
fn agrees_in(case: &Case, model: &str, more: &[&str], wanted: &[&str]) -> Value {
    let report = step(case, model, &[more, &["--json"]].concat()).json();
    let rows = report["plan"]["memory"].as_array().unwrap_or_else(|| panic!("{report}"));
    let names: Vec<&str> = rows.iter().map(|row| row[0].as_str().unwrap()).collect();
    assert_eq!(names, ["weights", "gradients", "optimizer", "activations", "tensors"]);
    for row in rows {
        let figure = |key: &str| row[1][key].as_f64().unwrap();
        println!(
            "{model} {more:?} {}: plan {} measured {} ({:+.2} %)",
            row[0],
            figure("plan"),
            figure("measured"),
            100.0 * figure("deviation")
        );
        let within = figure("deviation").abs() <= TOLERANCE || !wanted.contains(&row[0].as_str().unwrap());
        assert!(figure("measured") > 0.0 && within, "{model} {more:?}: {row}");
        assert!((figure("plan") / figure("measured") - 1.0 - figure("deviation")).abs() < 1e-12);
    }
    report
}

#[test]
fn one_rank_needs_what_the_plan_says() {
    let case = Case::tiny();
    models(&case);
    for model in ["dense.json", "tied.json", "experts.json", "mixed.json", "../common/tiny-qwen3"] {
        for more in [
            &[][..],
            &["--recompute", "selective"],
            &["--recompute", "full"],
            &["--recompute", "selective", "--set", "memory.recompute_parts=[\"qkv\",\"mlp\"]"],
            &["--accumulate", "3", "--doc-len", "20"],
            &["--set", "memory.loss_chunk=64", "--recompute", "full"],
        ] {
            agrees(&case, model, more);
        }
    }
}

#[test]
fn each_rank_of_a_layout_needs_what_the_plan_says() {
    let case = Case::tiny();
    models(&case);
    for (model, layout, ranks) in [
        ("dense.json", "tp=2", &["0", "1"][..]),
        ("dense.json", "tp=4", &["3"]),
        ("dense.json", "tp=2,sequence=false", &["0"]),
        ("dense.json", "dp=4", &["2"]),
        ("dense.json", "cp=2", &["0", "1"]),
        ("dense.json", "pp=2", &["0", "1"]),
        ("dense.json", "pp=3,split=1/2/1", &["0", "1", "2"]),
        ("dense.json", "pp=2,vpp=2", &["0", "1"]),
        ("dense.json", "tp=2,cp=2,pp=2,dp=2", &["0", "15"]),
        ("tied.json", "pp=2", &["0", "1"]),
        ("all.json", "ep=2,dp=2", &["0", "1"]),
        ("all.json", "ep=4,dp=4", &["0"]),
        ("all.json", "tp=2,ep=2,etp=1", &["0"]),
        ("all.json", "tp=2,sequence=false,ep=2,etp=1", &["1"]),
        ("all.json", "tp=2,ep=2,etp=2,dp=2", &["1"]),
        ("all.json", "tp=2,pp=2,ep=2,dp=2", &["0", "7"]),
        ("all.json", "cp=2,ep=2", &["1"]),
    ] {
        for rank in ranks {
            for recompute in ["none", "full"] {
                let report = agrees(&case, model, &["--as-rank", rank, "--of", layout, "--accumulate", "4", "--recompute", recompute]);
                assert_eq!(report["rank"]["skew"].is_object(), layout.contains("ep="), "{}", report["rank"]);
            }
        }
    }
}

/// Where a rank's experts get more in one layer than in another, the plan beside the measurement has each layer as it routed.
#[test]
fn uneven_routing_is_planned_as_it_was_measured() {
    let case = Case::tiny();
    models(&case);
    for (layout, rank) in
        [("ep=2,dp=2", "0"), ("ep=4,dp=4", "1"), ("tp=2,ep=2,etp=2,dp=2", "1"), ("tp=2,pp=2,ep=2,dp=2", "0"), ("pp=2,vpp=2,ep=2,dp=2", "2")]
    {
        for recompute in ["none", "selective", "full"] {
            let more = ["--as-rank", rank, "--of", layout, "--accumulate", "4", "--recompute", recompute];
            let report = agrees(&case, "experts.json", &more);
            let skew = |key: &str| report["rank"]["skew"][key].as_f64().unwrap();
            assert!(skew("most") > skew("mean") && skew("mean") > 0.0, "{}", report["rank"]);
            let layers = report["rank"]["skew"]["layers"].as_array().unwrap().len();
            let stages = if layout.contains("pp=2") { 2 } else { 1 };
            assert_eq!(
                layers,
                4 / stages * 4 * if recompute == "full" { 2 } else { 1 },
                "layers x micro-batches, and again in the backward pass"
            );
        }
    }
}

/// Ranks that are really there: what rank 0 measures.
#[test]
fn ranks_among_each_other_need_what_the_plan_says() {
    let case = Case::tiny();
    models(&case);
    agrees(&case, "dense.json", &["--layout", "tp=2", "--recompute", "selective"]);
    agrees(&case, "dense.json", &["--layout", "pp=2", "--accumulate", "4"]);
}

#[test]
fn the_plan_is_told_in_words() {
    let case = Case::tiny();
    let done = step(&case, "../common/tiny-qwen3", &[]).says(&["plan        peak of weights", "activations", "tensors", "off by"]);
    assert!(!done.stdout.contains("; step"), "a processor has no known rates: {}", done.stdout);
    step(&case, "../common/tiny-qwen3", &["--as-rank", "1", "--of", "tp=2"]).says(&["measured    rank 1 of tp=2", "plan        peak of"]);
}

/// Address space is limited from outside, so that the third or so of many tensors of a hundred megabytes cannot be had.
#[test]
fn where_memory_runs_out_the_plan_stands_beside_what_was_held() {
    let case = Case::tiny();
    let limited = |args: &[&str]| {
        let temper = command(&case.dir, args);
        let mut shell = Command::new("sh");
        shell.arg("-c").arg("ulimit -v 1000000; exec \"$0\" \"$@\"").arg(temper.get_program()).args(temper.get_args());
        shell.current_dir(&case.dir).envs(temper.get_envs().filter_map(|(k, v)| v.map(|v| (k, v))));
        finish(shell)
    };
    let long =
        ["--threads", "1", "bench", "step", "../common/tiny-qwen3", "--seq", "262144", "--doc-len", "32", "--steps", "1", "--warmup", "0"];
    let said =
        ["out of host memory", "for activations do not fit", "train.micro_batch", "The plan for rank 0 of tp=1", "held and asked for are"];
    limited(&long).exits(1).says(&said);
    let rows: String =
        std::iter::repeat_n("{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":\"b\"}]}\n", 20_000)
            .collect();
    case.write("many.jsonl", &rows);
    let sets = ["data.train=[\"many.jsonl\"]", "data.seq_len=262144", "data.packing=true", "train.global_batch=1", "train.micro_batch=1"];
    let args = [&["--threads", "1"][..], &Case::sft_args("config.toml", &sets, &[])].concat();
    limited(&args).exits(1).says(&said);
}
