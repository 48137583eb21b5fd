//! Weights and moments from files into the tensors of a [`Trainer`], which are there already: no rank ever holds its part a second time.
//!
//! What lies in host memory as it is computed with is read into its place. For a device, and for weights whose exact values are masters,
//! elements pass through two buffers: one is filled from the files while the other is handed over.

use crate::Result;
use crate::step::Trainer;
use std::{ops::Range, time::Instant};
use temper_checkpoint::{Kind, Slot, Traffic};
use temper_model::param::{Param, ParamId};
use temper_tensor::{Purpose, SliceMut, Tensor, View, ViewMut};

/// Elements of a buffer, 64 MiB of F32.
const STAGE: usize = 16 << 20;
/// Parts begin at multiples of this in a buffer: on any device a good address.
const ALIGN: usize = 128;

/// Fills slots from files.
pub(crate) type Read<'r> = &'r (dyn Fn(Vec<Slot<'_>>) -> temper_checkpoint::Result<Traffic> + Sync);

/// What of the optimizer belongs to a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Weight,
    /// Number of the segment, and whether its second moments are meant.
    Moment(usize, bool),
}

/// What is to pass through buffers: elements of flattened parameters.
type Rest = Vec<(Target, ParamId, Range<usize>)>;

/// Elements that pass through a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    target: Target,
    param: ParamId,
    /// Of the flattened parameter.
    range: Range<usize>,
    /// First element of the buffer.
    at: usize,
}

impl Part {
    /// Its elements of the buffer.
    fn within(&self) -> Range<usize> {
        self.at..self.at + self.range.len()
    }

    fn kind(&self) -> Kind {
        match self.target {
            Target::Weight => Kind::Weight,
            Target::Moment(_, false) => Kind::ExpAvg,
            Target::Moment(_, true) => Kind::ExpAvgSq,
        }
    }
}

/// What passes through buffers, of how many elements each.
#[derive(Clone, Copy)]
struct How {
    far: fn(&ViewMut<'_>) -> bool,
    stage: usize,
}

impl Trainer {
    /// Fills the weights, and with `moments` those too, with what `read` reads. Returns what it took altogether.
    pub(crate) fn fill(&mut self, moments: bool, read: Read) -> Result<Traffic> {
        self.fill_so(moments, read, How { far: is_far, stage: STAGE })
    }

    fn fill_so(&mut self, moments: bool, read: Read, how: How) -> Result<Traffic> {
        let clock = Instant::now();
        let before = self.ops.account(Purpose::Weights);
        let (slots, rest) = self.in_place(moments, how.far)?;
        let mut traffic = if slots.is_empty() { Traffic::default() } else { read(slots)? };
        traffic += self.through_buffers(&staged(rest, how.stage), read)?;
        self.ops.account(before);
        Ok(Traffic { took: clock.elapsed(), ..traffic })
    }

    /// A slot for everything that is read into its place, and a list of everything else.
    fn in_place(&mut self, moments: bool, far: fn(&ViewMut) -> bool) -> Result<(Vec<Slot<'_>>, Rest)> {
        let (mut slots, mut rest) = (Vec::new(), Vec::new());
        let Trainer { model, weights, optimizer, .. } = self;
        let params: &[Param] = &model.params;
        let masters = optimizer.has_masters();
        let segments = if moments { optimizer.segments().to_vec() } else { Vec::new() };
        for (i, (param, into)) in params.iter().zip(weights.all_mut()?).enumerate() {
            match masters || far(&into) {
                true => rest.push((Target::Weight, ParamId(i), 0..param.numel())),
                false => slots.push(Slot { kind: Kind::Weight, param, range: 0..param.numel(), into }),
            }
        }
        let tensors = optimizer.all_moments_mut();
        for (i, (segment, both)) in segments.iter().zip(tensors).enumerate() {
            for (second, into) in [false, true].into_iter().zip(both) {
                let range = segment.range.clone();
                match far(&into) {
                    true => rest.push((Target::Moment(i, second), segment.param, range)),
                    false => {
                        let kind = if second { Kind::ExpAvgSq } else { Kind::ExpAvg };
                        slots.push(Slot { kind, param: &params[segment.param.0], range, into });
                    }
                }
            }
        }
        Ok((slots, rest))
    }

    fn through_buffers(&mut self, stages: &[Vec<Part>], read: Read) -> Result<Traffic> {
        let mut traffic = Traffic::default();
        let Some(first) = stages.first() else { return Ok(traffic) };
        let largest = stages.iter().filter_map(|parts| parts.last()).map(|p| p.at + p.range.len()).max().unwrap_or(0);
        let buffer = |len: usize| Tensor::from_vec(vec![0f32; len], &[len]);
        let (mut filled, mut filling) = (buffer(largest), buffer(if stages.len() > 1 { largest } else { 0 }));
        let params = self.model.params.clone();
        traffic += read(slots(first, &params, &mut filled))?;
        for (i, parts) in stages.iter().enumerate() {
            let (handed, came) = std::thread::scope(|scope| {
                let reading = stages.get(i + 1).map(|next| scope.spawn(|| read(slots(next, &params, &mut filling))));
                let handed = parts.iter().try_for_each(|part| self.hand_over(part, filled.view().slice_rows(part.within())));
                (handed, reading.map(|r| r.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))))
            });
            handed?;
            traffic += came.transpose()?.unwrap_or_default();
            std::mem::swap(&mut filled, &mut filling);
        }
        Ok(traffic)
    }

    /// Puts values that were read into their place.
    fn hand_over(&mut self, part: &Part, values: View) -> Result<()> {
        let Trainer { ops, weights, optimizer, .. } = self;
        let there = ops.from_host(values)?;
        match part.target {
            Target::Weight => optimizer.set_master(&**ops, weights, part.param, &part.range, there.view())?,
            Target::Moment(segment, second) => {
                ops.copy(optimizer.moment_mut(segment, second, &part.range), there.view())?;
            }
        }
        Ok(())
    }
}

fn is_far(into: &ViewMut) -> bool {
    matches!(into.data, SliceMut::Device(..))
}

/// Cuts what passes through buffers of `size` elements into parts, and packs these into stages of a buffer each.
fn staged(rest: Rest, size: usize) -> Vec<Vec<Part>> {
    let mut stages: Vec<Vec<Part>> = Vec::new();
    let mut at = size;
    for (target, param, mut range) in rest {
        while !range.is_empty() {
            if at >= size {
                stages.push(Vec::new());
                at = 0;
            }
            let end = range.end.min(range.start + (size - at));
            let part = Part { target, param, range: range.start..end, at };
            at = (at + part.range.len()).next_multiple_of(ALIGN);
            range.start = end;
            if let Some(stage) = stages.last_mut() {
                stage.push(part);
            }
        }
    }
    stages
}

/// The slots of a stage's parts within its buffer.
fn slots<'s>(parts: &[Part], params: &'s [Param], buffer: &'s mut Tensor) -> Vec<Slot<'s>> {
    let (mut rest, mut at) = (buffer.view_mut(), 0);
    let mut slots = Vec::with_capacity(parts.len());
    for part in parts {
        let (into, tail) = rest.split_rows(part.at - at).1.split_rows(part.range.len());
        (rest, at) = (tail, part.within().end);
        slots.push(Slot { kind: part.kind(), param: &params[part.param.0], range: part.range.clone(), into });
    }
    slots
}

#[cfg(test)]
mod tests;
