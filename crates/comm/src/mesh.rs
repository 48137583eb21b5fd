//! [`Mesh`]: one group per axis of a layout, in Megatron's rank order `tp-cp-ep-dp-pp` with parallel folding.
//!
//! The ranks of a pipeline stage are seen twice: as tp x cp x dp, and as etp x ep x expert_dp (MoE Parallel Folding, Liu et al.
//! 2025; `RankGenerator` of Megatron-Core). The fastest axis comes first, the stage last.

use crate::{Comm, Error, Pending, Result, Solo, World};
use std::{collections::HashMap, sync::Arc};
use temper_tensor::{View, ViewMut};

/// Sizes of the axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Axes {
    /// Tensor parallel.
    pub tp: usize,
    /// Context parallel.
    pub cp: usize,
    /// Data parallel.
    pub dp: usize,
    /// Pipeline stages.
    pub pp: usize,
    /// Expert parallel.
    pub ep: usize,
    /// Tensor parallel within an expert.
    pub etp: usize,
}

impl Default for Axes {
    fn default() -> Axes {
        Axes { tp: 1, cp: 1, dp: 1, pp: 1, ep: 1, etp: 1 }
    }
}

impl Axes {
    /// Ranks of a stage.
    pub fn stage_ranks(&self) -> usize {
        self.tp * self.cp * self.dp
    }

    /// Ranks in all.
    pub fn world(&self) -> usize {
        self.stage_ranks() * self.pp
    }

    /// Replicas of an expert.
    pub fn expert_dp(&self) -> usize {
        self.stage_ranks() / (self.etp * self.ep).max(1)
    }
}

/// The members of the group of `rank` along an axis of `size` ranks, `stride` apart.
fn along(rank: usize, size: usize, stride: usize) -> Vec<usize> {
    let first = rank - rank / stride % size * stride;
    (0..size).map(|i| first + i * stride).collect()
}

/// One direction of a pipeline at one stage. Each connection of two neighbours is a group of its own, so that none waits for another.
#[derive(Clone)]
pub struct Line {
    to: Arc<dyn Comm>,
    from: Arc<dyn Comm>,
}

impl Line {
    /// The connection to the next stage: this stage is its rank 0, the next its rank 1.
    pub fn next(&self) -> &Arc<dyn Comm> {
        &self.to
    }

    /// Hands `x` to the next stage in this direction.
    pub fn send<'a>(&self, x: View<'a>) -> Result<Pending<'a>> {
        self.to.send(x, 1)
    }

    /// Receives what the stage before in this direction sends.
    pub fn recv<'a>(&self, x: ViewMut<'a>) -> Result<Pending<'a>> {
        self.from.recv(x, 0)
    }

    /// The connections from each of `pipeline`'s ranks to the next. Every rank of the job makes all of them, alone in those of others.
    fn new(world: &dyn World, name: &str, pipeline: &[usize]) -> Result<Line> {
        let solo: Arc<dyn Comm> = Arc::new(Solo);
        let mut line = Line { to: solo.clone(), from: solo };
        if pipeline.len() == 1 {
            return Ok(line);
        }
        let rank = world.rank();
        for (stage, &source) in pipeline.iter().enumerate() {
            let target = pipeline[(stage + 1) % pipeline.len()];
            let name = format!("{name} from stage {stage}");
            match rank {
                _ if rank == source => line.to = world.group(&name, &[source, target])?,
                _ if rank == target => line.from = world.group(&name, &[source, target])?,
                _ => drop(world.group(&name, &[rank])?),
            }
        }
        Ok(line)
    }
}

/// The groups that one rank belongs to.
#[derive(Clone)]
pub struct Mesh {
    /// Sizes of the axes.
    pub axes: Axes,
    /// This rank of the job.
    pub rank: usize,
    /// Everyone.
    pub world: Arc<dyn Comm>,
    /// Tensor parallel: neighbours that share each layer.
    pub tp: Arc<dyn Comm>,
    /// Context parallel: share each sequence.
    pub cp: Arc<dyn Comm>,
    /// tp x cp: those that work on the same micro-batch.
    pub tokens: Arc<dyn Comm>,
    /// etp x ep: those that hold each expert once, in slices; etp is the faster.
    pub experts: Arc<dyn Comm>,
    /// cp x dp: those that hold the same part of the model but for experts.
    pub dp: Arc<dyn Comm>,
    /// Those that hold the same slices of the same experts.
    pub expert_dp: Arc<dyn Comm>,
    /// From stage to stage of this rank's pipeline, and from the last round to the first.
    pub forward: Line,
    /// The other way round.
    pub backward: Line,
    /// First and last stage; the stages between are alone.
    pub ends: Arc<dyn Comm>,
    /// Neighbouring tensor ranks that hold a copy of the same key and value heads, by number of copies: see [`Mesh::copies`].
    copies: HashMap<usize, Arc<dyn Comm>>,
}

impl Mesh {
    /// One rank.
    pub fn single() -> Mesh {
        let solo: Arc<dyn Comm> = Arc::new(Solo);
        let s = || solo.clone();
        Mesh {
            axes: Axes::default(),
            rank: 0,
            world: s(),
            tp: s(),
            cp: s(),
            tokens: s(),
            experts: s(),
            dp: s(),
            expert_dp: s(),
            forward: Line { to: s(), from: s() },
            backward: Line { to: s(), from: s() },
            ends: s(),
            copies: HashMap::new(),
        }
    }

    /// The groups of a layout. `copies` lists into how many neighbours of the tensor axis copies are to be summed.
    ///
    /// # Errors
    /// When the product of the axes is not the number of ranks, or the expert axes do not divide a stage.
    pub fn new(world: &dyn World, axes: Axes, copies: &[usize]) -> Result<Mesh> {
        let Axes { tp, cp, dp, pp, ep, etp } = axes;
        if axes.world() != world.size() {
            let (product, size) = (axes.world(), world.size());
            return Err(Error::Transport(format!("tp {tp} x cp {cp} x dp {dp} x pp {pp} = {product} ranks, but the job has {size}")));
        }
        if !axes.stage_ranks().is_multiple_of((etp * ep).max(1)) || ep * etp == 0 {
            return Err(Error::Transport(format!("etp {etp} x ep {ep} does not divide the {} ranks of a stage", axes.stage_ranks())));
        }
        let rank = world.rank();
        let stage = axes.stage_ranks();
        let group = |name: &str, members: Vec<usize>| -> Result<Arc<dyn Comm>> {
            // A group of one needs no transport; all groups of a call are of one size, so every rank decides alike.
            if members.len() == 1 && name != "ends" { Ok(Arc::new(Solo)) } else { world.group(name, &members) }
        };
        let pipeline = along(rank, pp, stage);
        let at_end = [pipeline[0], pipeline[pp - 1]].contains(&rank);
        let ends: Arc<dyn Comm> = match (pp, at_end) {
            (1, _) => Arc::new(Solo),
            (_, true) => group("ends", vec![pipeline[0], pipeline[pp - 1]])?,
            (_, false) => group("ends", vec![rank])?,
        };
        let mut by_count = HashMap::new();
        for &count in copies.iter().filter(|n| **n > 1) {
            by_count.insert(count, group(&format!("copies{count}"), along(rank, count, 1))?);
        }
        Ok(Mesh {
            axes,
            rank,
            world: group("world", (0..world.size()).collect())?,
            tp: group("tp", along(rank, tp, 1))?,
            cp: group("cp", along(rank, cp, tp))?,
            tokens: group("tokens", along(rank, tp * cp, 1))?,
            experts: group("experts", along(rank, etp * ep, 1))?,
            dp: group("dp", along(rank, cp * dp, tp))?,
            expert_dp: group("expert_dp", along(rank, axes.expert_dp(), etp * ep))?,
            forward: Line::new(world, "forward", &pipeline)?,
            backward: Line::new(world, "backward", &pipeline.iter().rev().copied().collect::<Vec<_>>())?,
            ends,
            copies: by_count,
        })
    }

    /// The neighbours on the tensor axis among whom `count` copies of the same rows lie.
    pub fn copies(&self, count: usize) -> Option<&dyn Comm> {
        self.copies.get(&count).map(|c| &**c)
    }

    /// This rank's pipeline stage.
    pub fn stage(&self) -> usize {
        self.rank / self.axes.stage_ranks()
    }

    /// This rank's place along the data axis alone (context apart).
    pub fn replica(&self) -> usize {
        self.rank / (self.axes.tp * self.axes.cp) % self.axes.dp
    }
}
