//! One rank of a large layout on one device: the others are not there. Collectives give numbers of the right shape and kind, so that memory
//! and compute are those of the real rank; the time that making these numbers takes is measured, for the step's to be without it.
//!
//! Every other rank is taken to be like this one: what it would send is a copy of what this rank has.

use serde::Serialize;
use std::{
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};
use temper_comm::{Comm, Error, Pending, Reduce, Result, World};
use temper_tensor::{DType, Ops, Stamp, View, ViewMut};

/// The job of which only this rank is there.
pub struct AloneWorld {
    ops: Arc<dyn Ops>,
    rank: usize,
    size: usize,
    others: Arc<Others>,
}

/// What is counted of the ranks that are not there.
#[derive(Default)]
pub struct Others {
    routed: Mutex<Routed>,
    /// Marks before and after the making of what they would have sent.
    stood_in: Mutex<Vec<(Mark, Mark)>>,
}

/// Rows that came to this rank's experts, layer by layer in the order of the work, and what they were if all ranks of the group got as many.
#[derive(Default)]
struct Routed {
    all: Vec<(u64, u64)>,
    /// Where the present step begins among them.
    step: usize,
}

type Mark = Box<dyn Stamp>;

/// How many times their balanced share of rows a rank's experts got.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Skew {
    /// Over all layers.
    pub mean: f64,
    /// In the layer that got the most.
    pub most: f64,
    /// In the last step each time that a layer routed, in the order of the work.
    pub layers: Vec<f64>,
}

impl Others {
    /// A step begins.
    pub fn begin(&self) {
        let mut routed = self.routed.lock().unwrap_or_else(PoisonError::into_inner);
        routed.step = routed.all.len();
    }

    /// Milliseconds that making their part took since the last call.
    ///
    /// # Errors
    /// The backend's.
    pub fn stood_in_ms(&self) -> temper_tensor::Result<f64> {
        let marks = std::mem::take(&mut *self.stood_in.lock().unwrap_or_else(PoisonError::into_inner));
        marks.iter().map(|(before, after)| after.ms_since(&**before)).sum()
    }

    /// The skew so far; none when nothing was exchanged.
    pub fn skew(&self) -> Option<Skew> {
        let routed = self.routed.lock().unwrap_or_else(PoisonError::into_inner);
        let (rows, balanced) = routed.all.iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        let share = |(rows, balanced): (u64, u64)| rows as f64 / balanced.max(1) as f64;
        let all: Vec<f64> = routed.all.iter().map(|one| share(*one)).collect();
        let most = all.iter().copied().fold(0.0, f64::max);
        (balanced > 0).then(|| Skew { mean: share((rows, balanced)), most, layers: all[routed.step..].to_vec() })
    }

    /// Counts what a rank tells its group before rows are exchanged: borders between the rows for each of `size` ranks, then the rows
    /// of each one's experts (`temper_model`'s `dispatch.rs`). Every other rank tells the same.
    fn count(&self, counts: &[i32], rank: usize, size: usize) {
        let Some(rows) = counts.get(size + 1..2 * size + 1) else { return };
        let one = (size as u64 * rows[rank] as u64, rows.iter().map(|n| *n as u64).sum());
        self.routed.lock().unwrap_or_else(PoisonError::into_inner).all.push(one);
    }
}

impl AloneWorld {
    /// Rank `rank` of `size`.
    pub fn new(ops: Arc<dyn Ops>, rank: usize, size: usize) -> AloneWorld {
        AloneWorld { ops, rank, size, others: Arc::default() }
    }

    /// What is counted of the ranks that are not there.
    pub fn others(&self) -> Arc<Others> {
        self.others.clone()
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
        Ok(Arc::new(Alone { ops: self.ops.clone(), rank, size: members.len(), others: self.others.clone() }))
    }
}

/// A group of which only this rank is there.
struct Alone {
    ops: Arc<dyn Ops>,
    rank: usize,
    size: usize,
    others: Arc<Others>,
}

impl Alone {
    /// Does what the other ranks would have, with a mark before and after.
    fn stand_in<'a>(&self, work: impl FnOnce() -> Result<()>) -> Result<Pending<'a>> {
        let before = self.ops.stamp().map_err(failed)?;
        work()?;
        let after = self.ops.stamp().map_err(failed)?;
        self.others.stood_in.lock().unwrap_or_else(PoisonError::into_inner).push((before, after));
        Ok(Pending::done())
    }

    /// `out = x` over and over, whatever their lengths. What is there is copied, so that few calls do: a device would wait for the host.
    fn repeat(&self, out: ViewMut, x: View) -> Result<()> {
        let (len, n) = (out.numel(), x.numel());
        let mut out = out.reshape(&[len]);
        if n == 0 {
            return self.quiet(out);
        }
        let mut done = n.min(len);
        self.copy(out.reborrow().slice_rows(0..done), x.reshape(&[n]).slice_rows(0..done))?;
        while done < len {
            let more = done.min(len - done);
            let (before, after) = out.reborrow().split_rows(done);
            self.copy(after.slice_rows(0..more), before.as_view().slice_rows(0..more))?;
            done += more;
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
        if x.dtype() == DType::I32 {
            let counts = self.ops.to_host(x).map_err(failed)?;
            self.others.count(counts.as_slice::<i32>().unwrap_or_default(), self.rank, self.size);
        }
        self.stand_in(|| self.repeat(out, x))
    }

    fn all_gather_in_place<'a>(&self, _: ViewMut<'a>) -> Result<Pending<'a>> {
        Ok(Pending::done())
    }

    fn reduce_scatter<'a>(&self, out: ViewMut<'a>, x: View<'a>) -> Result<Pending<'a>> {
        let len = x.numel();
        let n = out.numel();
        let (mut out, own) = (out.reshape(&[n]), x.reshape(&[len]).slice_rows(self.own(len)));
        self.stand_in(|| {
            if out.dtype() == DType::I32 {
                return self.copy(out, own);
            }
            // The others' rows are not nothing: a token outside this rank's vocabulary would stay a row of zeros, whose norm has no end.
            self.quiet(out.reborrow())?;
            self.ops.add_assign(out, own).map_err(failed)
        })
    }

    fn reduce_scatter_in_place<'a>(&self, _: ViewMut<'a>) -> Result<Pending<'a>> {
        Ok(Pending::done())
    }

    /// Every rank sends what this one sends to itself.
    fn all_to_all<'a>(&self, out: ViewMut<'a>, _: &[usize], x: View<'a>, send: &[usize]) -> Result<Pending<'a>> {
        let start: usize = send[..self.rank].iter().sum();
        self.stand_in(|| self.repeat(out, x.slice_rows(start..start + send[self.rank])))
    }

    fn broadcast<'a>(&self, _: ViewMut<'a>, _: usize) -> Result<Pending<'a>> {
        Ok(Pending::done())
    }

    fn send<'a>(&self, _: View<'a>, _: usize) -> Result<Pending<'a>> {
        Ok(Pending::done())
    }

    fn recv<'a>(&self, x: ViewMut<'a>, _: usize) -> Result<Pending<'a>> {
        self.stand_in(|| self.quiet(x))
    }

    fn barrier(&self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use temper_tensor::{Tensor, cpu::Cpu};

    /// Rank 1 of 3 sends rows to each rank and gets its own rows from all.
    #[test]
    fn every_rank_sends_what_this_one_sends_to_itself() {
        let world = AloneWorld::new(Arc::new(Cpu::new(1)), 1, 3);
        let group = world.group("experts", &[0, 1, 2]).unwrap();
        let x = Tensor::from_vec(vec![1f32, 2.0, 3.0, 4.0, 5.0], &[5, 1]);
        let mut out = Tensor::from_vec(vec![0f32; 6], &[6, 1]);
        group.all_to_all(out.view_mut(), &[2, 2, 2], x.view(), &[1, 2, 2]).unwrap().wait().unwrap();
        assert_eq!(out.as_slice::<f32>().unwrap(), [2.0, 3.0, 2.0, 3.0, 2.0, 3.0]);
        // The time of it is told once.
        assert!(world.others().stood_in_ms().unwrap() > 0.0);
        assert_eq!(world.others().stood_in_ms().unwrap(), 0.0);
        assert_eq!(world.others().skew(), None);
        // Borders, and rows of each rank's experts: 6 of 12 are this rank's, so that it gets 18 where 12 are balanced.
        let counts = Tensor::from_vec(vec![0i32, 1, 3, 5, 2, 6, 4], &[7]);
        let mut all = Tensor::from_vec(vec![0i32; 21], &[21]);
        group.all_gather(all.view_mut(), counts.view()).unwrap().wait().unwrap();
        assert_eq!(world.others().skew(), Some(Skew { mean: 1.5, most: 1.5, layers: vec![1.5] }));
        world.others().begin();
        assert_eq!(world.others().skew().map(|skew| skew.layers), Some(vec![]), "those of the step under way");
    }
}
