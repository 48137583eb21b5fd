//! Between the QKV product and attention: `kernels/qkv.cu`. T tokens, Nq query heads, Nk key heads, head size D.

use super::reduce::chunks;
use super::{Op, vectors};
use crate::Cuda;
use crate::kernels::{Grid, Variant, args};
use temper_tensor::{DType, Result, RopeTable, View, ViewMut};

const FILE: &str = "qkv.cu";
/// Items that a warp of `qk_norm_weight` has on their way, and the bytes of one; as in `qkv.cu`.
const STAGES: usize = 4;
const SLOT: usize = 4 * 32 * 16 + 32 * 4;
/// Blocks whose sums one of them adds up; as in `qkv.cu`.
const TEAM: usize = 16;

/// Sizes and addresses common to the three operations.
struct Common {
    dtype: DType,
    t: usize,
    nq: usize,
    nk: usize,
    d: usize,
    qkv: u64,
    cos: u64,
    sin: u64,
    positions: u64,
}

fn common(op: Op, q: View, k: View, qkv: View, rope: RopeTable, positions: View) -> Result<Common> {
    let dtype = op.activation("qkv", qkv.dtype())?;
    let [t, nq, d] = op.dims("q", q)?;
    let [_, nk, _] = op.dims("k", k)?;
    if d == 0 || d % 2 != 0 || d > 256 || nk == 0 {
        return op.wrong("q", q, "[T, Nq, D] with D even and at most 256, and at least one key head");
    }
    let [p, _] = op.dims("rope.cos", rope.cos)?;
    Ok(Common {
        dtype,
        t,
        nq,
        nk,
        d,
        qkv: op.input("qkv", qkv, dtype, &[t, (nq + 2 * nk) * d])?,
        cos: op.input("rope.cos", rope.cos, DType::F32, &[p, d / 2])?,
        sin: op.input("rope.sin", rope.sin, DType::F32, &[p, d / 2])?,
        positions: op.input("positions", positions, DType::I32, &[t])?,
    })
}

impl Common {
    /// Variant, and lanes a head: a power of two that covers half a head.
    fn shape(&self, addresses: &[u64]) -> (Variant, usize) {
        let tables = [self.qkv, self.cos, self.sin];
        let vector = vectors(self.dtype, self.d / 2, addresses) && vectors(self.dtype, self.d / 2, &tables);
        let v = Variant::of(self.dtype, vector);
        (v, (self.d / 2).div_ceil(v.width()).next_power_of_two().min(32))
    }

    /// Warps that share the q heads, and the k heads, of a token when a lane holds `batch` heads; and a grid with all warps (v has as many
    /// as k).
    fn warps(&self, batch: usize, lanes: usize) -> (usize, usize, Grid) {
        let share = |heads: usize| heads.div_ceil(batch * 32 / lanes);
        let (q, k) = (share(self.nq), share(self.nk));
        (q, k, Grid::line((self.t * (q + 2 * k)).div_ceil(4), 128))
    }
}

pub fn prepare(
    c: &Cuda,
    q: ViewMut,
    k: ViewMut,
    v: ViewMut,
    rstd: Option<ViewMut>,
    qkv: View,
    norm: Option<(View, View, f64)>,
    rope: RopeTable,
    positions: View,
) -> Result<()> {
    let op = Op("qkv_prepare");
    let x = common(op, q.as_view(), k.as_view(), qkv, rope, positions)?;
    let kv = [x.t, x.nk, x.d];
    let q = op.output("q", &q, x.dtype, &[x.t, x.nq, x.d])?;
    let (k, v) = (op.output("k", &k, x.dtype, &kv)?, op.output("v", &v, x.dtype, &kv)?);
    let (mut wq, mut wk, mut eps, mut r) = (0, 0, 0.0, 0);
    if let Some((a, b, e)) = norm {
        (wq, wk, eps) = (op.input("norm wq", a, x.dtype, &[x.d])?, op.input("norm wk", b, x.dtype, &[x.d])?, e);
        let Some(rstd) = rstd else {
            return op.wrong("rstd", a, "to be given, since norm is");
        };
        r = op.output("rstd", &rstd, DType::F32, &[x.t, x.nq + x.nk])?;
    }
    let (variant, lanes) = x.shape(&[q, k, v, wq, wk]);
    let (q_warps, k_warps, grid) = x.warps(variant.width().div_ceil(2), lanes);
    let a = args![q, k, v, r, x.qkv, wq, wk, eps as f32, x.cos, x.sin, x.positions, x.t, x.nq, x.nk, x.d, q_warps, k_warps, lanes];
    Ok(c.kernels.launch(FILE, variant, "qkv_prepare", grid, a)?)
}

pub fn grad_input(
    c: &Cuda,
    dqkv: ViewMut,
    dq: View,
    dk: View,
    dv: View,
    qkv: View,
    norm: Option<(View, View, View)>,
    rope: RopeTable,
    positions: View,
) -> Result<()> {
    let op = Op("qkv_prepare_grad_input");
    let x = common(op, dq, dk, qkv, rope, positions)?;
    let kv = [x.t, x.nk, x.d];
    let out = op.output("dqkv", &dqkv, x.dtype, qkv.shape())?;
    let dq = op.input("dq", dq, x.dtype, &[x.t, x.nq, x.d])?;
    let (dk, dv) = (op.input("dk", dk, x.dtype, &kv)?, op.input("dv", dv, x.dtype, &kv)?);
    let (mut wq, mut wk, mut r) = (0, 0, 0);
    if let Some((a, b, s)) = norm {
        (wq, wk) = (op.input("norm wq", a, x.dtype, &[x.d])?, op.input("norm wk", b, x.dtype, &[x.d])?);
        r = op.input("norm rstd", s, DType::F32, &[x.t, x.nq + x.nk])?;
    }
    let (variant, lanes) = x.shape(&[out, dq, dk, dv, wq, wk]);
    let (q_warps, k_warps, grid) = x.warps(variant.width().div_ceil(4), lanes);
    let a = args![out, dq, dk, dv, x.qkv, wq, wk, r, x.cos, x.sin, x.positions, x.t, x.nq, x.nk, x.d, q_warps, k_warps, lanes];
    Ok(c.kernels.launch(FILE, variant, "qkv_prepare_grad_input", grid, a)?)
}

pub fn grad_weight(
    c: &Cuda,
    dwq: ViewMut,
    dwk: ViewMut,
    dq: View,
    dk: View,
    qkv: View,
    rstd: View,
    rope: RopeTable,
    positions: View,
) -> Result<()> {
    let op = Op("qk_norm_grad_weight");
    let x = common(op, dq, dk, qkv, rope, positions)?;
    let out = op.one_of("dwq", dwq.dtype(), &[DType::F32, x.dtype])?;
    let (wq, wk) = (op.output("dwq", &dwq, out, &[x.d])?, op.output("dwk", &dwk, out, &[x.d])?);
    let (dq, dk) = (op.input("dq", dq, x.dtype, &[x.t, x.nq, x.d])?, op.input("dk", dk, x.dtype, &[x.t, x.nk, x.d])?);
    let r = op.input("rstd", rstd, DType::F32, &[x.t, x.nq + x.nk])?;
    if x.t == 0 {
        return Ok(());
    }
    let (variant, lanes) = x.shape(&[dq, dk]);
    // As many blocks as run at once, two a multiprocessor: with twice as many it is a tenth slower.
    let (parts, per_chunk) = chunks(c, x.t, 2);
    let partial = c.scratch((parts + parts.div_ceil(TEAM)) * 2 * x.d * 4)?;
    let grid = Grid::line(parts, 256).shared((8 * STAGES * SLOT).max(256 / lanes * x.d * 4));
    let a = args![
        wq,
        wk,
        out == DType::F32,
        partial.address(),
        dq,
        dk,
        x.qkv,
        r,
        x.cos,
        x.sin,
        x.positions,
        x.t,
        per_chunk,
        x.nq,
        x.nk,
        x.d,
        lanes
    ];
    Ok(c.kernels.launch(FILE, variant, "qk_norm_weight", grid, a)?)
}
