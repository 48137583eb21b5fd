//! A plan in words and aligned columns: the verdict first, then what it rests on.

use crate::table::Table;
use serde_json::{Value, json};
use temper_planner::explain::Explanation;
use temper_planner::memory::{Memory, Phase, Purpose};
use temper_planner::time::{Op, axis_name};
use temper_planner::units::{Unit, bytes, count, difference, seconds, thousands};
use temper_planner::{Account, Axis, Layout, Plan, Recompute, Refused, layout_json};

/// Most columns of stages.
const MOST_STAGES: usize = 4;

/// The whole report.
pub fn human(plan: &Plan, measured: Option<f64>, notes: &[String]) -> String {
    let notes: String = notes.iter().map(|note| format!("\nnote: {note}")).collect();
    let mut parts = vec![verdict(plan) + &notes, setting(plan), memory(plan), life(plan), time(plan)];
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
    let (h, memory, (stage, phase, peak)) = (&plan.heaviest, plan.capacity(), plan.fullest());
    let free = bytes((memory - plan.worst()).max(0.0));
    let verb = match (plan.fits(), plan.fits_skewed(), plan.keeps_reserve()) {
        (true, true, true) => format!("FITS with {free} to spare"),
        (true, true, false) => format!("FITS with {free} to spare, less than the reserve of {}", bytes(plan.reserve())),
        (true, false, _) => "FITS ONLY WHILE ROUTING IS BALANCED".to_string(),
        _ => format!("DOES NOT FIT by {}", bytes(peak - memory)),
    };
    let skew = match plan.layout.ep > 1 {
        true => format!(" ({} when the busiest experts get {} times their share)", bytes(h.skewed_peak_bytes as f64), plan.run.job.skew),
        false => String::new(),
    };
    format!(
        "{verb}: rank {} (stage {stage}) needs {} of {}{}{skew}\n{} a step, {} tokens/s a device, MFU {:.1} %",
        stage * plan.layout.stage_ranks(),
        bytes(peak),
        bytes(memory),
        phase.while_it_is(),
        seconds(plan.time.total),
        count(plan.time.tokens_per_s_per_gpu),
        100.0 * plan.time.mfu
    )
}

fn setting(plan: &Plan) -> String {
    let (run, l) = (&plan.run, &plan.layout);
    let (network, job, cluster) = (&run.network, &run.job, &run.cluster);
    let (nodes, turns) = (cluster.gpus / cluster.per_node.max(1), l.turns(job.global_batch));
    let title = if cluster.device.title.is_empty() { &cluster.device.name } else { &cluster.device.title };
    let mean = if job.mean_tokens < job.seq as f64 { format!(" ({} on average)", thousands(job.mean_tokens)) } else { String::new() };
    let recompute = match l.recompute {
        Recompute::None => "nothing".to_string(),
        Recompute::Selective(_) => l.recompute.to_string(),
        Recompute::Full => "whole layers".to_string(),
    };
    [
        format!("model      {}: {} parameters, {} for a token", network.name, count(network.total as f64), count(network.active as f64)),
        format!(
            "devices    {} x {title}, {} node{} of {}{}",
            thousands(cluster.gpus as f64),
            thousands(nodes as f64),
            if nodes == 1 { "" } else { "s" },
            cluster.per_node,
            // What a layout over nodes hangs on.
            if nodes == 1 { String::new() } else { format!(", {} GB/s a device between them (--network)", cluster.device.network_gb_s) }
        ),
        format!("layout     {} ({})", told(plan, l), source(plan)),
        format!("           attention: tp {} x cp {} x dp {}{}; {} layers a stage", l.tp, l.cp, l.dp, experts(plan), layers(plan)),
        format!(
            "step       {} sequences of up to {} tokens{mean}: {} micro-batch{} of {} a replica; {recompute} recomputed",
            thousands(job.global_batch as f64),
            thousands(job.seq as f64),
            turns.real,
            if turns.real == 1 { "" } else { "es" },
            l.micro_batch
        ),
    ]
    .join("\n")
}

/// A layout as `--layout` takes it.
fn told(plan: &Plan, layout: &Layout) -> String {
    layout.told(plan.run.network.arch.moe.is_some())
}

/// Where the layout is from.
fn source(plan: &Plan) -> String {
    let wish = &plan.run.wish;
    if plan.searched {
        let best = if plan.keeps_reserve() { "best" } else { "smallest" };
        let held = wish.given();
        let held = if held.is_empty() { String::new() } else { format!(", {} held", held.join(",")) };
        return format!("the {best} of {} tried{held}", thousands(plan.tried as f64));
    }
    let chosen = [("recomputation", wish.recompute.is_none()), ("off-loading", wish.offload.is_none())];
    let chosen: Vec<&str> = chosen.iter().filter(|(_, open)| *open).map(|(name, _)| *name).collect();
    match chosen[..] {
        [] => "as given".to_string(),
        _ => format!("as given; {} chosen", chosen.join(" and ")),
    }
}

/// How experts lie on the ranks of a stage.
fn experts(plan: &Plan) -> String {
    let l = &plan.layout;
    if plan.run.network.arch.moe.is_none() {
        return String::new();
    }
    let why = if l.etp > 1 && !plan.searched && plan.run.wish.etp.is_none() { ", etp as tp" } else { "" };
    format!("; experts: etp {} x ep {} x {} replicas{why}", l.etp, l.ep, l.expert_dp())
}

/// Layers of the stages.
fn layers(plan: &Plan) -> String {
    let layers: Vec<String> = plan.stages.iter().map(|s| s.stage.layers.to_string()).collect();
    if layers.len() <= 16 {
        return layers.join("/");
    }
    let of = |pick: fn(usize, usize) -> usize| plan.stages.iter().map(|s| s.stage.layers).reduce(pick).unwrap_or(0);
    format!("{} to {}", of(usize::min), of(usize::max))
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
    let beside = &plan.beside.heaviest;
    let unit = Unit::of_bytes(stages.iter().map(|s| s.memory.total()).fold(0.0, f64::max));
    let mut titles = vec![format!("memory, {}", unit.name)];
    titles.extend(stages.iter().map(|s| format!("stage {}", s.stage.index)));
    titles.extend([other(plan).to_string(), String::new()]);
    let mut table = Table::new(&titles.iter().map(String::as_str).collect::<Vec<_>>());
    let mut row = |name: &str, mine: &dyn Fn(&temper_planner::StagePlan) -> f64, theirs: f64, format: &dyn Fn(f64) -> String| {
        let mut cells = vec![format!("  {name}")];
        cells.extend(stages.iter().map(|s| format(mine(s))));
        cells.extend([format(theirs), String::new()]);
        table.row(cells);
    };
    let cell = |v: f64| unit.cell(v);
    row("parameters", &|s| s.params.total() as f64, beside.params as f64, &count);
    for purpose in Purpose::ALL {
        let used = beside.by_purpose.of(purpose) > 0.0 || stages.iter().any(|s| s.memory.of(purpose) > 0.0);
        if used {
            row(purpose.name(), &|s| s.memory.of(purpose), beside.by_purpose.of(purpose), &cell);
        }
    }
    row("peak", &|s| s.memory.total(), beside.peak_bytes as f64, &cell);
    if plan.layout.ep > 1 {
        row(&format!("peak, routing skewed {}x", plan.run.job.skew), &|s| s.skewed.total(), beside.skewed_peak_bytes as f64, &cell);
    }
    row(&format!("kept free ({:.0} %)", 100.0 * plan.run.overheads.reserve), &|_| plan.reserve(), plan.reserve(), &cell);
    let host = plan.stages.iter().map(|s| s.memory.host).fold(0.0, f64::max);
    let host = if host > 0.0 { format!("\n  {} a rank on the host", bytes(host)) } else { String::new() };
    format!("{table}{host}\n{}", difference_in_words(plan))
}

fn other(plan: &Plan) -> &'static str {
    match plan.beside.account {
        Account::Megatron => "megatron",
        Account::Temper => "temper",
    }
}

/// Why the other account differs.
fn difference_in_words(plan: &Plan) -> String {
    let (mine, theirs) = (plan.heaviest.peak_bytes as f64, plan.beside.heaviest.peak_bytes as f64);
    let parts: Vec<String> = plan.beside.differences.iter().take(4).map(|(name, bytes)| format!("{name} {}", difference(*bytes))).collect();
    let moment = |memory: &Memory| if memory.of(Purpose::Logits) > 0.0 { "at the loss" } else { "in the backward pass of a layer" };
    let parts = if parts.is_empty() { String::new() } else { format!(": {}", parts.join(", ")) };
    format!(
        "  the peak is {}; {}'s, {}, is {}, {}{parts}",
        moment(&plan.heaviest.by_purpose),
        other(plan),
        moment(&plan.beside.heaviest.by_purpose),
        bytes(theirs),
        difference(theirs - mine)
    )
}

fn life(plan: &Plan) -> String {
    let Some(stage) = plan.stages.get(plan.heaviest.stage) else { return String::new() };
    let part = |phase: Phase| {
        let needs = stage.phases.of(phase);
        let beyond = if needs > plan.capacity() { " (more than the device has)" } else { "" };
        format!("{} {}{beyond}", phase.name().replace('_', " "), bytes(needs))
    };
    let parts: Vec<String> = Phase::ALL.into_iter().map(part).collect();
    format!(
        "life       {} ({} of it keys and values of {} sequences)",
        parts.join(", "),
        bytes(stage.phases.kv_cache),
        plan.run.job.rollouts
    )
}

fn time(plan: &Plan) -> String {
    let t = &plan.time;
    let unit = Unit::of_seconds(t.total);
    let mut table = Table::new(&[&format!("time, {}", unit.name), "step", "share", ""]);
    let mut row = |name: String, value: f64| {
        if value > 0.0 {
            table.row([format!("  {name}"), format!("{:.3}", unit.of(value)), format!("{:.1} %", 100.0 * value / t.total), String::new()]);
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
    row("fillers".into(), t.fillers);
    row("optimizer".into(), t.optimizer);
    row("step".into(), t.total);
    let c = &plan.checkpoint;
    let run = plan.days().map(|days| format!("\n  the run takes {}", seconds(days * 86_400.0))).unwrap_or_default();
    format!(
        "{table}{run}\n  a checkpoint is {}: training pauses {}, writing takes {} behind it",
        bytes(c.bytes as f64),
        seconds(c.pause_s),
        seconds(c.write_s)
    )
}

fn runners_up(plan: &Plan) -> String {
    let last = if plan.searched { "why not" } else { "against yours" };
    let mut table = Table::new(&["next best", "tokens/s", "peak", last]);
    let all = plan.runners_up.iter().chain(&plan.too_large);
    let mut any = false;
    for candidate in all {
        any = true;
        table.row([
            format!("  {}", told(plan, &candidate.layout)),
            count(candidate.time.tokens_per_s_per_gpu),
            bytes(candidate.peak),
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
        // Bytes are whole, whatever is expected of routing.
        let value = if line.value.fract() == 0.0 || line.unit == "B" { thousands(line.value) } else { format!("{:.6}", line.value) };
        let value = if line.unit == "B" { format!("{value} B ({})", bytes(line.value)) } else { format!("{value} {}", line.unit) };
        lines.push(format!("  {}\n    = {}\n    = {value}", line.formula, line.numbers));
    }
    lines.join("\n")
}

/// A refusal as JSON.
pub fn refused_json(refused: &Refused) -> Value {
    json!({
        "fits": false,
        "layout": layout_json(&refused.layout, refused.has_experts),
        "problems": refused.problems,
        "nearest": refused.nearest.iter().map(|l| layout_json(l, refused.has_experts)).collect::<Vec<_>>(),
    })
}

/// What a measured speed amounts to.
pub fn measured_json(plan: &Plan, speed: f64) -> Value {
    let mfu = plan.measured_mfu(speed);
    json!({ "tokens_per_s_per_gpu": speed, "mfu": mfu, "tflops": mfu * plan.run.cluster.device.bf16_tflops })
}
