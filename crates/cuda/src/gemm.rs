//! Matrix products by cuBLASLt, with one plan a shape.
//!
//! cuBLASLt is column-major, so the row-major `C[m, n] = op(A) op(B)` is computed as `C^T[n, m] = op(B)^T op(A)^T`: its
//! first operand is our `b`. Products of bf16 accumulate in f32; f32 products use full f32 (no TF32).
#![allow(unsafe_code)] // calls into cuBLASLt

use crate::Result;
use crate::arena::{Arena, Block};
use crate::device::Device;
use crate::sys::cublaslt::*;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};
use temper_tensor::{DType, Purpose};

/// Workspace of all products; they run one after another on the one stream.
const WORKSPACE: usize = 64 << 20;
/// Products smaller than this many FLOPs are not timed.
const WORTH_TIMING: f64 = 1e9;
/// Algorithms that are timed for a shape.
const CANDIDATES: usize = 6;
/// How often each of them is timed.
const ROUNDS: usize = 4;

/// A product.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Product {
    /// Rows of C.
    pub m: usize,
    /// Columns of C.
    pub n: usize,
    /// Depth.
    pub k: usize,
    /// `a` is stored [k, m].
    pub a_transposed: bool,
    /// `b` is stored [n, k].
    pub b_transposed: bool,
    /// Type of `a` and `b`: F32 or BF16.
    pub operands: DType,
    /// Type of `c`.
    pub result: DType,
    /// Add to C instead of overwriting it.
    pub accumulate: bool,
}

/// Addresses of `a`, `b` and `c`.
#[derive(Clone, Copy)]
pub struct Operands {
    /// First operand.
    pub a: u64,
    /// Second operand.
    pub b: u64,
    /// Result.
    pub c: u64,
}

impl Operands {
    /// log2 of the bytes all addresses are multiples of, at most 256.
    fn alignment(&self) -> u32 {
        (self.a | self.b | self.c | 256).trailing_zeros()
    }
}

/// cuBLASLt and its plans.
pub struct Gemm {
    device: Arc<Device>,
    lib: CublasLt,
    handle: cublasLtHandle_t,
    workspace: Block,
    arena: Arc<Arena>,
    plans: Mutex<HashMap<(Product, u32), Plan>>,
}

// SAFETY: the handles are used under the lock of `plans`.
unsafe impl Send for Gemm {}
unsafe impl Sync for Gemm {}

struct Plan {
    desc: cublasLtMatmulDesc_t,
    layouts: [cublasLtMatrixLayout_t; 3],
    algo: cublasLtMatmulAlgo_t,
}

impl Gemm {
    /// Opens the library and takes the workspace.
    pub fn new(device: Arc<Device>, lib: CublasLt, arena: &Arc<Arena>) -> Result<Gemm> {
        device.bind()?;
        let mut handle: cublasLtHandle_t = std::ptr::null_mut();
        // SAFETY: destroyed in `drop`.
        lib.check(unsafe { (lib.cublasLtCreate)(&mut handle) }, "cublasLtCreate")?;
        let workspace = arena.take(WORKSPACE, Purpose::Workspace)?;
        Ok(Gemm { device, lib, handle, workspace, arena: arena.clone(), plans: Mutex::default() })
    }

    /// Version number, for example 130100.
    pub fn version(&self) -> usize {
        // SAFETY: plain query.
        unsafe { (self.lib.cublasLtGetVersion)() }
    }

    /// Where the library was found.
    pub fn path(&self) -> &str {
        &self.lib.found.path
    }

    /// Enqueues a product. With `tune`, the first call for a shape times a few algorithms (and waits for the device);
    /// without, cuBLASLt's first proposal is taken, which is the same in every run.
    pub fn run(&self, product: Product, at: Operands, tune: bool) -> Result<()> {
        self.device.bind()?;
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (product, at.alignment());
        if let Some(plan) = plans.get(&key) {
            return self.execute(plan, &plan.algo, product.accumulate, at);
        }
        let plan = self.plan(product, at, tune)?;
        let done = self.execute(&plan, &plan.algo, product.accumulate, at);
        plans.insert(key, plan);
        done
    }

    fn execute(&self, plan: &Plan, algo: &cublasLtMatmulAlgo_t, accumulate: bool, at: Operands) -> Result<()> {
        let (alpha, beta) = (1f32, if accumulate { 1f32 } else { 0f32 });
        let [lb, la, lc] = plan.layouts;
        // SAFETY: the caller checked the operands' shapes; scalars are read during the call.
        let status = unsafe {
            (self.lib.cublasLtMatmul)(
                self.handle,
                plan.desc,
                (&raw const alpha).cast(),
                at.b as *const c_void,
                lb,
                at.a as *const c_void,
                la,
                (&raw const beta).cast(),
                at.c as *const c_void,
                lc,
                at.c as *mut c_void,
                lc,
                algo,
                self.workspace.address() as *mut c_void,
                WORKSPACE,
                self.device.stream().cast(),
            )
        };
        self.lib.check(status, "cublasLtMatmul")
    }

    fn plan(&self, p: Product, at: Operands, tune: bool) -> Result<Plan> {
        let mut plan = Plan { desc: std::ptr::null_mut(), layouts: [std::ptr::null_mut(); 3], algo: cublasLtMatmulAlgo_t { data: [0; 8] } };
        let made = self.describe(&mut plan, p).and_then(|()| self.choose(&mut plan, p, at, tune));
        match made {
            Ok(()) => Ok(plan),
            Err(e) => {
                self.destroy(&plan);
                Err(e)
            }
        }
    }

    /// Fills in descriptor and layouts.
    fn describe(&self, plan: &mut Plan, p: Product) -> Result<()> {
        use cublasLtMatmulDescAttributes_t::{CUBLASLT_MATMUL_DESC_TRANSA as TA, CUBLASLT_MATMUL_DESC_TRANSB as TB};
        let l = &self.lib;
        let compute = cublasComputeType_t::CUBLAS_COMPUTE_32F;
        // SAFETY: everything created is destroyed by `destroy`.
        unsafe {
            let created = (l.cublasLtMatmulDescCreate)(&mut plan.desc, compute, cudaDataType_t::CUDA_R_32F);
            l.check(created, "cublasLtMatmulDescCreate")?;
            for (attribute, transposed) in [(TA, p.b_transposed), (TB, p.a_transposed)] {
                let t = if transposed { cublasOperation_t::CUBLAS_OP_T } else { cublasOperation_t::CUBLAS_OP_N };
                let set = (l.cublasLtMatmulDescSetAttribute)(plan.desc, attribute, (&raw const t).cast(), size_of_val(&t));
                l.check(set, "cublasLtMatmulDescSetAttribute")?;
            }
            let b = if p.b_transposed { (p.k, p.n) } else { (p.n, p.k) };
            let a = if p.a_transposed { (p.m, p.k) } else { (p.k, p.m) };
            for (i, ((rows, cols), dtype)) in [(b, p.operands), (a, p.operands), ((p.n, p.m), p.result)].into_iter().enumerate() {
                let t = if dtype == DType::BF16 { cudaDataType_t::CUDA_R_16BF } else { cudaDataType_t::CUDA_R_32F };
                let made = (l.cublasLtMatrixLayoutCreate)(&mut plan.layouts[i], t, rows as u64, cols as u64, rows as i64);
                l.check(made, "cublasLtMatrixLayoutCreate")?;
            }
        }
        Ok(())
    }

    /// Takes the first proposal, or the fastest of a few.
    fn choose(&self, plan: &mut Plan, p: Product, at: Operands, tune: bool) -> Result<()> {
        let proposals = self.proposals(plan, p, at)?;
        plan.algo = proposals[0].algo;
        if !tune || proposals.len() == 1 || 2.0 * p.m as f64 * p.n as f64 * p.k as f64 <= WORTH_TIMING {
            return Ok(());
        }
        // A product that accumulates must not be repeated on its real result.
        let spare = if p.accumulate { Some(self.arena.take(p.m * p.n * p.result.size(), Purpose::Workspace)?) } else { None };
        let to = Operands { c: spare.as_ref().map_or(at.c, Block::address), ..at };
        // In turns, because clocks fall while the device is busy: one after the other, the first ones would look best. The first round only warms up.
        let mut total = vec![0.0; proposals.len()];
        for round in 0..=ROUNDS {
            for (proposal, ms) in proposals.iter().zip(&mut total) {
                let took = self.time(plan, &proposal.algo, to).unwrap_or(f64::INFINITY);
                *ms += if round > 0 || took.is_infinite() { took } else { 0.0 };
            }
        }
        let fastest = proposals.iter().zip(&total).min_by(|a, b| a.1.total_cmp(b.1));
        plan.algo = fastest.map_or(proposals[0].algo, |(proposal, _)| proposal.algo);
        Ok(())
    }

    fn time(&self, plan: &Plan, algo: &cublasLtMatmulAlgo_t, at: Operands) -> Result<f64> {
        let (start, end) = (self.device.event()?, self.device.event()?);
        start.record()?;
        self.execute(plan, algo, false, at)?;
        end.record()?;
        end.wait()?;
        end.since(&start)
    }

    fn proposals(&self, plan: &Plan, p: Product, at: Operands) -> Result<Vec<Heuristic>> {
        use cublasLtMatmulPreferenceAttributes_t as Attribute;
        let l = &self.lib;
        let mut preference: cublasLtMatmulPreference_t = std::ptr::null_mut();
        // SAFETY: destroyed below.
        l.check(unsafe { (l.cublasLtMatmulPreferenceCreate)(&mut preference) }, "cublasLtMatmulPreferenceCreate")?;
        // SAFETY: a plain C struct for which zero is valid.
        let mut found: [Heuristic; CANDIDATES] = unsafe { std::mem::zeroed() };
        let mut got = 0;
        let [lb, la, lc] = plan.layouts;
        let set = |attribute, value: *const c_void, size| {
            // SAFETY: the value lives until the call returns.
            l.check(
                unsafe { (l.cublasLtMatmulPreferenceSetAttribute)(preference, attribute, value, size) },
                "cublasLtMatmulPreferenceSetAttribute",
            )
        };
        let align = 1u32 << at.alignment();
        let result = (|| {
            let workspace = WORKSPACE;
            set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (&raw const workspace).cast(), 8)?;
            for attribute in [
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
            ] {
                set(attribute, (&raw const align).cast(), 4)?;
            }
            let (h, d) = (self.handle, plan.desc);
            // SAFETY: `found` holds as many results as are asked for.
            let status = unsafe {
                (l.cublasLtMatmulAlgoGetHeuristic)(h, d, lb, la, lc, lc, preference, CANDIDATES as i32, found.as_mut_ptr(), &mut got)
            };
            l.check(status, &format!("cublasLtMatmulAlgoGetHeuristic for {p:?}"))
        })();
        // SAFETY: created above.
        unsafe { (l.cublasLtMatmulPreferenceDestroy)(preference) };
        result?;
        let usable: Vec<Heuristic> = found[..got.max(0) as usize].iter().filter(|h| h.state == 0).copied().collect();
        if usable.is_empty() {
            return Err(crate::Error::Unsupported(format!("cuBLASLt has no algorithm for {p:?}")));
        }
        Ok(usable)
    }

    fn destroy(&self, plan: &Plan) {
        // SAFETY: each was created by `describe`, or is null.
        unsafe {
            for l in plan.layouts.iter().filter(|l| !l.is_null()) {
                (self.lib.cublasLtMatrixLayoutDestroy)(*l);
            }
            if !plan.desc.is_null() {
                (self.lib.cublasLtMatmulDescDestroy)(plan.desc);
            }
        }
    }
}

impl Drop for Gemm {
    fn drop(&mut self) {
        let _ = self.device.synchronize();
        let plans = std::mem::take(&mut *self.plans.lock().unwrap_or_else(PoisonError::into_inner));
        plans.values().for_each(|p| self.destroy(p));
        // SAFETY: nothing uses the handle any more.
        unsafe { (self.lib.cublasLtDestroy)(self.handle) };
    }
}
