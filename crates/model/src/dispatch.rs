//! The way of tokens to their experts, and back, where experts are divided over ranks.
//!
//! The group has N = etp x ep ranks: expert e lies on one ep rank, in slices on all its etp ranks. The row of a token goes once to each
//! rank that holds an expert of it (or a slice of one), with the token's choice and weights; that rank sends back one row, the sum over
//! its experts, and the rows of all ranks are added up. No token is dropped. Gradients take the same two roads: what goes out on one
//! way comes back summed on the other. (Sending a row per rank rather than per expert is DeepEP's way; deepseek-ai/DeepEP.)
//!
//! Legend: t tokens of this rank, K experts per token, E experts, e of this rank, n tokens that reach this rank (t where every expert is
//! here), R rows of this rank's experts, s rows that this rank sends, N ranks of the group, W row length.

use crate::moe::Routing;
use crate::{AxisRank, Cx, Result};
use temper_comm::{Comm, Mesh};
use temper_tensor::{DType, Tensor, View};

/// The roads of one layer and micro-batch.
pub(crate) struct Dispatch {
    /// Borders between this rank's experts among its rows, [e+1].
    pub offsets: Tensor,
    /// Where the rows of the tokens that are here lie by expert, [n, K].
    pub place: Tensor,
    /// R.
    pub rows: usize,
    /// Absent when every expert is here.
    exchange: Option<Exchange>,
}

struct Exchange {
    road: Road,
    /// Weights of the experts of the tokens that are here, [n, K].
    weights: Tensor,
}

/// Who sends how many rows to whom.
struct Road {
    /// Where the row that each token sends to each rank lies, [t, N].
    place: Tensor,
    /// Rows to each rank.
    send: Vec<usize>,
    /// Rows from each rank.
    receive: Vec<usize>,
}

/// Tokens that are here.
pub(crate) enum Tokens<'a> {
    /// This rank's own.
    Own(View<'a>),
    /// Those that reached it.
    Arrived(Tensor),
}

impl Tokens<'_> {
    /// [n, W].
    pub fn view(&self) -> View<'_> {
        match self {
            Tokens::Own(x) => *x,
            Tokens::Arrived(x) => x.view(),
        }
    }
}

impl Dispatch {
    /// The roads for a routing among `count` experts. Where experts are divided, the host waits for the numbers of rows.
    pub fn new(cx: &Cx, routing: &Routing, count: usize) -> Result<Dispatch> {
        let Mesh { experts: group, axes, .. } = &cx.ranks.mesh;
        let chosen = routing.experts.view();
        if group.size() == 1 {
            let (offsets, place) = sorted(cx, chosen, 0, count)?;
            return Ok(Dispatch { offsets, place, rows: chosen.numel(), exchange: None });
        }
        let own = AxisRank { rank: group.rank() / axes.etp, of: axes.ep }.share(count);
        let (place, counts) = to_each_rank(cx, chosen, own.len(), group.size())?;
        let counts = gathered(cx, &**group, counts)?;
        let me = group.rank();
        let send = (0..group.size()).map(|to| counts[me].rows_to(to)).collect();
        let receive = counts.iter().map(|from| from.rows_to(me)).collect();
        let road = Road { place, send, receive };
        let weights = road.spread(cx, routing.weights.view())?;
        let (offsets, place) = sorted(cx, road.spread(cx, chosen)?.view(), own.start, own.len())?;
        let rows = counts.iter().map(|from| from.routed[me] as usize).sum();
        Ok(Dispatch { offsets, place, rows, exchange: Some(Exchange { road, weights }) })
    }

    /// Weights of the experts of the tokens that are here, [n, K].
    pub fn weights<'a>(&'a self, routing: &'a Routing) -> View<'a> {
        self.exchange.as_ref().map_or(routing.weights.view(), |e| e.weights.view())
    }

    /// From this rank's tokens, [t, W], to those that are here, [n, W]: their rows at every rank that works on them.
    pub fn spread<'a>(&self, cx: &Cx, x: View<'a>) -> Result<Tokens<'a>> {
        match &self.exchange {
            None => Ok(Tokens::Own(x)),
            Some(e) => Ok(Tokens::Arrived(e.road.spread(cx, x)?)),
        }
    }

    /// From rows of the tokens that are here, [n, W], to the sums over all ranks for this rank's tokens, [t, W]. `meanwhile` is done
    /// while the rows are on their way.
    pub fn collect(&self, cx: &Cx, x: Tensor, meanwhile: impl FnOnce() -> Result<()>) -> Result<Tensor> {
        let Some(Exchange { road, .. }) = &self.exchange else { return meanwhile().map(|()| x) };
        let (width, tokens) = (x.shape()[1], road.place.shape()[0]);
        let mut back = cx.ops.alloc(x.dtype(), &[road.send.iter().sum(), width])?;
        let under_way = cx.ranks.mesh.experts.all_to_all(back.view_mut(), &road.send, x.view(), &road.receive)?;
        meanwhile()?;
        under_way.wait()?;
        let mut sums = cx.ops.alloc(x.dtype(), &[tokens, width])?;
        cx.ops.moe_combine(sums.view_mut(), back.view(), None, road.place.view())?;
        Ok(sums)
    }
}

impl Road {
    /// `x[t, W]` at the ranks that work on it: [n, W].
    fn spread(&self, cx: &Cx, x: View) -> Result<Tensor> {
        let mut rows = cx.ops.alloc(x.dtype(), &[self.send.iter().sum(), x.row_len()])?;
        cx.ops.moe_gather(rows.view_mut(), x, self.place.view())?;
        let mut arrived = cx.ops.alloc(x.dtype(), &[self.receive.iter().sum(), x.row_len()])?;
        cx.ranks.mesh.experts.all_to_all(arrived.view_mut(), &self.receive, rows.view(), &self.send)?.wait()?;
        Ok(arrived)
    }
}

/// `offsets[count+1]` and `place[n, K]` of the rows by expert; see [`temper_tensor::Ops::moe_sort`].
fn sorted(cx: &Cx, experts: View, first: usize, count: usize) -> Result<(Tensor, Tensor)> {
    let mut offsets = cx.alloc_index(&[count + 1])?;
    let mut place = cx.alloc_index(experts.shape())?;
    cx.ops.moe_sort(offsets.view_mut(), place.view_mut(), experts, first)?;
    Ok((offsets, place))
}

/// What one rank sends.
struct Counts {
    /// Borders between the rows for each rank, [N+1].
    offsets: Vec<i32>,
    /// Rows of each rank's experts, [N].
    routed: Vec<i32>,
}

impl Counts {
    fn rows_to(&self, rank: usize) -> usize {
        (self.offsets[rank + 1] - self.offsets[rank]) as usize
    }
}

/// Where the row that each token sends to each of `size` ranks lies, [t, N], and the [`Counts`] of this rank, [2N+1].
fn to_each_rank(cx: &Cx, experts: View, per_rank: usize, size: usize) -> Result<(Tensor, Tensor)> {
    let slices = cx.ranks.mesh.axes.etp;
    let mut counts = cx.alloc_index(&[2 * size + 1])?;
    let mut ranks = cx.alloc_index(&[experts.rows(), size])?;
    let mut place = cx.alloc_index(ranks.shape())?;
    cx.ops.moe_ranks(ranks.view_mut(), counts.view_mut().slice_rows(size + 1..2 * size + 1), experts, per_rank, slices)?;
    cx.ops.moe_sort(counts.view_mut().slice_rows(0..size + 1), place.view_mut(), ranks.view(), 0)?;
    Ok((place, counts))
}

/// The counts of every rank of the group, on the host.
fn gathered(cx: &Cx, group: &dyn Comm, counts: Tensor) -> Result<Vec<Counts>> {
    let mut all = cx.ops.alloc(DType::I32, &[group.size() * counts.numel()])?;
    group.all_gather(all.view_mut(), counts.view())?.wait()?;
    let host = cx.ops.to_host(all.view())?;
    let ranks = host.as_slice::<i32>().unwrap_or_default().chunks(counts.numel());
    let split = |c: &[i32]| Counts { offsets: c[..=group.size()].to_vec(), routed: c[group.size() + 1..].to_vec() };
    Ok(ranks.map(split).collect())
}
