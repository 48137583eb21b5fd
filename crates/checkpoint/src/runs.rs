//! Parts of parameters as runs of elements of the logical tensors on disk.

use std::ops::Range;
use temper_model::param::{Piece, Run};

/// What two ranges have in common.
pub(crate) fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

/// The runs of a piece that lie within `range` of the flattened parameter, in order.
pub(crate) fn within(piece: &Piece, range: Range<usize>) -> impl Iterator<Item = Run> + use<> {
    piece.runs().filter_map(move |run| {
        let own = overlap(&(run.memory..run.memory + run.len), &range);
        let disk = run.disk + own.start.saturating_sub(run.memory);
        (!own.is_empty()).then_some(Run { disk, memory: own.start, len: own.len() })
    })
}
