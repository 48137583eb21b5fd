//! From the declaration of a whole model to what one rank holds of it.

use crate::param::{Param, Part, Piece, Shard};
use crate::{Error, Result};
use std::ops::Range;
use temper_config::{Arch, Moe};

/// A rank's number on an axis, and the axis' size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AxisRank {
    /// From 0.
    pub rank: usize,
    /// Size of the axis.
    pub of: usize,
}

impl AxisRank {
    /// The only rank of its axis.
    pub const ALONE: AxisRank = AxisRank { rank: 0, of: 1 };

    /// This rank's part of `len` things in order, nearly equal for all.
    pub fn share(self, len: usize) -> Range<usize> {
        len * self.rank / self.of..len * (self.rank + 1) / self.of
    }
}

/// A rank's place on the axes that divide parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
    /// Tensor.
    pub tp: AxisRank,
    /// Expert.
    pub ep: AxisRank,
    /// Tensor within an expert.
    pub etp: AxisRank,
}

impl Seat {
    /// A model that is not divided.
    pub const WHOLE: Seat = Seat { tp: AxisRank::ALONE, ep: AxisRank::ALONE, etp: AxisRank::ALONE };

    /// An architecture with the heads and widths of one rank. Experts, vocabulary and hidden size stay whole.
    ///
    /// # Errors
    /// When heads or widths do not divide.
    pub fn arch(&self, arch: &Arch) -> Result<Arch> {
        let part = |what: &str, len: usize, by: AxisRank| match len.is_multiple_of(by.of) {
            true => Ok(len / by.of),
            false => Err(Error::Arch(format!("{len} {what} do not divide over {} ranks", by.of))),
        };
        let kv_heads = if self.tp.of > arch.kv_heads && self.tp.of.is_multiple_of(arch.kv_heads) {
            1
        } else {
            part("key/value heads", arch.kv_heads, self.tp)?
        };
        let dense = (0..arch.layers).any(|i| !arch.is_moe_layer(i));
        let intermediate = if dense { part("columns of the feed-forward", arch.intermediate, self.tp)? } else { arch.intermediate };
        let moe = arch.moe.as_ref().map(|moe| -> Result<Moe> {
            part("experts", moe.experts, self.ep)?;
            Ok(Moe { intermediate: part("columns of an expert", moe.intermediate, self.etp)?, ..moe.clone() })
        });
        Ok(Arch { heads: part("query heads", arch.heads, self.tp)?, kv_heads, intermediate, moe: moe.transpose()?, ..arch.clone() })
    }
}

impl Param {
    /// What the rank at `seat` holds of this whole parameter.
    pub fn at(&self, seat: &Seat) -> Param {
        let pieces: Vec<Piece> = match self.shard {
            Shard::Replicated | Shard::Shared => self.pieces.clone(),
            Shard::TensorRows => self.pieces.iter().map(|p| rows(p, seat.tp)).collect(),
            Shard::TensorCols => self.pieces.iter().map(|p| cols(p, seat.tp)).collect(),
            Shard::ExpertRows => self.experts(seat.ep).map(|p| rows(p, seat.etp)).collect(),
            Shard::ExpertCols => self.experts(seat.ep).map(|p| cols(p, seat.etp)).collect(),
        };
        let mut end = 0;
        let pieces: Vec<Piece> = pieces
            .into_iter()
            .map(|p| {
                let start = end;
                end += p.local_shape().iter().product::<usize>();
                Piece { range: start..end, ..p }
            })
            .collect();
        let replicated = matches!(self.shard, Shard::Replicated | Shard::Shared);
        Param { shape: self.local_shape(&pieces, seat), counted: !replicated || seat.tp.rank == 0, pieces, ..self.clone() }
    }

    /// The pieces of this rank's experts: whole experts in order.
    fn experts(&self, ep: AxisRank) -> impl Iterator<Item = &Piece> {
        let experts = self.shape.first().copied().unwrap_or(1).max(1);
        let each = self.pieces.len() / experts;
        let own = ep.share(experts);
        self.pieces[own.start * each..own.end * each].iter()
    }

    fn local_shape(&self, pieces: &[Piece], seat: &Seat) -> Vec<usize> {
        let mut shape = self.shape.clone();
        let numel = pieces.last().map_or(0, |p| p.range.end);
        match self.shard {
            Shard::Replicated | Shard::Shared => {}
            Shard::TensorRows => shape[0] = numel / self.shape[1..].iter().product::<usize>().max(1),
            Shard::TensorCols => shape[1] = seat.tp.share(self.shape[1]).len(),
            Shard::ExpertRows => {
                shape[0] = seat.ep.share(self.shape[0]).len();
                shape[1] = numel / (shape[0] * shape[2]).max(1);
            }
            Shard::ExpertCols => {
                shape[0] = seat.ep.share(self.shape[0]).len();
                shape[2] = seat.etp.share(self.shape[2]).len();
            }
        }
        shape
    }
}

/// Some units of dim 0; where there are fewer units than ranks, neighbours hold copies of one.
fn rows(piece: &Piece, place: AxisRank) -> Piece {
    if place.of == 1 {
        return piece.clone();
    }
    let len = piece.shape.first().copied().unwrap_or(1);
    let unit = len / piece.units.max(1);
    let (copies, units) = match piece.units < place.of {
        true => {
            let copies = place.of / piece.units.max(1);
            let own = place.rank / copies;
            (copies, own..own + 1)
        }
        false => (1, place.share(piece.units)),
    };
    Piece { part: Some(Part { dim: 0, range: units.start * unit..units.end * unit }), copies, ..piece.clone() }
}

/// Some columns.
fn cols(piece: &Piece, place: AxisRank) -> Piece {
    if place.of == 1 {
        return piece.clone();
    }
    let len = piece.shape.get(1).copied().unwrap_or(1);
    Piece { part: Some(Part { dim: 1, range: place.share(len) }), ..piece.clone() }
}
