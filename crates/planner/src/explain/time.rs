//! Figures of the account of time.

use super::{Explanation, n};
use crate::flops::ModelFlops;
use crate::job::Account;
use crate::layout::Axis;
use crate::memory::{AXES, Dims};
use crate::plan::Plan;
use crate::time::{Op, RATES, all_to_all, axis_name, ring, ring_bandwidth, send};

/// Adds the lines of a figure of time.
pub(super) fn explain(plan: &Plan, name: &str, e: &mut Explanation) {
    let (t, job) = (&plan.time, &plan.run.job);
    match name {
        "flops" => flops(plan, e),
        "step" => step(plan, e),
        "compute" => {
            e.because("Each operation at the slower of arithmetic and memory: roofline (Williams et al. 2009), with shares of the peaks measured on an H200.");
            let used: Vec<Op> = Op::ALL.into_iter().filter(|op| t.compute[*op as usize] > 0.0).collect();
            let numbers = used.iter().map(|op| n(t.compute[*op as usize])).collect::<Vec<_>>().join(" + ");
            let words = used.iter().map(|op| op.name()).collect::<Vec<_>>().join(" + ");
            e.line(format!("on stage {}: {words}", t.slowest), numbers, t.compute.iter().sum(), "s");
        }
        "recompute" => e.line("forward passes that run again, communication included", n(t.recompute), t.recompute, "s"),
        "bubble" => {
            e.because("The first micro-batch crosses all stages before the last one works: the other stages' time once, over vpp (Narayanan et al. 2021).");
            e.line(
                "sum over the other stages of a micro-batch's time / vpp",
                format!("{} / {}", n(t.bubble * plan.layout.vpp as f64), plan.layout.vpp),
                t.bubble,
                "s",
            );
        }
        "optimizer" => optimizer(plan, e),
        "tp" | "ep" | "pp" | "cp" => collective(plan, name, e),
        "dp" => synchronise(plan, e),
        "tokens_per_s" => {
            let numbers = format!("{} x {} / {} / {}", job.global_batch, n(job.mean_tokens), n(t.total), plan.run.cluster.gpus);
            e.line("sequences x mean tokens / seconds / devices", numbers, t.tokens_per_s_per_gpu, "tokens/s");
        }
        "days" => {
            let steps = job.steps.unwrap_or(0) as f64;
            let words = if job.steps.is_some() { "steps x seconds of a step / seconds of a day" } else { "no --steps: 0" };
            e.line(words, format!("{} x {} / 86400", n(steps), n(t.total)), steps * t.total / 86_400.0, "days");
        }
        "mfu" => {
            flops(plan, e);
            let per_token = e.value();
            let numbers = format!("{} x {} / {}", n(per_token), n(t.tokens_per_s_per_gpu), n(plan.run.cluster.device.peak()));
            e.line("FLOPs of a token x tokens a second / bf16 peak", numbers, t.mfu, "of the peak");
        }
        _ => {}
    }
}

fn flops(plan: &Plan, e: &mut Explanation) {
    let (f, length) = (ModelFlops::new(&plan.run.network), plan.run.job.reach());
    e.because("6 a parameter and token for forward and backward (Kaplan et al. 2020), look-up left out; attention as in PaLM's appendix B, causal.");
    let numbers = format!("6 x {} + {} x {} + {}", n(f.params), n(f.per_position), n(length), n(f.recurrence));
    e.line("6 x parameters + 6 x attention layers x heads x head size x length + recurrence", numbers, f.per_token(length), "FLOP");
}

fn step(plan: &Plan, e: &mut Explanation) {
    let t = &plan.time;
    let compute: f64 = t.compute.iter().sum();
    let talking: Vec<Axis> = AXES.into_iter().filter(|axis| t.comm[*axis as usize] > 0.0).collect();
    let mut words = vec!["compute".to_string(), "recomputation".to_string()];
    let mut numbers = vec![n(compute), n(t.recompute)];
    for axis in talking {
        words.push(format!("{} communication", axis_name(axis)));
        numbers.push(n(t.comm[axis as usize]));
    }
    words.push("bubble".to_string());
    numbers.push(n(t.bubble));
    if t.fillers > 0.0 {
        words.push("fillers".to_string());
        numbers.push(n(t.fillers));
    }
    words.push("optimizer".to_string());
    numbers.push(n(t.optimizer));
    e.line(words.join(" + "), numbers.join(" + "), t.total, "s");
}

fn optimizer(plan: &Plan, e: &mut Explanation) {
    let value = plan.time.optimizer;
    let (device, p) = (&plan.run.cluster.device, plan.run.job.precision);
    let Some(stage) = plan.stages.get(plan.time.slowest) else { return };
    let shard = stage.params.optimizer_shard(&plan.layout) as f64;
    let state = f64::from(p.master_bytes(plan.run.job.account)) + f64::from(p.moments_bytes());
    let grad = f64::from(p.grad_bytes);
    let streamed = |bytes: f64| format!("{} x {bytes} / ({} x 1000000000000 x {})", n(shard), device.memory_tb_s, RATES.memory);
    match plan.layout.offload {
        crate::layout::Offload::None => {
            let bytes = 2.0 * grad + 2.0 * (f64::from(p.weight_bytes) + state);
            e.line("shard x bytes read and written / (memory bandwidth x share)", streamed(bytes), value, "s");
        }
        crate::layout::Offload::Optimizer => {
            let numbers = format!("{} + {} x {state} / ({} x 1000000000 x {})", streamed(grad), n(shard), device.host_gb_s, RATES.host);
            e.line(
                "norm: shard x gradient / (memory bandwidth x share) + update: shard x state / (bandwidth to the host x share)",
                numbers,
                value,
                "s",
            );
        }
    }
}

/// A collective inside layers: what one costs, and how many there are in a step.
fn collective(plan: &Plan, name: &str, e: &mut Explanation) {
    let (l, cluster) = (&plan.layout, &plan.run.cluster);
    let d = Dims::of_length(&plan.run.network, &plan.run.job, l, plan.run.job.mean_tokens);
    let axis = match name {
        "tp" => Axis::Tp,
        "ep" => Axis::Ep,
        "cp" => Axis::Cp,
        _ => Axis::Pp,
    };
    let (group, total) = (l.group(axis, cluster), plan.time.comm[axis as usize]);
    if group.size <= 1 || total == 0.0 {
        return e.line(format!("{name} is 1: none"), n(total), total, "s");
    }
    let place = if group.nodes > 1 { format!("over {} nodes", group.nodes) } else { "within a node".to_string() };
    let (words, bytes, one) = match axis {
        Axis::Tp => {
            let bytes = d.tokens * d.hidden * d.a;
            ("all-gather or reduce-scatter of T x H x a", bytes, ring(cluster, group, bytes))
        }
        Axis::Cp if plan.run.job.account == Account::Temper => {
            let bytes = 2.0 * d.tokens * d.cp * d.kv * d.a;
            (
                "gather of keys and values (or scatter of their gradients) of all ranks: 2 x T x cp x KV x a",
                bytes,
                ring(cluster, group, bytes),
            )
        }
        Axis::Cp => {
            let bytes = 2.0 * d.tokens * d.kv * d.a;
            ("send of keys and values, behind attention as far as it lasts: 2 x T x KV x a", bytes, send(cluster, group, bytes))
        }
        Axis::Ep if plan.run.job.account == Account::Temper => {
            let bytes = d.here * d.hidden * d.a;
            ("all-to-all of a row for each rank that works on a token x H x a", bytes, all_to_all(cluster, l.experts_group(cluster), bytes))
        }
        Axis::Ep => {
            let bytes = d.sent * d.hidden * d.a;
            ("all-to-all of a row for each expert of a token x H x a", bytes, all_to_all(cluster, group, bytes))
        }
        _ => {
            let bytes = d.shared * d.hidden * d.a;
            ("send of T / tp x H x a", bytes, send(cluster, group, bytes))
        }
    };
    e.line(format!("bytes of one {words}"), n(bytes), bytes, "B");
    let bandwidth = ring_bandwidth(cluster, group) / 1e9;
    e.line(format!("seconds of one, {} ranks {place} (a ring there reaches {bandwidth:.0} GB/s)", group.size), n(one), one, "s");
    e.line("how many in a step on the slowest stage x seconds", format!("{} x {}", n(total / one), n(one)), total, "s");
}

fn synchronise(plan: &Plan, e: &mut Explanation) {
    let t = &plan.time;
    let (dense, experts) = t.sync;
    let exposed = t.comm[Axis::Dp as usize] + t.comm[Axis::ExpertDp as usize];
    e.because("Ring reduce-scatter of gradients and all-gather of weights, (n - 1) / n of the bytes each; the last backward pass hides the one, the first forward pass the other.");
    let hidden = dense + experts - exposed;
    e.line(
        "dense weights over dp + experts over expert_dp - what compute hides",
        format!("{} + {} - {}", n(dense), n(experts), n(hidden)),
        exposed,
        "s",
    );
}
