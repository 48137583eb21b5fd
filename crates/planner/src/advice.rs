//! What is wrong with a layout, and what would be better.

use crate::layout::{Axis, Layout, Recompute};
use crate::memory::{Dims, Purpose};
use crate::plan::Plan;
use crate::search::{Candidate, Space};
use crate::stages::Stage;
use crate::time::{Op, StepTime, axis_name};
use crate::units::{bytes, seconds, thousands};
use crate::waste::waste;
use serde::Serialize;
use std::fmt;

/// Something the user should know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Advice {
    /// Whether the run fails because of it.
    pub fatal: bool,
    /// What is so.
    pub found: String,
    /// What to do.
    pub remedy: String,
}

impl Advice {
    /// Something that does not make the run fail.
    pub(crate) fn hint(found: String, remedy: impl Into<String>) -> Advice {
        Advice { fatal: false, found, remedy: remedy.into() }
    }
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}. {}", self.found, self.remedy)
    }
}

/// Bubbles beyond this share are worth a word.
const LONG_BUBBLE: f64 = 0.1;
/// A layout that is faster by this factor is worth a word.
const FASTER: f64 = 1.05;
/// Rows of an expert's product below which a tile is partly empty.
const FEW_ROWS: f64 = 128.0;

/// Everything worth saying about a plan, what is fatal first.
pub fn advise(plan: &Plan) -> Vec<Advice> {
    let mut list = List(Vec::new());
    list.memory(plan);
    list.engine(plan);
    list.experts(plan);
    list.tensor(plan);
    list.pipeline(plan);
    list.0.extend(waste(&plan.layout, &plan.run.job));
    list.unneeded(plan);
    list.better(plan);
    list.0
}

struct List(Vec<Advice>);

impl List {
    fn add(&mut self, found: String, remedy: impl Into<String>) {
        self.0.push(Advice::hint(found, remedy));
    }

    fn memory(&mut self, plan: &Plan) {
        let ((stage, phase, peak), memory, worst) = (plan.fullest(), plan.capacity(), plan.worst());
        let skew = plan.run.job.skew;
        if !plan.fits() {
            let (purpose, most) = largest(plan);
            let (rank, more) = (stage * plan.layout.stage_ranks(), bytes(peak - memory));
            let found = format!("rank {rank} needs {more} more than the {} of a device{}", bytes(memory), phase.while_it_is());
            let remedy = format!("Most of it is {} ({}): {}", purpose.name(), bytes(most), lighten(purpose));
            self.0.push(Advice { fatal: true, found, remedy });
        } else if !plan.fits_skewed() {
            let found = format!(
                "it fits while routing is balanced; with {skew} times its share of rows a rank needs {} of {}",
                bytes(worst),
                bytes(memory)
            );
            self.add(found, "Early steps route unevenly: recompute the experts (recompute=selective), or shard further.");
        } else if !plan.keeps_reserve() {
            let found = format!(
                "it fits, but leaves {} free of {}, less than the reserve of {} ({:.0} %)",
                bytes(memory - worst),
                bytes(memory),
                bytes(plan.reserve()),
                100.0 * plan.run.overheads.reserve
            );
            self.add(
                found,
                "Watch the first steps; off-load or shard further if they fail. No layout is chosen so; --reserve sets another share.",
            );
        }
    }

    fn engine(&mut self, plan: &Plan) {
        if let Some(why) = &plan.run.network.refused {
            self.add(format!("temper plans this model but does not train it yet: {why}"), "The figures hold for an engine that does.");
        }
    }

    fn experts(&mut self, plan: &Plan) {
        let (l, network) = (&plan.layout, &plan.run.network);
        let Some(moe) = &network.arch.moe else { return };
        if l.etp > 1 {
            self.expert_tensor(plan, moe.intermediate / l.etp, moe.experts);
        }
        if l.expert_dp() == 1 && l.dp > 1 {
            let found = "expert_dp is 1: each rank keeps the whole optimizer state of its experts, nothing shards it".to_string();
            self.add(found, "A smaller ep x etp shares it over replicas, at the price of more expert weights a rank.");
        }
        let group = l.group(Axis::Ep, &plan.run.cluster);
        if group.nodes > 1 {
            let found = format!(
                "the experts' all-to-all (ep {}) crosses {} nodes and takes {:.0} % of the step",
                l.ep,
                group.nodes,
                100.0 * plan.time.comm[Axis::Ep as usize] / plan.time.total
            );
            self.add(found, format!("An ep of at most {} (with etp=1) stays on a node.", plan.run.cluster.per_node));
        }
        let dims = Dims::of_length(network, &plan.run.job, l, plan.run.job.mean_tokens);
        let rows = dims.routed / (dims.experts.0 / dims.ep).max(1.0);
        if rows < FEW_ROWS {
            let found = format!("an expert gets {rows:.0} rows of a micro-batch: its products fill a fraction of a tile");
            self.add(found, "Larger micro-batches, or a larger ep, give each expert more rows.");
        }
    }

    /// Dividing each expert is the worse way to shard experts: whole experts over a larger ep hold as many parameters a rank.
    fn expert_tensor(&mut self, plan: &Plan, width: usize, experts: usize) {
        let l = &plan.layout;
        let ep = l.ep * l.etp;
        let mut found = format!("etp {} cuts every expert to a width of {width} and brings every rank the rows of {} ranks", l.etp, l.etp);
        let whole = Layout { ep, etp: 1, ..l.clone() };
        if !experts.is_multiple_of(ep) {
            return self.add(found, "etp=1 shards better: take a larger ep instead.");
        }
        let space = plan.run.space();
        let other = space.candidate(&whole, &same_stages(plan));
        let dims = |l: &Layout| Dims::new(&plan.run.network, &plan.run.job, l).routed;
        found += &format!(": {} rows instead of {}", thousands(dims(l)), thousands(dims(&whole)));
        let remedy = format!(
            "etp=1 shards better: ep={ep},etp=1 holds as many parameters a rank in whole experts; peak {} instead of {}, step {} instead of {}.",
            bytes(other.peak),
            bytes(plan.heaviest.peak_bytes as f64),
            seconds(other.time.total),
            seconds(plan.time.total)
        );
        self.add(found, remedy);
    }

    fn tensor(&mut self, plan: &Plan) {
        let (l, arch) = (&plan.layout, &plan.run.network.arch);
        if l.group(Axis::Tp, &plan.run.cluster).nodes > 1 {
            let found = format!("tp {} crosses nodes: four collectives a layer at network speed", l.tp);
            self.add(found, format!("Take tp of at most {}.", plan.run.cluster.per_node));
        }
        if l.tp > arch.kv_heads {
            let copies = l.tp / arch.kv_heads;
            self.add(
                format!("tp {} on {} key/value heads: {copies} ranks hold a copy of each head", l.tp, arch.kv_heads),
                format!("tp={} needs no copies.", arch.kv_heads),
            );
        }
    }

    fn pipeline(&mut self, plan: &Plan) {
        let (l, share) = (&plan.layout, plan.time.bubble / plan.time.total);
        if share > LONG_BUBBLE {
            let m = l.turns(plan.run.job.global_batch).real;
            let found = format!("the pipeline's bubble is {:.0} % of the step: {m} micro-batches for {} stages", 100.0 * share, l.pp);
            self.add(found, "A larger global batch, vpp above 1, or fewer stages shorten it.");
        }
    }

    fn unneeded(&mut self, plan: &Plan) {
        let job = &plan.run.job;
        if job.mean_tokens < 0.8 * job.seq as f64 {
            let found = format!(
                "sequences have {} of {} tokens on average: memory is planned for the longest, and ranks wait for it",
                thousands(job.mean_tokens),
                thousands(job.seq as f64)
            );
            self.add(found, "data.packing fills sequences.");
        }
        let l = &plan.layout;
        if l.recompute != Recompute::None && plan.run.wish.recompute.is_some() {
            let lean = Layout { recompute: Recompute::None, ..l.clone() };
            let other = plan.run.space().candidate(&lean, &same_stages(plan));
            if other.skewed <= plan.run.space().limit() {
                let found = format!("recomputation is not needed: without it the peak is {}", bytes(other.peak));
                let gain = 100.0 * (other.time.tokens_per_s_per_gpu / plan.time.tokens_per_s_per_gpu - 1.0);
                self.add(found, format!("recompute=none is {gain:.0} % faster."));
            }
        }
    }

    /// The best layout of all, where the user's is much slower.
    fn better(&mut self, plan: &Plan) {
        let Some(best) = plan.runners_up.first().filter(|_| !plan.searched) else { return };
        let factor = best.time.tokens_per_s_per_gpu / plan.time.tokens_per_s_per_gpu;
        if factor > FASTER || !plan.fits() {
            let found = format!("another layout is predicted {factor:.2} times as fast, at {}", bytes(best.peak));
            self.add(found, format!("--layout {}", best.layout.told(plan.run.network.arch.moe.is_some())));
        }
    }
}

fn largest(plan: &Plan) -> (Purpose, f64) {
    plan.heaviest.by_purpose.parts().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((Purpose::Weights, 0.0))
}

/// What makes a purpose smaller.
fn lighten(purpose: Purpose) -> &'static str {
    match purpose {
        Purpose::Weights => "more tp, pp or ep divide them.",
        Purpose::Gradients => "bf16 gradients (--grads bf16) halve them; more tp, pp or ep divide them.",
        Purpose::Masters | Purpose::Moments => "more data parallelism shards them, offload=optimizer moves them to the host.",
        Purpose::Activations => "recompute=full, more cp or tp, or a smaller micro-batch shrink them.",
        Purpose::Moe => "recompute=selective, etp=1 or a smaller micro-batch shrink them.",
        Purpose::Logits => "temper's chunked head does not hold them whole; tp and cp divide them.",
        Purpose::Communication | Purpose::Libraries | Purpose::Allocator => "it is the price of the libraries.",
    }
}

/// What tells a candidate from the best: the memory that is not there, or the part of the step that differs most.
pub(crate) fn compare(best: &StepTime, candidate: &Candidate, space: &Space) -> String {
    if candidate.skewed > space.limit() {
        let routing = if candidate.peak > space.limit() { "" } else { " when routing is uneven" };
        let (memory, reserve) = (bytes(space.cluster.device.memory_bytes()), bytes(space.reserve()));
        return format!("needs {}{routing} of {memory} less the reserve of {reserve}", bytes(candidate.skewed));
    }
    let theirs = &candidate.time;
    let change = 100.0 * (theirs.total / best.total - 1.0);
    let mut parts: Vec<(String, f64, f64)> = vec![
        ("recomputation".to_string(), theirs.recompute, best.recompute),
        ("pipeline bubble".to_string(), theirs.bubble, best.bubble),
        ("optimizer".to_string(), theirs.optimizer, best.optimizer),
    ];
    parts.extend(Op::ALL.map(|op| (op.name().replace('_', " "), theirs.compute[op as usize], best.compute[op as usize])));
    let axes = crate::memory::AXES;
    parts.extend(axes.map(|axis| (format!("{} communication", axis_name(axis)), theirs.comm[axis as usize], best.comm[axis as usize])));
    // The part that moved most in the direction of the whole.
    let moved = |part: &(String, f64, f64)| (part.1 - part.2) * change.signum();
    match parts.iter().max_by(|a, b| moved(a).total_cmp(&moved(b))).filter(|part| moved(part) > 0.0) {
        Some((name, theirs, ours)) => format!("{change:+.1} % time: {name} {} against {}", seconds(*theirs), seconds(*ours)),
        None => format!("{change:+.1} % time"),
    }
}

/// The stages of the plan, for a layout that differs in other things.
fn same_stages(plan: &Plan) -> Vec<Stage> {
    plan.stages.iter().map(|stage| stage.stage.clone()).collect()
}
