//! [`Plan`]: the whole answer to a question, and how it reads as JSON.

use crate::advice::{Advice, advise};
use crate::check::{Problem, check, nearest};
use crate::flops::{ModelFlops, mfu};
use crate::job::{Account, Job};
use crate::layout::{Layout, LayoutRequest};
use crate::memory::{Memory, Overheads, Peak, Phase, Phases, Question, peak_activations, phases, stage_memory};
use crate::network::Network;
use crate::search::{Candidate, Found, Space, search, settings};
use crate::shard::{RankParams, rank_params};
use crate::stages::{Stage, stages};
use crate::time::StepTime;
use crate::{Cluster, memory::Dims};
use serde::Serialize;
use serde_json::{Value, json};

/// A question.
#[derive(Clone, Debug)]
pub struct Run {
    /// The model.
    pub network: Network,
    /// The devices.
    pub cluster: Cluster,
    /// What is trained on.
    pub job: Job,
    /// What the user fixes of the layout; what [`LayoutRequest::is_searched`] leaves open is searched.
    pub wish: LayoutRequest,
    /// What libraries take.
    pub overheads: Overheads,
}

impl Run {
    /// The space of layouts of this question.
    pub fn space(&self) -> Space<'_> {
        Space { network: &self.network, cluster: &self.cluster, job: &self.job, overheads: self.overheads }
    }
}

/// One pipeline stage of a plan. All its ranks are alike.
#[derive(Clone, Debug)]
pub struct StagePlan {
    /// The stage.
    pub stage: Stage,
    /// Parameters of a rank.
    pub params: RankParams,
    /// Peak with balanced routing.
    pub memory: Memory,
    /// Peak with skewed routing.
    pub skewed: Memory,
    /// Peaks through a run's life, with balanced routing.
    pub phases: Phases,
    /// The moment of the peak.
    pub peak: Peak,
}

/// The rank that needs the most memory.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Heaviest {
    /// Its number, the first of its stage.
    pub rank: usize,
    /// Its stage.
    pub stage: usize,
    /// Parameters it holds.
    pub params: u64,
    /// Peak with balanced routing.
    pub peak_bytes: u64,
    /// Peak with skewed routing.
    pub skewed_peak_bytes: u64,
    /// The balanced peak by purpose.
    pub by_purpose: Memory,
}

/// The same run under the other account.
#[derive(Clone, Debug, Serialize)]
pub struct Beside {
    /// Whose.
    pub account: Account,
    /// Its heaviest rank.
    pub heaviest: Heaviest,
    /// Where the two differ, largest first: purpose, and bytes of the other account less bytes of this.
    pub differences: Vec<(&'static str, f64)>,
}

/// A full checkpoint.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Checkpoint {
    /// Bytes of weights, f32 masters and moments.
    pub bytes: u64,
    /// Seconds to write it to storage.
    pub write_s: f64,
    /// Seconds that training pauses for the copy to the host.
    pub pause_s: f64,
}

/// The answer.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The question.
    pub run: Run,
    /// The layout, given or found.
    pub layout: Layout,
    /// Whether the layout was searched rather than given.
    pub searched: bool,
    /// Its stages.
    pub stages: Vec<StagePlan>,
    /// Its heaviest rank.
    pub heaviest: Heaviest,
    /// The other account.
    pub beside: Beside,
    /// Its time.
    pub time: StepTime,
    /// Its checkpoint.
    pub checkpoint: Checkpoint,
    /// What is wrong with it, or could be better.
    pub advice: Vec<Advice>,
    /// The next best layouts: three that fit, and the fastest that does not.
    pub runners_up: Vec<Candidate>,
    /// The fastest layout of all that does not fit.
    pub too_large: Option<Candidate>,
    /// Layouts whose figures were computed.
    pub tried: usize,
}

/// A layout that cannot be run.
#[derive(Clone, Debug)]
pub struct Refused {
    /// The layout.
    pub layout: Layout,
    /// The constraints it breaks.
    pub problems: Vec<Problem>,
    /// Legal layouts close to it.
    pub nearest: Vec<Layout>,
    /// Whether the model has experts, which decides how layouts are told.
    pub has_experts: bool,
}

/// Answers a question.
///
/// # Errors
/// The constraints that the user's layout breaks, with the nearest legal ones; also when no layout at all is legal.
pub fn plan(run: Run) -> Result<Plan, Box<Refused>> {
    let given = !run.wish.is_searched();
    let has_experts = run.network.arch.moe.is_some();
    let asked = run.wish.complete(run.cluster.gpus, has_experts);
    if given {
        refuse_illegal(&run, &asked)?;
    }
    // The search holds what the user gives; a given layout is compared with the best of all.
    let free = if given { LayoutRequest::default() } else { run.wish.clone() };
    let found = search(&run.space(), &free);
    let layout = if given { best_setting(&run, &asked)? } else { chosen(&run, &found, &asked)? };
    assemble(run, layout, !given, found)
}

fn refuse_illegal(run: &Run, layout: &Layout) -> Result<(), Box<Refused>> {
    let problems = check(&run.network, &run.cluster, &run.job, layout);
    if problems.is_empty() {
        return Ok(());
    }
    Err(refused(run, layout, problems))
}

fn refused(run: &Run, layout: &Layout, problems: Vec<Problem>) -> Box<Refused> {
    let nearest = nearest(&run.network, &run.cluster, &run.job, layout, 3);
    Box::new(Refused { layout: layout.clone(), problems, nearest, has_experts: run.network.arch.moe.is_some() })
}

fn stages_of(run: &Run, layout: &Layout) -> Result<Vec<Stage>, Box<Refused>> {
    stages(&run.network, layout).map_err(|refusal| refused(run, layout, vec![refusal.into()]))
}

/// The best layout found; else the smallest; else whatever keeps any layout from being legal.
fn chosen(run: &Run, found: &Found, asked: &Layout) -> Result<Layout, Box<Refused>> {
    match found.fitting.first().or(found.smallest.as_ref()) {
        Some(candidate) => Ok(candidate.layout.clone()),
        None => {
            refuse_illegal(run, asked)?;
            Ok(asked.clone())
        }
    }
}

/// The fastest recomputation and off-loading with which a layout fits; the leanest when none does.
fn best_setting(run: &Run, layout: &Layout) -> Result<Layout, Box<Refused>> {
    let space = run.space();
    let stages = stages_of(run, layout)?;
    let all: Vec<Candidate> = settings(&run.wish).into_iter().map(|s| space.candidate(&layout.with(s), &stages)).collect();
    let fastest = |fits: &dyn Fn(&Candidate) -> bool| {
        all.iter().filter(|c| fits(c)).max_by(|a, b| a.time.tokens_per_s_per_gpu.total_cmp(&b.time.tokens_per_s_per_gpu))
    };
    let memory = space.cluster.device.memory_bytes();
    let chosen = fastest(&|c| c.skewed <= space.limit())
        .or_else(|| fastest(&|c| c.skewed <= memory))
        .or_else(|| fastest(&|c| c.peak <= memory))
        .or_else(|| all.iter().min_by(|a, b| a.peak.total_cmp(&b.peak)));
    Ok(chosen.map_or_else(|| layout.clone(), |c| c.layout.clone()))
}

fn assemble(run: Run, layout: Layout, searched: bool, found: Found) -> Result<Plan, Box<Refused>> {
    let list = stages_of(&run, &layout)?;
    let stage_plans = stage_plans(&run, &run.job, &layout, &list);
    let heaviest = heaviest(&layout, &stage_plans);
    let beside = beside(&run, &layout, &list, &heaviest);
    let time = crate::time::step_time(&run.network, &run.cluster, &run.job, &layout, &list);
    let checkpoint = checkpoint(&run, &layout, &list);
    let runners_up: Vec<Candidate> = found.fitting.into_iter().filter(|c| c.layout != layout).take(3).collect();
    let too_large = found.too_large.filter(|c| c.layout != layout && c.time.tokens_per_s_per_gpu > time.tokens_per_s_per_gpu);
    let mut plan = Plan {
        run,
        layout,
        searched,
        stages: stage_plans,
        heaviest,
        beside,
        time,
        checkpoint,
        advice: Vec::new(),
        runners_up,
        too_large,
        tried: found.tried,
    };
    plan.advice = advise(&plan);
    Ok(plan)
}

fn stage_plans(run: &Run, job: &Job, layout: &Layout, list: &[Stage]) -> Vec<StagePlan> {
    let question = Question { network: &run.network, job, layout, overheads: run.overheads };
    let dims = Dims::new(&run.network, job, layout);
    let one = |stage: &Stage| StagePlan {
        stage: stage.clone(),
        params: rank_params(&run.network, layout, stage, job.account),
        memory: stage_memory(&question, stage, 1.0),
        skewed: stage_memory(&question, stage, if layout.ep > 1 { job.skew.max(1.0) } else { 1.0 }),
        phases: phases(&question, stage, 1.0),
        peak: peak_activations(&question, &dims, stage, 1.0),
    };
    list.iter().map(one).collect()
}

fn heaviest(layout: &Layout, stages: &[StagePlan]) -> Heaviest {
    let mut best: Option<&StagePlan> = None;
    for stage in stages {
        if best.is_none_or(|b| stage.memory.total() > b.memory.total()) {
            best = Some(stage);
        }
    }
    let memory = best.map(|s| s.memory).unwrap_or_default();
    let index = best.map_or(0, |s| s.stage.index);
    Heaviest {
        rank: index * layout.stage_ranks(),
        stage: index,
        params: best.map_or(0, |s| s.params.total()),
        peak_bytes: memory.total().round() as u64,
        skewed_peak_bytes: stages.iter().map(|s| s.skewed.total()).fold(0.0, f64::max).round() as u64,
        by_purpose: memory,
    }
}

fn beside(run: &Run, layout: &Layout, list: &[Stage], mine: &Heaviest) -> Beside {
    let account = match run.job.account {
        Account::Temper => Account::Megatron,
        Account::Megatron => Account::Temper,
    };
    let other = heaviest(layout, &stage_plans(run, &run.job.under(account), layout, list));
    let difference = |purpose| other.by_purpose.of(purpose) - mine.by_purpose.of(purpose);
    let mut differences: Vec<(&'static str, f64)> = crate::memory::Purpose::ALL.map(|p| (p.name(), difference(p))).to_vec();
    differences.retain(|(_, bytes)| bytes.abs() >= 1e6);
    differences.sort_by(|a, b| b.1.abs().total_cmp(&a.1.abs()));
    Beside { account, heaviest: other, differences }
}

/// Bytes a parameter in a full checkpoint: bf16 weights (2) that are read without the rest, f32 masters (4), two f32 moments (8).
/// In f32 the weights are the masters.
pub(crate) fn checkpoint_bytes(job: &Job) -> u64 {
    if job.precision.weight_bytes == 2 { 14 } else { 12 }
}

/// Parameters of the rank with the most to write, which holds the training up.
pub(crate) fn heaviest_shard<'a>(run: &Run, layout: &Layout, stages: impl Iterator<Item = &'a Stage>) -> u64 {
    stages.map(|stage| rank_params(&run.network, layout, stage, run.job.account).optimizer_shard(layout)).max().unwrap_or(0)
}

fn checkpoint(run: &Run, layout: &Layout, list: &[Stage]) -> Checkpoint {
    let bytes = run.network.total * checkpoint_bytes(&run.job);
    let nodes = run.cluster.gpus.div_ceil(run.cluster.per_node.max(1)) as f64;
    let most = heaviest_shard(run, layout, list.iter());
    Checkpoint {
        bytes,
        write_s: bytes as f64 / (nodes * run.job.storage_gb_s * 1e9),
        pause_s: (most * checkpoint_bytes(&run.job)) as f64 / (run.cluster.device.host_gb_s * 1e9),
    }
}

impl Plan {
    /// Memory of a device.
    pub fn capacity(&self) -> f64 {
        self.run.cluster.device.memory_bytes()
    }

    /// Bytes of a device that a chosen layout leaves free.
    pub fn reserve(&self) -> f64 {
        self.run.space().reserve()
    }

    /// The fullest moment of a training run with balanced routing, from reading to saving: stage, phase and bytes. Where steps are the
    /// fullest, it is that of the heaviest rank.
    pub fn fullest(&self) -> (usize, Phase, f64) {
        let steps = (self.heaviest.stage, Phase::Steady, self.heaviest.peak_bytes as f64);
        let most = self.stages.iter().map(|s| (s.stage.index, s.phases.most()));
        most.fold(steps, |most, (stage, (phase, bytes))| if bytes.round() > most.2 { (stage, phase, bytes) } else { most })
    }

    /// The most of any rank through a training run, with routing skewed where there are experts.
    pub fn worst(&self) -> f64 {
        self.fullest().2.max(self.heaviest.skewed_peak_bytes as f64)
    }

    /// Whether every rank fits through a training run with balanced routing.
    pub fn fits(&self) -> bool {
        self.fullest().2 <= self.capacity()
    }

    /// What the memory of a rank is asked of.
    pub(crate) fn question(&self) -> Question<'_> {
        Question { network: &self.run.network, job: &self.run.job, layout: &self.layout, overheads: self.run.overheads }
    }

    /// Whether it fits when the busiest expert rank gets `job.skew` times its share.
    pub fn fits_skewed(&self) -> bool {
        self.worst() <= self.capacity()
    }

    /// Whether it also leaves the reserve free.
    pub fn keeps_reserve(&self) -> bool {
        self.worst() <= self.run.space().limit()
    }

    /// MFU of a speed that was measured, in tokens a second and device.
    pub fn measured_mfu(&self, tokens_per_s_per_gpu: f64) -> f64 {
        mfu(&ModelFlops::new(&self.run.network), self.run.job.reach(), tokens_per_s_per_gpu, self.run.cluster.device.peak())
    }

    /// How another layout differs from this one in time, or why it cannot be had.
    pub fn why_not(&self, candidate: &Candidate) -> String {
        crate::advice::compare(&self.time, candidate, &self.run.space())
    }

    /// Length of the run in days, when its steps are known.
    pub fn days(&self) -> Option<f64> {
        self.run.job.steps.map(|steps| steps as f64 * self.time.total / 86_400.0)
    }

    /// The plan as JSON.
    pub fn to_json(&self) -> Value {
        let (stage, phase, most) = self.fullest();
        let (network, job) = (&self.run.network, &self.run.job);
        json!({
            "fits": self.fits(),
            "fits_skewed": self.fits_skewed(),
            "keeps_reserve": self.keeps_reserve(),
            "account": job.account,
            "model": {
                "name": network.name, "family": network.family, "params": network.total, "active_params": network.active,
                "trainable_today": network.refused.is_none(), "notices": network.notices,
            },
            "job": job,
            "cluster": self.run.cluster,
            "layout": layout_json(&self.layout, network.arch.moe.is_some()),
            "turns": {
                "micro_batches": self.layout.micro_batches(job.global_batch), "a_replica": self.layout.turns(job.global_batch).real,
                "with_fillers": self.layout.turns(job.global_batch).all,
            },
            "searched": self.searched,
            "heaviest": self.heaviest,
            "fullest": { "stage": stage, "phase": phase, "bytes": most.round() },
            "limit_bytes": self.capacity() as u64,
            "reserve_bytes": self.reserve() as u64,
            "stages": self.stages.iter().map(|s| json!({
                "stage": s.stage.index, "layers": s.stage.layers, "params": s.params.total(), "params_by_part": s.params,
                "peak_bytes": s.memory.total().round(), "skewed_peak_bytes": s.skewed.total().round(),
                "by_purpose": s.memory, "host_bytes": s.memory.host.round(), "phases": s.phases,
            })).collect::<Vec<_>>(),
            "beside": self.beside,
            "step": self.time,
            "days": self.days(),
            "checkpoint": self.checkpoint,
            "problems": self.advice,
            "runners_up": self.runners_up.iter().map(|c| self.runner_json(c)).collect::<Vec<_>>(),
            "too_large": self.too_large.as_ref().map(|c| self.runner_json(c)),
            "tried": self.tried,
        })
    }

    fn runner_json(&self, candidate: &Candidate) -> Value {
        json!({
            "layout": layout_json(&candidate.layout, self.run.network.arch.moe.is_some()),
            "tokens_per_s_per_gpu": candidate.time.tokens_per_s_per_gpu,
            "time_s": candidate.time.total,
            "peak_bytes": candidate.peak.round(),
            "why": self.why_not(candidate),
        })
    }
}

/// A layout as JSON: its axes, and the text that `--layout` takes, for a model with experts or without.
pub fn layout_json(l: &Layout, has_experts: bool) -> Value {
    json!({
        "tp": l.tp, "pp": l.pp, "vpp": l.vpp, "ep": l.ep, "etp": l.etp, "cp": l.cp, "dp": l.dp, "expert_dp": l.expert_dp(),
        "sequence": l.sequence, "micro_batch": l.micro_batch, "recompute": l.recompute.to_string(), "offload": l.offload, "split": l.split, "text": l.told(has_experts),
    })
}
