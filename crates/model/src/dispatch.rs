//! The way of routed rows to their experts, and back, where experts are divided over ranks.
//!
//! The group has etp x ep ranks: expert e lies on one ep rank, in slices on all its etp ranks. A row goes to every slice of its expert
//! and the slices' outputs come back to be added up. No token is dropped. On the way back gradients take the same two roads.
//!
//! Legend: t tokens of this rank, K experts per token, S = t*K routed rows, E experts, R rows that reach this rank, n ranks of the group,
//! W row length.

use crate::{AxisRank, Cx, Result};
use std::ops::Range;
use temper_comm::{Comm, Mesh};
use temper_tensor::{DType, Tensor, View};

/// Where routed rows lie once sorted by expert (see [`temper_tensor::Ops::moe_sort`]).
pub(crate) struct Order {
    /// [E+1].
    pub offsets: Tensor,
    /// `[S]`.
    pub source: Tensor,
    /// [t, K].
    pub place: Tensor,
}

impl Order {
    fn new(cx: &Cx, experts: View, count: usize) -> Result<Order> {
        let mut offsets = cx.alloc_index(&[count + 1])?;
        let mut source = cx.alloc_index(&[experts.numel()])?;
        let mut place = cx.alloc_index(experts.shape())?;
        cx.ops.moe_sort(offsets.view_mut(), source.view_mut(), place.view_mut(), experts)?;
        Ok(Order { offsets, source, place })
    }
}

/// The roads of one layer and micro-batch.
pub(crate) struct Dispatch {
    /// This rank's routed rows by expert.
    pub order: Order,
    /// Absent when every expert is here.
    exchange: Option<Exchange>,
}

/// Who sends how many rows to whom.
struct Exchange {
    /// Rows of this rank for each ep rank.
    send: Vec<usize>,
    /// Rows from each rank of the group.
    receive: Vec<usize>,
    /// The received rows by expert.
    order: Order,
    /// This rank's experts.
    own: Range<usize>,
}

impl Dispatch {
    /// The roads for `experts[t, K]`, the choice of each token among `count` experts. Where experts are divided, the host waits for
    /// the numbers of rows.
    pub fn new(cx: &Cx, experts: View, count: usize) -> Result<Dispatch> {
        let order = Order::new(cx, experts, count)?;
        let Mesh { experts: group, axes, .. } = &cx.ranks.mesh;
        if group.size() == 1 {
            return Ok(Dispatch { order, exchange: None });
        }
        let ranks = |rank: usize| AxisRank { rank, of: axes.ep }.share(count);
        let all = gathered_offsets(cx, &**group, &order)?;
        let rows = |from: usize, of: &Range<usize>| (all[from][of.end] - all[from][of.start]) as usize;
        let own = ranks(group.rank() / axes.etp);
        let send = (0..axes.ep).map(|to| rows(group.rank(), &ranks(to))).collect();
        let receive: Vec<usize> = (0..group.size()).map(|from| rows(from, &own)).collect();
        let mut arrived: Vec<i32> = Vec::with_capacity(receive.iter().sum());
        for offsets in &all {
            for e in own.clone() {
                arrived.extend(std::iter::repeat_n(e as i32, (offsets[e + 1] - offsets[e]) as usize));
            }
        }
        let arrived = cx.ops.from_host(View::host(&arrived, &[arrived.len(), 1]))?;
        let exchange = Exchange { send, receive, order: Order::new(cx, arrived.view(), count)?, own };
        Ok(Dispatch { order, exchange: Some(exchange) })
    }

    /// The borders between this rank's experts among the rows that reach it.
    pub fn offsets(&self) -> View<'_> {
        match &self.exchange {
            None => self.order.offsets.view(),
            // Rows of other experts do not reach this rank, so the first border is 0.
            Some(e) => e.order.offsets.view().slice_rows(e.own.start..e.own.end + 1),
        }
    }

    /// From the rows of this rank's tokens by expert, [S, W], to the rows of this rank's experts, [R, W]. Its gradient is
    /// [`Dispatch::to_tokens`].
    pub fn to_experts(&self, cx: &Cx, rows: Tensor) -> Result<Tensor> {
        let Some(e) = &self.exchange else { return Ok(rows) };
        let (etp, width) = (cx.ranks.mesh.axes.etp, rows.shape()[1]);
        let sent = if etp == 1 { rows } else { e.for_every_slice(cx, rows, etp)? };
        let mut arrived = cx.alloc(&[e.receive.iter().sum(), width])?;
        let send = e.to_each(etp);
        cx.ranks.mesh.experts.all_to_all(arrived.view_mut(), &e.receive, sent.view(), &send)?.wait()?;
        let mut sorted = cx.alloc(arrived.shape())?;
        cx.ops.moe_gather(sorted.view_mut(), arrived.view(), e.order.source.view())?;
        Ok(sorted)
    }

    /// From the rows of this rank's experts, [R, W], to the rows of its tokens, [S, W]. Its gradient is [`Dispatch::to_experts`].
    pub fn to_tokens(&self, cx: &Cx, sorted: Tensor) -> Result<Tensor> {
        let Some(e) = &self.exchange else { return Ok(sorted) };
        let (etp, width) = (cx.ranks.mesh.axes.etp, sorted.shape()[1]);
        let mut arrived = cx.alloc(sorted.shape())?;
        cx.ops.moe_combine(arrived.view_mut(), sorted.view(), None, e.order.place.view())?;
        let send = e.to_each(etp);
        let mut back = cx.alloc(&[send.iter().sum(), width])?;
        cx.ranks.mesh.experts.all_to_all(back.view_mut(), &send, arrived.view(), &e.receive)?.wait()?;
        if etp == 1 { Ok(back) } else { e.sum_of_slices(cx, back, etp) }
    }
}

impl Exchange {
    /// Rows of this rank for each rank of the group: every slice of an expert gets them.
    fn to_each(&self, etp: usize) -> Vec<usize> {
        self.send.iter().flat_map(|n| std::iter::repeat_n(*n, etp)).collect()
    }

    /// The rows for each ep rank once for each of its etp ranks.
    fn for_every_slice(&self, cx: &Cx, rows: Tensor, etp: usize) -> Result<Tensor> {
        let mut all = cx.alloc(&[rows.shape()[0] * etp, rows.shape()[1]])?;
        for (from, _, to) in self.slices(etp) {
            cx.ops.copy(all.view_mut().slice_rows(to), rows.view().slice_rows(from))?;
        }
        Ok(all)
    }

    /// The sum of what the etp ranks of each ep rank sent back.
    fn sum_of_slices(&self, cx: &Cx, all: Tensor, etp: usize) -> Result<Tensor> {
        let mut rows = cx.alloc(&[all.shape()[0] / etp, all.shape()[1]])?;
        for (to, slice, from) in self.slices(etp) {
            let (to, from) = (rows.view_mut().slice_rows(to), all.view().slice_rows(from));
            if slice == 0 { cx.ops.copy(to, from)? } else { cx.ops.add_assign(to, from)? }
        }
        Ok(rows)
    }

    /// For each ep rank and slice: the rows among this rank's, the slice, and the rows among those of all slices.
    fn slices(&self, etp: usize) -> impl Iterator<Item = (Range<usize>, usize, Range<usize>)> {
        let mut end = 0;
        self.send.iter().flat_map(move |&n| {
            let start = end;
            end += n;
            (0..etp).map(move |slice| {
                let to = start * etp + slice * n;
                (start..start + n, slice, to..to + n)
            })
        })
    }
}

/// The `offsets[E+1]` of every rank of the group, on the host.
fn gathered_offsets(cx: &Cx, group: &dyn Comm, order: &Order) -> Result<Vec<Vec<i32>>> {
    let len = order.offsets.numel();
    let mut all = cx.ops.alloc(DType::I32, &[group.size() * len])?;
    group.all_gather(all.view_mut(), order.offsets.view())?.wait()?;
    let host = cx.ops.to_host(all.view())?;
    Ok(host.as_slice::<i32>().unwrap_or_default().chunks(len).map(<[i32]>::to_vec).collect())
}
