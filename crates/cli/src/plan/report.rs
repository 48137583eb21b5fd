//! A plan in words and aligned columns: the verdict first, then what it rests on.

use crate::table::Table;
use serde_json::{Value, json};
use temper_planner::explain::Explanation;
use temper_planner::memory::{Memory, Phase, Purpose};
use temper_planner::time::{Op, axis_name};
use temper_planner::{Account, Axis, Plan, Recompute, Refused, layout_json};

/// Most columns of stages.
const MOST_STAGES: usize = 4;

/// The whole report.
pub fn human(plan: &Plan, measured: Option<f64>) -> String {
    let mut parts = vec![verdict(plan), setting(plan), memory(plan), life(plan), time(plan)];
    if let Some(speed) = measured {
        parts.push(format!(
            "measured   {speed} tokens/s a device are {:.1} TFLOP/s, {:.1} % of the peak",
            plan.measured_mfu(speed) * plan.run.cluster.device.bf16_tflops,
            100.0 * plan.measured_mfu(speed)
        ));
    }
    parts.extend([runners_up(plan), advice(plan)].into_iter().filter(|part| !part.is_empty()));
    parts.join("\n\n")
}

fn verdict(plan: &Plan) -> String {
    let (h, limit) = (&plan.heaviest, plan.limit());
    let peak = h.peak_bytes as f64;
    let verb = match (plan.fits(), plan.fits_skewed()) {
        (true, true) => format!("FITS with {} GB to spare", gb(limit - h.skewed_peak_bytes.max(h.peak_bytes) as f64)),
        (true, false) => "FITS ONLY WHILE ROUTING IS BALANCED".to_string(),
        _ => format!("DOES NOT FIT by {} GB", gb(peak - limit)),
    };
    let skew = match plan.layout.ep > 1 {
        true => format!(" ({} when the busiest experts get {} times their share)", gb(h.skewed_peak_bytes as f64), plan.run.job.skew),
        false => String::new(),
    };
    format!(
        "{verb}: rank {} (stage {}) needs {} of {} GB{skew}\n{} a step, {} tokens/s a device, MFU {:.1} %",
        h.rank,
        h.stage,
        gb(peak),
        gb(limit),
        seconds(plan.time.total),
        thousands(plan.time.tokens_per_s_per_gpu),
        100.0 * plan.time.mfu
    )
}

fn setting(plan: &Plan) -> String {
    let (run, l) = (&plan.run, &plan.layout);
    let (network, job, cluster) = (&run.network, &run.job, &run.cluster);
    let nodes = cluster.gpus / cluster.per_node.max(1);
    let title = if cluster.device.title.is_empty() { &cluster.device.name } else { &cluster.device.title };
    let source = if plan.searched {
        format!("the {} of {} tried", if plan.fits() { "best" } else { "smallest" }, thousands(plan.tried as f64))
    } else {
        let chosen = [("recomputation", run.wish.recompute.is_none()), ("off-loading", run.wish.offload.is_none())];
        let chosen: Vec<&str> = chosen.iter().filter(|(_, open)| *open).map(|(name, _)| *name).collect();
        match chosen[..] {
            [] => "as given".to_string(),
            _ => format!("as given; {} chosen", chosen.join(" and ")),
        }
    };
    let experts = match network.arch.moe {
        Some(_) => format!("; experts: etp {} x ep {} x {} replicas", l.etp, l.ep, l.expert_dp()),
        None => String::new(),
    };
    let layers: Vec<String> = plan.stages.iter().map(|s| s.stage.layers.to_string()).collect();
    let layers = if layers.len() <= 16 {
        layers.join("/")
    } else {
        format!("{} to {}", layers.iter().min().unwrap_or(&layers[0]), layers.iter().max().unwrap_or(&layers[0]))
    };
    let mean = if job.mean_tokens < job.seq as f64 { format!(" ({} on average)", thousands(job.mean_tokens)) } else { String::new() };
    let recompute = match l.recompute {
        Recompute::None => "nothing".to_string(),
        Recompute::Selective(_) => l.recompute.to_string(),
        Recompute::Full => "whole layers".to_string(),
    };
    [
        format!("model      {}: {} B parameters, {} B for a token", network.name, billions(network.total), billions(network.active)),
        format!("devices    {} x {title}, {nodes} node{} of {}", cluster.gpus, if nodes == 1 { "" } else { "s" }, cluster.per_node),
        format!("layout     {l} ({source})"),
        format!("           attention: tp {} x cp {} x dp {}{experts}; {layers} layers a stage", l.tp, l.cp, l.dp),
        format!(
            "step       {} sequences of up to {} tokens{mean}: {} micro-batches of {} a rank; {recompute} recomputed",
            thousands(job.global_batch as f64),
            thousands(job.seq as f64),
            l.micro_batches(job.global_batch),
            l.micro_batch
        ),
    ]
    .join("\n")
}

/// The stages worth a column: the first two, the heaviest, the last.
fn shown(plan: &Plan) -> Vec<usize> {
    let last = plan.stages.len().saturating_sub(1);
    if last < MOST_STAGES {
        return (0..=last).collect();
    }
    let mut all = vec![0, 1, plan.heaviest.stage, last];
    all.sort_unstable();
    all.dedup();
    all
}

fn memory(plan: &Plan) -> String {
    let stages: Vec<_> = shown(plan).into_iter().filter_map(|i| plan.stages.get(i)).collect();
    let mut titles = vec!["memory, GB".to_string()];
    titles.extend(stages.iter().map(|s| format!("stage {}", s.stage.index)));
    titles.extend([other(plan).to_string(), String::new()]);
    let mut table = Table::new(&titles.iter().map(String::as_str).collect::<Vec<_>>());
    let beside = &plan.beside.heaviest;
    let mut row = |name: &str, mine: &dyn Fn(&temper_planner::StagePlan) -> f64, theirs: f64, format: &dyn Fn(f64) -> String| {
        let mut cells = vec![format!("  {name}")];
        cells.extend(stages.iter().map(|s| format(mine(s))));
        cells.extend([format(theirs), String::new()]);
        table.row(cells);
    };
    row("parameters, B", &|s| s.params.total() as f64, beside.params as f64, &|v| format!("{:.2}", v / 1e9));
    for purpose in Purpose::ALL {
        let used = beside.by_purpose.of(purpose) > 0.0 || stages.iter().any(|s| s.memory.of(purpose) > 0.0);
        if used {
            row(purpose.name(), &|s| s.memory.of(purpose), beside.by_purpose.of(purpose), &gb);
        }
    }
    row("peak", &|s| s.memory.total(), beside.peak_bytes as f64, &gb);
    if plan.layout.ep > 1 {
        row(&format!("peak, routing skewed {}x", plan.run.job.skew), &|s| s.skewed.total(), beside.skewed_peak_bytes as f64, &gb);
    }
    let host = plan.stages.iter().map(|s| s.memory.host).fold(0.0, f64::max);
    let host = if host > 0.0 { format!("\n  {} GB a rank on the host", gb(host)) } else { String::new() };
    format!("{table}{host}\n{}", difference(plan))
}

fn other(plan: &Plan) -> &'static str {
    match plan.beside.account {
        Account::Megatron => "megatron",
        Account::Temper => "temper",
    }
}

/// Why the other account differs.
fn difference(plan: &Plan) -> String {
    let (mine, theirs) = (plan.heaviest.peak_bytes as f64, plan.beside.heaviest.peak_bytes as f64);
    let parts: Vec<String> = plan.beside.differences.iter().take(4).map(|(name, bytes)| format!("{name} {:+.1}", bytes / 1e9)).collect();
    let moment = |memory: &Memory| if memory.of(Purpose::Logits) > 0.0 { "at the loss" } else { "in the backward pass of a layer" };
    format!(
        "  the peak is {}; {}'s, {}, is {} GB, {:+.1}: {}",
        moment(&plan.heaviest.by_purpose),
        other(plan),
        moment(&plan.beside.heaviest.by_purpose),
        gb(theirs),
        (theirs - mine) / 1e9,
        parts.join(", ")
    )
}

fn life(plan: &Plan) -> String {
    let Some(stage) = plan.stages.get(plan.heaviest.stage) else { return String::new() };
    let parts: Vec<String> = Phase::ALL.iter().map(|p| format!("{} {}", p.name().replace('_', " "), gb(stage.phases.of(*p)))).collect();
    format!("life, GB   {} ({} of it keys and values of {} sequences)", parts.join(", "), gb(stage.phases.kv_cache), plan.run.job.rollouts)
}

fn time(plan: &Plan) -> String {
    let t = &plan.time;
    let mut table = Table::new(&["time, s", "step", "share", ""]);
    let mut row = |name: String, value: f64| {
        if value > 0.0 {
            table.row([format!("  {name}"), format!("{value:.3}"), format!("{:.1} %", 100.0 * value / t.total), String::new()]);
        }
    };
    for op in Op::ALL {
        row(op.name().replace('_', " "), t.compute[op as usize]);
    }
    row("recomputation".into(), t.recompute);
    for axis in [Axis::Tp, Axis::Cp, Axis::Ep, Axis::Etp, Axis::Pp, Axis::Dp, Axis::ExpertDp] {
        let group = plan.layout.group(axis, &plan.run.cluster);
        let place = if group.nodes > 1 { format!("{} nodes", group.nodes) } else { "in a node".to_string() };
        row(format!("{} communication, {place}", axis_name(axis)), t.comm[axis as usize]);
    }
    row("bubble".into(), t.bubble);
    row("optimizer".into(), t.optimizer);
    row("step".into(), t.total);
    let c = &plan.checkpoint;
    let days = plan.days().map(|days| format!("\n  the run takes {days:.2} days")).unwrap_or_default();
    format!(
        "{table}{days}\n  a checkpoint is {} GB: training pauses {}, writing takes {} behind it",
        gb(c.bytes as f64),
        seconds(c.pause_s),
        seconds(c.write_s)
    )
}

fn runners_up(plan: &Plan) -> String {
    let last = if plan.searched { "why not" } else { "against yours" };
    let mut table = Table::new(&["next best", "tokens/s", "peak GB", last]);
    let all = plan.runners_up.iter().chain(&plan.too_large);
    let mut any = false;
    for candidate in all {
        any = true;
        table.row([
            format!("  {}", candidate.layout),
            thousands(candidate.time.tokens_per_s_per_gpu),
            gb(candidate.peak),
            plan.why_not(candidate),
        ]);
    }
    if any { table.to_string() } else { String::new() }
}

fn advice(plan: &Plan) -> String {
    let mut lines = Vec::new();
    for advice in &plan.advice {
        lines.push(format!("  {} {}\n    {}", if advice.fatal { "!" } else { "-" }, advice.found, advice.remedy));
    }
    lines.extend(plan.run.network.notices.iter().map(|notice| format!("  - {notice}")));
    if lines.is_empty() { String::new() } else { format!("worth knowing\n{}", lines.join("\n")) }
}

/// An explanation in lines.
pub fn explanation(e: &Explanation) -> String {
    let mut lines = vec![format!("{}: {}", e.name, e.about)];
    for line in &e.lines {
        let value = if line.value.fract() == 0.0 { thousands(line.value) } else { format!("{:.6}", line.value) };
        let value = if line.unit == "B" { format!("{value} B ({} GB)", gb(line.value)) } else { format!("{value} {}", line.unit) };
        lines.push(format!("  {}\n    = {}\n    = {value}", line.formula, line.numbers));
    }
    lines.join("\n")
}

/// A refusal in words.
pub fn refused(refused: &Refused) -> String {
    let mut text = format!("the layout {} cannot be run", refused.layout);
    for problem in &refused.problems {
        text += &format!("\n  - {problem}");
    }
    if !refused.nearest.is_empty() {
        text += "\nthe nearest legal layouts:";
        for layout in &refused.nearest {
            text += &format!("\n  --layout {layout}");
        }
    }
    text
}

/// A refusal as JSON.
pub fn refused_json(refused: &Refused) -> Value {
    json!({
        "fits": false,
        "layout": layout_json(&refused.layout),
        "problems": refused.problems,
        "nearest": refused.nearest.iter().map(layout_json).collect::<Vec<_>>(),
    })
}

/// What a measured speed amounts to.
pub fn measured_json(plan: &Plan, speed: f64) -> Value {
    let mfu = plan.measured_mfu(speed);
    json!({ "tokens_per_s_per_gpu": speed, "mfu": mfu, "tflops": mfu * plan.run.cluster.device.bf16_tflops })
}

fn gb(bytes: f64) -> String {
    format!("{:.1}", bytes / 1e9)
}

fn billions(n: u64) -> String {
    format!("{:.2}", n as f64 / 1e9)
}

fn seconds(s: f64) -> String {
    match s {
        s if s >= 120.0 => format!("{:.1} min", s / 60.0),
        s if s >= 1.0 => format!("{s:.2} s"),
        s => format!("{:.1} ms", s * 1e3),
    }
}

fn thousands(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) && out.chars().all(|c| c.is_ascii_digit() || c == ',') {
            out.push(',');
        }
        out.push(c);
    }
    out
}
