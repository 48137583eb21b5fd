//! From the numbers of a layout to one rank's groups and its part of the model.

use crate::{Error, Result};
use std::fmt;
use temper_comm::{Axes, Mesh, World};
use temper_config::{Arch, Parallel, expert_tensor};
use temper_model::{AxisRank, Portion, Ranks, Seat};
use temper_parallel::Stages;

/// A layout: sizes of the axes, and how layers lie on pipeline stages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Sizes of the axes.
    pub axes: Axes,
    /// Sequence parallelism.
    pub sequence: bool,
    /// Virtual stages of each rank.
    pub vpp: usize,
    /// Layers of each stage; empty where they divide evenly.
    pub split: Vec<usize>,
}

impl Layout {
    /// One rank.
    pub fn single() -> Layout {
        Layout { axes: Axes::default(), sequence: false, vpp: 1, split: Vec::new() }
    }

    /// The layout of a configuration for a job of `ranks`; `has_experts` decides what `etp` is unless given ([`expert_tensor`]).
    ///
    /// # Errors
    /// When the axes do not multiply to the ranks, or the expert axes do not divide the ranks of a stage.
    pub fn new(p: &Parallel, ranks: usize, has_experts: bool) -> Result<Layout> {
        let others = p.tp * p.cp * p.pp;
        let dp = p.dp.unwrap_or((ranks / others).max(1));
        let found = format!("tp {} x cp {} x dp {dp} x pp {}", p.tp, p.cp, p.pp);
        if others * dp != ranks {
            let remedy = match ranks.is_multiple_of(others) {
                true => format!("Set parallel.dp to {}, or start {} ranks", ranks / others, others * dp),
                false => format!("Start a multiple of {others} ranks, or change [parallel]"),
            };
            return Err(Error::Input(format!("[parallel]: {found} = {} ranks, but the job has {ranks}. {remedy}", others * dp)));
        }
        let stage = ranks / p.pp;
        let etp = expert_tensor(p.etp, p.tp, has_experts);
        if !stage.is_multiple_of(p.ep * etp) {
            let smaller = if etp > 1 { ", or etp = 1" } else { "" };
            let remedy = format!("Experts fold into these ranks and do not multiply them: take a smaller ep{smaller}");
            return Err(Error::Input(format!(
                "[parallel]: ep {} x etp {etp} does not divide the {stage} ranks of a stage ({found}). {remedy}",
                p.ep
            )));
        }
        let axes = Axes { tp: p.tp, cp: p.cp, dp, pp: p.pp, ep: p.ep, etp };
        Ok(Layout { axes, sequence: p.sequence, vpp: p.vpp, split: p.split.clone() })
    }

    /// Whether every rank holds the whole model: only sequences and micro-batches are divided.
    pub fn is_whole(&self) -> bool {
        let Axes { tp, pp, ep, etp, .. } = self.axes;
        tp * pp * ep * etp == 1
    }

    /// This rank's groups. Every rank of the job calls this.
    pub fn ranks(&self, world: &dyn World, arch: &Arch) -> Result<Ranks> {
        let copies = if self.axes.tp > arch.kv_heads { vec![self.axes.tp / arch.kv_heads] } else { Vec::new() };
        let mesh = Mesh::new(world, self.axes, &copies).map_err(temper_model::Error::Comm)?;
        Ok(Ranks { mesh, sequence: self.sequence && self.axes.tp > 1 })
    }

    /// What a rank holds of the model.
    ///
    /// # Errors
    /// When the layers do not lie on the stages, or experts are divided that the model does not have.
    pub fn portion(&self, arch: &Arch, ranks: &Ranks) -> Result<Portion> {
        let Axes { ep, etp, pp, .. } = self.axes;
        if arch.moe.is_none() && ep * etp > 1 {
            return Err(Error::Input(format!("parallel.ep {ep} and parallel.etp {etp}, but the model has no experts. Set both to 1")));
        }
        let stages = Stages::new(arch.layers, pp, self.vpp, &self.split).map_err(|r| Error::Input(format!("[parallel]: {r}")))?;
        let (stage, member) = (ranks.mesh.stage(), ranks.mesh.experts.rank());
        let chunks = 0..stages.chunks();
        Ok(Portion {
            seat: Seat { tp: ranks.tensor(), ep: AxisRank { rank: member / etp, of: ep }, etp: AxisRank { rank: member % etp, of: etp } },
            embed: chunks.clone().any(|chunk| stages.has_embedding(stage, chunk)),
            head: chunks.clone().any(|chunk| stages.has_head(stage, chunk)),
            chunks: chunks.map(|chunk| stages.layers_of(stage, chunk)).collect(),
        })
    }
}

/// The axes that divide something, as `tp 2, pp 2, dp 2, ep 2`; of one rank `one rank`.
impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Axes { tp, cp, dp, pp, ep, etp } = self.axes;
        let axes = [("tp", tp), ("cp", cp), ("pp", pp), ("vpp", self.vpp), ("dp", dp), ("ep", ep), ("etp", etp)];
        let mut parts: Vec<String> = axes.iter().filter(|(_, n)| *n > 1).map(|(axis, n)| format!("{axis} {n}")).collect();
        if !self.split.is_empty() {
            parts.push(format!("split {:?}", self.split));
        }
        if tp > 1 && !self.sequence {
            parts.push("without sequence parallelism".into());
        }
        f.write_str(if parts.is_empty() { "one rank" } else { "" })?;
        f.write_str(&parts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_shows_what_it_divides() {
        let layout = |tp, cp, dp, pp, ep| Layout { axes: Axes { tp, cp, dp, pp, ep, etp: 1 }, sequence: true, vpp: 1, split: vec![] };
        assert_eq!(Layout::single().to_string(), "one rank");
        assert_eq!(layout(2, 1, 2, 2, 2).to_string(), "tp 2, pp 2, dp 2, ep 2");
        let uneven = Layout { sequence: false, split: vec![2, 1], ..layout(2, 2, 1, 2, 1) };
        assert_eq!(uneven.to_string(), "tp 2, cp 2, pp 2, split [2, 1], without sequence parallelism");
        assert!(layout(1, 2, 4, 1, 1).is_whole() && !layout(1, 1, 4, 1, 2).is_whole() && !uneven.is_whole());
    }
}
