//! What a benchmark found, for reading.

use super::predict::{Beside, Held};
use crate::table::Table;
use std::fmt::Write as _;
use temper_monitor::size;
use temper_tensor::Rates;
use temper_train::bench::{Memory, OperationRow, RankOf, Shape, Spread, StepReport, Work};

/// Model and batch in a line each.
pub fn subject(shape: &Shape, work: &Work) -> String {
    let Shape { name, layers, hidden, params, active_params, .. } = shape;
    let billions = |n: u64| format!("{:.3} B", n as f64 / 1e9);
    let active = if params == active_params { String::new() } else { format!(", {} active", billions(*active_params)) };
    let Work { seq_len, micro_batch, accumulate, doc_len, tokens, .. } = work;
    let packed = if doc_len == seq_len { String::new() } else { format!(" in documents of {doc_len}") };
    format!(
        "model       {name}, {layers} layers of width {hidden}, {} parameters{active}\n\
         step        {accumulate} micro-batch(es) of {micro_batch} x {seq_len} tokens{packed} = {tokens} tokens\n\
         types       weights {}, gradients {}, moments {}{}, recompute {}",
        billions(*params),
        work.dtype,
        work.grads,
        work.moments,
        if work.offload_optimizer { " (in host memory)" } else { "" },
        serde_json::to_value(work.recompute).ok().as_ref().and_then(|v| v.as_str()).unwrap_or("?"),
    )
}

/// The whole report, with the plan beside it where there is one.
pub fn step(report: &StepReport, plan: Option<&Beside>) -> String {
    let mut text = format!("backend     {}\n{}\n", report.backend, subject(&report.model, &report.work));
    if let Some(RankOf { rank, layout, params, skew, stood_in_ms, .. }) = &report.rank {
        let others = stood_in_ms.map_or("speeds are those of one of the ranks".to_string(), |ms| {
            format!("the other ranks are not there: the {:.2} ms a step that stand for their messages are left out of the time (not of the phases)", ms.median)
        });
        let skew = skew.as_ref().map_or(String::new(), |skew| {
            format!("; its experts got {:.2} times their share of rows, at most {:.2}", skew.mean, skew.most)
        });
        let _ = writeln!(text, "measured    rank {rank} of {layout}: {params} parameters; {others}{skew}");
    }
    let ms = |s: &Spread| format!("{:.2} ms (min {:.2}, max {:.2})", s.median, s.min, s.max);
    let _ = writeln!(text, "start       {:.1} s to the first step, {:.1} s to its end", report.startup_s, report.to_first_step_s);
    let _ = writeln!(text, "time        {}, median of {} steps after {}", ms(&report.step_ms), report.steps, report.warmup);
    let mfu = report.mfu.map_or(String::new(), |mfu| format!(", MFU {:.1} %", 100.0 * mfu));
    let _ = writeln!(text, "speed       {:.0} tokens/s, {} model TFLOP/s{mfu}", report.tokens_per_s, digits(report.model_tflops));
    if let Some(memory) = &report.memory {
        text += &memory_line(memory);
    }
    if let Some(plan) = plan {
        text += &plan_lines(plan);
    }
    let losses: Vec<String> = report.losses.iter().map(|l| format!("{l:.4}")).collect();
    let _ = writeln!(text, "losses      {}", losses.join(" "));
    if report.left_out > 0 {
        let _ = writeln!(
            text,
            "left out    {} of {} updates: gradients were not finite, so the optimizer took no time",
            report.left_out,
            losses.len()
        );
    }
    text.push('\n');
    let mut table = Table::new(&["phase", "median ms", "min", "max", "of the step"]);
    for p in &report.phases {
        let share = format!("{:.1} %", 100.0 * p.ms.median / report.step_ms.median);
        table.row([p.phase.into(), format!("{:.2}", p.ms.median), format!("{:.2}", p.ms.min), format!("{:.2}", p.ms.max), share]);
    }
    text + &table.to_string()
}

fn memory_line(memory: &Memory) -> String {
    let parts: Vec<String> = memory.peak.iter().map(|(purpose, bytes)| format!("{purpose} {}", size(*bytes as u64))).collect();
    format!(
        "memory      peak {} ({}), {} reserved in {} allocations, {} after the warm-up\n",
        size(memory.peak_total as u64),
        parts.join(", "),
        size(memory.reserved as u64),
        memory.growths,
        memory.growths_after_warmup
    )
}

/// The plan's figures with how far they are off.
fn plan_lines(plan: &Beside) -> String {
    let percent = |held: &Held| format!("{:+.1} %", 100.0 * held.deviation);
    let parts = plan.memory.iter().filter(|(_, held)| held.plan.max(held.measured) > 0.0);
    let parts: Vec<String> = parts.map(|(name, held)| format!("{name} {} ({})", size(held.plan as u64), percent(held))).collect();
    let step = plan.step_ms.as_ref().map_or(String::new(), |held| format!("; step {:.2} ms ({})", held.plan, percent(held)));
    format!("plan        peak of {}{step}; off by the shares in brackets\n", parts.join(", "))
}

/// Operations, most time lost first, beside the length of the step that they were recorded in.
pub fn operations(rows: &[OperationRow], rates: Option<Rates>, step_ms: Option<f64>) -> String {
    let mut titles = vec!["operation", "calls", "ms", "share", "reached"];
    if rates.is_some() {
        titles.extend(["floor ms", "of floor", "lost ms"]);
    }
    titles.push("shape");
    let mut table = Table::new(&titles);
    for row in rows {
        let share = format!("{:.1} %", 100.0 * row.share);
        let mut cells = vec![row.name.into(), row.calls.to_string(), format!("{:.3}", row.ms), share, reached(row)];
        if let Some(floor) = row.floor_ms.filter(|_| rates.is_some()) {
            let part = format!("{:.0} %", 100.0 * floor / row.ms.max(f64::MIN_POSITIVE));
            cells.extend([format!("{floor:.3}"), part, format!("{:.3}", row.lost_ms())]);
        }
        cells.push(row.shape.clone());
        table.row(cells);
    }
    let total: f64 = rows.iter().map(|r| r.ms).sum();
    let floors: Option<f64> = rows.iter().map(|r| r.floor_ms).sum();
    let note = match (rates, floors) {
        (Some(r), Some(floor)) => {
            format!("; at {:.2} TB/s and {:.0} TFLOP/s they would take {floor:.2} ms", r.bytes_per_s / 1e12, r.flops_per_s / 1e12)
        }
        _ => String::new(),
    };
    let step = step_ms.map_or(String::new(), |ms| format!(" of a recorded step of {ms:.2} ms"));
    format!("{table}\noperations together {total:.2} ms{step}{note}")
}

/// The rate that says most: products in FLOPs, everything else in bytes.
fn reached(row: &OperationRow) -> String {
    if row.tflops > 0.0 { format!("{} TFLOP/s", digits(row.tflops)) } else { format!("{:.0} GB/s", row.gb_per_s) }
}

/// Three digits or so.
fn digits(x: f64) -> String {
    if x >= 10.0 { format!("{x:.0}") } else { format!("{x:.3}") }
}
