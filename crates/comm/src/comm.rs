//! The contract of communication within a group of ranks.
//!
//! Legend: n ranks of the group.

use crate::Result;
use std::{marker::PhantomData, sync::Arc};
use temper_tensor::{View, ViewMut};

/// How values of different ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// Their sum. On host memory it is accumulated in at least f32, in the order of ranks; NCCL rounds 16-bit floats at every hop.
    Sum,
    /// The largest.
    Max,
}

/// One rank's handle on a group of ranks. Operations of one handle happen in the order of their calls; handles are independent.
///
/// Buffers handed over belong to the operation until its [`Pending`] is waited for. Sizes must agree between ranks.
pub trait Comm: Send + Sync {
    /// This rank's place in the group, from 0.
    fn rank(&self) -> usize;
    /// Ranks of the group, n.
    fn size(&self) -> usize;

    /// `x` becomes the reduction of all ranks' `x`; the same bits on every rank.
    fn all_reduce<'a>(&self, x: ViewMut<'a>, op: Reduce) -> Result<Pending<'a>>;
    /// `out` becomes the `x` of all ranks, one after another in the order of ranks.
    fn all_gather<'a>(&self, out: ViewMut<'a>, x: View<'a>) -> Result<Pending<'a>>;
    /// As [`Comm::all_gather`] where this rank's part already lies in its place of `x`.
    fn all_gather_in_place<'a>(&self, x: ViewMut<'a>) -> Result<Pending<'a>>;
    /// `out` becomes this rank's n-th part of the sum of all ranks' `x`.
    fn reduce_scatter<'a>(&self, out: ViewMut<'a>, x: View<'a>) -> Result<Pending<'a>>;
    /// As [`Comm::reduce_scatter`] with the result in this rank's part of `x`; the rest of `x` is unspecified afterwards.
    fn reduce_scatter_in_place<'a>(&self, x: ViewMut<'a>) -> Result<Pending<'a>>;
    /// Rows of dim 0: the first `send[0]` rows of `x` go to rank 0, the next `send[1]` to rank 1, and so on; `out` receives
    /// `receive[r]` rows of rank r in the order of ranks.
    fn all_to_all<'a>(&self, out: ViewMut<'a>, receive: &[usize], x: View<'a>, send: &[usize]) -> Result<Pending<'a>>;
    /// `x` of rank `root` reaches every rank.
    fn broadcast<'a>(&self, x: ViewMut<'a>, root: usize) -> Result<Pending<'a>>;
    /// Hands `x` to rank `to`, without waiting for it on the host. Messages between two ranks arrive in order.
    fn send<'a>(&self, x: View<'a>, to: usize) -> Result<Pending<'a>>;
    /// Receives what rank `from` sends.
    fn recv<'a>(&self, x: ViewMut<'a>, from: usize) -> Result<Pending<'a>>;
    /// Returns when every rank has called it.
    fn barrier(&self) -> Result<()>;
}

/// All ranks of a job, seen from one of them.
pub trait World: Send + Sync {
    /// This rank, from 0.
    fn rank(&self) -> usize;
    /// Ranks of the job.
    fn size(&self) -> usize;
    /// A new group, of which this rank is one of `members` (ranks of the job, in the order of the group). Every rank of the job
    /// calls this as often and with the same `name`s in the same order, each with the group it belongs to; the groups of one
    /// call do not overlap.
    fn group(&self, name: &str, members: &[usize]) -> Result<Arc<dyn Comm>>;
    /// As [`World::group`], for buffers in host memory.
    fn host_group(&self, name: &str, members: &[usize]) -> Result<Arc<dyn Comm>> {
        self.group(name, members)
    }
}

/// What remains of an operation under way: something that can be waited for.
pub trait Work: Send {
    /// Makes what comes next come after the operation. A backend with an order of work of its own does not block the host.
    fn wait(self: Box<Self>) -> Result<()>;
}

/// An operation under way on buffers that live for `'a`.
#[must_use = "buffers may not be used before the operation was waited for"]
pub struct Pending<'a> {
    work: Option<Box<dyn Work>>,
    buffers: PhantomData<ViewMut<'a>>,
}

impl<'a> Pending<'a> {
    /// An operation that is already done.
    pub fn done() -> Pending<'a> {
        Pending { work: None, buffers: PhantomData }
    }

    /// An operation that is done when `work` is.
    pub fn new(work: Box<dyn Work>) -> Pending<'a> {
        Pending { work: Some(work), buffers: PhantomData }
    }

    /// What comes next may use the buffers.
    pub fn wait(mut self) -> Result<()> {
        self.work.take().map_or(Ok(()), |work| work.wait())
    }

    /// Lets go of the borrow: the caller promises to leave the buffers alone, and alive, until [`Pending::wait`].
    pub fn detach(mut self) -> Pending<'static> {
        Pending { work: self.work.take(), buffers: PhantomData }
    }
}
