//! The account of time: an optimizer step, from the layers of its slowest stage to its throughput.

mod layer;
mod rates;

pub use layer::{Comm, Compute, LayerTime, Op, Pass, Setting};
pub use rates::{RATES, Rates, all_to_all, gemm, ring, ring_bandwidth, send, stream};

use crate::cluster::Cluster;
use crate::flops::{ModelFlops, mfu};
use crate::job::Job;
use crate::layout::{Axis, Layout, Offload};
use crate::memory::Dims;
use crate::network::Network;
use crate::shard::{RankParams, rank_params};
use crate::stages::Stage;
use serde::Serialize;
use temper_parallel::schedule::Turns;

/// Seconds of an optimizer step, and what they amount to. The parts of `total` are on its slowest stage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTime {
    /// Compute by kind of operation, recomputation left out.
    pub compute: Compute,
    /// Computing activations again.
    pub recompute: f64,
    /// Communication that nothing hides, by axis.
    pub comm: Comm,
    /// Communication of gradients and weights in all, hidden or not: dp, expert_dp.
    pub sync: (f64, f64),
    /// Waiting while the pipeline fills and drains.
    pub bubble: f64,
    /// Fillers that complete the groups of an interleaved schedule.
    pub fillers: f64,
    /// The optimizer.
    pub optimizer: f64,
    /// The step.
    pub total: f64,
    /// The stage that the others wait for.
    pub slowest: usize,
    /// Tokens a second and device.
    pub tokens_per_s_per_gpu: f64,
    /// Model FLOPs utilisation of the bf16 peak.
    pub mfu: f64,
}

/// An optimizer step of a legal layout.
pub fn step_time(network: &Network, cluster: &Cluster, job: &Job, layout: &Layout, stages: &[Stage]) -> StepTime {
    let dims = Dims::of_length(network, job, layout, job.mean_tokens);
    let grad = f64::from(job.precision.grad_bytes);
    let setting = Setting { cluster, layout, dims: &dims, length: job.reach(), grad, account: job.account };
    let kinds: Vec<LayerTime> = network.kinds.kinds.iter().map(|kind| setting.layer(kind.linear, kind.experts)).collect();
    let head = setting.head();
    let turns = layout.turns(job.global_batch);
    let m = turns.real.max(1) as f64;
    let (mut longest, mut sum, mut slowest) = (StageTime::default(), 0.0, 0);
    for stage in stages {
        let time = stage_time(layout, stage, &kinds, &head);
        sum += time.total();
        if time.total() > longest.total() {
            (longest, slowest) = (time, stage.index);
        }
    }
    let one = longest.total();
    let params = stages.get(slowest).map(|stage| rank_params(network, layout, stage, job.account)).unwrap_or_default();
    let hop = send(cluster, layout.group(Axis::Pp, cluster), dims.shared * dims.hidden * dims.a);
    let sync = synchronise(cluster, job, layout, &params);
    let mut time = StepTime {
        compute: longest.work.compute.map(|s| s * m),
        recompute: longest.recompute * m,
        comm: longest.work.comm.map(|s| s * m),
        sync: (sync.dp(), sync.expert_dp()),
        bubble: (sum - one).max(0.0) / layout.vpp as f64,
        fillers: fillers(network, cluster, job, layout, stages.get(slowest), turns),
        optimizer: optimizer(cluster, job, layout, &params),
        total: 0.0,
        slowest,
        tokens_per_s_per_gpu: 0.0,
        mfu: 0.0,
    };
    // Each micro-batch crosses every boundary of its chunks once forward and once backward.
    time.comm[Axis::Pp as usize] += 2.0 * m * layout.vpp as f64 * hop;
    let hidden = sync.hide(&longest);
    time.comm[Axis::Dp as usize] += hidden.0;
    time.comm[Axis::ExpertDp as usize] += hidden.1;
    time.total =
        time.compute.iter().sum::<f64>() + time.recompute + time.comm.iter().sum::<f64>() + time.bubble + time.fillers + time.optimizer;
    let tokens = job.global_batch as f64 * job.mean_tokens;
    time.tokens_per_s_per_gpu = tokens / time.total / cluster.gpus as f64;
    time.mfu = mfu(&ModelFlops::new(network), job.reach(), time.tokens_per_s_per_gpu, cluster.device.peak());
    time
}

/// Seconds that a stage passes fillers through: as many tokens as make one for every rank.
fn fillers(network: &Network, cluster: &Cluster, job: &Job, layout: &Layout, stage: Option<&Stage>, turns: Turns) -> f64 {
    let (Some(stage), true) = (stage, turns.all > turns.real) else { return 0.0 };
    let one = Layout { micro_batch: 1, ..layout.clone() };
    let dims = Dims::of_length(network, job, &one, 1.0);
    let grad = f64::from(job.precision.grad_bytes);
    let setting = Setting { cluster, layout: &one, dims: &dims, length: 1.0, grad, account: job.account };
    let kinds: Vec<LayerTime> = network.kinds.kinds.iter().map(|kind| setting.layer(kind.linear, kind.experts)).collect();
    (turns.all - turns.real) as f64 * stage_time(&one, stage, &kinds, &setting.head()).total()
}

/// Seconds of a step of one rank of a stage on its own, the other ranks not there: no communication, no bubble. What
/// `bench step --as-rank` measures.
pub fn alone(network: &Network, cluster: &Cluster, job: &Job, layout: &Layout, stage: &Stage) -> f64 {
    let dims = Dims::of_length(network, job, layout, job.mean_tokens);
    // On one device there is nobody to talk to.
    let solo = Layout { tp: 1, cp: 1, dp: 1, pp: 1, vpp: 1, ep: 1, etp: 1, ..layout.clone() };
    let grad = f64::from(job.precision.grad_bytes);
    let setting = Setting { cluster, layout: &solo, dims: &dims, length: job.reach(), grad, account: job.account };
    let kinds: Vec<LayerTime> = network.kinds.kinds.iter().map(|kind| setting.layer(kind.linear, kind.experts)).collect();
    let micro = layout.turns(job.global_batch).real.max(1) as f64;
    let params = rank_params(network, layout, stage, job.account);
    micro * stage_time(layout, stage, &kinds, &setting.head()).total() + optimizer(cluster, job, layout, &params)
}

/// One micro-batch on one stage.
#[derive(Clone, Copy, Debug, Default)]
struct StageTime {
    work: Pass,
    recompute: f64,
    forward: f64,
}

impl StageTime {
    fn total(&self) -> f64 {
        self.work.total() + self.recompute
    }
}

fn stage_time(layout: &Layout, stage: &Stage, kinds: &[LayerTime], head: &LayerTime) -> StageTime {
    let mut time = StageTime::default();
    for (kind, count) in kinds.iter().zip(&stage.kinds) {
        let n = *count as f64;
        time.work.add(&kind.mixer, n);
        time.work.add(&kind.feed_forward, n);
        time.work.add(&kind.backward, n);
        time.forward += n * (kind.mixer.total() + kind.feed_forward.total());
        time.recompute += n * kind.again(layout.recompute);
    }
    if stage.last {
        time.work.add(&head.feed_forward, 1.0);
        time.work.add(&head.backward, 1.0);
        time.forward += head.feed_forward.total();
    }
    time
}

/// Seconds to reduce-scatter gradients and to all-gather weights, over (dp, expert_dp).
#[derive(Clone, Copy, Debug)]
struct Sync {
    reduce: (f64, f64),
    gather: (f64, f64),
}

impl Sync {
    fn dp(&self) -> f64 {
        self.reduce.0 + self.gather.0
    }

    fn expert_dp(&self) -> f64 {
        self.reduce.1 + self.gather.1
    }

    /// What is left after the last backward pass has hidden the one and the first forward pass the other.
    fn hide(&self, stage: &StageTime) -> (f64, f64) {
        let left = |(dense, experts): (f64, f64), cover: f64| {
            let exposed = (dense + experts - RATES.overlap * cover).max(0.0);
            let all = (dense + experts).max(f64::MIN_POSITIVE);
            (exposed * dense / all, exposed * experts / all)
        };
        let (reduce, gather) = (left(self.reduce, stage.total() - stage.forward), left(self.gather, stage.forward));
        (reduce.0 + gather.0, reduce.1 + gather.1)
    }
}

fn synchronise(cluster: &Cluster, job: &Job, layout: &Layout, params: &RankParams) -> Sync {
    let over = |axis: Axis, params: u64, bytes: u8| {
        if params == 0 { 0.0 } else { ring(cluster, layout.group(axis, cluster), params as f64 * f64::from(bytes)) }
    };
    let (grad, weight) = (job.precision.grad_bytes, job.precision.weight_bytes);
    Sync {
        reduce: (over(Axis::Dp, params.dense(), grad), over(Axis::ExpertDp, params.experts, grad)),
        gather: (over(Axis::Dp, params.dense(), weight), over(Axis::ExpertDp, params.experts, weight)),
    }
}

/// AdamW on the rank's shard: the gradient is read (once more for the norm), weight, master and moments are read and written.
fn optimizer(cluster: &Cluster, job: &Job, layout: &Layout, params: &RankParams) -> f64 {
    let p = job.precision;
    let state = f64::from(p.master_bytes(job.account)) + f64::from(p.moments_bytes());
    let grad = f64::from(p.grad_bytes);
    let shard = params.optimizer_shard(layout) as f64;
    match layout.offload {
        Offload::None => stream(&cluster.device, shard * (2.0 * grad + 2.0 * (f64::from(p.weight_bytes) + state))),
        // The norm, then the update, in which the device's memory waits for the host's.
        Offload::Optimizer => stream(&cluster.device, shard * grad) + shard * state / (cluster.device.host_gb_s * 1e9 * RATES.host),
    }
}

impl Serialize for StepTime {
    /// Seconds by part, with what they amount to.
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeMap;
        let by_op: serde_json::Map<_, _> = Op::ALL.iter().map(|op| (op.name().into(), self.compute[*op as usize].into())).collect();
        let by_axis: serde_json::Map<_, _> =
            crate::memory::AXES.iter().map(|axis| (axis_name(*axis).into(), self.comm[*axis as usize].into())).collect();
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("time_s", &self.total)?;
        map.serialize_entry("tokens_per_s_per_gpu", &self.tokens_per_s_per_gpu)?;
        map.serialize_entry("mfu", &self.mfu)?;
        map.serialize_entry("compute_s", &by_op)?;
        map.serialize_entry("recompute_s", &self.recompute)?;
        map.serialize_entry("exposed_communication_s", &by_axis)?;
        map.serialize_entry("bubble_s", &self.bubble)?;
        map.serialize_entry("fillers_s", &self.fillers)?;
        map.serialize_entry("optimizer_s", &self.optimizer)?;
        map.serialize_entry("slowest_stage", &self.slowest)?;
        map.end()
    }
}

/// The name of an axis as `--layout` has it.
pub fn axis_name(axis: Axis) -> &'static str {
    match axis {
        Axis::Tp => "tp",
        Axis::Cp => "cp",
        Axis::Dp => "dp",
        Axis::Pp => "pp",
        Axis::Etp => "etp",
        Axis::Ep => "ep",
        Axis::ExpertDp => "expert_dp",
    }
}
