//! The layout of a run before its ranks begin: chosen by the planner (`parallel = "auto"`), or held to the planner's rules.
//!
//! Every process of a job comes to the same layout from the same configuration, ranks and device.

use crate::args::{Cli, Device as Choice};
use crate::exit::BadInput;
use temper_comm::Axes;
use temper_config::{Config, Device, Resolved, devices};
use temper_model::CHUNK_ROWS;
use temper_planner::memory::Overheads;
use temper_planner::units::bytes;
use temper_planner::{
    Candidate, Cluster, Job, Layout, LayoutRequest, Network, Offload, Precision, Problem, Recompute, Space, check, nearest, stages, waste,
};
use temper_train::layout::Layout as Mesh;
use temper_train::setup::find_source;

/// What `parallel.auto` chooses.
const AXES: [&str; 8] = ["tp", "pp", "vpp", "ep", "etp", "cp", "dp", "split"];
/// Layouts shown beside one that is refused.
const NEAREST: usize = 3;

/// What the planner knows of the device of a rank.
pub struct Place {
    /// Its figures.
    pub device: Device,
    /// What libraries take there.
    pub overheads: Overheads,
    /// Why its figures are unknown, if they are.
    pub unknown: Option<String>,
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

/// Settles the layout of a job of `ranks`: what the configuration leaves open of it is written into it, with the reason.
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
    let overheads = Overheads { reserve: resolved.config.parallel.reserve, ..place.overheads };
    let question = Question { network, cluster, job: job(&resolved.config, place), overheads };
    let layout = if auto { choose(resolved, &question, place)? } else { hold(resolved, &question, place)? };
    resolved.notices.extend(waste(&layout, &question.job).iter().map(ToString::to_string));
    Ok(())
}

struct Question {
    network: Network,
    cluster: Cluster,
    job: Job,
    overheads: Overheads,
}

impl Question {
    fn space(&self) -> Space<'_> {
        Space { network: &self.network, cluster: &self.cluster, job: &self.job, overheads: self.overheads }
    }

    fn has_experts(&self) -> bool {
        self.network.arch.moe.is_some()
    }
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
fn choose(resolved: &mut Resolved, question: &Question, place: &Place) -> anyhow::Result<Layout> {
    if let Some(unknown) = &place.unknown {
        return Err(BadInput(format!("parallel.auto: {unknown}, so nothing can be predicted for it. Give the axes in [parallel]")).into());
    }
    let (wish, space, experts) = (LayoutRequest::of(resolved), question.space(), question.has_experts());
    let found = temper_planner::search(&space, &wish);
    let Some(best) = found.fitting.first() else { return Err(nothing_fits(&space, &wish, found.smallest.as_ref()).into()) };
    let held = wish.given();
    let held = if held.is_empty() { String::new() } else { format!(" with {} held", held.join(", ")) };
    let next = found.fitting.get(1).map_or(String::new(), |next| {
        let slower = 100.0 * (best.time.tokens_per_s_per_gpu / next.time.tokens_per_s_per_gpu - 1.0);
        format!("; next comes {}, {slower:.1} % slower", axes(&next.layout, experts))
    });
    write(resolved, &best.layout);
    resolved.notices.push(format!(
        "parallel.auto: {} is the fastest of {} layouts that fit{held}: {} of {} on the heaviest rank{next}",
        axes(&best.layout, experts),
        found.fitting.len(),
        bytes(best.peak),
        bytes(space.cluster.device.memory_bytes()),
    ));
    Ok(best.layout.clone())
}

/// Why `parallel.auto` finds nothing: the smallest layout is too large, or a rule forbids them all.
fn nothing_fits(space: &Space, wish: &LayoutRequest, smallest: Option<&Candidate>) -> BadInput {
    let experts = space.network.arch.moe.is_some();
    let Some(smallest) = smallest else {
        let asked = wish.complete(space.cluster.gpus, experts);
        let problems = check(space.network, space.cluster, space.job, &asked);
        let free = LayoutRequest { micro_batch: wish.micro_batch, recompute: wish.recompute, offload: wish.offload, ..Default::default() };
        let legal = temper_planner::search(space, &free).fitting;
        let legal: Vec<String> = legal.into_iter().take(NEAREST).map(|c| axes(&c.layout, experts)).collect();
        return refusal("parallel.auto: no layout agrees with what [parallel] and [train] give", &problems, &legal);
    };
    let lighter = LayoutRequest { recompute: None, offload: None, ..wish.clone() };
    let remedy = match temper_planner::search(space, &lighter).fitting.first() {
        Some(lean) => format!("With {} it fits: {}", memory_keys(&lean.layout), axes(&lean.layout, experts)),
        None if smallest.skewed <= space.cluster.device.memory_bytes() => {
            "It fits without the reserve: lower parallel.reserve, or take more devices, a smaller train.micro_batch or data.seq_len"
                .to_string()
        }
        None => "No recomputation or off-loading is enough: take more devices, a smaller train.micro_batch or data.seq_len".to_string(),
    };
    BadInput(format!(
        "parallel.auto: no layout of {} ranks fits: the smallest, {}, needs {} of {}, of which {} stay free (parallel.reserve). {remedy}",
        space.cluster.gpus,
        axes(&smallest.layout, experts),
        bytes(smallest.skewed),
        bytes(space.cluster.device.memory_bytes()),
        bytes(space.reserve())
    ))
}

/// Holds a layout that the configuration gives to the rules, and says when it will not fit.
fn hold(resolved: &mut Resolved, question: &Question, place: &Place) -> anyhow::Result<Layout> {
    let Question { network, cluster, job, .. } = question;
    let experts = question.has_experts();
    let layout = LayoutRequest::of(resolved).complete(cluster.gpus, experts);
    legal(network, cluster, job, &layout, "[parallel]", &|l| axes(l, experts))?;
    if resolved.config.parallel.etp.is_none() && layout.etp > 1 {
        resolved.config.parallel.etp = Some(layout.etp);
        resolved.explain("parallel.etp", "that of tp, as in Megatron");
    }
    if let (true, None, Ok(stages)) = (place.gpu, &place.unknown, stages(network, &layout)) {
        let space = question.space();
        let (peak, memory) = (space.peaks(&layout, &stages).0, space.cluster.device.memory_bytes());
        if peak > space.limit() {
            let what = if peak > memory {
                "does not fit".to_string()
            } else {
                format!("leaves less than the reserve of {}", bytes(space.reserve()))
            };
            let needs = format!("the plan needs {} on the heaviest rank of this layout, and a device has {}", bytes(peak), bytes(memory));
            resolved.notices.push(format!("{needs}: it {what}; see temper plan"));
        }
    }
    Ok(layout)
}

/// Refuses a layout that breaks a rule; `origin` is where it was given, `told` puts layouts into the words of that place.
///
/// # Errors
/// Names every rule that it breaks, and the nearest layouts that break none.
fn legal(
    network: &Network,
    cluster: &Cluster,
    job: &Job,
    layout: &Layout,
    origin: &str,
    told: &dyn Fn(&Layout) -> String,
) -> Result<(), BadInput> {
    let problems = check(network, cluster, job, layout);
    if problems.is_empty() {
        return Ok(());
    }
    let nearest: Vec<String> = nearest(network, cluster, job, layout, NEAREST).iter().map(told).collect();
    Err(refusal(&format!("{origin}: {} cannot be run", told(layout)), &problems, &nearest))
}

/// Refuses a layout that the model cannot be divided by: the rules of [`legal`], but for those of a batch.
///
/// # Errors
/// As [`legal`].
pub fn divides(network: &Network, layout: &Layout, origin: &str) -> anyhow::Result<()> {
    let device = devices()?.into_iter().next().ok_or_else(|| anyhow::anyhow!("there is no device in the table"))?;
    let cluster = Cluster { device, gpus: layout.world(), per_node: layout.world() };
    // A batch that fits any layout.
    let job = Job::new(1, layout.dp.saturating_mul(layout.pp).saturating_mul(layout.micro_batch));
    Ok(legal(network, &cluster, &job, layout, origin, &|l| words(l, network))?)
}

/// A layout as `--layout` takes it, but for the micro-batch.
pub fn words(layout: &Layout, network: &Network) -> String {
    layout.told(network.arch.moe.is_some()).replace(&format!(",mb={}", layout.micro_batch), "")
}

/// A planned layout as the engine divides by it.
pub fn of_engine(l: &Layout) -> Mesh {
    let axes = Axes { tp: l.tp, cp: l.cp, dp: l.dp, pp: l.pp, ep: l.ep, etp: l.etp };
    Mesh { axes, sequence: l.sequence && l.tp > 1, vpp: l.vpp, split: l.split.clone() }
}

/// A layout of the engine with the settings of a configuration, as it is planned.
pub fn as_planned(mesh: &Mesh, config: &Config, place: &Place) -> Layout {
    let Axes { tp, cp, dp, pp, ep, etp } = mesh.axes;
    Layout {
        tp,
        cp,
        dp,
        pp,
        vpp: mesh.vpp,
        ep,
        etp,
        sequence: mesh.sequence,
        micro_batch: config.train.micro_batch,
        recompute: Recompute::of(&config.memory),
        // A processor's tensors are in the host's memory anyway.
        offload: if config.memory.offload_optimizer && place.gpu { Offload::Optimizer } else { Offload::None },
        split: mesh.split.clone(),
    }
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

/// The keys of `[parallel]` that differ from their defaults, and `dp`; with experts also `etp`, as far as it means anything.
fn axes(l: &Layout, has_experts: bool) -> String {
    let etp = if has_experts && (l.tp > 1 || l.etp > 1) { 0 } else { 1 }; // the number that goes without saying
    let numbers = [("tp", l.tp, 1), ("pp", l.pp, 1), ("vpp", l.vpp, 1), ("ep", l.ep, 1), ("etp", l.etp, etp), ("cp", l.cp, 1)];
    let mut keys: Vec<String> = numbers.iter().filter(|(_, n, usual)| n != usual).map(|(key, n, _)| format!("{key} = {n}")).collect();
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
    (p.tp, p.pp, p.vpp, p.ep, p.etp, p.cp, p.dp) = (l.tp, l.pp, l.vpp, l.ep, Some(l.etp), l.cp, Some(l.dp));
    p.split.clone_from(&l.split);
    for key in left {
        resolved.explain(&key, "parallel.auto: the fastest layout that fits, by the planner");
    }
}
