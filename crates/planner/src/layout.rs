//! [`Layout`]: how a run is spread over ranks, in Megatron's order `tp-cp-ep-dp-pp` with parallel folding.
//!
//! Attention sees the ranks of a stage as tp x cp x dp, experts see the same ranks as etp x ep x expert_dp (MoE Parallel
//! Folding, Liu et al. 2025; `RankGenerator` of Megatron-Core). The fastest axis comes first, the stage last.

use crate::check::smaller_experts;
use crate::cluster::Cluster;
use crate::error::{Error, Result};
use serde::Serialize;
use std::fmt;
use temper_config::{Config, Resolved, expert_tensor};
pub use temper_model::Recompute;
use temper_model::token_multiple;
use temper_parallel::schedule::Turns;

/// What lives in the host's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Offload {
    /// Nothing.
    None,
    /// Masters and moments, streamed through the device in the optimizer step.
    Optimizer,
}

/// A complete layout.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    /// Tensor parallel (with sequence parallel activations).
    pub tp: usize,
    /// Context parallel.
    pub cp: usize,
    /// Data parallel.
    pub dp: usize,
    /// Pipeline stages.
    pub pp: usize,
    /// Virtual stages of each rank.
    pub vpp: usize,
    /// Expert parallel.
    pub ep: usize,
    /// Tensor parallel within an expert.
    pub etp: usize,
    /// Tensor ranks also divide the tokens between the matrices (sequence parallelism).
    pub sequence: bool,
    /// Sequences of a forward pass.
    pub micro_batch: usize,
    /// What is recomputed.
    pub recompute: Recompute,
    /// What is off-loaded.
    pub offload: Offload,
    /// Layers of each stage; empty is even.
    pub split: Vec<usize>,
}

impl Layout {
    /// Ranks of a stage: tp x cp x dp.
    pub fn stage_ranks(&self) -> usize {
        self.tp.saturating_mul(self.cp).saturating_mul(self.dp)
    }

    /// Ranks in all.
    pub fn world(&self) -> usize {
        self.stage_ranks().saturating_mul(self.pp)
    }

    /// Replicas of an expert: the ranks its optimizer state is sharded over.
    pub fn expert_dp(&self) -> usize {
        self.stage_ranks() / self.ep.saturating_mul(self.etp).max(1)
    }

    /// Micro-batches of a step, all replicas together.
    pub fn micro_batches(&self, global_batch: usize) -> usize {
        global_batch.div_ceil(self.micro_batch.max(1))
    }

    /// What each replica runs of a step.
    pub fn turns(&self, global_batch: usize) -> Turns {
        Turns::new(self.micro_batches(global_batch), self.dp, self.pp, self.vpp)
    }

    /// `tokens` of a micro-batch with those that fill them up, so that every rank has as many.
    pub fn filled(&self, tokens: f64) -> f64 {
        match token_multiple(self.tp, self.cp) {
            0 | 1 => tokens,
            multiple => (tokens / multiple as f64).ceil() * multiple as f64,
        }
    }

    /// Size and stride of an axis among the ranks.
    fn axis(&self, axis: Axis) -> (usize, usize) {
        match axis {
            Axis::Tp => (self.tp, 1),
            Axis::Cp => (self.cp, self.tp),
            Axis::Dp => (self.dp.saturating_mul(self.cp), self.tp),
            Axis::Pp => (self.pp, self.stage_ranks()),
            Axis::Etp => (self.etp, 1),
            Axis::Ep => (self.ep, self.etp),
            Axis::ExpertDp => (self.expert_dp(), self.etp.saturating_mul(self.ep)),
        }
    }

    /// Where the members of a group of an axis sit.
    pub fn group(&self, axis: Axis, cluster: &Cluster) -> Group {
        self.placed(self.axis(axis), cluster)
    }

    /// Where the ranks sit that hold every expert once between them, in slices: etp x ep neighbours.
    pub fn experts_group(&self, cluster: &Cluster) -> Group {
        self.placed((self.ep.saturating_mul(self.etp), 1), cluster)
    }

    fn placed(&self, (size, stride): (usize, usize), cluster: &Cluster) -> Group {
        let node = cluster.per_node.max(1);
        let span = size.saturating_mul(stride);
        let (per_node, nodes) = if size <= 1 {
            (1, 1)
        } else if span > MOST_RANKS {
            (1, size) // no legal layout has so many ranks
        } else if node.is_multiple_of(span) {
            (size, 1)
        } else if stride.is_multiple_of(node) {
            (1, size)
        } else if node.is_multiple_of(stride) && span.is_multiple_of(node) {
            (node / stride, span / node)
        } else {
            worst_node(size, stride, self.world(), node)
        };
        Group { size, per_node, nodes }
    }

    /// The coordinates of a rank: (tp, cp, dp, pp).
    pub fn coordinates(&self, rank: usize) -> (usize, usize, usize, usize) {
        let (tp, cp, dp) = (self.tp.max(1), self.cp.max(1), self.dp.max(1));
        (rank % tp, rank / tp % cp, rank / (tp * cp) % dp, rank / (tp * cp * dp))
    }

    /// The coordinates of a rank among the experts: (etp, ep, expert_dp, pp).
    pub fn expert_coordinates(&self, rank: usize) -> (usize, usize, usize, usize) {
        let (etp, ep, edp) = (self.etp.max(1), self.ep.max(1), self.expert_dp().max(1));
        (rank % etp, rank / etp % ep, rank / (etp * ep) % edp, rank / (etp * ep * edp))
    }
}

/// Ranks beyond which nothing is counted one by one.
const MOST_RANKS: usize = 1 << 20;

/// The fewest members on one node, and the nodes touched, over all groups of an axis that do not align with nodes.
fn worst_node(size: usize, stride: usize, world: usize, node: usize) -> (usize, usize) {
    let (mut fewest, mut most) = (size, 1);
    for block in (0..world.min(MOST_RANKS)).step_by(size.saturating_mul(stride).max(1)) {
        let mut counts = std::collections::BTreeMap::new();
        for i in 0..size {
            *counts.entry((block + i * stride) / node).or_insert(0) += 1;
        }
        fewest = fewest.min(counts.values().copied().min().unwrap_or(1));
        most = most.max(counts.len());
    }
    (fewest, most)
}

/// An axis of the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Axis {
    /// Tensor.
    Tp,
    /// Context.
    Cp,
    /// Data and context together: gradients and optimizer shards of everything but experts.
    Dp,
    /// Pipeline.
    Pp,
    /// Tensor within an expert.
    Etp,
    /// Expert.
    Ep,
    /// Replicas of an expert.
    ExpertDp,
}

/// Where the members of a group sit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Members.
    pub size: usize,
    /// Members on one node (the fewest).
    pub per_node: usize,
    /// Nodes touched.
    pub nodes: usize,
}

impl Layout {
    /// As `--layout` takes it, for a model with experts or without.
    pub fn told(&self, has_experts: bool) -> String {
        let text = self.to_string();
        // There is nothing that etp would divide.
        if has_experts || self.etp != 1 { text } else { text.replacen(",etp=1", "", 1) }
    }
}

impl fmt::Display for Layout {
    /// As `--layout` takes it for any model.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tp={},pp={}", self.tp, self.pp)?;
        for (name, value) in [("vpp", self.vpp), ("ep", self.ep), ("etp", self.etp), ("cp", self.cp)] {
            // Unless given, etp is tp.
            if value != 1 || (name == "etp" && (self.ep > 1 || self.tp > 1)) {
                write!(f, ",{name}={value}")?;
            }
        }
        write!(f, ",dp={},mb={}", self.dp, self.micro_batch)?;
        if self.tp > 1 && !self.sequence {
            f.write_str(",sequence=false")?;
        }
        if self.recompute != Recompute::None {
            write!(f, ",recompute={}", self.recompute)?;
        }
        if self.offload == Offload::Optimizer {
            f.write_str(",offload=optimizer")?;
        }
        if !self.split.is_empty() {
            let parts: Vec<String> = self.split.iter().map(usize::to_string).collect();
            write!(f, ",split={}", parts.join("/"))?;
        }
        Ok(())
    }
}

/// A layout as the user wrote it; what is absent is derived or searched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayoutRequest {
    /// tp.
    pub tp: Option<usize>,
    /// cp.
    pub cp: Option<usize>,
    /// dp; absent: what the other axes leave.
    pub dp: Option<usize>,
    /// pp.
    pub pp: Option<usize>,
    /// vpp.
    pub vpp: Option<usize>,
    /// ep.
    pub ep: Option<usize>,
    /// etp; absent: tp where the model has experts, as in Megatron ([`expert_tensor`]).
    pub etp: Option<usize>,
    /// Sequence parallelism; absent: on.
    pub sequence: Option<bool>,
    /// Micro-batch.
    pub micro_batch: Option<usize>,
    /// Recomputation; absent: the least that fits.
    pub recompute: Option<Recompute>,
    /// Off-loading; absent: none unless nothing else fits.
    pub offload: Option<Offload>,
    /// Layers of each stage.
    pub split: Vec<usize>,
    /// Absent axes are searched, those given held.
    pub auto: bool,
}

impl LayoutRequest {
    /// Parses `tp=8,pp=2,ep=4,split=47/47`; `origin` is what errors call it. The word `auto` alone has the axes searched that are not given.
    ///
    /// # Errors
    /// On an unknown key, a value that is not a number of the right kind, or a key given twice.
    pub fn parse(text: &str, origin: &str) -> Result<LayoutRequest> {
        const KEYS: &str = "Keys are tp, pp, vpp, ep, etp, cp, dp, sequence, mb, recompute, offload, split.";
        let mut request = LayoutRequest::default();
        let mut seen: Vec<&str> = Vec::new();
        for part in text.split(',').map(str::trim).filter(|_| !text.trim().is_empty()) {
            if part.is_empty() {
                return Err(Error::key(origin, text, "nothing between two commas, or at an end", "Write tp=2,pp=2."));
            }
            if part == "auto" {
                request.auto = true;
                continue;
            }
            let Some((key, value)) = part.split_once('=').map(|(k, v)| (k.trim(), v.trim())) else {
                return Err(Error::key(origin, part, "no value", format!("Write {part}=N. {KEYS}")));
            };
            if seen.contains(&key) {
                return Err(Error::key(origin, key, "given twice", "Give it once."));
            }
            seen.push(key);
            let count = |text: &str| match text.parse::<usize>() {
                Ok(n) if n > 0 => Ok(n),
                _ => Err(Error::key(origin, key, format!("found {text:?}"), "Expected a whole number of at least 1.")),
            };
            match key {
                "tp" => request.tp = Some(count(value)?),
                "cp" => request.cp = Some(count(value)?),
                "dp" => request.dp = Some(count(value)?),
                "pp" => request.pp = Some(count(value)?),
                "vpp" => request.vpp = Some(count(value)?),
                "ep" => request.ep = Some(count(value)?),
                "etp" => request.etp = Some(count(value)?),
                "mb" | "micro_batch" => request.micro_batch = Some(count(value)?),
                "split" => request.split = split(value, origin)?,
                "sequence" => {
                    request.sequence = Some(match value {
                        "true" => true,
                        "false" => false,
                        _ => return Err(Error::key(origin, key, format!("found {value:?}"), "Expected true or false.")),
                    });
                }
                "recompute" => {
                    let expected = "Expected none, selective or full, or parts joined by +: norm, act, moe, mlp, qkv.";
                    let unknown = || Error::key(origin, key, format!("found {value:?}"), expected);
                    request.recompute = Some(Recompute::parse(value).ok_or_else(unknown)?);
                }
                "offload" => {
                    request.offload = Some(match value {
                        "none" => Offload::None,
                        "optimizer" => Offload::Optimizer,
                        _ => return Err(Error::key(origin, key, format!("found {value:?}"), "Expected none or optimizer.")),
                    });
                }
                _ => return Err(Error::key(origin, key, "unknown", KEYS)),
            }
        }
        Ok(request)
    }

    /// What a configuration says: micro-batch, recomputation, off-loading, and the axes: with `parallel.auto` those that it gives, else
    /// all of them if it gives any.
    pub fn of(resolved: &Resolved) -> LayoutRequest {
        let Config { parallel: p, memory, train, .. } = &resolved.config;
        let gives = |axis: &str| resolved.gives(&format!("parallel.{axis}"));
        let all = !p.auto && ["tp", "pp", "vpp", "ep", "etp", "cp", "dp", "split"].into_iter().any(gives);
        let axis = |name: &str, size: usize| (all || gives(name)).then_some(size);
        LayoutRequest {
            tp: axis("tp", p.tp),
            cp: axis("cp", p.cp),
            dp: p.dp,
            pp: axis("pp", p.pp),
            vpp: axis("vpp", p.vpp),
            ep: axis("ep", p.ep),
            etp: p.etp,
            sequence: Some(p.sequence),
            micro_batch: Some(train.micro_batch),
            recompute: Some(Recompute::of(memory)),
            offload: Some(if memory.offload_optimizer { Offload::Optimizer } else { Offload::None }),
            split: p.split.clone(),
            auto: p.auto,
        }
    }

    /// This request, and what `other` says where this one is silent; axes only together, as they must fit each other.
    pub fn or(self, other: LayoutRequest) -> LayoutRequest {
        let auto = self.auto || other.auto;
        let axes = if self.names_axes() { self.clone() } else { LayoutRequest { auto, ..other.clone() } };
        LayoutRequest {
            sequence: self.sequence.or(other.sequence),
            micro_batch: self.micro_batch.or(other.micro_batch),
            recompute: self.recompute.or(other.recompute),
            offload: self.offload.or(other.offload),
            ..axes
        }
    }

    /// Whether the user fixed anything that decides where weights lie.
    pub fn names_axes(&self) -> bool {
        !self.given().is_empty()
    }

    /// The axes given, as `--layout` takes them.
    pub fn given(&self) -> Vec<String> {
        let axes =
            [("tp", self.tp), ("pp", self.pp), ("vpp", self.vpp), ("ep", self.ep), ("etp", self.etp), ("cp", self.cp), ("dp", self.dp)];
        let split: Vec<String> = self.split.iter().map(usize::to_string).collect();
        let split = (!split.is_empty()).then(|| format!("split={}", split.join("/")));
        axes.into_iter().filter_map(|(name, size)| size.map(|size| format!("{name}={size}"))).chain(split).collect()
    }

    /// Whether the layout is to be searched: nothing is fixed, or not everything.
    pub fn is_searched(&self) -> bool {
        self.auto || !self.names_axes()
    }

    /// The ranks that the axes given multiply to; none where that is more than can be counted.
    pub fn ranks(&self) -> Option<usize> {
        [self.tp, self.cp, self.pp, self.dp].iter().try_fold(1usize, |all, n| all.checked_mul(n.unwrap_or(1)))
    }

    /// The whole layout: absent axes are 1, `dp` what is left of the devices, `etp` as [`expert_tensor`] has it.
    pub fn complete(&self, gpus: usize, has_experts: bool) -> Layout {
        let one = |value: Option<usize>| value.unwrap_or(1);
        let (tp, cp, pp, ep) = (one(self.tp), one(self.cp), one(self.pp), one(self.ep));
        let rest = gpus / tp.saturating_mul(cp).saturating_mul(pp).max(1);
        Layout {
            tp,
            cp,
            dp: self.dp.unwrap_or(rest.max(1)),
            pp,
            vpp: one(self.vpp),
            ep,
            etp: expert_tensor(self.etp, tp, has_experts),
            sequence: self.sequence.unwrap_or(true),
            micro_batch: one(self.micro_batch),
            recompute: self.recompute.unwrap_or(Recompute::None),
            offload: self.offload.unwrap_or(Offload::None),
            split: self.split.clone(),
        }
    }

    /// The layout by itself: absent axes are 1, `dp` the smallest into which the experts fold.
    ///
    /// # Errors
    /// When some axes are to be searched, or there are more ranks than any job has.
    pub fn alone(&self, has_experts: bool, origin: &str) -> Result<Layout> {
        if self.auto {
            return Err(nothing_searched(origin));
        }
        let one = self.complete(1, has_experts);
        let (experts, ranks) = (one.ep.saturating_mul(one.etp), one.tp.saturating_mul(one.cp));
        let layout = Layout { dp: self.dp.unwrap_or(experts / common(experts, ranks)), ..one };
        if layout.world() > MOST_RANKS {
            return Err(Error::key(origin, "tp x cp x dp x pp", "more ranks than can be counted", "Take smaller axes."));
        }
        Ok(layout)
    }

    /// The layout over `ranks` ranks; absent: as many as the axes multiply to.
    ///
    /// # Errors
    /// When the axes do not make up the ranks, those of experts do not fold into the ranks of a stage, or some are to be searched.
    pub fn over(&self, ranks: Option<usize>, has_experts: bool, origin: &str) -> Result<Layout> {
        if self.auto {
            return Err(nothing_searched(origin));
        }
        let Some(ranks) = ranks.or(self.ranks()) else {
            return Err(Error::key(origin, "tp x cp x dp x pp", "more ranks than can be counted", "Take smaller axes."));
        };
        let layout = self.complete(ranks, has_experts);
        let Layout { tp, cp, dp, pp, ep, etp, .. } = layout;
        let axes = format!("tp {tp} x cp {cp} x dp {dp} x pp {pp}");
        if [tp, cp, dp, pp].iter().try_fold(1usize, |all, n| all.checked_mul(*n)) != Some(ranks) {
            return Err(Error::key(origin, &axes, format!("does not make up {ranks} ranks"), "Their product is the number of ranks."));
        }
        if !ep.checked_mul(etp).is_some_and(|n| layout.stage_ranks().is_multiple_of(n)) {
            let found = format!("ep {ep} x etp {etp} does not divide the {} ranks of a stage", layout.stage_ranks());
            return Err(Error::key(origin, &axes, found, smaller_experts(ep, etp)));
        }
        Ok(layout)
    }
}

fn nothing_searched(origin: &str) -> Error {
    Error::key(origin, "auto", "nothing is searched here", "Give the axes; temper plan --layout auto finds them.")
}

/// Greatest common divisor.
fn common(a: usize, b: usize) -> usize {
    if b == 0 { a.max(1) } else { common(b, a % b) }
}

/// Layers of each stage, joined by `/`.
fn split(value: &str, origin: &str) -> Result<Vec<usize>> {
    let all: Option<Vec<usize>> = value.split('/').map(|n| n.parse().ok().filter(|n| *n > 0)).collect();
    all.ok_or_else(|| {
        // Numbers that are good, joined in another way, are what is meant.
        let numbers: Vec<&str> = value.split(|c: char| !c.is_ascii_digit()).filter(|n| !n.is_empty()).collect();
        let good = numbers.len() > 1 && numbers.iter().all(|n| n.parse::<usize>().is_ok_and(|n| n > 0));
        let example = if good { numbers.join("/") } else { "2/1".to_string() };
        let remedy = format!("Expected the layers of each stage, whole numbers of at least 1 joined by /: split={example}.");
        Error::key(origin, "split", format!("found {value:?}"), remedy)
    })
}
