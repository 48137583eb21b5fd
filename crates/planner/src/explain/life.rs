//! Figures of a run's life: what the model has, what a rank holds when no step is under way, and what a checkpoint costs.

use super::{Explanation, n};
use crate::job::Account;
use crate::memory::{Dims, Passing, Purpose, passing};
use crate::plan::{Plan, StagePlan, checkpoint_bytes, heaviest_shard};
use temper_model::param::Shard;

/// Adds the lines of such a figure; false when `name` is none.
pub(super) fn explain(plan: &Plan, name: &str, e: &mut Explanation) -> bool {
    let Some(stage) = plan.stages.get(plan.heaviest.stage) else { return false };
    match name {
        "model_params" => params(plan, e),
        "active_params" => active(plan, e),
        "skewed_peak" => skewed(plan, e),
        "reserve" => {
            e.because("For what no plan knows: other processes, a driver of another version. --reserve sets the share.");
            let numbers = format!("{} x {}", n(plan.capacity()), plan.run.overheads.reserve);
            e.line("memory of a device x share", numbers, plan.reserve(), "B");
        }
        "load" => still(plan, stage, stage.phases.load, READ, e),
        "save" => still(plan, stage, stage.phases.save, SAVED, e),
        "resume" => still(plan, stage, stage.phases.resume, READ, e),
        "first_step" => first_step(plan, stage, e),
        "rollout" => {
            e.because("Gradients lend their memory to the cache while nothing is trained.");
            let stands = stage.memory.between();
            let (gradients, cache) = (stage.memory.of(Purpose::Gradients), stage.phases.kv_cache);
            let numbers = format!("{} - {} + {}", n(stands), n(gradients), n(cache));
            e.line("what stands between steps - gradients + cache of keys and values", numbers, stage.phases.rollout, "B");
        }
        "kv_cache" => kv_cache(plan, stage, e),
        "write" => {
            let nodes = plan.run.cluster.gpus.div_ceil(plan.run.cluster.per_node.max(1));
            let numbers = format!("{} / ({nodes} x {} x 1000000000)", n(plan.checkpoint.bytes as f64), plan.run.job.storage_gb_s);
            e.line("bytes of the checkpoint / (nodes x bandwidth of the storage)", numbers, plan.checkpoint.write_s, "s");
        }
        "pause" => {
            e.because("Each rank copies its shard to the host; writing goes on beside training.");
            let shard = heaviest_shard(&plan.run, &plan.layout, plan.stages.iter().map(|s| &s.stage));
            let (each, host) = (checkpoint_bytes(&plan.run.job), plan.run.cluster.device.host_gb_s);
            let numbers = format!("{} x {each} / ({host} x 1000000000)", n(shard as f64));
            e.line("largest optimizer shard x bytes a parameter / bandwidth to the host", numbers, plan.checkpoint.pause_s, "s");
        }
        _ => return false,
    }
    true
}

fn params(plan: &Plan, e: &mut Explanation) {
    e.because("Every parameter of temper_model::declare.");
    let network = &plan.run.network;
    let of = |wanted: bool| network.params.iter().filter(|p| p.shard.is_expert() == wanted).map(|p| p.numel() as f64).sum::<f64>();
    e.line("all but routed experts + routed experts", format!("{} + {}", n(of(false)), n(of(true))), network.total as f64, "parameters");
}

fn active(plan: &Plan, e: &mut Explanation) {
    let network = &plan.run.network;
    let is_expert = |shard: Shard| shard.is_expert();
    let routed: f64 = network.params.iter().filter(|p| is_expert(p.shard)).map(|p| p.numel() as f64).sum();
    let (experts, k) = network.arch.moe.as_ref().map_or((1, 0), |m| (m.experts, m.top_k));
    let rest = network.active as f64 - routed / experts as f64 * k as f64;
    e.because("Of the experts only those chosen count, and no vision tower.");
    let numbers = format!("{} + {} / {experts} x {k}", n(rest), n(routed));
    e.line("all but routed experts + routed experts / experts x experts per token", numbers, network.active as f64, "parameters");
}

fn skewed(plan: &Plan, e: &mut Explanation) {
    let worst = plan.stages.iter().max_by(|a, b| a.skewed.total().total_cmp(&b.skewed.total()));
    let Some(stage) = worst else { return };
    let parts: Vec<String> = stage.skewed.parts().map(|(p, _)| p.name().to_string()).collect();
    let numbers: Vec<String> = stage.skewed.parts().map(|(_, bytes)| n(bytes)).collect();
    e.because("Rows of the busiest experts are --skew times their share, with everything that is as long as they are.");
    e.line(format!("stage {}: {}", stage.stage.index, parts.join(" + ")), numbers.join(" + "), stage.skewed.total(), "B");
}

/// What passes through a device beside what stands, in words.
type Passes = (&'static str, fn(Passing) -> f64);
const READ: Passes = ("the part of a parameter that is handed over", |passing| passing.read);
const SAVED: Passes = ("the largest exact weights on their way to the host", |passing| passing.save);

/// A moment at which no step is under way.
fn still(plan: &Plan, stage: &StagePlan, value: f64, (what, passes): Passes, e: &mut Explanation) {
    let (stands, passes) = (stage.memory.between(), passes(passing(&plan.question(), &stage.stage)));
    let lazy = (stands + passes - value).round(); // what is not there yet
    let numbers = format!("{} - {} + {}", n(stands), n(lazy), n(passes));
    let words = if plan.run.job.account == Account::Megatron {
        "moments that Adam has not made yet"
    } else {
        "nothing, for temper allocates before step 1"
    };
    e.line(format!("weights, gradients, optimizer, libraries and communicators - {words} + {what}"), numbers, value, "B");
}

fn first_step(plan: &Plan, stage: &StagePlan, e: &mut Explanation) {
    let (value, all) = (stage.phases.first_step, stage.memory.total());
    let words = match plan.run.job.account {
        Account::Temper => "peak - nothing: everything is allocated before",
        Account::Megatron => "peak - moments, which Adam makes in its first step",
    };
    e.line(words, format!("{} - {}", n(all), n(all - value)), value, "B");
}

fn kv_cache(plan: &Plan, stage: &StagePlan, e: &mut Explanation) {
    let (run, value) = (&plan.run, stage.phases.kv_cache);
    let d = Dims::new(&run.network, &run.job, &plan.layout);
    let kinds = run.network.kinds.kinds.iter().zip(&stage.stage.kinds);
    let layers: f64 = kinds.filter(|(kind, _)| !kind.linear).map(|(_, count)| *count as f64).sum();
    let (sequences, length) = (run.job.rollouts as f64, run.job.seq as f64);
    let states = value - sequences * layers * 2.0 * d.kv * d.a * length;
    let numbers = format!("{} x {} x 2 x {} x {} x {} + {}", n(sequences), n(layers), n(d.kv), n(d.a), n(length), n(states));
    e.line("answers x attention layers x (k, v) x key rows x bytes x tokens + states of linear attention", numbers, value, "B");
}
