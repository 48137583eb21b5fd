//! [`Buckets`]: which gradients and weights ranks exchange in one message, and which part of them a rank updates.
//!
//! The optimizer is divided over the ranks that hold the same parameters (ZeRO stage 1, Rajbhandari et al. 2020). A bucket is all of a
//! block of the network; its experts, which other ranks share, are a bucket of their own. It is cut into equal parts, whatever
//! parameters these cut through: each rank of the group receives the summed gradients of its part, updates its weights, and
//! gives them to the others.

use std::ops::Range;
use std::sync::Arc;
use temper_comm::{Comm, Mesh};
use temper_model::param::{Block, Param, ParamId, Shard};
use temper_model::{ALIGN, Model, Ranks, Result, Slots};

/// Some neighbouring elements of a parameter, which this rank updates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The parameter.
    pub param: ParamId,
    /// Its elements, within what this rank holds of the parameter, flattened.
    pub range: Range<usize>,
    /// The bucket.
    pub bucket: usize,
    /// Their moments, within those of the bucket.
    pub state: Range<usize>,
}

impl Segment {
    /// The moments of some of its elements, given as those of the parameter.
    pub fn state_of(&self, range: &Range<usize>) -> Range<usize> {
        let first = self.state.start + range.start - self.range.start;
        first..first + range.len()
    }
}

/// A bucket, as this rank sees it.
#[derive(Clone, Debug)]
pub(crate) struct Bucket {
    /// The block of the network it belongs to.
    pub block: Block,
    /// It holds experts.
    experts: bool,
    /// Its parameters, in the order of their places.
    pub params: Vec<ParamId>,
    /// The elements that this rank updates.
    pub part: Range<usize>,
    /// Elements whose gradients tensor ranks have parts of; possibly none.
    pub tensor_sum: Range<usize>,
    /// Elements of which neighbouring tensor ranks hold copies, with the number of copies.
    pub copied: Vec<(usize, Range<usize>)>,
    /// First and last stage have it both.
    pub at_ends: bool,
}

impl Bucket {
    /// The ranks that hold the same parameters.
    pub fn group<'m>(&self, mesh: &'m Mesh) -> &'m dyn Comm {
        group(mesh, self.experts)
    }
}

/// The ranks that hold the same experts, or the same of everything else.
fn group(mesh: &Mesh, experts: bool) -> &dyn Comm {
    if experts { &*mesh.expert_dp } else { &*mesh.dp }
}

/// The buckets of a rank.
pub struct Buckets {
    pub(crate) mesh: Mesh,
    pub(crate) list: Vec<Bucket>,
    slots: Arc<Slots>,
    segments: Vec<Segment>,
    /// Of the segments what this rank counts in norms.
    counted: Vec<(ParamId, Range<usize>)>,
    /// Whether a parameter decays.
    decays: Vec<bool>,
}

impl Buckets {
    /// The buckets for what a rank holds of a model: one per parameter when it is alone, in the order of declaration.
    pub fn new(model: &Model, ranks: &Ranks) -> Result<Buckets> {
        let (params, mesh) = (&model.params, ranks.mesh.clone());
        let (slots, list) = if mesh.axes.world() == 1 { apart(params) } else { packed(model, ranks)? };
        let segments = segments(&slots, &list);
        let counted = counted(params, &segments, &mesh);
        Ok(Buckets { mesh, list, slots: Arc::new(slots), segments, counted, decays: params.iter().map(|p| p.decay).collect() })
    }

    /// How weights and gradients lie in memory.
    pub fn slots(&self) -> Arc<Slots> {
        self.slots.clone()
    }

    /// What this rank updates, bucket by bucket: on a single rank every parameter whole. Between them, the ranks that hold the same
    /// parameters have every element once.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The elements that this rank counts in norms over the whole model: between them all ranks count every element once.
    pub(crate) fn counted(&self) -> &[(ParamId, Range<usize>)] {
        &self.counted
    }

    pub(crate) fn decays(&self, id: ParamId) -> bool {
        self.decays[id.0]
    }

    /// Shape of the moments of a bucket.
    pub(crate) fn state_shape(&self, bucket: usize) -> Vec<usize> {
        match self.list[bucket].group(&self.mesh).size() {
            1 => self.slots.shapes()[bucket].clone(),
            _ => vec![self.list[bucket].part.len()],
        }
    }
}

/// A bucket per parameter.
fn apart(params: &[Param]) -> (Slots, Vec<Bucket>) {
    let bucket = |(i, param): (usize, &Param)| Bucket {
        block: param.block(),
        experts: param.shard.is_expert(),
        params: vec![ParamId(i)],
        part: 0..param.numel(),
        tensor_sum: 0..0,
        copied: Vec::new(),
        at_ends: false,
    };
    (Slots::apart(params), params.iter().enumerate().map(bucket).collect())
}

/// A bucket or two per block of the network, in the order of the forward pass.
fn packed(model: &Model, ranks: &Ranks) -> Result<(Slots, Vec<Bucket>)> {
    let (params, mesh) = (&model.params, &ranks.mesh);
    let mut groups: Vec<((Block, bool), Vec<ParamId>)> = Vec::new();
    for (i, param) in params.iter().enumerate() {
        let key = (param.block(), param.shard.is_expert());
        match groups.iter_mut().rev().find(|(k, _)| *k == key) {
            Some((_, ids)) => ids.push(ParamId(i)),
            None => groups.push((key, vec![ParamId(i)])),
        }
    }
    // What tensor ranks sum lies together, in one message.
    let order = |id: &ParamId| match params[id.0].shard {
        Shard::Shared => 0,
        Shard::Replicated => 1,
        _ => 2,
    };
    groups.iter_mut().for_each(|(_, ids)| ids.sort_by_key(order));
    let wanted: Vec<_> = groups.iter().map(|((_, experts), ids)| (ids.clone(), ALIGN * group(mesh, *experts).size())).collect();
    let slots = Slots::packed(params, &wanted)?;
    let list = groups.into_iter().zip(slots.shapes()).map(|(((block, experts), ids), shape)| {
        let (comm, len) = (group(mesh, experts), shape.iter().product::<usize>());
        let each = len / comm.size();
        Bucket {
            block,
            experts,
            part: comm.rank() * each..(comm.rank() + 1) * each,
            tensor_sum: tensor_sum(params, &ids, &slots, ranks),
            copied: ids.iter().flat_map(|id| copied(&params[id.0], slots.slot(*id).range.start)).collect(),
            at_ends: block == Block::Embedding && model.arch.tied && mesh.ends.size() > 1,
            params: ids,
        }
    });
    let list = list.collect();
    Ok((slots, list))
}

/// The elements of a bucket whose gradients tensor ranks have parts of. Their parameters come first.
fn tensor_sum(params: &[Param], ids: &[ParamId], slots: &Slots, ranks: &Ranks) -> Range<usize> {
    let summed = |shard| shard == Shard::Shared || (shard == Shard::Replicated && ranks.sequence);
    let end = ids.iter().filter(|id| summed(params[id.0].shard)).map(|id| slots.slot(*id).range.end).max().unwrap_or(0);
    if ranks.mesh.tp.size() > 1 { 0..end } else { 0..0 }
}

/// Those elements of a parameter that begins at `start` of a bucket of which neighbours hold copies, with the number of copies.
fn copied(param: &Param, start: usize) -> Vec<(usize, Range<usize>)> {
    let mut runs: Vec<(usize, Range<usize>)> = Vec::new();
    for piece in param.pieces.iter().filter(|piece| piece.copies > 1) {
        let range = start + piece.range.start..start + piece.range.end;
        match runs.last_mut() {
            Some((copies, run)) if *copies == piece.copies && run.end == range.start => run.end = range.end,
            _ => runs.push((piece.copies, range)),
        }
    }
    runs
}

/// The parameters of every bucket as far as they lie in this rank's part of it.
fn segments(slots: &Slots, list: &[Bucket]) -> Vec<Segment> {
    let mut segments = Vec::new();
    for (bucket, Bucket { params, part, .. }) in list.iter().enumerate() {
        for &param in params {
            let whole = &slots.slot(param).range;
            let (start, end) = (whole.start.max(part.start), whole.end.min(part.end));
            if start < end {
                let (range, state) = (start - whole.start..end - whole.start, start - part.start..end - part.start);
                segments.push(Segment { param, range, bucket, state });
            }
        }
    }
    segments
}

/// Of the segments what counts: of several tensor ranks or stages that hold the same, one counts it.
fn counted(params: &[Param], segments: &[Segment], mesh: &Mesh) -> Vec<(ParamId, Range<usize>)> {
    let mut counted: Vec<(ParamId, Range<usize>)> = Vec::new();
    for Segment { param, range, .. } in segments.iter().filter(|s| params[s.param.0].counted) {
        for piece in &params[param.0].pieces {
            let first = mesh.copies(piece.copies).is_none_or(|copies| copies.rank() == 0);
            let (start, end) = (piece.range.start.max(range.start), piece.range.end.min(range.end));
            if !first || start >= end {
                continue;
            }
            match counted.last_mut() {
                Some((last, run)) if last == param && run.end == start => run.end = end,
                _ => counted.push((*param, start..end)),
            }
        }
    }
    counted
}
