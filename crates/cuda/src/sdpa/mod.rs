//! bf16 attention by cuDNN: forward and backward of packed sequences, with plans kept by bucket of sizes.
#![allow(unsafe_code)] // calls into cuDNN

mod graph;
mod pattern;

pub use graph::{Plan, Target};
pub use pattern::Shape;

use crate::device::Device;
use crate::kernels::{Grid, Variant, args};
use crate::sys::cudnn::{Cudnn, cudnnHandle_t};
use crate::{Cuda, Error, Result};
use pattern::id;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};
use temper_tensor::AttentionSizes as Sizes;

/// Oldest version whose packed backward was checked for head sizes up to 128.
const OLDEST: usize = 91400;
/// Oldest version whose packed backward is right at head size 256: 9.14 returns wrong dQ and NaN dK, dV there, with no error.
const OLDEST_FOR_256: usize = 91900;
/// Most dense plans of a run: each is for one length only, and compiling it stops a step for tenths of a second.
const MOST_DENSE: usize = 4;
/// Lengths that get a dense plan are multiples of this, so that lone documents of any length do not use up the plans.
const DENSE_STEP: usize = 128;

/// Device addresses of a call: tensors as in `Ops::attention` and `Ops::attention_grad`.
#[derive(Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct Addresses {
    pub q: u64,
    pub k: u64,
    pub v: u64,
    pub o: u64,
    pub lse: u64,
    pub dout: u64,
    pub dq: u64,
    pub dk: u64,
    pub dv: u64,
    /// Sequence starts, i32 [B+1].
    pub cu: u64,
}

/// cuDNN and its attention plans.
pub struct Sdpa {
    device: Arc<Device>,
    lib: Arc<Cudnn>,
    version: usize,
    state: Mutex<State>,
}

struct State {
    target: Target,
    handle: cudnnHandle_t,
    forward: HashMap<Shape, Plan>,
    backward: HashMap<Shape, Plan>,
}
// SAFETY: the handle is used under the lock only.
unsafe impl Send for State {}

impl Sdpa {
    /// Opens the library; refuses versions that were not checked.
    pub fn new(device: Arc<Device>, lib: Cudnn) -> Result<Sdpa> {
        device.bind()?;
        // SAFETY: plain query.
        let version = unsafe { (lib.cudnnGetVersion)() };
        if version < OLDEST {
            return Err(Error::Unsupported(format!(
                "cuDNN {} is older than {}; {}",
                dotted(version),
                dotted(OLDEST),
                crate::sys::cudnn::SPEC.remedy
            )));
        }
        let mut handle: cudnnHandle_t = std::ptr::null_mut();
        // SAFETY: destroyed in `drop`.
        lib.check(unsafe { (lib.cudnnCreate)(&mut handle) }, "create handle")?;
        lib.check(unsafe { (lib.cudnnSetStream)(handle, device.stream().cast()) }, "set stream")?;
        if version < OLDEST_FOR_256 {
            tracing::warn!(
                cudnn = dotted(version),
                "its backward is wrong at head size 256: our own kernels serve there, about fifty times slower"
            );
        }
        let state = State { target: Target::Handle(handle), handle, forward: HashMap::new(), backward: HashMap::new() };
        Ok(Sdpa { device, lib: Arc::new(lib), version, state: Mutex::new(state) })
    }

    /// Version, for example `9.19.0`.
    pub fn version_text(&self) -> String {
        dotted(self.version)
    }

    /// Where the library was found.
    pub fn path(&self) -> &str {
        &self.lib.found.path
    }

    /// Whether cuDNN is used for these sizes.
    pub fn serves(&self, z: Sizes) -> bool {
        match z.head {
            64 | 96 | 128 => true,
            256 => self.version >= OLDEST_FOR_256,
            _ => false,
        }
    }

    /// Compiles the plans of calls to come, in a thread of its own: a call that comes before a plan is done waits for it. What fails here
    /// fails again, with its error, in the call.
    pub fn prepare(self: &Arc<Self>, calls: Vec<Sizes>, backward: bool) {
        let sdpa = self.clone();
        let work = move || -> Result<()> {
            sdpa.device.bind()?;
            for sizes in calls {
                let mut s = sdpa.state.lock().unwrap_or_else(PoisonError::into_inner);
                let shape = s.shape(sizes);
                s.plans(&sdpa.lib, shape, backward)?;
            }
            Ok(())
        };
        let report = move || {
            if let Err(e) = work() {
                tracing::debug!(error = %e, "an attention plan was not made in advance");
            }
        };
        if let Err(e) = std::thread::Builder::new().name("attention-plans".into()).spawn(report) {
            tracing::debug!(error = %e, "no thread for attention plans: the first step makes them");
        }
    }

    /// Enqueues the forward pass.
    pub fn forward(&self, c: &Cuda, z: Sizes, at: Addresses, scale: f32) -> Result<()> {
        self.device.bind()?;
        let mut s = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let shape = s.shape(z);
        let batch = Batch::new(c, z, shape, at.cu)?;
        let handle = s.handle;
        let (plan, _) = s.plans(&self.lib, shape, false)?;
        let workspace = c.scratch(plan.workspace)?;
        let scalars = scalars(scale);
        // SAFETY: the launcher checked all shapes; the scalars outlive the call.
        unsafe { plan.execute(handle, &batch.bind(at, &scalars), workspace.address())? };
        batch.statistics_out(c, at.lse)
    }

    /// Enqueues the backward pass.
    pub fn backward(&self, c: &Cuda, z: Sizes, at: Addresses, scale: f32) -> Result<()> {
        self.device.bind()?;
        let mut s = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let shape = s.shape(z);
        let batch = Batch::new(c, z, shape, at.cu)?;
        batch.statistics_in(c, at.lse)?;
        let handle = s.handle;
        let (_, plan) = s.plans(&self.lib, shape, true)?;
        let plan = plan.ok_or_else(|| Error::Unsupported("cuDNN has no backward plan".into()))?;
        let workspace = c.scratch(plan.workspace)?;
        let (rows, width) = (z.tokens * z.q_heads, z.head);
        let grouped = if z.q_heads == z.k_heads { 0 } else { rows * width * 2 };
        let pieces = [(id::DELTA, rows * 4), (id::DQ_SUM, rows * width * 4), (id::DK_HEADS, grouped), (id::DV_HEADS, grouped)];
        let scratch = c.scratch(pieces.iter().map(|p| p.1.next_multiple_of(256)).sum())?;
        let scalars = scalars(scale);
        let mut all = batch.bind(at, &scalars);
        let pointer = |x: u64| x as *mut c_void;
        all.extend([(id::D_O, pointer(at.dout)), (id::DQ, pointer(at.dq)), (id::DK, pointer(at.dk)), (id::DV, pointer(at.dv))]);
        all.push((id::ONE, (&raw const scalars[3]).cast_mut().cast()));
        let mut next = scratch.address();
        for (piece, bytes) in pieces.into_iter().filter(|p| p.1 > 0) {
            all.push((piece, pointer(next)));
            next += bytes.next_multiple_of(256) as u64;
        }
        // SAFETY: as in `forward`; the scratch pieces have the sizes that the pattern needs.
        unsafe { plan.execute(handle, &all, workspace.address()) }
    }
}

impl Drop for Sdpa {
    fn drop(&mut self) {
        let _ = self.device.synchronize();
        let s = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        s.forward.clear();
        s.backward.clear();
        // SAFETY: no plan is left.
        unsafe { (self.lib.cudnnDestroy)(s.handle) };
    }
}

impl State {
    /// The plan for a batch: dense when all sequences have one length, else by bucket. Packed plans accept fewer and shorter
    /// sequences than they are compiled for, at almost no cost, so sizes are rounded up to powers of four: few plans in a run.
    fn shape(&self, z: Sizes) -> Shape {
        let heads = Shape { b: 0, s: 0, hq: z.q_heads as i64, hk: z.k_heads as i64, d: z.head as i64, dense: false };
        if z.longest * z.sequences == z.tokens && z.longest.is_multiple_of(DENSE_STEP) {
            let exact = Shape { b: z.sequences as i64, s: z.longest as i64, dense: true, ..heads };
            if self.forward.contains_key(&exact) || self.forward.keys().filter(|k| k.dense).count() < MOST_DENSE {
                return exact;
            }
        }
        Shape { b: power_of_four(z.sequences) as i64, s: power_of_four(z.longest.div_ceil(128)) as i64 * 128, ..heads }
    }

    fn plans(&mut self, lib: &Arc<Cudnn>, shape: Shape, backward: bool) -> Result<(&Plan, Option<&Plan>)> {
        if !self.forward.contains_key(&shape) {
            self.forward.insert(shape, shape.forward(lib)?.plan(&self.target)?);
        }
        if backward && !self.backward.contains_key(&shape) {
            self.backward.insert(shape, shape.backward(lib)?.plan(&self.target)?);
        }
        Ok((&self.forward[&shape], self.backward.get(&shape)))
    }
}

/// The next power of four, at least 1.
fn power_of_four(n: usize) -> usize {
    let p = n.next_power_of_two();
    if p.trailing_zeros().is_multiple_of(2) { p } else { 2 * p }
}

/// Scale, causal fill, padding fill, one.
fn scalars(scale: f32) -> [f32; 4] {
    [scale, f32::NEG_INFINITY, f32::NEG_INFINITY, 1.0]
}

/// What a plan needs beside the tensors, in device memory. Packed: lengths and element offsets of the sequences, made from their
/// starts. Dense: the statistics in the plan's order [b, hq, s], where ours is [tokens, hq].
struct Batch {
    block: crate::arena::Block,
    shape: Shape,
}

impl Batch {
    fn new(c: &Cuda, z: Sizes, shape: Shape, cu: u64) -> Result<Batch> {
        if shape.dense {
            return Ok(Batch { block: c.scratch(z.tokens * z.q_heads * 4)?, shape });
        }
        let b = shape.b as usize;
        let l = Batch { block: c.scratch(3 * (b + 1) * 8 + b * 4)?, shape };
        let (qd, kd) = (z.q_heads * z.head, z.k_heads * z.head);
        let a = args![l.offsets(0), l.offsets(1), l.offsets(2), l.lengths(), cu, z.sequences, b, qd, kd, z.q_heads];
        c.kernels.launch("sdpa.cu", Variant::PLAIN, "sdpa_lengths", Grid::line((b + 1).div_ceil(128), 128), a)?;
        Ok(l)
    }

    fn offsets(&self, i: usize) -> u64 {
        self.block.address() + (i * (self.shape.b as usize + 1) * 8) as u64
    }

    fn lengths(&self) -> u64 {
        self.offsets(3)
    }

    /// Brings the statistics into the plan's order (backward).
    fn statistics_in(&self, c: &Cuda, lse: u64) -> Result<()> {
        self.transpose(c, self.block.address(), lse, self.shape.s, self.shape.hq)
    }

    /// Brings the statistics into our order (forward).
    fn statistics_out(&self, c: &Cuda, lse: u64) -> Result<()> {
        self.transpose(c, lse, self.block.address(), self.shape.hq, self.shape.s)
    }

    fn transpose(&self, c: &Cuda, to: u64, from: u64, rows: i64, cols: i64) -> Result<()> {
        if !self.shape.dense {
            return Ok(());
        }
        let n = (self.shape.b * rows * cols) as usize;
        let grid = Grid::line(n.div_ceil(256), 256);
        c.kernels.launch("sdpa.cu", Variant::PLAIN, "sdpa_transpose", grid, args![to, from, n, rows, cols])
    }

    fn bind(&self, at: Addresses, scalars: &[f32; 4]) -> Vec<(i64, *mut c_void)> {
        let p = |x: u64| x as *mut c_void;
        let h = |i: usize| (&raw const scalars[i]).cast_mut().cast();
        let stats = if self.shape.dense { self.block.address() } else { at.lse };
        let mut all = vec![(id::Q, p(at.q)), (id::K, p(at.k)), (id::V, p(at.v)), (id::O, p(at.o)), (id::STATS, p(stats))];
        all.extend([(id::SCALE, h(0)), (id::NEG_CAUSAL, h(1))]);
        if !self.shape.dense {
            all.extend([(id::NEG_PADDING, h(2)), (id::LENGTHS_Q, p(self.lengths())), (id::LENGTHS_K, p(self.lengths()))]);
            let offsets = [id::OFFSETS_Q, id::OFFSETS_K, id::OFFSETS_STATS];
            all.extend(offsets.into_iter().enumerate().map(|(i, id)| (id, p(self.offsets(i)))));
        }
        all
    }
}

/// 91900 as `9.19.0`.
fn dotted(version: usize) -> String {
    format!("{}.{}.{}", version / 10000, version / 100 % 100, version % 100)
}
