//! How fast a group exchanges, counted as nccl-tests counts it (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md).
//!
//! The algorithm's bandwidth is bytes over time; the bus bandwidth multiplies it so that it can be held against the hardware's,
//! whatever the number of ranks. Bytes are those of the larger buffer of a rank. Every result is checked before it is timed.
//!
//! Legend: n ranks of the group.

use crate::{Comm, Error, Operation, Reduce, Result};
use std::time::{Duration, Instant};
use temper_tensor::{DType, Ops, Tensor, View};

/// The operations measured, in the order of tables. [`Operation::Send`] stands for messages from every even rank to the next.
pub const OPERATIONS: [Operation; 6] =
    [Operation::AllReduce, Operation::AllGather, Operation::ReduceScatter, Operation::AllToAll, Operation::Broadcast, Operation::Send];

/// Repetitions of which the mean is taken, at most.
const REPEAT: usize = 20;
/// A measurement ends with the repetition in which this has passed.
const ENOUGH: Duration = Duration::from_millis(500);
/// Elements that are checked at the start, in the middle and at the end of each rank's part.
const WINDOW: usize = 256;

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// Bytes of the larger buffer of a rank.
    pub bytes: usize,
    /// Mean time of an operation on the slowest rank, seconds.
    pub seconds: f64,
    /// Repetitions.
    pub repeated: usize,
    /// Bytes a second.
    pub algorithm: f64,
    /// Bytes a second on the slowest link.
    pub bus: f64,
}

/// Bus bandwidth over the algorithm's.
pub fn bus_factor(operation: Operation, n: usize) -> f64 {
    let n = n as f64;
    match operation {
        Operation::AllReduce => 2.0 * (n - 1.0) / n,
        Operation::AllGather | Operation::ReduceScatter | Operation::AllToAll => (n - 1.0) / n,
        Operation::Broadcast | Operation::Send | Operation::Recv | Operation::Barrier => 1.0,
    }
}

/// Bytes that all buffers of a measurement take, for `bytes` of the larger one.
pub fn memory(operation: Operation, n: usize, bytes: usize) -> usize {
    match operation {
        Operation::AllGather | Operation::ReduceScatter => bytes + bytes / n.max(1),
        Operation::AllToAll => 2 * bytes,
        _ => bytes,
    }
}

/// Checks and times `operation` on buffers of about `bytes` bytes of f32, rounded down to whole parts for n ranks. All ranks of
/// `world`, in which the groups `comm` lie, measure at the same time; the slowest counts.
///
/// # Errors
/// When the exchange fails, or a result is wrong.
pub fn measure(world: &dyn Comm, comm: &dyn Comm, ops: &dyn Ops, operation: Operation, bytes: usize) -> Result<Measured> {
    let n = comm.size();
    let part = (bytes / size_of::<f32>() / n).max(1);
    let mut buffers = Buffers::new(ops, comm, operation, part)?;
    buffers.check(ops, comm)?;
    let once = |buffers: &mut Buffers, times: usize| -> Result<f64> {
        world.barrier()?;
        let begun = Instant::now();
        for _ in 0..times {
            buffers.run(comm)?;
        }
        ops.wait().map_err(backend)?;
        slowest(world, ops, begun.elapsed().as_secs_f64() / times as f64)
    };
    let warm = once(&mut buffers, 2)?;
    let repeated = ((ENOUGH.as_secs_f64() / warm) as usize).clamp(1, REPEAT);
    let seconds = once(&mut buffers, repeated)?;
    let bytes = part * n * size_of::<f32>();
    let algorithm = bytes as f64 / seconds;
    Ok(Measured { bytes, seconds, repeated, algorithm, bus: algorithm * bus_factor(operation, n) })
}

/// The largest `x` of all ranks, rounded to f32.
pub fn slowest(world: &dyn Comm, ops: &dyn Ops, x: f64) -> Result<f64> {
    let own = [x as f32];
    let mut t = ops.from_host(View::host(&own, &[1])).map_err(backend)?;
    world.all_reduce(t.view_mut(), Reduce::Max)?.wait()?;
    let t = ops.to_host(t.view()).map_err(backend)?;
    Ok(t.as_slice::<f32>().and_then(|x| x.first()).map_or(x, |x| f64::from(*x)))
}

fn backend(e: temper_tensor::Error) -> Error {
    Error::Transport(e.to_string())
}

/// What one operation works on.
struct Buffers {
    operation: Operation,
    /// Elements of a rank's part.
    part: usize,
    /// The operand; the result too, where the operation is in place.
    x: Tensor,
    out: Option<Tensor>,
}

/// Element `i` of rank `rank`'s operand: whole numbers, whose sums are exact.
fn value(rank: usize, i: usize) -> f32 {
    ((rank + 1) * (1 + i % 13)) as f32
}

/// The stretches that are checked of `len` elements.
fn windows(len: usize) -> [(usize, usize); 3] {
    let size = WINDOW.min(len);
    [(0, size), ((len - size) / 2, size), (len - size, size)]
}

impl Buffers {
    fn new(ops: &dyn Ops, comm: &dyn Comm, operation: Operation, part: usize) -> Result<Buffers> {
        let n = comm.size();
        let (len, out) = match operation {
            Operation::AllGather => (part, Some(part * n)),
            Operation::ReduceScatter => (part * n, Some(part)),
            Operation::AllToAll => (part * n, Some(part * n)),
            _ => (part * n, None),
        };
        let zeros = |len: usize| ops.zeros(DType::F32, &[len]).map_err(backend);
        let mut buffers = Buffers { operation, part, x: zeros(len)?, out: out.map(zeros).transpose()? };
        for at in (0..len).step_by(part) {
            for (start, size) in windows(part) {
                let values: Vec<f32> = (at + start..at + start + size).map(|i| value(comm.rank(), i)).collect();
                let values = ops.from_host(View::host(&values, &[size])).map_err(backend)?;
                let to = buffers.x.view_mut().slice_rows(at + start..at + start + size);
                ops.copy(to, values.view()).map_err(backend)?;
            }
        }
        Ok(buffers)
    }

    /// Enqueues the operation once, and what comes next behind it.
    fn run(&mut self, comm: &dyn Comm) -> Result<()> {
        let (n, rank) = (comm.size(), comm.rank());
        let x = &mut self.x;
        let pending = match (self.operation, &mut self.out) {
            (Operation::AllReduce, _) => comm.all_reduce(x.view_mut(), Reduce::Sum)?,
            (Operation::AllGather, Some(out)) => comm.all_gather(out.view_mut(), x.view())?,
            (Operation::ReduceScatter, Some(out)) => comm.reduce_scatter(out.view_mut(), x.view())?,
            (Operation::AllToAll, Some(out)) => {
                let rows = vec![self.part; n];
                comm.all_to_all(out.view_mut(), &rows, x.view(), &rows)?
            }
            (Operation::Broadcast, _) => comm.broadcast(x.view_mut(), 0)?,
            (Operation::Send, _) if rank % 2 == 1 => comm.recv(x.view_mut(), rank - 1)?,
            (Operation::Send, _) if rank + 1 < n => comm.send(x.view(), rank + 1)?,
            _ => return Ok(()),
        };
        pending.wait()
    }

    /// Runs the operation once and looks at its result.
    fn check(&mut self, ops: &dyn Ops, comm: &dyn Comm) -> Result<()> {
        self.run(comm)?;
        let (n, rank, part) = (comm.size(), comm.rank(), self.part);
        let sum = |i: usize| (0..n).map(|r| value(r, i)).sum::<f32>();
        let want = |i: usize| match self.operation {
            Operation::AllReduce => sum(i),
            Operation::AllGather => value(i / part, i % part),
            Operation::ReduceScatter => sum(rank * part + i),
            Operation::AllToAll => value(i / part, rank * part + i % part),
            Operation::Broadcast => value(0, i),
            _ => value(if rank % 2 == 1 { rank - 1 } else { rank }, i),
        };
        let result = self.out.as_ref().unwrap_or(&self.x).view();
        for at in (0..result.rows()).step_by(part) {
            for (start, size) in windows(part) {
                let range = at + start..at + start + size;
                let got = ops.to_host(result.slice_rows(range.clone())).map_err(backend)?;
                let got = got.as_slice::<f32>().unwrap_or_default();
                if let Some((i, got)) = range.zip(got).find(|(i, got)| want(*i).to_bits() != got.to_bits()) {
                    let place = format!("{} of {n} ranks, {} elements each", self.operation.name(), self.x.numel());
                    let what = format!("wrong result: element {i} is {got} on rank {rank}, not {}", want(i));
                    return Err(Error::Call { place, what });
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{World, threads};
    use temper_tensor::cpu::Cpu;

    /// The factors of nccl-tests for two and eight ranks.
    #[test]
    fn bus_bandwidth_is_that_of_nccl_tests() {
        for (operation, two, eight) in [
            (Operation::AllReduce, 1.0, 1.75),
            (Operation::AllGather, 0.5, 0.875),
            (Operation::ReduceScatter, 0.5, 0.875),
            (Operation::AllToAll, 0.5, 0.875),
            (Operation::Broadcast, 1.0, 1.0),
            (Operation::Send, 1.0, 1.0),
        ] {
            assert_eq!((bus_factor(operation, 2), bus_factor(operation, 8)), (two, eight), "{}", operation.name());
        }
    }

    #[test]
    fn every_operation_is_measured_and_its_result_seen() {
        let worlds = threads(3, Duration::from_secs(20));
        std::thread::scope(|scope| {
            for world in worlds {
                scope.spawn(move || {
                    let comm = world.group("all", &[0, 1, 2]).unwrap();
                    for operation in OPERATIONS {
                        for bytes in [4, 4096, 100_000] {
                            let m = measure(&*comm, &*comm, &Cpu::new(1), operation, bytes).unwrap();
                            assert!(m.bytes >= 12 && m.bytes <= bytes.max(12) && m.seconds > 0.0, "{m:?}");
                            assert!((m.bus / m.algorithm / bus_factor(operation, 3) - 1.0).abs() < 1e-12);
                        }
                    }
                });
            }
        });
    }
}
