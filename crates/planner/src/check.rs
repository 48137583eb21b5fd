//! The constraints on a layout. One list of rules for the planner and for whoever launches a run.

use crate::cluster::Cluster;
use crate::job::Job;
use crate::layout::{Layout, Recompute};
use crate::network::Network;
use crate::waste::enough;
use serde::Serialize;
use std::fmt;
use temper_parallel::schedule::check_interleaving;
use temper_parallel::{PipelineRule, Refusal, Stages, balanced_split};

/// The constraint that a layout breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// tp x cp x dp x pp is the number of devices; expert parallelism folds into it and does not multiply it.
    World,
    /// Nodes are of equal size.
    Nodes,
    /// Tensor parallelism divides the query heads.
    Heads,
    /// Key/value heads divide over the tensor ranks, or the tensor ranks over them.
    KvHeads,
    /// Tensor parallelism divides the heads of linear attention.
    LinearHeads,
    /// Tensor parallelism divides the width of the dense feed-forward.
    Intermediate,
    /// Expert axes need a model with experts.
    NoExperts,
    /// Expert parallelism divides the experts.
    Experts,
    /// Tensor parallelism within an expert divides its width.
    ExpertWidth,
    /// etp x ep divides the ranks of a stage.
    ExpertGroup,
    /// A stage has at least one layer.
    Stages,
    /// Stages of unequal size must be asked for.
    Split,
    /// Virtual stages need a pipeline and equal chunks.
    Interleaving,
    /// A global batch is whole micro-batches.
    Batch,
    /// A pipeline has at least as many micro-batches as stages.
    MicroBatches,
    /// Every axis is at least 1.
    Zero,
}

/// A broken constraint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// Which.
    pub rule: Rule,
    /// What was found, in numbers.
    pub found: String,
    /// What to do.
    pub remedy: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}. {}", self.found, self.remedy)
    }
}

/// What the engine itself refuses of a pipeline.
impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Problem {
        let rule = match refusal.rule {
            PipelineRule::Stages => Rule::Stages,
            PipelineRule::Split => Rule::Split,
            PipelineRule::Interleaving => Rule::Interleaving,
        };
        Problem { rule, found: refusal.found, remedy: refusal.remedy }
    }
}

/// Every constraint that a layout breaks; none means legal. Takes any numbers.
pub fn check(network: &Network, cluster: &Cluster, job: &Job, layout: &Layout) -> Vec<Problem> {
    let mut problems = Problems(Vec::new());
    problems.zeroes(layout, job);
    if !problems.0.is_empty() {
        return problems.0;
    }
    problems.world(cluster, layout);
    problems.heads(network, layout);
    problems.experts(network, layout);
    problems.pipeline(network, job, layout);
    problems.batch(job, layout);
    problems.0
}

struct Problems(Vec<Problem>);

impl Problems {
    fn add(&mut self, rule: Rule, found: String, remedy: impl Into<String>) {
        self.0.push(Problem { rule, found, remedy: remedy.into() });
    }

    fn zeroes(&mut self, l: &Layout, job: &Job) {
        let axes = [
            ("tp", l.tp),
            ("cp", l.cp),
            ("dp", l.dp),
            ("pp", l.pp),
            ("vpp", l.vpp),
            ("ep", l.ep),
            ("etp", l.etp),
            ("mb", l.micro_batch),
            ("seq", job.seq),
            ("global batch", job.global_batch),
        ];
        for (name, _) in axes.iter().filter(|(_, value)| *value == 0) {
            self.add(Rule::Zero, format!("{name} is 0"), "Give at least 1.");
        }
    }

    fn world(&mut self, cluster: &Cluster, l: &Layout) {
        let product = wide(l.tp) * wide(l.cp);
        let product = product.saturating_mul(wide(l.dp)).saturating_mul(wide(l.pp));
        if product != wide(cluster.gpus) {
            let found = format!("tp {} x cp {} x dp {} x pp {} = {product} ranks on {} devices", l.tp, l.cp, l.dp, l.pp, cluster.gpus);
            let rest = cluster.gpus.checked_div(l.tp.saturating_mul(l.cp).saturating_mul(l.pp));
            let remedy = match rest.filter(|dp| *dp > 0 && l.tp * l.cp * l.pp * dp == cluster.gpus) {
                Some(dp) => format!("Take dp={dp}, or another number of devices."),
                None => "The product must be the number of devices.".to_string(),
            };
            self.add(Rule::World, found, remedy);
        }
        if cluster.per_node == 0 || !cluster.gpus.is_multiple_of(cluster.per_node) {
            self.add(Rule::Nodes, format!("{} devices in nodes of {}", cluster.gpus, cluster.per_node), "Give nodes of equal size.");
        }
    }

    fn heads(&mut self, network: &Network, l: &Layout) {
        let arch = &network.arch;
        if !arch.heads.is_multiple_of(l.tp) {
            let found = format!("tp {} does not divide {} attention heads", l.tp, arch.heads);
            self.add(Rule::Heads, found, format!("Take tp among {}.", divisors_of(arch.heads)));
        } else if !arch.kv_heads.is_multiple_of(l.tp) && !l.tp.is_multiple_of(arch.kv_heads) {
            let found = format!("{} key/value heads neither divide over tp {} nor tp over them", arch.kv_heads, l.tp);
            self.add(Rule::KvHeads, found, format!("Take tp among the divisors or multiples of {}.", arch.kv_heads));
        }
        if let Some(h) = &network.hybrid
            && h.linear.contains(&true)
            && !h.key_heads.is_multiple_of(l.tp)
        {
            let found = format!("tp {} does not divide {} key heads of linear attention", l.tp, h.key_heads);
            self.add(Rule::LinearHeads, found, format!("Take tp among {}.", divisors_of(h.key_heads)));
        }
        let has_dense = network.kinds.kinds.iter().any(|kind| !kind.experts);
        let shared = network.hybrid.as_ref().and_then(|h| h.shared_expert);
        let widths = [has_dense.then_some(arch.intermediate), shared];
        if let Some(width) = widths.into_iter().flatten().find(|width| !width.is_multiple_of(l.tp)) {
            let found = format!("tp {} does not divide the feed-forward width {width}", l.tp);
            self.add(Rule::Intermediate, found, "Take a tp that divides it.");
        }
    }

    fn experts(&mut self, network: &Network, l: &Layout) {
        let Some(moe) = &network.arch.moe else {
            if l.ep > 1 || l.etp > 1 {
                let found = format!("ep {} and etp {} on a dense model: {} has no experts", l.ep, l.etp, network.name);
                self.add(Rule::NoExperts, found, "Take ep=1 (and etp=1).");
            }
            return;
        };
        if !moe.experts.is_multiple_of(l.ep) {
            let found = format!("ep {} does not divide {} experts", l.ep, moe.experts);
            self.add(Rule::Experts, found, format!("Take ep among {}.", divisors_of(moe.experts)));
        }
        if !moe.intermediate.is_multiple_of(l.etp) {
            let found = format!("etp {} does not divide the width {} of an expert", l.etp, moe.intermediate);
            self.add(Rule::ExpertWidth, found, "Take etp=1: experts shard better over ep.");
        }
        let stage = wide(l.tp).saturating_mul(wide(l.cp)).saturating_mul(wide(l.dp));
        let experts = wide(l.ep).saturating_mul(wide(l.etp));
        if !stage.is_multiple_of(experts) {
            let found = format!(
                "etp {} x ep {} = {experts} does not divide the {stage} ranks of a stage (tp {} x cp {} x dp {})",
                l.etp, l.ep, l.tp, l.cp, l.dp
            );
            self.add(Rule::ExpertGroup, found, smaller_experts(l.ep, l.etp));
        }
    }

    fn pipeline(&mut self, network: &Network, job: &Job, l: &Layout) {
        if let Err(refusal) = Stages::new(network.arch.layers, l.pp, l.vpp, &l.split) {
            let no_stages = refusal.rule == PipelineRule::Stages;
            self.0.push(refusal.into());
            if no_stages {
                return;
            }
        }
        let turns = l.turns(job.global_batch);
        self.0.extend(check_interleaving(l.pp, l.vpp, turns.all).err().map(Problem::from));
        if turns.real < l.pp {
            let found = format!("{} micro-batches for {} stages: some would never work", turns.real, l.pp);
            let enough = l.dp.saturating_mul(l.micro_batch).saturating_mul(l.pp - 1).saturating_add(l.micro_batch);
            let smaller = if l.micro_batch > 1 { "pp or micro-batch" } else { "pp" };
            self.add(Rule::MicroBatches, found, format!("Take a smaller {smaller}, or a global batch of at least {enough}."));
        }
    }

    fn batch(&mut self, job: &Job, l: &Layout) {
        if !job.global_batch.is_multiple_of(l.micro_batch) {
            let found = format!("global batch {} is not a multiple of micro-batch {}", job.global_batch, l.micro_batch);
            let below = job.global_batch / l.micro_batch * l.micro_batch;
            let near = match enough(l, [below, below.saturating_add(l.micro_batch)]) {
                none if none.is_empty() => String::new(), // too few for the stages, which is told above
                some => format!(" take {some}, or"),
            };
            self.add(Rule::Batch, found, format!("An optimizer step takes whole micro-batches:{near} another micro-batch."));
        }
    }
}

/// The remedy for expert axes that do not fold into the ranks of a stage.
pub(crate) fn smaller_experts(ep: usize, etp: usize) -> String {
    let smaller = match (ep > 1, etp > 1) {
        (true, true) => "a smaller ep, or etp=1",
        (false, true) => "etp=1",
        _ => "a smaller ep",
    };
    format!("Experts fold into the ranks of a stage and do not multiply them: take {smaller}.")
}

fn wide(n: usize) -> u128 {
    n as u128
}

/// The divisors of `n`, for a remedy.
fn divisors_of(n: usize) -> String {
    divisors(n).iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

/// The divisors of `n` in order.
pub(crate) fn divisors(n: usize) -> Vec<usize> {
    let mut small: Vec<usize> = (1..).take_while(|d| d * d <= n).filter(|d| n.is_multiple_of(*d)).collect();
    let large: Vec<usize> = small.iter().rev().map(|d| n / d).filter(|d| d * d > n).collect();
    small.extend(large);
    small
}

/// Legal layouts on the same devices, the most similar first: the fewest doublings and halvings of axes away.
pub fn nearest(network: &Network, cluster: &Cluster, job: &Job, layout: &Layout, count: usize) -> Vec<Layout> {
    let mut found: Vec<(f64, Layout)> = legal(network, cluster, job, layout).map(|other| (distance(layout, &other), other)).collect();
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    found.into_iter().take(count).map(|(_, layout)| layout).collect()
}

/// Every legal choice of axes for the micro-batch, virtual stages and recomputation of `like`; uneven splits are made explicit.
pub(crate) fn legal<'a>(network: &'a Network, cluster: &'a Cluster, job: &'a Job, like: &'a Layout) -> impl Iterator<Item = Layout> + 'a {
    let has_experts = network.arch.moe.is_some();
    meshes(network, cluster)
        .flat_map(move |(tp, cp, dp, pp)| {
            let experts = if has_experts { divisors(tp * cp * dp) } else { vec![1] };
            experts.clone().into_iter().flat_map(move |ep| {
                let etps = if has_experts { divisors(tp) } else { vec![1] };
                etps.into_iter().flat_map(move |etp| {
                    [like.vpp, 1].into_iter().take(if like.vpp == 1 { 1 } else { 2 }).map(move |vpp| {
                        let even = network.arch.layers.is_multiple_of(pp * vpp.max(1));
                        let split = if even { Vec::new() } else { balanced_split(network.arch.layers, pp) };
                        Layout { tp, cp, dp, pp, vpp, ep, etp, split, ..like.clone() }
                    })
                })
            })
        })
        .filter(move |other| check(network, cluster, job, other).is_empty())
}

/// Every (tp, cp, dp, pp) whose product is the number of devices, as far as the model's heads and layers allow.
pub(crate) fn meshes<'a>(network: &'a Network, cluster: &'a Cluster) -> impl Iterator<Item = (usize, usize, usize, usize)> + 'a {
    let (heads, layers) = (network.arch.heads, network.arch.layers);
    let tps = divisors(cluster.gpus).into_iter().filter(move |tp| heads.is_multiple_of(*tp));
    tps.flat_map(move |tp| {
        let rest = cluster.gpus / tp;
        divisors(rest).into_iter().filter(move |pp| *pp <= layers).flat_map(move |pp| {
            let rest = rest / pp;
            divisors(rest).into_iter().map(move |cp| (tp, cp, rest / cp, pp))
        })
    })
}

/// How far two layouts are apart: doublings of each axis, plus a little for a change of kind.
fn distance(a: &Layout, b: &Layout) -> f64 {
    let doublings = |x: usize, y: usize| ((x.max(1) as f64).log2() - (y.max(1) as f64).log2()).abs();
    let axes = [(a.tp, b.tp), (a.cp, b.cp), (a.pp, b.pp), (a.vpp, b.vpp), (a.ep, b.ep), (a.etp, b.etp)];
    let mut sum: f64 = axes.iter().map(|(x, y)| doublings(*x, *y)).sum();
    // dp is usually what the other axes leave: it counts less.
    sum += 0.25 * doublings(a.dp, b.dp);
    if a.split != b.split {
        sum += 0.1;
    }
    if a.recompute != b.recompute && b.recompute == Recompute::Full {
        sum += 0.1;
    }
    sum
}
