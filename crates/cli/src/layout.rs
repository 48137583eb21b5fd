//! The layout of a run before its ranks begin: chosen by the planner (`parallel = "auto"`), or held to the planner's rules.
//!
//! Every process of a job comes to the same layout from the same configuration, ranks and device.

use crate::args::{Cli, Device as Choice};
use crate::exit::BadInput;
use temper_comm::Axes;
use temper_config::{Config, Device, Resolved, devices};
use temper_model::CHUNK_ROWS;
use temper_planner::memory::Overheads;
use temper_planner::{
    Candidate, Cluster, Job, Layout, LayoutRequest, Network, Offload, Precision, Problem, Recompute, Space, check, nearest, stages,
};
use temper_train::setup::find_source;

/// What `parallel.auto` chooses.
const AXES: [&str; 8] = ["tp", "pp", "vpp", "ep", "etp", "cp", "dp", "split"];
/// Layouts shown beside one that is refused.
pub const NEAREST: usize = 3;

/// What the planner knows of the device of a rank.
pub struct Place {
    /// Its figures.
    pub device: Device,
    /// What libraries take there.
    pub overheads: Overheads,
    /// Why its figures are unknown, if they are.
    unknown: Option<String>,
    /// Whether it is a GPU.
    pub gpu: bool,
    /// Ranks of a host.
    here: usize,
}

impl Place {
    /// Whether the device's speeds are known, so that times can be predicted.
    pub fn known(&self) -> bool {
        self.gpu && self.unknown.is_none()
    }
}

/// The devices that `here` ranks of this host take.
pub fn place(cli: &Cli, here: usize) -> anyhow::Result<Place> {
    let card = if matches!(cli.device, Choice::Cpu) { None } else { temper_cuda::card(0) };
    let Some((name, bytes)) = card else { return Ok(processors(here)) };
    let table = devices()?;
    let found = Device::of(&name);
    let known: Vec<&str> = table.iter().map(|device| device.name.as_str()).collect();
    let unknown = found.is_none().then(|| format!("{name} is not among the planner's devices ({})", known.join(", ")));
    let device = found.or(table.first().cloned()).ok_or_else(|| BadInput("the planner has no devices".into()))?;
    let device = Device { title: name, memory_mib: bytes >> 20, ..device };
    Ok(Place { device, overheads: Overheads::GPU, unknown, gpu: true, here })
}

/// This host's processors as a device. Their speeds only rank layouts: all are far below a GPU's, and exchange is dear beside them.
fn processors(here: usize) -> Place {
    let memory_mib = (temper_tensor::cpu::pool::physical_memory() / here.max(1)) as u64 >> 20;
    let device = Device {
        name: "cpu".into(),
        title: "processors of this host".into(),
        cards: Vec::new(),
        memory_mib: memory_mib.max(1),
        bf16_tflops: 0.1,
        fp8_tflops: None,
        memory_tb_s: 0.02,
        link_gb_s: 1.0,
        network_gb_s: 1.0,
        host_gb_s: 10.0,
        source: String::new(),
    };
    Place { device, overheads: Overheads::NONE, unknown: None, gpu: false, here }
}

/// Settles the layout of a job of `ranks`: one that the configuration leaves to the planner is written into it, with the reason.
///
/// # Errors
/// When the layout breaks a rule, with the nearest legal ones; when none is legal or fits.
pub fn settle(resolved: &mut Resolved, ranks: usize, place: &Place) -> anyhow::Result<()> {
    let auto = resolved.config.parallel.auto;
    if !auto && ranks == 1 && !LayoutRequest::of(resolved).names_axes() {
        return Ok(());
    }
    let network = Network::from_folder(&find_source(resolved)?.model_dir)?;
    let per_node = if place.here > 0 && ranks.is_multiple_of(place.here) { place.here } else { ranks };
    let cluster = Cluster { device: place.device.clone(), gpus: ranks, per_node };
    let question = Question { network, cluster, job: job(&resolved.config, place), overheads: place.overheads };
    if auto {
        choose(resolved, question, place)?
    } else {
        hold(resolved, &question, place)?
    }
    resolved.notices.extend(idle(&resolved.config, ranks));
    Ok(())
}

/// A word about replicas that have no micro-batch of a step.
fn idle(config: &Config, ranks: usize) -> Option<String> {
    let p = &config.parallel;
    let dp = p.dp.unwrap_or(ranks / (p.tp * p.cp * p.pp).max(1));
    let micro_batches = config.train.global_batch / config.train.micro_batch.max(1);
    (dp > micro_batches).then(|| {
        let remedy = "lower train.micro_batch, raise train.global_batch, or take a smaller dp";
        format!("{} of {dp} replicas have nothing to train: a step has {micro_batches} micro-batches; {remedy}", dp - micro_batches)
    })
}

struct Question {
    network: Network,
    cluster: Cluster,
    job: Job,
    overheads: Overheads,
}

/// The job of a configuration on the devices of a place.
pub fn job(config: &Config, place: &Place) -> Job {
    let mut job = Job::of(config);
    if !place.gpu {
        job.loss_chunk = if job.loss_chunk == 0 { CHUNK_ROWS } else { job.loss_chunk };
        if config.precision.dtype.is_none() {
            job.precision = Precision { weight_bytes: Precision::F32.weight_bytes, ..job.precision };
        }
    }
    job
}

/// Takes the fastest layout that fits.
fn choose(resolved: &mut Resolved, question: Question, place: &Place) -> anyhow::Result<()> {
    if let Some(unknown) = &place.unknown {
        return Err(BadInput(format!("parallel.auto: {unknown}, so nothing can be predicted for it. Give the axes in [parallel]")).into());
    }
    let wish = LayoutRequest::of(resolved);
    let Question { network, cluster, job, overheads } = question;
    let space = Space { network: &network, cluster: &cluster, job: &job, overheads };
    let found = temper_planner::search(&space, &wish);
    let Some(best) = found.fitting.first() else { return Err(nothing_fits(&space, &wish, found.smallest.as_ref()).into()) };
    write(resolved, &best.layout);
    resolved.notices.push(format!(
        "parallel.auto: {} is the fastest of {} layouts that fit: {:.1} of {:.1} GB on the heaviest rank{}",
        axes(&best.layout),
        found.fitting.len(),
        best.peak / 1e9,
        space.limit() / 1e9,
        found.fitting.get(1).map_or(String::new(), |next| format!(
            "; next comes {}, {:.1} % slower",
            axes(&next.layout),
            100.0 * (best.time.tokens_per_s_per_gpu / next.time.tokens_per_s_per_gpu - 1.0)
        )),
    ));
    Ok(())
}

/// Why `parallel.auto` finds nothing: the smallest layout is too large, or a rule forbids them all.
fn nothing_fits(space: &Space, wish: &LayoutRequest, smallest: Option<&Candidate>) -> BadInput {
    let Some(smallest) = smallest else {
        let asked = wish.complete(space.cluster.gpus, space.network.arch.moe.is_some());
        let problems = check(space.network, space.cluster, space.job, &asked);
        let free = LayoutRequest { micro_batch: wish.micro_batch, recompute: wish.recompute, offload: wish.offload, ..Default::default() };
        let legal = temper_planner::search(space, &free).fitting;
        let legal: Vec<String> = legal.into_iter().take(NEAREST).map(|c| axes(&c.layout)).collect();
        return refusal("parallel.auto: no layout agrees with what [parallel] and [train] give", &problems, &legal);
    };
    let lighter = LayoutRequest { recompute: None, offload: None, ..wish.clone() };
    let remedy = match temper_planner::search(space, &lighter).fitting.first() {
        Some(lean) => format!("With {} it fits: {}", memory_keys(&lean.layout), axes(&lean.layout)),
        None => "No recomputation or off-loading is enough: take more devices, a smaller train.micro_batch or data.seq_len".to_string(),
    };
    BadInput(format!(
        "parallel.auto: no layout of {} ranks fits: the smallest, {}, needs {:.1} of {:.1} GB. {remedy}",
        space.cluster.gpus,
        axes(&smallest.layout),
        smallest.peak / 1e9,
        space.limit() / 1e9
    ))
}

/// Holds a layout that the configuration gives to the rules, and says when it will not fit.
fn hold(resolved: &mut Resolved, question: &Question, place: &Place) -> anyhow::Result<()> {
    let Question { network, cluster, job, overheads } = question;
    let asked = LayoutRequest { etp: Some(resolved.config.parallel.etp), ..LayoutRequest::of(resolved) };
    let asked = asked.complete(cluster.gpus, network.arch.moe.is_some());
    // Replicas need not have equally many micro-batches, nor sequences equal parts: fillers complete them.
    let even = |n: usize, step: usize| n.checked_next_multiple_of(step.max(1)).unwrap_or(n);
    let job = Job {
        global_batch: even(job.global_batch, asked.dp.saturating_mul(asked.micro_batch)),
        seq: even(job.seq, asked.cp.saturating_mul(asked.tp).saturating_mul(2)),
        ..job.clone()
    };
    let problems = check(network, cluster, &job, &asked);
    if !problems.is_empty() {
        let legal: Vec<String> = nearest(network, cluster, &job, &asked, NEAREST).iter().map(axes).collect();
        return Err(refusal(&format!("[parallel]: {} cannot be run", axes(&asked)), &problems, &legal).into());
    }
    if let (true, None, Ok(stages)) = (place.gpu, &place.unknown, stages(network, &asked)) {
        let space = Space { network, cluster, job: &job, overheads: *overheads };
        let peak = space.peaks(&asked, &stages).0;
        if peak > space.limit() {
            resolved.notices.push(format!(
                "the plan needs {:.1} GB on the heaviest rank of this layout, and a device has {:.1}: see temper plan",
                peak / 1e9,
                space.limit() / 1e9
            ));
        }
    }
    Ok(())
}

/// A planned layout as the engine divides by it.
pub fn of_engine(l: &Layout) -> temper_train::layout::Layout {
    let axes = Axes { tp: l.tp, cp: l.cp, dp: l.dp, pp: l.pp, ep: l.ep, etp: l.etp };
    temper_train::layout::Layout { axes, sequence: l.sequence && l.tp > 1, vpp: l.vpp, split: l.split.clone() }
}

/// The rules that a layout breaks, and legal ones in the words in which it was asked for.
pub fn refusal(what: &str, problems: &[Problem], legal: &[String]) -> BadInput {
    let mut text = what.to_string();
    for problem in problems {
        text += &format!("\n  - {problem}");
    }
    if !legal.is_empty() {
        text += "\nthe nearest legal layouts:";
        for layout in legal {
            text += &format!("\n  {layout}");
        }
    }
    BadInput(text)
}

/// The keys of `[parallel]` that differ from their defaults, and `dp`.
fn axes(l: &Layout) -> String {
    let numbers = [("tp", l.tp), ("pp", l.pp), ("vpp", l.vpp), ("ep", l.ep), ("etp", l.etp), ("cp", l.cp)];
    let mut keys: Vec<String> = numbers.iter().filter(|(_, n)| *n != 1).map(|(key, n)| format!("{key} = {n}")).collect();
    keys.push(format!("dp = {}", l.dp));
    if !l.split.is_empty() {
        keys.push(format!("split = {:?}", l.split));
    }
    keys.join(", ")
}

/// The keys of `[memory]` of a layout.
fn memory_keys(l: &Layout) -> String {
    let mut keys = Vec::new();
    if l.recompute != Recompute::None {
        keys.push(format!("memory.recompute = \"{}\"", l.recompute));
    }
    if l.offload == Offload::Optimizer {
        keys.push("memory.offload_optimizer = true".to_string());
    }
    keys.join(" and ")
}

/// Writes a layout into the configuration.
fn write(resolved: &mut Resolved, l: &Layout) {
    let left = AXES.map(|axis| format!("parallel.{axis}")).into_iter().filter(|key| !resolved.gives(key)).collect::<Vec<_>>();
    let p = &mut resolved.config.parallel;
    (p.tp, p.pp, p.vpp, p.ep, p.etp, p.cp, p.dp) = (l.tp, l.pp, l.vpp, l.ep, l.etp, l.cp, Some(l.dp));
    p.split.clone_from(&l.split);
    for key in left {
        resolved.explain(&key, "parallel.auto: the fastest layout that fits, by the planner");
    }
}
