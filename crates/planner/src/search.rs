//! The search: every legal layout, the fastest that fits.
//!
//! It is exhaustive over tp, cp, pp, vpp, ep, etp, dp and the micro-batch. One fact spares work without changing the answer: of two
//! settings of recomputation the one that recomputes less is faster and larger. So what does not fit at its leanest is left at once, and
//! of the settings only the first that fits counts. What the user gives is held, also beyond the limits of the search.

use crate::check::{check, divisors, meshes};
use crate::cluster::Cluster;
use crate::job::Job;
use crate::layout::{Layout, LayoutRequest, Offload, Recompute};
use crate::memory::{Memory, Overheads, Question, stages_memory};
use crate::network::Network;
use crate::stages::{Stage, stages};
use crate::time::{StepTime, step_time};
use temper_model::Parts;
use temper_parallel::balanced_split;

/// Largest micro-batch and most virtual stages that are tried.
const MOST_MICRO_BATCH: usize = 16;
const MOST_VIRTUAL: usize = 8;

/// A layout with its figures.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The layout.
    pub layout: Layout,
    /// Its time.
    pub time: StepTime,
    /// Peak of its heaviest rank with balanced routing.
    pub peak: f64,
    /// The same with skewed routing.
    pub skewed: f64,
}

/// What a search found.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// The best candidate of each choice of axes that fits, the fastest first.
    pub fitting: Vec<Candidate>,
    /// The fastest candidate that does not fit, at its leanest.
    pub too_large: Option<Candidate>,
    /// The candidate that needs the least memory, when none fits.
    pub smallest: Option<Candidate>,
    /// Layouts whose figures were computed.
    pub tried: usize,
}

/// What is searched.
#[derive(Clone, Copy)]
pub struct Space<'a> {
    /// The model.
    pub network: &'a Network,
    /// The devices.
    pub cluster: &'a Cluster,
    /// What is trained on.
    pub job: &'a Job,
    /// What libraries take.
    pub overheads: Overheads,
}

impl Space<'_> {
    /// The figures of a legal layout.
    pub fn candidate(&self, layout: &Layout, stages: &[Stage]) -> Candidate {
        let (peak, skewed) = self.peaks(layout, stages);
        let time = step_time(self.network, self.cluster, self.job, layout, stages);
        Candidate { layout: layout.clone(), time, peak, skewed }
    }

    /// Peak of the heaviest rank through a training run with balanced and with skewed routing.
    pub fn peaks(&self, layout: &Layout, stages: &[Stage]) -> (f64, f64) {
        let question = Question { network: self.network, job: self.job, layout, overheads: self.overheads };
        let most = |(memory, stage): (&Memory, &Stage)| memory.most(&question, stage);
        let peak = |skew: f64| stages_memory(&question, stages, skew).iter().zip(stages).map(most).fold(0.0, f64::max);
        let balanced = peak(1.0);
        let skewed = if layout.ep > 1 && self.job.skew > 1.0 { peak(self.job.skew) } else { balanced };
        (balanced, skewed)
    }

    /// Bytes that a chosen layout may take of a device.
    pub fn limit(&self) -> f64 {
        self.cluster.device.memory_bytes() - self.reserve()
    }

    /// Bytes of a device that a chosen layout leaves free.
    pub fn reserve(&self) -> f64 {
        self.cluster.device.memory_bytes() * self.overheads.reserve
    }
}

/// Searches all layouts that agree with `wish`.
pub fn search(space: &Space, wish: &LayoutRequest) -> Found {
    let mut found = Found::default();
    for (tp, cp, dp, pp) in meshes(space.network, space.cluster) {
        let agrees = [(wish.tp, tp), (wish.cp, cp), (wish.dp, dp), (wish.pp, pp)].iter().all(|(w, n)| w.is_none_or(|w| w == *n));
        if agrees {
            for (vpp, split) in pipelines(space.network.arch.layers, pp, wish) {
                for (ep, etp) in expert_meshes(space.network, tp, tp * cp * dp, wish) {
                    let (sequence, split) = (wish.sequence.unwrap_or(true), split.clone());
                    let (micro_batch, recompute, offload) = (1, Recompute::None, Offload::None);
                    let layout = Layout { tp, cp, dp, pp, vpp, ep, etp, sequence, micro_batch, recompute, offload, split };
                    try_mesh(space, wish, &layout, &mut found);
                }
            }
        }
    }
    found.fitting.sort_by(|a, b| b.time.tokens_per_s_per_gpu.total_cmp(&a.time.tokens_per_s_per_gpu));
    found
}

/// Virtual stages and split of a number of stages.
fn pipelines(layers: usize, pp: usize, wish: &LayoutRequest) -> Vec<(usize, Vec<usize>)> {
    let mut all = Vec::new();
    if !wish.split.is_empty() {
        all.push((wish.vpp.unwrap_or(1), wish.split.clone()));
    } else if !layers.is_multiple_of(pp) {
        all.push((1, balanced_split(layers, pp)));
    } else {
        let most = if pp > 1 { wish.vpp.unwrap_or(MOST_VIRTUAL) } else { 1 };
        all.extend(divisors(layers / pp).into_iter().filter(|v| *v <= most).map(|v| (v, Vec::new())));
    }
    all.retain(|(vpp, _)| wish.vpp.is_none_or(|w| w == *vpp));
    all
}

/// Expert axes of a mesh: ep divides the experts, etp divides tp unless the user gives another, and both fold into the stage.
fn expert_meshes(network: &Network, tp: usize, stage_ranks: usize, wish: &LayoutRequest) -> Vec<(usize, usize)> {
    let Some(moe) = &network.arch.moe else { return vec![(1, 1)] };
    let etps = wish.etp.map_or_else(|| divisors(tp), |one| vec![one]);
    let mut all = Vec::new();
    for etp in etps.into_iter().filter(|etp| moe.intermediate.is_multiple_of(*etp) && stage_ranks.is_multiple_of(*etp)) {
        let eps = divisors(stage_ranks / etp).into_iter().filter(|ep| moe.experts.is_multiple_of(*ep) && wish.ep.is_none_or(|w| w == *ep));
        all.extend(eps.map(|ep| (ep, etp)));
    }
    all
}

/// The best micro-batch, recomputation and off-loading of one choice of axes.
fn try_mesh(space: &Space, wish: &LayoutRequest, mesh: &Layout, found: &mut Found) {
    let Ok(stages) = stages(space.network, mesh) else { return }; // `check` refuses it too
    let batches = match wish.micro_batch {
        Some(one) => vec![one],
        None => divisors(space.job.global_batch).into_iter().take_while(|n| *n <= MOST_MICRO_BATCH).collect(),
    };
    let (mut best, mut too_large): (Option<Candidate>, bool) = (None, false);
    for micro_batch in batches {
        let layout = Layout { micro_batch, ..mesh.clone() };
        if !check(space.network, space.cluster, space.job, &layout).is_empty() {
            continue;
        }
        let settings = settings(wish);
        let leanest = settings.iter().max().map(|s| layout.with(*s));
        if let Some(leanest) = leanest.filter(|lean| space.peaks(lean, &stages).1 > space.limit()) {
            found.tried += 1;
            if !too_large {
                keep_too_large(space.candidate(&leanest, &stages), found);
            }
            too_large = true;
            continue; // a larger micro-batch may need less where it makes fewer in flight
        }
        for offload in [Offload::None, Offload::Optimizer] {
            let fits = settings.iter().filter(|s| s.0 == offload).map(|s| layout.with(*s)).find(|one| {
                found.tried += 1;
                space.peaks(one, &stages).1 <= space.limit()
            });
            if let Some(one) = fits {
                let candidate = space.candidate(&one, &stages);
                if best.as_ref().is_none_or(|b| candidate.time.tokens_per_s_per_gpu > b.time.tokens_per_s_per_gpu) {
                    best = Some(candidate);
                }
            }
        }
    }
    found.fitting.extend(best);
}

fn keep_too_large(candidate: Candidate, found: &mut Found) {
    if found.smallest.as_ref().is_none_or(|s| candidate.peak < s.peak) {
        found.smallest = Some(candidate.clone());
    }
    if found.too_large.as_ref().is_none_or(|s| candidate.time.tokens_per_s_per_gpu > s.time.tokens_per_s_per_gpu) {
        found.too_large = Some(candidate);
    }
}

/// Off-loading and recomputation that agree with a wish, the fastest and largest first.
pub(crate) fn settings(wish: &LayoutRequest) -> Vec<(Offload, Recompute)> {
    let mut all = Vec::new();
    for offload in [Offload::None, Offload::Optimizer] {
        if wish.offload.is_none_or(|w| w == offload) {
            let free = || vec![Recompute::None, Recompute::Selective(Parts::usual()), Recompute::Full];
            all.extend(wish.recompute.map_or_else(free, |one| vec![one]).into_iter().map(|recompute| (offload, recompute)));
        }
    }
    all
}

impl Layout {
    /// The same layout with other settings of memory.
    pub(crate) fn with(&self, (offload, recompute): (Offload, Recompute)) -> Layout {
        Layout { offload, recompute, ..self.clone() }
    }
}
