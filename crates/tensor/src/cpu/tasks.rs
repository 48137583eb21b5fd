//! How an operation is cut into tasks and run.
//!
//! Task sizes follow from shapes alone, and partial sums are combined in task order: results do not depend on the
//! number of threads.

use super::{Cpu, float::Float};
use rayon::prelude::*;
use std::sync::{Mutex, PoisonError};

/// Elements below which handing work to other threads costs more than it saves.
const SERIAL_ELEMENTS: usize = 16 * 1024;
/// Elements one task of a memory-bound operation covers.
const TASK_ELEMENTS: usize = 16 * 1024;

/// Runs one task, compiled for AVX2 where the processor has it. `f` must be inlined all the way down, so that its loops
/// are compiled here; wider vectors would only double the code, since these loops wait for memory.
#[inline(never)]
fn run<I, R>(f: &impl Fn(I) -> R, task: I) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        struct Call<'a, F, I>(&'a F, I);
        impl<I, R, F: Fn(I) -> R> pulp::NullaryFnOnce for Call<'_, F, I> {
            type Output = R;
            #[inline(always)]
            fn call(self) -> R {
                (self.0)(self.1)
            }
        }
        if let Some(avx2) = pulp::x86::V3::try_new() {
            return pulp::Simd::vectorize(avx2, Call(f, task));
        }
    }
    f(task)
}

/// Rows of `row_len` elements that one task takes.
pub fn rows_per_task(row_len: usize) -> usize {
    (TASK_ELEMENTS / row_len.max(1)).max(1)
}

/// Cuts `data` into consecutive pieces of the given lengths, which must not exceed it together.
pub fn split_lengths<T>(mut data: &mut [T], lengths: impl IntoIterator<Item = usize>) -> Vec<&mut [T]> {
    lengths
        .into_iter()
        .map(|n| {
            let (head, rest) = std::mem::take(&mut data).split_at_mut(n);
            data = rest;
            head
        })
        .collect()
}

impl Cpu {
    /// Runs `f` on every task, on several threads when `elements` touched in all are worth it.
    #[inline(always)]
    pub(super) fn each<I: Send>(&self, elements: usize, tasks: impl Iterator<Item = I>, f: impl Fn(I) + Sync) {
        let tasks: Vec<Mutex<Option<I>>> = tasks.map(|t| Mutex::new(Some(t))).collect();
        let job = |i: usize| {
            let task = tasks[i].lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(task) = task {
                run(&f, task);
            }
        };
        self.run_jobs(elements, tasks.len(), &job);
    }

    /// As `each`, keeping the results in task order.
    #[inline(always)]
    pub(super) fn map<I: Send, R: Send>(&self, elements: usize, tasks: impl Iterator<Item = I>, f: impl Fn(I) -> R + Sync) -> Vec<R> {
        let tasks: Vec<I> = tasks.collect();
        let mut results: Vec<Option<R>> = tasks.iter().map(|_| None).collect();
        let pairs = tasks.into_iter().zip(&mut results);
        self.each(
            elements,
            pairs,
            #[inline(always)]
            |(task, result)| *result = Some(f(task)),
        );
        results.into_iter().flatten().collect()
    }

    /// Runs `job(0..jobs)`. Not generic, so that the scheduler is compiled once and not for every operation.
    fn run_jobs(&self, elements: usize, jobs: usize, job: &(dyn Fn(usize) + Sync)) {
        match &self.pool {
            Some(pool) if elements >= SERIAL_ELEMENTS && jobs > 1 => {
                pool.install(|| (0..jobs).into_par_iter().with_max_len(1).for_each(job));
            }
            _ => (0..jobs).for_each(job),
        }
    }

    /// `out += ` the sum over row blocks of what `f(first row, end row, partial)` adds to a zeroed partial of `out`'s length.
    #[inline(always)]
    pub(super) fn sum_rows<T: Float>(&self, out: &mut [T], rows: usize, row_len: usize, f: impl Fn(usize, usize, &mut [T]) + Sync) {
        let width = out.len();
        let step = rows_per_task(row_len).max(16);
        let partials = self.map(
            rows * row_len,
            (0..rows).step_by(step),
            #[inline(always)]
            |first| {
                let mut partial = vec![T::ZERO; width];
                f(first, (first + step).min(rows), &mut partial);
                partial
            },
        );
        for partial in partials {
            for (o, p) in out.iter_mut().zip(partial) {
                *o += p;
            }
        }
    }
}
