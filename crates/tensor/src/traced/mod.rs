//! [`Traced`]: a backend that notes what is asked of it, and when it was asked and done.
//!
//! It wraps any backend and changes no result. Nothing waits while it records: a mark goes into the backend's order of work before and
//! after what is timed, and the marks are read when the recording ends.

mod cost;
mod ops;

use crate::{Ops, Phase, Result, Stamp};
pub use cost::{Call, Rates};
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// What is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// The phases of a step.
    Phases,
    /// Phases and every operation.
    Operations,
}

/// Hears of every operation that is to be repeated.
type Hear = Box<dyn FnMut(&Call) + Send>;

/// A backend that records when asked to.
pub struct Traced {
    inner: Arc<dyn Ops>,
    /// 0 off, 1 phases, 2 operations, 3 alone: read before anything else, so that what does not record costs next to nothing.
    on: AtomicU8,
    notes: Mutex<Notes>,
}

#[derive(Default)]
struct Notes {
    origin: Option<Mark>,
    phases: Vec<(Phase, Mark)>,
    calls: Vec<(Call, Mark, Mark)>,
    /// Text that names must contain.
    only: String,
    hear: Option<Hear>,
    alone: Vec<(Call, Vec<(Mark, Mark)>)>,
}

/// A moment on both sides.
struct Mark {
    device: Box<dyn Stamp>,
    host: Instant,
}

/// A stretch of time in milliseconds since the recording began.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// Where it starts.
    pub start: f64,
    /// Where it ends.
    pub end: f64,
}

impl Span {
    /// Its length in milliseconds.
    pub fn ms(&self) -> f64 {
        self.end - self.start
    }
}

/// Something that was recorded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timed<T> {
    /// What.
    pub what: T,
    /// When the backend did it.
    pub device: Span,
    /// When the host asked for it.
    pub host: Span,
}

/// What was recorded.
#[derive(Clone, Debug, Default)]
pub struct Recording {
    /// Phases in order; each lasts until the next begins, [`Phase::Between`] and an open last one are left out.
    pub phases: Vec<Timed<Phase>>,
    /// Operations in order.
    pub calls: Vec<Timed<Call>>,
    /// Operations that were repeated, and the milliseconds of one run, shortest first.
    pub alone: Vec<(Call, Vec<f64>)>,
}

/// Blocks of runs that are timed of an operation alone, and runs of a block.
const BLOCKS: usize = 5;
const RUNS: usize = 3;

impl Traced {
    /// Wraps a backend. Records nothing yet.
    pub fn new(inner: Arc<dyn Ops>) -> Traced {
        Traced { inner, on: AtomicU8::new(0), notes: Mutex::default() }
    }

    /// Begins a recording, after waiting for the backend.
    pub fn start(&self, level: Level) -> Result<()> {
        let on = match level {
            Level::Phases => 1,
            Level::Operations => 2,
        };
        self.begin(on, Notes::default())
    }

    /// As [`Traced::start`], of the first call of each shape of operations whose name contains `only`: it is repeated on its own operands,
    /// and `hear` is told before. Overwritten and changed data is no longer what the step would have made.
    pub fn start_alone(&self, only: &str, hear: impl FnMut(&Call) + Send + 'static) -> Result<()> {
        self.begin(3, Notes { only: only.into(), hear: Some(Box::new(hear)), ..Notes::default() })
    }

    fn begin(&self, on: u8, notes: Notes) -> Result<()> {
        self.inner.wait()?;
        let origin = Some(self.mark()?);
        *self.notes() = Notes { origin, ..notes };
        self.on.store(on, Relaxed);
        Ok(())
    }

    /// Ends the recording and reads it. Waits for the backend.
    pub fn finish(&self) -> Result<Recording> {
        self.on.store(0, Relaxed);
        let notes = std::mem::take(&mut *self.notes());
        let Some(origin) = notes.origin else { return Ok(Recording::default()) };
        let span = |a: &Mark, b: &Mark| -> Result<(Span, Span)> {
            let host = |m: &Mark| m.host.duration_since(origin.host).as_secs_f64() * 1e3;
            let device = |m: &Mark| m.device.ms_since(&*origin.device);
            Ok((Span { start: device(a)?, end: device(b)? }, Span { start: host(a), end: host(b) }))
        };
        let mut recording = Recording::default();
        for pair in notes.phases.windows(2).filter(|pair| pair[0].0 != Phase::Between) {
            let (device, host) = span(&pair[0].1, &pair[1].1)?;
            recording.phases.push(Timed { what: pair[0].0, device, host });
        }
        for (what, begin, end) in &notes.calls {
            let (device, host) = span(begin, end)?;
            recording.calls.push(Timed { what: *what, device, host });
        }
        for (call, blocks) in &notes.alone {
            let mut ms = blocks.iter().map(|(a, b)| Ok(span(a, b)?.0.ms() / RUNS as f64)).collect::<Result<Vec<_>>>()?;
            ms.sort_by(f64::total_cmp);
            recording.alone.push((*call, ms));
        }
        Ok(recording)
    }

    fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mark(&self) -> Result<Mark> {
        Ok(Mark { host: Instant::now(), device: self.inner.stamp()? })
    }

    fn note_phase(&self, phase: Phase) -> Result<()> {
        if self.on.load(Relaxed) > 0 {
            let mark = self.mark()?;
            self.notes().phases.push((phase, mark));
        }
        self.inner.phase(phase)
    }

    /// Runs an operation and notes it.
    fn run<R>(&self, call: Call, mut operation: impl FnMut(&dyn Ops) -> Result<R>) -> Result<R> {
        let on = self.on.load(Relaxed);
        if on < 2 {
            return operation(&*self.inner);
        }
        let begin = self.mark()?;
        let result = operation(&*self.inner)?;
        let end = self.mark()?;
        if on == 3 && self.is_new(&call) {
            if let Some(hear) = &mut self.notes().hear {
                hear(&call);
            }
            let mut blocks = Vec::with_capacity(BLOCKS);
            for _ in 0..BLOCKS {
                let begin = self.mark()?;
                for _ in 0..RUNS {
                    operation(&*self.inner)?;
                }
                blocks.push((begin, self.mark()?));
            }
            self.notes().alone.push((call, blocks));
        }
        if on == 2 {
            self.notes().calls.push((call, begin, end));
        }
        Ok(result)
    }

    fn is_new(&self, call: &Call) -> bool {
        let notes = self.notes();
        call.name.contains(&notes.only) && !notes.alone.iter().any(|(known, _)| known == call)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, View, cpu::Cpu};
    use std::collections::BTreeSet;

    fn methods(source: &str) -> BTreeSet<&str> {
        source.lines().filter_map(|l| l.strip_prefix("    fn ")?.split(['(', '<']).next()).collect()
    }

    /// A method with a default that is not forwarded would run as what its default is made of.
    #[test]
    fn every_method_of_the_contract_is_forwarded() {
        let (contract, forwarded) = (methods(include_str!("../ops.rs")), methods(include_str!("ops.rs")));
        assert!(contract.len() > 40 && contract.contains("gemm"));
        assert_eq!(contract, forwarded);
    }

    #[test]
    fn only_what_was_asked_for_is_repeated_and_each_shape_once() {
        let traced = Traced::new(Arc::new(Cpu::new(1)));
        let (a, mut out) = (vec![1f32; 12], traced.zeros(DType::F32, &[12]).unwrap());
        let (sender, heard) = std::sync::mpsc::channel();
        traced.start_alone("add", move |call| sender.send(call.shape()).unwrap()).unwrap();
        for rows in [3, 3, 4] {
            traced.add_assign(out.view_mut().slice_rows(0..rows), View::host(&a[..rows], &[rows])).unwrap();
            traced.scale(out.view_mut(), 1.0).unwrap();
        }
        let recording = traced.finish().unwrap();
        let shapes: Vec<String> = recording.alone.iter().map(|(call, _)| format!("{} {}", call.name, call.shape())).collect();
        assert_eq!(shapes, ["add_assign 3 float32", "add_assign 4 float32"]);
        assert_eq!(heard.iter().collect::<Vec<_>>(), ["3 float32", "4 float32"]);
        assert!(recording.calls.is_empty() && recording.alone.iter().all(|(_, ms)| ms.len() == BLOCKS));
        // Each new shape ran once and then in blocks; the known one only once.
        let runs = (1 + BLOCKS * RUNS) as f32;
        assert_eq!(out.as_slice::<f32>().unwrap()[..5], [2.0 * runs + 1.0, 2.0 * runs + 1.0, 2.0 * runs + 1.0, runs, 0.0]);
    }

    /// Without a recording nothing is kept, and one that was never begun is empty.
    #[test]
    fn nothing_is_noted_unasked() {
        let traced = Traced::new(Arc::new(Cpu::new(1)));
        traced.phase(Phase::Forward).unwrap();
        traced.zeros(DType::F32, &[4]).unwrap();
        let recording = traced.finish().unwrap();
        assert!(recording.calls.is_empty() && recording.phases.is_empty());
    }
}
