//! Parts of logical tensors: what a rank hands over, and what is recorded of it.

use super::super::Kind;
use crate::runs;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use temper_model::param::{Param, Part, Piece, Run};
use temper_tensor::{DType, View};

/// A part of a parameter that this rank saves. Over all ranks, the entries of a save must hold every element of every tensor of the
/// model exactly once: see [`own_ranges`].
#[derive(Clone)]
pub struct Entry<'a> {
    /// What of the parameter.
    pub kind: Kind,
    /// The parameter as this rank has it.
    pub param: &'a Param,
    /// Elements of the flattened parameter.
    pub range: Range<usize>,
    /// As many elements, in host memory.
    pub data: View<'a>,
}

/// Of the elements `range` that this rank keeps of a parameter (all of it, or its share on the data axis), those that it saves: what
/// several tensor ranks (or stages) hold alike is saved by the first of them. `tp_rank` is this rank's number on the tensor axis.
pub fn own_ranges(param: &Param, range: &Range<usize>, tp_rank: usize) -> Vec<Range<usize>> {
    if !param.counted {
        return Vec::new();
    }
    let mut own: Vec<Range<usize>> = Vec::new();
    for piece in param.pieces.iter().filter(|p| tp_rank.is_multiple_of(p.copies.max(1))) {
        let here = runs::overlap(&piece.range, range);
        match own.last_mut() {
            Some(last) if last.end == here.start => last.end = here.end,
            _ if here.is_empty() => {}
            _ => own.push(here),
        }
    }
    own
}

/// Consecutive elements of a part of a logical tensor, lying one after another in a rank's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Fragment {
    /// The rank that wrote it.
    pub(crate) rank: usize,
    /// Byte of its file.
    pub(crate) at: u64,
    /// The part of the tensor that the rank holds: `[dim, first index, end]`. Absent: all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) part: Option<[usize; 3]>,
    /// Elements of the flattened part: `[first, end]`.
    pub(crate) range: [usize; 2],
}

/// A fragment with the name of its tensor, as a rank records it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Named {
    pub(crate) tensor: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) kind: Kind,
    pub(crate) dtype: String,
    pub(crate) fragment: Fragment,
}

impl Fragment {
    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.range[1].saturating_sub(self.range[0])
    }

    /// Its runs of elements within a tensor of this shape; `memory` counts from the fragment's first element.
    pub(crate) fn runs(&self, shape: &[usize]) -> impl Iterator<Item = Run> + use<> {
        let mut piece = Piece::new("", shape, 0);
        piece.part = self.part.map(|[dim, start, end]| Part { dim, range: start..end });
        piece.range = 0..piece.local_shape().iter().product();
        let [start, end] = self.range;
        runs::within(&piece, start..end).map(move |run| Run { memory: run.memory - start, ..run })
    }

    /// Whether it lies within a tensor of this shape, and within a file of `bytes` bytes.
    pub(crate) fn fits(&self, shape: &[usize], dtype: DType, bytes: u64) -> bool {
        let mut local = shape.to_vec();
        if let Some([dim, start, end]) = self.part {
            match local.get_mut(dim) {
                Some(len) if start <= end && end <= *len => *len = end - start,
                _ => return false,
            }
        }
        let size = dtype.size() as u64;
        let end = (self.len() as u64).checked_mul(size).and_then(|n| n.checked_add(self.at));
        self.range[0] <= self.range[1]
            && self.range[1] <= local.iter().product()
            && self.at.is_multiple_of(size)
            && end.is_some_and(|end| end <= bytes)
    }
}

/// What an entry consists of, with the bytes of each fragment after `at`.
pub(crate) fn fragments(entry: &Entry<'_>, rank: usize, mut at: u64) -> Vec<Named> {
    let Entry { kind, param, range, data } = entry;
    let mut out = Vec::new();
    for piece in &param.pieces {
        let own = runs::overlap(&piece.range, range);
        if own.is_empty() {
            continue;
        }
        let part = piece.part.as_ref().map(|p| [p.dim, p.range.start, p.range.end]);
        let fragment = Fragment { rank, at, part, range: [own.start - piece.range.start, own.end - piece.range.start] };
        at += (own.len() * data.dtype().size()) as u64;
        let dtype = data.dtype().name().to_string();
        out.push(Named { tensor: piece.name.clone(), shape: piece.shape.clone(), kind: *kind, dtype, fragment });
    }
    out
}
