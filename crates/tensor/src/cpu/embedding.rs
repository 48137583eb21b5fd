//! Look-up of rows in a table and its gradient.

use super::{
    Cpu,
    args::Op,
    float::{Float, accumulate},
    tasks::rows_per_task,
};
use crate::{Result, View, ViewMut};

/// See [`Ops::embedding`](crate::Ops::embedding).
pub(super) fn embedding<T: Float>(cpu: &Cpu, out: ViewMut, table: View, ids: View) -> Result<()> {
    let op = Op("embedding");
    let ([v, h], [t]) = (op.dims("table", table.shape())?, op.dims("ids", ids.shape())?);
    let (table, ids) = (op.read::<T>("table", table, &[v, h])?, op.read::<i32>("ids", ids, &[t])?);
    let out = op.write::<T>("out", out, &[t, h])?;
    op.indices("token id", ids, v)?;
    let rows = rows_per_task(h);
    cpu.each(
        out.len(),
        out.chunks_mut((rows * h).max(1)).zip(ids.chunks(rows)),
        #[inline(always)]
        |(out, ids)| {
            for (out, &id) in out.chunks_mut(h).zip(ids) {
                out.copy_from_slice(&table[id as usize * h..][..h]);
            }
        },
    );
    Ok(())
}

/// See [`Ops::embedding_grad`](crate::Ops::embedding_grad).
pub(super) fn embedding_grad<T: Float>(cpu: &Cpu, dtable: ViewMut, dy: View, ids: View) -> Result<()> {
    let op = Op("embedding_grad");
    let ([v, h], [t]) = (op.dims("dtable", dtable.shape())?, op.dims("ids", ids.shape())?);
    let (dy, ids) = (op.read::<T>("dy", dy, &[t, h])?, op.read::<i32>("ids", ids, &[t])?);
    let dtable = op.write::<T>("dtable", dtable, &[v, h])?;
    op.indices("token id", ids, v)?;
    // Tokens grouped by id, in the order of t within a group: one task owns one row of the table.
    let mut order: Vec<usize> = (0..t).collect();
    order.sort_by_key(|&t| ids[t]);
    let mut rest = dtable;
    let mut passed = 0;
    let mut tasks = Vec::new();
    for tokens in order.chunk_by(|&a, &b| ids[a] == ids[b]) {
        let id = ids[tokens[0]] as usize;
        let (row, tail) = std::mem::take(&mut rest)[(id - passed) * h..].split_at_mut(h);
        tasks.push((row, tokens));
        (rest, passed) = (tail, id + 1);
    }
    cpu.each(
        t * h,
        tasks.into_iter(),
        #[inline(always)]
        |(row, tokens)| {
            for &t in tokens {
                accumulate(row, &dy[t * h..][..h]);
            }
        },
    );
    Ok(())
}
