//! How a plan is told: explanations that add up, JSON with its promised keys, a picture of sound form.

mod common;

use common::*;
use temper_planner::explain::{Explanation, NAMES, explain};
use temper_planner::*;

/// Plans of many shapes.
fn plans() -> Vec<Plan> {
    let mut all = Vec::new();
    for (model, gpu, gpus, seq, batch, layout) in [
        ("Qwen3-235B-A22B", "h20", 64, 4096, 32, "tp=8,pp=2,ep=4,recompute=moe"),
        ("Qwen3-235B-A22B", "h100", 256, 4096, 512, "tp=4,pp=8,ep=8,etp=1,split=11/12/12/12/12/12/12/11,recompute=full,offload=optimizer"),
        ("Qwen3.6-35B-A3B", "h20", 40, 49_152, 80, "ep=8,recompute=full"),
        ("Qwen3-8B", "h100", 8, 4096, 64, "pp=4,vpp=3,tp=2"),
        ("Qwen3.5-27B", "h200", 8, 32_768, 8, "tp=4,cp=2"),
        ("Qwen3-0.6B", "l40s", 1, 2048, 8, ""),
        ("Qwen3-30B-A3B", "b200", 16, 4096, 64, ""),
    ] {
        for account in [Account::Temper, Account::Megatron] {
            let mut job = Job::new(seq, batch).under(account);
            job.steps = Some(100);
            all.push(planned(run(model, cluster(gpu, gpus), job, layout)));
        }
    }
    all
}

/// The value of an expression of numbers, `+ - x /` and brackets.
fn evaluate(text: &str) -> f64 {
    let clean: String = text.chars().filter(|c| *c != ',').collect();
    let spaced = clean.replace('(', " ( ").replace(')', " ) ");
    let tokens: Vec<&str> = spaced.split_whitespace().collect();
    let mut at = 0;
    let value = sum(&tokens, &mut at);
    assert_eq!(at, tokens.len(), "{text}");
    value
}

fn sum(tokens: &[&str], at: &mut usize) -> f64 {
    let mut value = product(tokens, at);
    while let Some(sign @ (&"+" | &"-")) = tokens.get(*at) {
        *at += 1;
        let next = product(tokens, at);
        value += if *sign == "+" { next } else { -next };
    }
    value
}

fn product(tokens: &[&str], at: &mut usize) -> f64 {
    let mut value = atom(tokens, at);
    while let Some(sign @ (&"x" | &"/")) = tokens.get(*at) {
        *at += 1;
        let next = atom(tokens, at);
        value = if *sign == "x" { value * next } else { value / next };
    }
    value
}

fn atom(tokens: &[&str], at: &mut usize) -> f64 {
    let token = tokens[*at];
    *at += 1;
    if token != "(" {
        return token.parse().unwrap_or_else(|_| panic!("{token} in {tokens:?}"));
    }
    let value = sum(tokens, at);
    assert_eq!(tokens[*at], ")");
    *at += 1;
    value
}

#[track_caller]
fn adds_up(e: &Explanation) {
    assert!(!e.lines.is_empty() && !e.about.is_empty(), "{e:?}");
    for line in &e.lines {
        let value = evaluate(&line.numbers);
        assert!(
            (value - line.value).abs() <= 1e-9 * line.value.abs().max(1e-9),
            "{}: {} = {value}, not {}",
            e.name,
            line.numbers,
            line.value
        );
    }
}

#[test]
fn every_explanation_adds_up_to_the_figure_of_the_plan() {
    for plan in plans() {
        for (name, _) in NAMES {
            let e = explain(&plan, name).unwrap();
            adds_up(&e);
            let t = &plan.time;
            let h = &plan.heaviest;
            let figure = match name {
                "params" => h.params as f64,
                "peak" => h.by_purpose.total(),
                "in_flight" => e.value(),
                "model_params" => plan.run.network.total as f64,
                "active_params" => plan.run.network.active as f64,
                "skewed_peak" => plan.stages.iter().map(|s| s.skewed.total()).fold(0.0, f64::max),
                "load" | "first_step" | "save" | "resume" | "rollout" => {
                    let phase = memory::Phase::ALL.into_iter().find(|p| p.name() == name).unwrap();
                    plan.stages[h.stage].phases.of(phase)
                }
                "kv_cache" => plan.stages[h.stage].phases.kv_cache,
                "write" => plan.checkpoint.write_s,
                "pause" => plan.checkpoint.pause_s,
                "reserve" => 0.05 * plan.run.cluster.device.memory_bytes(),
                "days" => plan.days().unwrap(),
                "cp" => t.comm[Axis::Cp as usize],
                "expert_dp" => plan.layout.expert_dp() as f64,
                "checkpoint" => plan.checkpoint.bytes as f64,
                "flops" => ModelFlops::new(&plan.run.network).per_token(plan.run.job.mean_tokens),
                "step" => t.total,
                "compute" => t.compute.iter().sum(),
                "recompute" => t.recompute,
                "bubble" => t.bubble,
                "optimizer" => t.optimizer,
                "tp" => t.comm[Axis::Tp as usize],
                "ep" => t.comm[Axis::Ep as usize],
                "pp" => t.comm[Axis::Pp as usize],
                "dp" => t.comm[Axis::Dp as usize] + t.comm[Axis::ExpertDp as usize],
                "tokens_per_s" => t.tokens_per_s_per_gpu,
                "mfu" => t.mfu,
                purpose => {
                    let found = memory::Purpose::ALL.into_iter().find(|p| p.name() == purpose);
                    h.by_purpose.of(found.unwrap_or_else(|| panic!("{purpose} is no purpose")))
                }
            };
            near(e.value(), figure, 1e-12);
            // No number of bytes shows the noise of its last bits.
            let digits = |number: &str| number.chars().filter(char::is_ascii_digit).count();
            let noisy = |number: &str| number.split_once('.').is_some_and(|(whole, _)| whole.len() > 3) && digits(number) > 11;
            assert!(!e.lines.iter().any(|line| line.numbers.split(' ').any(noisy)), "{e:?}");
        }
        assert!(explain(&plan, "nonsense").is_none());
    }
}

#[test]
fn json_has_the_promised_keys() {
    for plan in plans() {
        let json = plan.to_json();
        for key in [
            "/model/params",
            "/model/active_params",
            "/layout/tp",
            "/layout/pp",
            "/layout/vpp",
            "/layout/ep",
            "/layout/etp",
            "/layout/cp",
            "/layout/dp",
            "/layout/expert_dp",
            "/heaviest/rank",
            "/heaviest/params",
            "/heaviest/peak_bytes",
            "/step/time_s",
            "/step/tokens_per_s_per_gpu",
            "/step/mfu",
            "/checkpoint/bytes",
            "/checkpoint/write_s",
            "/checkpoint/pause_s",
            "/days",
            "/stages/0/phases/load",
            "/stages/0/phases/first_step",
            "/stages/0/phases/steady",
            "/stages/0/phases/save",
            "/stages/0/phases/resume",
            "/stages/0/phases/rollout",
            "/beside/heaviest/peak_bytes",
        ] {
            assert!(json.pointer(key).is_some_and(serde_json::Value::is_number), "{key}");
        }
        assert!(json["problems"].is_array());
        let parts = json["heaviest"]["by_purpose"].as_object().unwrap();
        let sum: f64 = parts.values().map(|v| v.as_f64().unwrap()).sum();
        near(sum, json["heaviest"]["peak_bytes"].as_f64().unwrap(), 1e-9);
        assert!(json["days"].as_f64().unwrap() > 0.0);
    }
}

/// The verdict is that of the fullest moment of a run, be it no step: a short sequence takes less than the exact embedding on its way to a file.
#[test]
fn the_verdict_is_that_of_the_fullest_moment() {
    let ask = |bytes: f64| {
        let mut run = run("Qwen3-0.6B", cluster("h100", 1), Job::new(16, 1), "tp=1,offload=none,recompute=full");
        run.cluster.device.memory_mib = (bytes / 1_048_576.0) as u64;
        planned(run)
    };
    let free = ask(80e9);
    let (_, phase, most) = free.fullest();
    assert_eq!((phase, most), (memory::Phase::Save, free.stages[0].phases.save));
    let steps = free.heaviest.peak_bytes as f64;
    assert!(steps < most);
    let between = ask((steps + most) / 2.0);
    assert!(
        !between.fits() && between.advice.iter().any(|a| a.fatal && a.found.contains("while a checkpoint is written")),
        "{:?}",
        between.advice
    );
    assert!(ask(most + 2e6).fits());
    // A search holds the same limit, and every moment of a run that fits does.
    for plan in plans().into_iter().filter(Plan::fits) {
        let trained = memory::Phase::ALL.into_iter().filter(|phase| *phase != memory::Phase::Rollout);
        for phase in trained {
            assert!(plan.stages.iter().all(|s| s.phases.of(phase) <= plan.capacity()), "{phase:?}");
        }
    }
    let mut tight = between.run.clone();
    (tight.wish, tight.overheads.reserve) = (LayoutRequest { offload: Some(Offload::None), ..LayoutRequest::default() }, 0.0);
    assert!(search(&tight.space(), &tight.wish).fitting.is_empty());
}

#[test]
fn the_picture_is_sound() {
    for plan in plans() {
        let svg = svg::picture(&plan);
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
        assert_eq!(svg.matches("<svg").count(), svg.matches("</svg>").count());
        assert!(svg.contains("pipeline stage") && svg.contains("weights") && svg.len() < 100 << 10);
    }
    let mut odd = planned(run("Qwen3-0.6B", cluster("h100", 1), Job::new(128, 1), ""));
    odd.run.network.name = "a <b> & \"c\"".into();
    assert!(svg::picture(&odd).contains("a &lt;b&gt; &amp; &quot;c&quot;"));
}

#[test]
fn advice_names_what_is_wrong_and_the_remedy() {
    let said = |model: &str, gpu: &str, gpus: usize, seq: usize, batch: usize, layout: &str| {
        let plan = planned(run(model, cluster(gpu, gpus), Job::new(seq, batch), layout));
        plan.advice.iter().map(|a| format!("{} {}", a.found, a.remedy)).collect::<Vec<_>>().join("\n")
    };
    for (text, words) in [
        (said("Qwen3-8B", "h100", 1, 4096, 4, "tp=1,offload=none,recompute=full"), "needs"),
        (said("Qwen3-8B", "h100", 16, 4096, 64, "tp=16"), "crosses nodes"),
        (said("Qwen3-30B-A3B", "h100", 8, 4096, 64, "tp=8,ep=8,etp=1"), "copy of each head"),
        (said("Qwen3-8B", "h100", 32, 4096, 32, "pp=4,dp=8"), "bubble"),
        (said("Qwen3-30B-A3B", "h100", 64, 4096, 256, "ep=64"), "crosses 8 nodes"),
        (said("Qwen3-8B", "h200", 8, 4096, 64, "tp=8,recompute=full"), "recomputation is not needed"),
        (said("Qwen3-8B", "h200", 8, 4096, 64, "tp=8"), "times as fast"),
        (said("Qwen3.6-35B-A3B", "h20", 40, 49_152, 80, "ep=8"), "does not train it yet"),
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
}
