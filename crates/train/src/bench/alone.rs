//! One rank of a large layout on one device: the others are not there. Collectives cost next to nothing and give numbers of the right
//! shape and kind, so that memory and compute time are those of the real rank.
//!
//! Every other rank is taken to be like this one: what it would send is a copy of what this rank has.

use std::{ops::Range, sync::Arc};
use temper_comm::{Comm, Error, Pending, Reduce, Result, World};
use temper_tensor::{DType, Ops, View, ViewMut};

/// The job of which only this rank is there.
pub struct AloneWorld {
    ops: Arc<dyn Ops>,
    rank: usize,
    size: usize,
}

impl AloneWorld {
    /// Rank `rank` of `size`.
    pub fn new(ops: Arc<dyn Ops>, rank: usize, size: usize) -> AloneWorld {
        AloneWorld { ops, rank, size }
    }
}

impl World for AloneWorld {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn group(&self, name: &str, members: &[usize]) -> Result<Arc<dyn Comm>> {
        let rank = members.iter().position(|r| *r == self.rank);
        let rank = rank.ok_or_else(|| Error::Transport(format!("rank {} is not in group {name} {members:?}", self.rank)))?;
        Ok(Arc::new(Alone { ops: self.ops.clone(), rank, size: members.len() }))
    }
}

/// A group of which only this rank is there.
struct Alone {
    ops: Arc<dyn Ops>,
    rank: usize,
    size: usize,
}

impl Alone {
    /// `out = x` over and over, whatever their lengths.
    fn repeat(&self, out: ViewMut, x: View) -> Result<()> {
        let (len, n) = (out.numel(), x.numel());
        let (mut out, x) = (out.reshape(&[len]), x.reshape(&[n]));
        if n == 0 {
            return self.quiet(out);
        }
        for start in (0..len).step_by(n) {
            let count = n.min(len - start);
            self.copy(out.reborrow().slice_rows(start..start + count), x.slice_rows(0..count))?;
        }
        Ok(())
    }

    fn copy(&self, out: ViewMut, x: View) -> Result<()> {
        self.ops.copy(out, x).map_err(failed)
    }

    /// Numbers that are no tokens of anything but harm nothing: small activations.
    fn quiet(&self, x: ViewMut) -> Result<()> {
        if x.numel() == 0 || x.dtype() == DType::I32 {
            return Ok(());
        }
        self.ops.fill(x, 0.01).map_err(failed)
    }

    fn own(&self, len: usize) -> Range<usize> {
        len / self.size * self.rank..len / self.size * (self.rank + 1)
    }
}

fn failed(error: temper_tensor::Error) -> Error {
    Error::Transport(error.to_string())
}

impl Comm for Alone {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn all_reduce<'a>(&self, _: ViewMut<'a>, _: Reduce) -> Result<Pending<'a>> {
        Ok(Pending::done())
    }

    fn all_gather<'a>(&self, out: ViewMut<'a>, x: View<'a>) -> Result<Pending<'a>> {
        self.repeat(out, x)?;
        Ok(Pending::done())
    }

    fn all_gather_in_place<'a>(&self, _: ViewMut<'a>) -> Result<Pending<'a>> {
        Ok(Pending::done())
    }

    fn reduce_scatter<'a>(&self, out: ViewMut<'a>, x: View<'a>) -> Result<Pending<'a>> {
        let len = x.numel();
        let n = out.numel();
        self.copy(out.reshape(&[n]), x.reshape(&[len]).slice_rows(self.own(len)))?;
        Ok(Pending::done())
    }

    fn reduce_scatter_in_place<'a>(&self, _: ViewMut<'a>) -> Result<Pending<'a>> {
        Ok(Pending::done())
    }

    fn all_to_all<'a>(&self, out: ViewMut<'a>, _: &[usize], x: View<'a>, _: &[usize]) -> Result<Pending<'a>> {
        self.repeat(out, x)?;
        Ok(Pending::done())
    }

    fn broadcast<'a>(&self, _: ViewMut<'a>, _: usize) -> Result<Pending<'a>> {
        Ok(Pending::done())
    }

    fn send<'a>(&self, _: View<'a>, _: usize) -> Result<Pending<'a>> {
        Ok(Pending::done())
    }

    fn recv<'a>(&self, x: ViewMut<'a>, _: usize) -> Result<Pending<'a>> {
        self.quiet(x)?;
        Ok(Pending::done())
    }

    fn barrier(&self) -> Result<()> {
        Ok(())
    }
}
