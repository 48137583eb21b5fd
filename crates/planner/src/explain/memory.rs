//! Figures of the account of memory.

use super::{Explanation, activations, n};
use crate::job::Account;
use crate::layout::Offload;
use crate::memory::{Overheads, Purpose, communicators};
use crate::plan::{Plan, StagePlan, checkpoint_bytes};

/// Adds the lines of a figure of memory; false when `name` is none.
pub(super) fn explain(plan: &Plan, name: &str, e: &mut Explanation) -> bool {
    let Some(stage) = plan.stages.get(plan.heaviest.stage) else { return false };
    match name {
        "params" => params(stage, e),
        "weights" => held(plan, stage, Purpose::Weights, e),
        "gradients" => held(plan, stage, Purpose::Gradients, e),
        "masters" => sharded(plan, stage, Purpose::Masters, e),
        "moments" => sharded(plan, stage, Purpose::Moments, e),
        "activations" => activations::activations(plan, stage, e),
        "moe" => activations::moe(plan, stage, e),
        "logits" => activations::logits(plan, stage, e),
        "communication" => {
            let (count, each) = (communicators(&plan.layout) as f64, plan.run.overheads.communicator);
            e.line("communicators x NCCL's buffers", format!("{} x {}", n(count), n(each)), stage.memory.of(Purpose::Communication), "B");
        }
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
            activations::flights(plan, stage, e);
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
        _ => (job.precision.moments_bytes(), if job.precision.moment_bytes == 4 { "two f32" } else { "two bf16" }),
    };
    let value = stage.memory.of(purpose);
    if l.offload == Offload::Optimizer {
        let what = "off-loaded: the update reads and writes it in the host's memory";
        e.line(what, n(value), value, "B");
        return;
    }
    e.line(format!("their sum x {each} B ({what})"), format!("({} + {}) x {each}", n(dense as f64), n(experts as f64)), value, "B");
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
