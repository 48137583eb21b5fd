//! The tensor axis inside a layer: which rows a rank has, and what is exchanged where a layer is divided.
//!
//! Between the divided parts of a layer every tensor rank has, with sequence parallelism, its share of the tokens (Korthikanti et al.
//! 2022), and without it all of them, the same on each. Two exchanges lead in and out, and each is the other's gradient:
//! [`Cx::whole_tokens`] before matrices divided by outputs, [`Cx::sum_parts`] after matrices divided by inputs.
//!
//! Legend: T tokens of the tensor group (all of a sequence, or this context rank's), H hidden size, R tensor ranks.

use crate::{Act, AxisRank, Cx, Result};
use std::{
    ops::Range,
    sync::{Arc, LazyLock},
};
use temper_comm::{Comm, Mesh, Reduce};
use temper_tensor::{Tensor, View};

/// The ranks that share a model, as one of them sees them.
#[derive(Clone)]
pub struct Ranks {
    /// The groups.
    pub mesh: Mesh,
    /// Tensor ranks divide the tokens between them outside of matrices.
    pub sequence: bool,
}

static SINGLE: LazyLock<Ranks> = LazyLock::new(|| Ranks { mesh: Mesh::single(), sequence: false });

impl Ranks {
    /// One rank.
    pub fn single() -> &'static Ranks {
        &SINGLE
    }

    /// This rank on the tensor axis.
    pub fn tensor(&self) -> AxisRank {
        place(&*self.mesh.tp)
    }

    /// This rank on the context axis.
    pub fn context(&self) -> AxisRank {
        place(&*self.mesh.cp)
    }

    /// Tokens come in multiples of this, so that every rank has as many.
    pub fn token_multiple(&self) -> usize {
        token_multiple(self.mesh.axes.tp, self.mesh.axes.cp)
    }
}

/// The tokens of a micro-batch are filled up to a multiple of this, so that every rank of a layout with these axes has as many: each tensor
/// rank a share, each context rank an early and a late piece.
pub fn token_multiple(tp: usize, cp: usize) -> usize {
    tp.saturating_mul(if cp > 1 { cp.saturating_mul(2) } else { 1 })
}

fn place(comm: &dyn Comm) -> AxisRank {
    AxisRank { rank: comm.rank(), of: comm.size() }
}

/// A tensor that was given, or one made from it.
pub enum Operand<'t> {
    /// As it was given.
    Given(View<'t>),
    /// Made.
    Made(Tensor),
}

impl Operand<'_> {
    /// The elements.
    pub fn view(&self) -> View<'_> {
        match self {
            Operand::Given(v) => *v,
            Operand::Made(t) => t.view(),
        }
    }
}

impl Cx<'_> {
    fn tp(&self) -> &dyn Comm {
        &*self.ranks.mesh.tp
    }

    /// Whether tensor ranks have different tokens between the divided parts of a layer.
    fn tokens_divided(&self) -> bool {
        self.ranks.sequence && self.tp().size() > 1
    }

    /// Rows of an activation between the divided parts of a layer: T, or this rank's share of them.
    pub fn rows(&self) -> usize {
        if self.tokens_divided() { self.batch.tokens() / self.tp().size() } else { self.batch.tokens() }
    }

    /// All T rows of what tensor ranks have between the divided parts of a layer. Its gradient is [`Cx::sum_parts`].
    pub fn whole_tokens<'t>(&self, x: View<'t>) -> Result<Operand<'t>> {
        if self.tokens_divided() { Ok(Operand::Made(self.gathered(x)?)) } else { Ok(Operand::Given(x)) }
    }

    /// As [`Cx::whole_tokens`] of a shared activation.
    pub fn whole_tokens_shared(&self, x: &Act) -> Result<Act> {
        if self.tokens_divided() { Ok(Arc::new(self.gathered(x.view())?)) } else { Ok(x.clone()) }
    }

    /// The sum over tensor ranks of `y[T, H]`, and of it the rows a rank has between the divided parts of a layer. Its gradient is
    /// [`Cx::whole_tokens`].
    pub fn sum_parts(&self, mut y: Tensor) -> Result<Tensor> {
        if self.tp().size() == 1 {
            return Ok(y);
        }
        if !self.tokens_divided() {
            self.tp().all_reduce(y.view_mut(), Reduce::Sum)?.wait()?;
            return Ok(y);
        }
        let mut own = self.alloc(&[y.shape()[0] / self.tp().size(), y.shape()[1]])?;
        self.tp().reduce_scatter(own.view_mut(), y.view())?.wait()?;
        Ok(own)
    }

    /// This rank's rows of a whole `[T, H]`.
    pub fn own_rows<'t>(&self, whole: View<'t>) -> View<'t> {
        let rows = self.own_range(whole.rows());
        whole.slice_rows(rows)
    }

    /// The experts work on tokens that are divided whatever the mode: this rank's share of `x`, which is all there is of them with
    /// sequence parallelism. Its gradient is [`Cx::join_shares`].
    pub fn own_share<'t>(&self, x: View<'t>) -> View<'t> {
        if self.tokens_divided() { x } else { x.slice_rows(self.ranks.tensor().share(x.rows())) }
    }

    /// The inverse of [`Cx::own_share`].
    pub fn join_shares(&self, y: Tensor) -> Result<Tensor> {
        if self.tokens_divided() || self.tp().size() == 1 { Ok(y) } else { self.gathered(y.view()) }
    }

    /// How many rows of [`Cx::own_share`] are tokens; the rest, at the end, fills up to [`Ranks::token_multiple`].
    pub fn real_rows(&self) -> usize {
        let share = self.ranks.tensor().share(self.batch.tokens());
        self.batch.real.clamp(share.start, share.end) - share.start
    }

    fn own_range(&self, rows: usize) -> Range<usize> {
        if self.tokens_divided() { self.ranks.tensor().share(rows) } else { 0..rows }
    }

    fn gathered(&self, x: View) -> Result<Tensor> {
        let mut whole = self.ops.alloc(x.dtype(), &[x.rows() * self.tp().size(), x.row_len()])?;
        self.tp().all_gather(whole.view_mut(), x)?.wait()?;
        Ok(whole)
    }
}
