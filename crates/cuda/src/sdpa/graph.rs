//! cuDNN's operation graphs, from Rust: descriptors, tensors, nodes, and the plan cuDNN compiles from them.
//!
//! cuDNN has no "attention" call in C. The caller describes the arithmetic node by node (matrix product, pointwise,
//! reduction, reshape); a pattern matcher inside recognises the whole and answers with one fused kernel.
#![allow(unsafe_code)] // calls into cuDNN

use crate::sys::cudnn::*;
use crate::{Error, Result};
use cudnnBackendAttributeName_t as A;
use cudnnBackendAttributeType_t as Ty;
use cudnnBackendDescriptorType_t as Kind;
use cudnnDataType_t as Dt;
use cudnnPointwiseMode_t as Pw;
use cudnnReduceTensorOp_t as Red;
use std::ffi::c_void;
use std::sync::Arc;

/// f32 of cuDNN.
pub const F32: Dt = Dt::CUDNN_DATA_FLOAT;
/// bf16 of cuDNN.
pub const BF16: Dt = Dt::CUDNN_DATA_BFLOAT16;
/// i32 of cuDNN.
pub const I32: Dt = Dt::CUDNN_DATA_INT32;
/// i64 of cuDNN.
pub const I64: Dt = Dt::CUDNN_DATA_INT64;
/// Truth values of cuDNN.
pub const BOOL: Dt = Dt::CUDNN_DATA_BOOLEAN;

/// An owned descriptor.
pub struct Desc {
    raw: cudnnBackendDescriptor_t,
    lib: Arc<Cudnn>,
}

// SAFETY: descriptors are used under the lock of `Sdpa`'s plans.
unsafe impl Send for Desc {}
unsafe impl Sync for Desc {}

impl Drop for Desc {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed once.
        unsafe { (self.lib.cudnnBackendDestroyDescriptor)(self.raw) };
    }
}

impl Desc {
    /// An empty descriptor.
    pub fn new(lib: &Arc<Cudnn>, kind: Kind) -> Result<Desc> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: destroyed in `drop`.
        lib.check(unsafe { (lib.cudnnBackendCreateDescriptor)(kind, &mut raw) }, &format!("create {kind:?}"))?;
        Ok(Desc { raw, lib: lib.clone() })
    }

    /// Sets an attribute.
    pub fn set<X>(&self, name: A, kind: Ty, values: &[X]) -> Result<()> {
        // SAFETY: cuDNN copies `values`, whose type goes with `kind`.
        let status = unsafe { (self.lib.cudnnBackendSetAttribute)(self.raw, name, kind, values.len() as i64, values.as_ptr().cast()) };
        self.lib.check(status, &format!("set {name:?}"))
    }

    /// Sets an attribute to other descriptors.
    pub fn set_descs(&self, name: A, others: &[&Desc]) -> Result<()> {
        let raw: Vec<_> = others.iter().map(|d| d.raw).collect();
        self.set(name, Ty::CUDNN_TYPE_BACKEND_DESCRIPTOR, &raw)
    }

    /// Completes the descriptor.
    pub fn finalize(self) -> Result<Desc> {
        self.lib.check(unsafe { (self.lib.cudnnBackendFinalize)(self.raw) }, "finalize")?;
        Ok(self)
    }

    /// Reads an integer.
    fn get_i64(&self, name: A) -> Result<i64> {
        let (mut value, mut got) = (0i64, 0i64);
        // SAFETY: room for the one value asked for.
        let status =
            unsafe { (self.lib.cudnnBackendGetAttribute)(self.raw, name, Ty::CUDNN_TYPE_INT64, 1, &mut got, (&raw mut value).cast()) };
        self.lib.check(status, &format!("get {name:?}"))?;
        Ok(value)
    }

    /// Fills descriptors from an attribute; with none, returns how many there are.
    fn get_descs(&self, name: A, into: &[Desc]) -> Result<usize> {
        let mut raw: Vec<_> = into.iter().map(|d| d.raw).collect();
        let mut got = 0i64;
        let kind = Ty::CUDNN_TYPE_BACKEND_DESCRIPTOR;
        let to = if raw.is_empty() { std::ptr::null_mut() } else { raw.as_mut_ptr().cast() };
        // SAFETY: room for as many descriptors as are asked for.
        let status = unsafe { (self.lib.cudnnBackendGetAttribute)(self.raw, name, kind, raw.len() as i64, &mut got, to) };
        self.lib.check(status, &format!("get {name:?}"))?;
        Ok(got.max(0) as usize)
    }
}

/// What a plan is compiled for.
pub enum Target {
    /// A live device.
    Handle(cudnnHandle_t),
    /// A description of one, as cuDNN wrote it: plans can then be compiled, but not run, without a GPU.
    Described(Desc),
}

impl Target {
    /// From the JSON of a device.
    pub fn described(lib: &Arc<Cudnn>, json: &[u8]) -> Result<Target> {
        let d = Desc::new(lib, Kind::CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR)?;
        d.set(A::CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, Ty::CUDNN_TYPE_CHAR, json)?;
        d.finalize().map(Target::Described)
    }
}

/// A tensor of a graph.
#[derive(Clone, Copy)]
pub struct T(usize);

/// Where a tensor's data comes from.
#[derive(Clone, Copy)]
pub enum Source {
    /// Device memory, bound by this id at execution.
    Real(i64),
    /// A value that only lives inside the fused kernel.
    Virtual,
    /// A host scalar, bound by this id at execution.
    ByValue(i64),
}

/// Dims and strides of a tensor.
pub type Layout = ([i64; 4], [i64; 4]);

/// Row-major strides.
pub fn contiguous(d: [i64; 4]) -> [i64; 4] {
    [d[1] * d[2] * d[3], d[2] * d[3], d[3], 1]
}

/// A graph under construction; also keeps every descriptor alive for its plan.
pub struct Graph {
    lib: Arc<Cudnn>,
    tensors: Vec<(Desc, [i64; 4])>,
    ops: Vec<Desc>,
    keep: Vec<Desc>,
    virtuals: i64,
}

impl Graph {
    /// An empty graph.
    pub fn new(lib: &Arc<Cudnn>) -> Graph {
        Graph { lib: lib.clone(), tensors: vec![], ops: vec![], keep: vec![], virtuals: 0 }
    }

    fn desc(&self, kind: Kind) -> Result<Desc> {
        Desc::new(&self.lib, kind)
    }

    /// Declares a tensor; `ragged` gives the element offset at which each sequence starts.
    pub fn tensor(&mut self, source: Source, dt: Dt, (dim, stride): Layout, ragged: Option<T>) -> Result<T> {
        let d = self.desc(Kind::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?;
        let id = match source {
            Source::Real(id) | Source::ByValue(id) => id,
            Source::Virtual => {
                self.virtuals += 1;
                1000 + self.virtuals // ids must be unique in the graph; the real ones are below 1000
            }
        };
        d.set(A::CUDNN_ATTR_TENSOR_UNIQUE_ID, Ty::CUDNN_TYPE_INT64, &[id])?;
        d.set(A::CUDNN_ATTR_TENSOR_DATA_TYPE, Ty::CUDNN_TYPE_DATA_TYPE, &[dt])?;
        d.set(A::CUDNN_ATTR_TENSOR_DIMENSIONS, Ty::CUDNN_TYPE_INT64, &dim)?;
        d.set(A::CUDNN_ATTR_TENSOR_STRIDES, Ty::CUDNN_TYPE_INT64, &stride)?;
        d.set(A::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, Ty::CUDNN_TYPE_INT64, &[16i64])?;
        match source {
            Source::Virtual => d.set(A::CUDNN_ATTR_TENSOR_IS_VIRTUAL, Ty::CUDNN_TYPE_BOOLEAN, &[1u8])?,
            Source::ByValue(_) => d.set(A::CUDNN_ATTR_TENSOR_IS_BY_VALUE, Ty::CUDNN_TYPE_BOOLEAN, &[1u8])?,
            Source::Real(_) => {}
        }
        if let Some(r) = ragged {
            d.set_descs(A::CUDNN_ATTR_TENSOR_RAGGED_OFFSET_DESC, &[&self.tensors[r.0].0])?;
        }
        self.tensors.push((d.finalize()?, dim));
        Ok(T(self.tensors.len() - 1))
    }

    /// A tensor in device memory.
    pub fn real(&mut self, id: i64, dt: Dt, layout: Layout, ragged: Option<T>) -> Result<T> {
        self.tensor(Source::Real(id), dt, layout, ragged)
    }

    /// A host scalar.
    pub fn scalar(&mut self, id: i64) -> Result<T> {
        self.tensor(Source::ByValue(id), F32, ([1; 4], [1; 4]), None)
    }

    /// A value inside the kernel.
    pub fn inner(&mut self, dt: Dt, dim: [i64; 4]) -> Result<T> {
        self.tensor(Source::Virtual, dt, (dim, contiguous(dim)), None)
    }

    /// Adds an operation with the given parameter descriptor and tensors.
    fn push(
        &mut self,
        kind: Kind,
        parameter: Option<(A, Desc)>,
        tensors: &[(A, Option<T>)],
        finish: impl Fn(&Desc) -> Result<()>,
    ) -> Result<()> {
        let o = self.desc(kind)?;
        if let Some((name, p)) = parameter {
            o.set_descs(name, &[&p])?;
            self.keep.push(p);
        }
        for (name, t) in tensors {
            if let Some(t) = t {
                o.set_descs(*name, &[&self.tensors[t.0].0])?;
            }
        }
        finish(&o)?;
        self.ops.push(o.finalize()?);
        Ok(())
    }

    /// `y = mode(x [, b [, select]])`; `precision` is the node's own arithmetic.
    pub fn pointwise_to(&mut self, mode: Pw, precision: Dt, axis: Option<i64>, ins: [Option<T>; 3], y: T) -> Result<()> {
        let p = self.desc(Kind::CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?;
        p.set(A::CUDNN_ATTR_POINTWISE_MODE, Ty::CUDNN_TYPE_POINTWISE_MODE, &[mode])?;
        p.set(A::CUDNN_ATTR_POINTWISE_MATH_PREC, Ty::CUDNN_TYPE_DATA_TYPE, &[precision])?;
        if let Some(a) = axis {
            p.set(A::CUDNN_ATTR_POINTWISE_AXIS, Ty::CUDNN_TYPE_INT64, &[a])?;
        }
        let tensors = [
            (A::CUDNN_ATTR_OPERATION_POINTWISE_XDESC, ins[0]),
            (A::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, Some(y)),
            (A::CUDNN_ATTR_OPERATION_POINTWISE_BDESC, ins[1]),
            (A::CUDNN_ATTR_OPERATION_POINTWISE_TDESC, ins[2]),
        ];
        let parameter = (A::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, p.finalize()?);
        self.push(Kind::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, Some(parameter), &tensors, |o| {
            o.set(A::CUDNN_ATTR_OPERATION_POINTWISE_ALPHA1, Ty::CUDNN_TYPE_FLOAT, &[1f32])?;
            o.set(A::CUDNN_ATTR_OPERATION_POINTWISE_ALPHA2, Ty::CUDNN_TYPE_FLOAT, &[1f32])
        })
    }

    /// The same into a fresh inner tensor of x's dims.
    pub fn pointwise(&mut self, mode: Pw, precision: Dt, axis: Option<i64>, ins: [Option<T>; 3], out: Dt) -> Result<T> {
        let dim = ins[0].map_or([1; 4], |x| self.tensors[x.0].1);
        let y = self.inner(out, dim)?;
        self.pointwise_to(mode, precision, axis, ins, y)?;
        Ok(y)
    }

    /// An f32 node of one or two operands.
    pub fn f32(&mut self, mode: Pw, x: T, b: Option<T>) -> Result<T> {
        self.pointwise(mode, F32, None, [Some(x), b, None], F32)
    }

    /// `c = a b` over the last two axes; `sizes` (m, n, k) override the sizes of each sequence.
    pub fn matmul(&mut self, a: T, b: T, c: T, sizes: [Option<T>; 3]) -> Result<()> {
        let p = self.desc(Kind::CUDNN_BACKEND_MATMUL_DESCRIPTOR)?;
        p.set(A::CUDNN_ATTR_MATMUL_COMP_TYPE, Ty::CUDNN_TYPE_DATA_TYPE, &[F32])?;
        let tensors = [
            (A::CUDNN_ATTR_OPERATION_MATMUL_ADESC, Some(a)),
            (A::CUDNN_ATTR_OPERATION_MATMUL_BDESC, Some(b)),
            (A::CUDNN_ATTR_OPERATION_MATMUL_CDESC, Some(c)),
            (A::CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC, sizes[0]),
            (A::CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC, sizes[1]),
            (A::CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC, sizes[2]),
        ];
        let parameter = (A::CUDNN_ATTR_OPERATION_MATMUL_DESC, p.finalize()?);
        self.push(Kind::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, Some(parameter), &tensors, |_| Ok(()))
    }

    /// `y = reduce(x)` over the axes in which y has size 1.
    pub fn reduce(&mut self, op: Red, x: T, y: T) -> Result<()> {
        let p = self.desc(Kind::CUDNN_BACKEND_REDUCTION_DESCRIPTOR)?;
        p.set(A::CUDNN_ATTR_REDUCTION_COMP_TYPE, Ty::CUDNN_TYPE_DATA_TYPE, &[F32])?;
        p.set(A::CUDNN_ATTR_REDUCTION_OPERATOR, Ty::CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, &[op])?;
        let tensors = [(A::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, Some(x)), (A::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, Some(y))];
        let parameter = (A::CUDNN_ATTR_OPERATION_REDUCTION_DESC, p.finalize()?);
        self.push(Kind::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, Some(parameter), &tensors, |_| Ok(()))
    }

    /// Another view of x; here always "transpose the last two axes", expressed by y's strides.
    pub fn reshape(&mut self, x: T, y: T) -> Result<()> {
        let tensors = [(A::CUDNN_ATTR_OPERATION_RESHAPE_XDESC, Some(x)), (A::CUDNN_ATTR_OPERATION_RESHAPE_YDESC, Some(y))];
        self.push(Kind::CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, None, &tensors, |_| Ok(()))
    }

    /// Asks the heuristics for engines and compiles the first that works: tens of milliseconds to seconds.
    pub fn plan(self, target: &Target) -> Result<Plan> {
        let graph = self.desc(Kind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
        graph.set_descs(A::CUDNN_ATTR_OPERATIONGRAPH_OPS, &self.ops.iter().collect::<Vec<_>>())?;
        if let Target::Handle(h) = target {
            graph.set(A::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, Ty::CUDNN_TYPE_HANDLE, &[*h])?;
        }
        let graph = graph.finalize()?;
        let heuristic = self.desc(Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?;
        heuristic.set_descs(A::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &[&graph])?;
        let mode = cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_A;
        heuristic.set(A::CUDNN_ATTR_ENGINEHEUR_MODE, Ty::CUDNN_TYPE_HEUR_MODE, &[mode])?;
        if let Target::Described(p) = target {
            heuristic.set_descs(A::CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, &[p])?;
        }
        let heuristic = heuristic.finalize()?;
        let results = A::CUDNN_ATTR_ENGINEHEUR_RESULTS;
        let count = heuristic.get_descs(results, &[])?;
        let kind = Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR;
        let configs: Vec<Desc> = (0..count).map(|_| self.desc(kind)).collect::<Result<_>>()?;
        let got = if count == 0 { 0 } else { heuristic.get_descs(results, &configs)? };
        let mut why = Error::Unsupported("cuDNN's heuristics know no engine for this attention".into());
        for config in &configs[..got.min(count)] {
            let plan = self.desc(Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
            plan.set_descs(A::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, &[config])?;
            if let Target::Handle(h) = target {
                plan.set(A::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, Ty::CUDNN_TYPE_HANDLE, &[*h])?;
            }
            match plan.finalize() {
                Ok(plan) => {
                    let workspace = plan.get_i64(A::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)?.max(0) as usize;
                    return Ok(Plan { plan, workspace, _graph: self, _keep: vec![graph, heuristic], _configs: configs });
                }
                Err(e) => why = e,
            }
        }
        Err(why)
    }
}

/// A compiled plan.
pub struct Plan {
    plan: Desc,
    /// Bytes of workspace.
    pub workspace: usize,
    _graph: Graph,
    _keep: Vec<Desc>,
    _configs: Vec<Desc>,
}

impl Plan {
    /// Enqueues the plan on the handle's stream.
    ///
    /// # Safety
    /// Every real tensor of the graph must be bound to memory that is large enough and stays valid until the stream has
    /// passed this point (host scalars: until return).
    pub unsafe fn execute(&self, handle: cudnnHandle_t, bind: &[(i64, *mut c_void)], workspace: u64) -> Result<()> {
        let lib = &self.plan.lib;
        let ids: Vec<i64> = bind.iter().map(|b| b.0).collect();
        let pointers: Vec<*mut c_void> = bind.iter().map(|b| b.1).collect();
        let pack = Desc::new(lib, Kind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?;
        pack.set(A::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, Ty::CUDNN_TYPE_INT64, &ids)?;
        pack.set(A::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, Ty::CUDNN_TYPE_VOID_PTR, &pointers)?;
        pack.set(A::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, Ty::CUDNN_TYPE_VOID_PTR, &[workspace as *mut c_void])?;
        let pack = pack.finalize()?;
        lib.check(unsafe { (lib.cudnnBackendExecute)(handle, self.plan.raw, pack.raw) }, "execute")
    }
}
