//! Figures of the account of memory.

use super::{Explanation, n};
use crate::job::Account;
use crate::layout::{Offload, Recompute};
use crate::memory::{Dims, Kept, Overheads, Purpose, Transient, communicators, kept, transient};
use crate::plan::{Plan, StagePlan, checkpoint_bytes};
use temper_parallel::schedule::in_flight;

/// Adds the lines of a figure of memory; false when `name` is none.
pub(super) fn explain(plan: &Plan, name: &str, e: &mut Explanation) -> bool {
    let Some(stage) = plan.stages.get(plan.heaviest.stage) else { return false };
    match name {
        "params" => params(stage, e),
        "weights" => held(plan, stage, Purpose::Weights, e),
        "gradients" => held(plan, stage, Purpose::Gradients, e),
        "masters" => sharded(plan, stage, Purpose::Masters, e),
        "moments" => sharded(plan, stage, Purpose::Moments, e),
        "activations" => activations(plan, stage, e),
        "moe" => moe(plan, stage, e),
        "logits" => logits(plan, stage, e),
        "communication" => communication(plan, stage, e),
        "libraries" => {
            let o = plan.run.overheads;
            let value = stage.memory.of(Purpose::Libraries);
            e.because("Measured on an H200 with driver 580.");
            e.line("CUDA context + workspaces of cuBLASLt and cuDNN", format!("{} + {}", n(o.context), n(o.workspace)), value, "B");
        }
        "allocator" => allocator(plan, stage, e),
        "peak" => {
            let parts: Vec<String> = stage.memory.parts().map(|(p, _)| p.name().to_string()).collect();
            let numbers: Vec<String> = stage.memory.parts().map(|(_, bytes)| n(bytes)).collect();
            e.line(parts.join(" + "), numbers.join(" + "), stage.memory.total(), "B");
        }
        "in_flight" => {
            flights(plan, stage, e);
        }
        "expert_dp" => {
            let l = &plan.layout;
            e.because("Experts fold into the ranks of a stage (MoE Parallel Folding, Liu et al. 2025).");
            let numbers = format!("{} x {} x {} / ({} x {})", l.tp, l.cp, l.dp, l.ep, l.etp);
            e.line("tp x cp x dp / (ep x etp)", numbers, l.expert_dp() as f64, "replicas");
        }
        "checkpoint" => {
            let (bytes, total) = (checkpoint_bytes(&plan.run.job), plan.run.network.total);
            let each = if bytes == 14 { "bf16 weight 2 + f32 master 4 + two f32 moments 8" } else { "f32 weight 4 + two f32 moments 8" };
            e.line(format!("parameters x ({each})"), format!("{} x {bytes}", n(total as f64)), plan.checkpoint.bytes as f64, "B");
        }
        _ => return false,
    }
    true
}

fn params(stage: &StagePlan, e: &mut Explanation) {
    let p = stage.params;
    e.because("Each parameter of temper_model::declare, divided by its Shard rule.");
    let numbers = [p.embedding, p.layers, p.experts, p.head].map(|v| n(v as f64)).join(" + ");
    e.line("embedding + layers + routed experts + head", numbers, p.total() as f64, "parameters");
}

fn held(plan: &Plan, stage: &StagePlan, purpose: Purpose, e: &mut Explanation) {
    params(stage, e);
    let precision = plan.run.job.precision;
    let each = if purpose == Purpose::Weights { precision.weight_bytes } else { precision.grad_bytes };
    let numbers = format!("{} x {each}", n(stage.params.total() as f64));
    e.line("parameters of the rank x bytes each", numbers, stage.memory.of(purpose), "B");
}

fn sharded(plan: &Plan, stage: &StagePlan, purpose: Purpose, e: &mut Explanation) {
    let (p, l, job) = (stage.params, &plan.layout, &plan.run.job);
    e.because("The optimizer's state is sharded over replicas (ZeRO-1, Rajbhandari et al. 2020): dense weights over dp x cp, experts over expert_dp.");
    let (dense, experts) = (p.dense().div_ceil((l.dp * l.cp) as u64), p.experts.div_ceil(l.expert_dp().max(1) as u64));
    e.line("dense parameters / (dp x cp), rounded up", n(dense as f64), dense as f64, "parameters");
    e.line("routed experts / expert_dp, rounded up", n(experts as f64), experts as f64, "parameters");
    let (each, what) = match purpose {
        Purpose::Masters if job.account == Account::Temper => {
            (job.precision.master_bytes(job.account), "a 16-bit remainder: weight and remainder are an exact f32")
        }
        Purpose::Masters => (job.precision.master_bytes(job.account), "an f32 copy"),
        _ => (8, "two f32"),
    };
    let value = stage.memory.of(purpose);
    if l.offload == Offload::Optimizer {
        let what = "off-loaded: on the device are two windows of 64 MiB at most (masters: none)";
        e.line(what, n(value), value, "B");
        return;
    }
    e.line(format!("their sum x {each} B ({what})"), format!("({} + {}) x {each}", n(dense as f64), n(experts as f64)), value, "B");
}

/// Layers of one kind on the stage, with what they keep.
struct Layers {
    name: &'static str,
    linear: bool,
    experts: bool,
    count: f64,
    kept: Kept,
    transient: Transient,
}

fn layers(plan: &Plan, stage: &StagePlan, d: &Dims) -> Vec<Layers> {
    let kinds = plan.run.network.kinds.kinds.iter().zip(&stage.stage.kinds).filter(|(_, count)| **count > 0);
    kinds
        .map(|(kind, count)| Layers {
            name: match (kind.linear, kind.experts) {
                (false, false) => "attention, dense",
                (false, true) => "attention, experts",
                (true, false) => "linear attention, dense",
                (true, true) => "linear attention, experts",
            },
            linear: kind.linear,
            experts: kind.experts,
            count: *count as f64,
            kept: kept(d, kind.linear, kind.experts, 1.0),
            transient: transient(d, kind.linear, kind.experts, 1.0, plan.run.job.account),
        })
        .collect()
}

fn flights(plan: &Plan, stage: &StagePlan, e: &mut Explanation) -> f64 {
    let (l, m) = (&plan.layout, plan.layout.micro_batches(plan.run.job.global_batch));
    let s = stage.stage.index;
    let chunks = in_flight(s, l.pp, l.vpp, m.max(1));
    match l.vpp {
        1 => {
            e.because("1F1B (Narayanan et al. 2021): a stage runs ahead by the stages after it.");
            let formula = format!("the lesser of pp - stage and the {m} micro-batches; here stage {s} of {}", l.pp);
            e.line(formula, n(chunks as f64), chunks as f64, "micro-batches");
        }
        v => {
            e.because("Interleaved 1F1B, Megatron's warm-up: (pp - 1 - stage) x 2 + (vpp - 1) x pp chunks, and one more.");
            e.line(
                format!("chunks / vpp; here stage {s} of {}", l.pp),
                format!("{chunks} / {v}"),
                chunks as f64 / v as f64,
                "micro-batches",
            );
        }
    }
    chunks as f64 / l.vpp as f64
}

fn activations(plan: &Plan, stage: &StagePlan, e: &mut Explanation) {
    let d = Dims::new(&plan.run.network, &plan.run.job, &plan.layout);
    let flights = flights(plan, stage, e);
    let mut terms = Vec::new();
    let mut sum = 0.0;
    for kind in layers(plan, stage, &d) {
        let k = kind.kept;
        let (formula, parts) = match plan.layout.recompute {
            Recompute::None => ("input + mixer + feed-forward", vec![k.input, k.mixer, k.feed_forward]),
            Recompute::Selective => ("input + mixer (the feed-forward is computed again)", vec![k.input, k.mixer]),
            Recompute::Full => ("input (the rest is computed again)", vec![k.input]),
        };
        ingredients(plan, &kind, &d, e);
        let one: f64 = parts.iter().sum();
        let numbers = parts.iter().map(|v| n(*v)).collect::<Vec<_>>().join(" + ");
        e.line(format!("kept by a layer ({}) for a micro-batch: {formula}", kind.name), numbers, one, "B");
        terms.push(format!("{} x {} x {}", n(kind.count), n(flights), n(one)));
        sum += kind.count * flights * one;
    }
    let rest = stage.memory.of(Purpose::Activations) - sum;
    let what = if stage.peak.at_loss {
        "input of the head, normed hidden states and their gradient"
    } else {
        "gradients of one layer, and what it recomputes"
    };
    terms.push(n(rest));
    e.line(format!("layers x micro-batches in flight x kept + {what}"), terms.join(" + "), stage.memory.of(Purpose::Activations), "B");
}

/// What a layer's input, attention and dense feed-forward keep, from its sizes.
fn ingredients(plan: &Plan, kind: &Layers, d: &Dims, e: &mut Explanation) {
    let (t, ts, h, a) = (n(d.tokens), n(d.shared), n(d.hidden), n(d.a));
    e.line(format!("input of a layer ({}): T / tp x H x a", kind.name), format!("{ts} x {h} x {a}"), kind.kept.input, "B");
    if plan.layout.recompute == Recompute::Full {
        return;
    }
    if !kind.linear {
        let (q, kv, gate) = (n(d.q), n(d.kv), n(d.gate));
        let norm = if d.qk_norm { d.heads.0 + d.heads.1 } else { 0.0 };
        let rows = format!("(2 x ({q} + 2 x {kv}) + {q} + 2 x {gate}) x {a} + ({} + {}) x 4", n(norm), n(d.heads.0));
        let numbers = format!("{t} x ({rows}) + 3 x {ts} x {h} x {a} + 2 x {ts} x 4");
        let words = "mixer: T x ((q, k, v before and after rotation + output + gates) x a + statistics x 4) + 3 x T / tp x H x a + norms";
        e.line(words, numbers, kind.kept.mixer, "B");
    }
    if !kind.experts && plan.layout.recompute == Recompute::None {
        e.line("feed-forward: T x 3 x width x a", format!("{t} x 3 x {} x {a}", n(d.dense)), kind.kept.feed_forward, "B");
    }
}

fn moe(plan: &Plan, stage: &StagePlan, e: &mut Explanation) {
    let d = Dims::new(&plan.run.network, &plan.run.job, &plan.layout);
    let value = stage.memory.of(Purpose::Moe);
    if d.experts.0 == 0.0 {
        return e.line("a dense model routes nothing", n(value), value, "B");
    }
    e.because("Rows are balanced here; with routing skewed s times every row count of the rank is s times larger.");
    e.line("rows sent: tokens / tp x experts per token", format!("{} / {} x {}", n(d.tokens), n(d.tp), n(d.experts.1)), d.sent, "rows");
    e.line("rows that arrive: rows sent x etp", format!("{} x {}", n(d.sent), n(d.etp)), d.routed, "rows");
    let Some(kind) = layers(plan, stage, &d).into_iter().find(|k| k.kept.moe > 0.0) else {
        return e.line("this stage has no layer with experts", n(value), value, "B");
    };
    let numbers =
        format!("{} x ({} + 3 x {}) x {} + {} x {} x {}", n(d.routed), n(d.hidden), n(d.expert), n(d.a), n(d.sent), n(d.hidden), n(d.a));
    e.line("kept by a layer: arrived x (H + 3 x width) x a + sent x H x a", numbers, kind.kept.moe, "B");
    if plan.layout.recompute == Recompute::None {
        let flights = flights(plan, stage, e);
        let count: f64 = layers(plan, stage, &d).iter().filter(|k| k.kept.moe > 0.0).map(|k| k.count).sum();
        let rest = value - count * flights * kind.kept.moe;
        let numbers = format!("{} x {} x {} + {}", n(count), n(flights), n(kind.kept.moe), n(rest));
        return e.line("layers x micro-batches in flight x kept + gradients of one layer", numbers, value, "B");
    }
    match stage.peak.at_loss {
        true => e.line("recomputed layers hold nothing at the loss, where the peak is", n(value), value, "B"),
        false => {
            e.line("gradients of its rows", n(kind.transient.moe), kind.transient.moe, "B");
            e.line("one layer at a time: kept + gradients", format!("{} + {}", n(kind.kept.moe), n(value - kind.kept.moe)), value, "B");
        }
    }
}

fn logits(plan: &Plan, stage: &StagePlan, e: &mut Explanation) {
    let d = Dims::new(&plan.run.network, &plan.run.job, &plan.layout);
    let value = stage.memory.of(Purpose::Logits);
    if !stage.peak.at_loss {
        let why = if stage.stage.last {
            "the backward pass of a layer needs more than the loss: no logits at the peak"
        } else {
            "the head is on another stage"
        };
        return e.line(why, n(value), value, "B");
    }
    let (rows, bytes, what) = match plan.run.job.account {
        Account::Temper => (d.logit_rows(&plan.run.job), d.a, "rows of a chunk x vocabulary of the rank x a"),
        Account::Megatron => (d.tokens, 4.0, "all tokens x vocabulary of the rank x f32"),
    };
    e.line(what, format!("{} x {} x {}", n(rows), n(d.vocab), n(bytes)), value, "B");
}

fn communication(plan: &Plan, stage: &StagePlan, e: &mut Explanation) {
    let (l, o) = (&plan.layout, plan.run.overheads);
    let d = Dims::new(&plan.run.network, &plan.run.job, l);
    let pipeline = if l.pp > 1 { 2.0 * d.shared * d.hidden * d.a } else { 0.0 };
    let numbers = format!("{} x {} + {}", communicators(l), n(o.communicator), n(pipeline));
    e.line("communicators x NCCL's buffers + receive buffers of the pipeline", numbers, stage.memory.of(Purpose::Communication), "B");
}

fn allocator(plan: &Plan, stage: &StagePlan, e: &mut Explanation) {
    let (o, value): (Overheads, f64) = (plan.run.overheads, stage.memory.of(Purpose::Allocator));
    match plan.run.job.account {
        Account::Temper => e.line("temper's arena is planned: nothing", n(value), value, "B"),
        Account::Megatron => {
            let (a, m) = (stage.memory.of(Purpose::Activations), stage.memory.of(Purpose::Moe));
            let numbers = format!("{} x ({} + {})", o.fragments, n(a), n(m));
            e.line("a share of activations and routed rows", numbers, value, "B");
        }
    }
}
