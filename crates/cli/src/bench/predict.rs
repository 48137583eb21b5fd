//! What the planner says of a benchmark, beside what is measured.

use crate::exit::BadInput;
use crate::layout::{Place, as_planned, job};
use crate::shortage::{Planned, planned};
use serde::Serialize;
use temper_comm::Axes;
use temper_config::{Arch, Config};
use temper_planner::memory::{Memory, Purpose, Question, rank_memory, routed_memory};
use temper_planner::time::{alone, step_time};
use temper_planner::{Cluster, Job, Layout, Network, Stage, stages};
use temper_tensor::Ops;
use temper_train::bench::{Skew, StepReport};
use temper_train::layout::Layout as Mesh;

/// The planner's question about a benchmark.
pub struct Subject {
    network: Network,
    cluster: Cluster,
    job: Job,
    layout: Layout,
    stages: Vec<Stage>,
    rank: usize,
    alone: bool,
    place: Place,
}

/// A figure of the plan and what it turned out to be.
#[derive(Serialize)]
pub struct Held {
    /// The plan's.
    pub plan: f64,
    /// What was measured.
    pub measured: f64,
    /// Plan less measured, as a share of measured.
    pub deviation: f64,
}

impl Held {
    fn new(plan: f64, measured: f64) -> Held {
        Held { plan, measured, deviation: if measured > 0.0 { plan / measured - 1.0 } else { 0.0 } }
    }
}

/// The plan beside the measurement.
#[derive(Serialize)]
pub struct Beside {
    /// The layout that was planned.
    pub layout: String,
    /// Peak bytes by what the engine accounts for, and last of all tensors together.
    pub memory: Vec<(&'static str, Held)>,
    /// Bytes of libraries and communicators, which the engine's account does not have.
    pub libraries: f64,
    /// Milliseconds of a step; absent for devices without known rates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_ms: Option<Held>,
}

impl Subject {
    /// The question; `mesh` and `rank` are absent where one rank does all the work. `alone`: the other ranks are not there.
    ///
    /// # Errors
    /// Layers that do not lie on the stages, or a model beyond counting.
    pub fn new(
        (name, arch): (&str, &Arch),
        config: &Config,
        document: usize,
        mesh: Option<(&Mesh, usize)>,
        alone: bool,
        place: Place,
    ) -> anyhow::Result<Subject> {
        let network = Network::of(arch.clone(), name)?;
        let single = || Mesh { axes: Axes::default(), sequence: false, vpp: 1, split: Vec::new() };
        let (mesh, rank) = mesh.map_or_else(|| (single(), 0), |(mesh, rank)| (mesh.clone(), rank));
        let axes = mesh.axes;
        let layout = as_planned(&mesh, config, &place);
        let stages = stages(&network, &layout).map_err(|refusal| BadInput(refusal.to_string()))?;
        // A benchmark's batch is that of one replica, and a step of several ranks has as many for each.
        let job = Job { document, global_batch: config.train.global_batch * axes.dp, ..job(config, &place) };
        let world = axes.world();
        let cluster = Cluster { device: place.device.clone(), gpus: world, per_node: world };
        Ok(Subject { network, cluster, job, layout, stages, rank, alone, place })
    }

    /// With routing as it was measured, layer by layer; balanced where it is not known.
    fn memory(&self, routing: Option<&Skew>) -> Memory {
        let question = Question { network: &self.network, job: &self.job, layout: &self.layout, overheads: self.place.overheads };
        let memory = match routing {
            Some(skew) => routed_memory(&question, &self.stages, self.rank, &skew.layers),
            None => rank_memory(&question, &self.stages, self.rank, 1.0),
        };
        memory.unwrap_or_default()
    }

    /// The plan of the rank, with balanced routing.
    pub fn planned(&self) -> Planned {
        planned(self.rank, self.layout.told(self.network.arch.moe.is_some()), self.memory(None))
    }

    /// Refuses what does not fit, by more than the plan may be off.
    ///
    /// # Errors
    /// Names the memory that there is, what is needed, and what makes it less.
    pub fn must_fit(&self, ops: &dyn Ops) -> Result<(), BadInput> {
        let capacity = ops.memory().map_or(0, |m| m.capacity) as f64;
        let memory = self.memory(None);
        if capacity == 0.0 || memory.total() * (1.0 - TOLERANCE) <= capacity {
            return Ok(());
        }
        let gib = |bytes: f64| format!("{:.1} GiB", bytes / GIB);
        let parts: Vec<String> = memory.parts().map(|(purpose, bytes)| format!("{} {}", purpose.name(), gib(bytes))).collect();
        let smaller = if self.place.gpu { ", set --grads and --moments to bf16, or --set memory.offload_optimizer=true" } else { "" };
        Err(BadInput(format!(
            "{} has {}, but the plan needs {} ({}). Lower --layers, --seq or --micro-batch, or take --recompute full{smaller}",
            ops.name(),
            gib(capacity),
            gib(memory.total()),
            parts.join(", ")
        )))
    }

    /// The plan beside what was measured.
    pub fn beside(&self, report: &StepReport) -> Option<Beside> {
        let measured = report.memory.as_ref()?;
        let plan = self.memory(report.rank.as_ref().and_then(|rank| rank.skew.as_ref()));
        let sum = |purposes: &[Purpose]| purposes.iter().map(|p| plan.of(*p)).sum::<f64>();
        let peak = |name: &str| measured.peak.iter().find(|(known, _)| *known == name).map_or(0.0, |(_, bytes)| *bytes as f64);
        let mut memory: Vec<(&'static str, Held)> =
            TENSORS.iter().map(|(name, purposes)| (*name, Held::new(sum(purposes), peak(name)))).collect();
        let all = TENSORS.iter().map(|(_, purposes)| sum(purposes)).sum();
        memory.push(("tensors", Held::new(all, measured.peak_tensors as f64)));
        let layout = self.layout.told(self.network.arch.moe.is_some());
        Some(Beside { layout, memory, libraries: plan.total() - all, step_ms: self.step_ms(report) })
    }

    fn step_ms(&self, report: &StepReport) -> Option<Held> {
        if !self.place.known() {
            return None;
        }
        let Subject { network, cluster, job, layout, stages, .. } = self;
        let stage = stages.get(layout.coordinates(self.rank).3)?;
        let seconds = match self.alone {
            true => alone(network, cluster, job, layout, stage),
            false => step_time(network, cluster, job, layout, stages).total,
        };
        Some(Held::new(1e3 * seconds, report.step_ms.median))
    }
}

const GIB: f64 = (1u64 << 30) as f64;
/// What the plan may be off.
const TOLERANCE: f64 = 0.03;

/// What the engine accounts for as tensors, and what that is in the plan.
const TENSORS: [(&str, &[Purpose]); 4] = [
    ("weights", &[Purpose::Weights]),
    ("gradients", &[Purpose::Gradients]),
    ("optimizer", &[Purpose::Masters, Purpose::Moments]),
    ("activations", &[Purpose::Activations, Purpose::Moe, Purpose::Logits]),
];
