//! Matrix products: cuBLASLt for single ones, `kernels/gemm_grouped.cu` and `kernels/gemm_sm90a.cu` for layers of experts.
#![allow(unsafe_code)] // a launch with tensor maps among its arguments

use super::reduce::{ColumnSum, column_sum};
use super::{Op, elementwise, moe::MAX_EXPERTS, vectors};
use crate::Cuda;
use crate::gemm::{Operands, Product};
use crate::kernels::{Grid, TensorMap, Variant, args};
use std::ffi::c_void;
use temper_tensor::{Beta, DType, GroupedGemm, Purpose, Result, Tensor, Trans, View, ViewMut};

/// `c` may be f32 while `a` and `b` are bf16, which is how weight gradients accumulate in f32.
pub fn gemm(cuda: &Cuda, c: ViewMut, a: View, ta: Trans, b: View, tb: Trans, beta: Beta) -> Result<()> {
    let op = Op("gemm");
    if (a.dtype(), b.dtype()) == (DType::F32, DType::BF16) {
        return mixed(cuda, c, a, ta, b, tb, beta);
    }
    let dtype = op.activation("a", a.dtype())?;
    let result = op.one_of("c", c.dtype(), &[dtype, DType::F32])?;
    let [m, n] = op.dims("c", c.as_view())?;
    let [a0, a1] = op.dims("a", a)?;
    let (am, k) = if ta == Trans::Yes { (a1, a0) } else { (a0, a1) };
    if am != m {
        return op.wrong("a", a, format!("{m} rows of the result after its transposition"));
    }
    let b_shape = if tb == Trans::Yes { [n, k] } else { [k, n] };
    let at = Operands { a: op.address("a", a)?, b: op.input("b", b, dtype, &b_shape)?, c: op.address("c", c.as_view())? };
    if m == 0 || n == 0 {
        return Ok(());
    }
    let accumulate = beta == Beta::One;
    if k == 0 {
        return if accumulate { Ok(()) } else { elementwise::fill(cuda, c, 0.0) };
    }
    let p = Product { m, n, k, a_transposed: ta == Trans::Yes, b_transposed: tb == Trans::Yes, operands: dtype, result, accumulate };
    Ok(cuda.gemm.run(p, at, !cuda.options.deterministic)?)
}

/// An f32 `a` beside a bf16 `b`: `a` is taken as the sum of two bf16 parts, which keeps 16 bits of each element. An f32 `c` adds the product
/// of each part up; a bf16 `c`, which must be rounded once, is one product of twice the depth, `b` being repeated.
fn mixed(cuda: &Cuda, mut c: ViewMut, a: View, ta: Trans, b: View, tb: Trans, beta: Beta) -> Result<()> {
    let op = Op("gemm");
    let ([a0, a1], [b0, b1]) = (op.dims("a", a)?, op.dims("b", b)?);
    if a0 * a1 == 0 {
        // No depth, or no result: nothing to split.
        let empty = cuda.tensor(DType::BF16, a.shape())?;
        return gemm(cuda, c, empty.view(), ta, b, tb, beta);
    }
    if c.dtype() == DType::F32 {
        let parts = in_two(cuda, op, "a", a, a0 * a1, &[2, a0, a1])?;
        gemm(cuda, c.reborrow(), parts.view().index(0), ta, b, tb, beta)?;
        return gemm(cuda, c, parts.view().index(1), ta, b, tb, Beta::One);
    }
    let a = if ta == Trans::Yes { in_two(cuda, op, "a", a, a0 * a1, &[2 * a0, a1])? } else { in_two(cuda, op, "a", a, a1, &[a0, 2 * a1])? };
    let b = if tb == Trans::Yes { in_two(cuda, op, "b", b, b1, &[b0, 2 * b1])? } else { in_two(cuda, op, "b", b, b0 * b1, &[2 * b0, b1])? };
    gemm(cuda, c, a.view(), ta, b.view(), tb, beta)
}

/// Rows of `row` elements of `x` as two bf16 parts side by side (f32), or twice (bf16), seen as `shape`.
fn in_two(cuda: &Cuda, op: Op, what: &'static str, x: View, row: usize, shape: &[usize]) -> Result<Tensor> {
    let before = cuda.set_purpose(Purpose::Workspace);
    let out = cuda.tensor(DType::BF16, shape);
    cuda.set_purpose(before);
    let out = out?;
    let kernel = if x.dtype() == DType::F32 { "split_f32" } else { "repeat_bf16" };
    let a = args![op.address("parts", out.view())?, op.address(what, x)?, x.numel(), row];
    cuda.kernels.launch("convert.cu", Variant::PLAIN, kernel, Grid::line(cuda.flat_blocks(x.numel()), 256), a)?;
    Ok(out)
}

pub fn add_bias(c: &Cuda, y: ViewMut, bias: View) -> Result<()> {
    let op = Op("add_bias");
    let dtype = op.activation("y", y.dtype())?;
    let [t, n] = op.dims("y", y.as_view())?;
    let (p, b) = (op.address("y", y.as_view())?, op.input("bias", bias, dtype, &[n])?);
    let v = Variant::of(dtype, vectors(dtype, n, &[p, b]));
    let grid = Grid::line(c.flat_blocks(t * n / v.width()), 256);
    Ok(c.kernels.launch("elementwise.cu", v, "add_bias", grid, args![p, b, t * n, n])?)
}

pub fn bias_grad(c: &Cuda, dbias: ViewMut, dy: View) -> Result<()> {
    let op = Op("bias_grad");
    let dtype = op.activation("dy", dy.dtype())?;
    let [t, n] = op.dims("dy", dy)?;
    let out = op.one_of("dbias", dbias.dtype(), &[DType::F32, dtype])?;
    let (d, g) = (op.output("dbias", &dbias, out, &[n])?, op.address("dy", dy)?);
    column_sum(c, d, out, g, dtype, t, n, ColumnSum::Plain)
}

/// Sizes of a grouped product: experts, width of the outer and of the inner side of the matrices, rows.
struct Sizes {
    e: usize,
    n: usize,
    m: usize,
    s: usize,
}

pub fn grouped_gemm(cuda: &Cuda, kind: GroupedGemm, c: ViewMut, a: View, b: View, offsets: View) -> Result<()> {
    let op = Op("grouped_gemm");
    let dtype = op.activation("a", a.dtype())?;
    let e = offsets.numel().saturating_sub(1);
    if e == 0 || e > MAX_EXPERTS {
        return op.wrong("offsets", offsets, format!("[E+1] with E in 1..={MAX_EXPERTS}"));
    }
    let offsets = op.input("offsets", offsets, DType::I32, &[e + 1])?;
    // The matrices [E, N, M] are b, except for the weight gradient, whose result they are.
    let [_, n, m] = match kind {
        GroupedGemm::WeightGrad(_) => op.dims("c", c.as_view())?,
        _ => op.dims("b", b)?,
    };
    let s = a.rows();
    let (ca, cb, cc): (&[usize], &[usize], &[usize]) = match kind {
        GroupedGemm::Forward => (&[s, m], &[e, n, m], &[s, n]),
        GroupedGemm::InputGrad => (&[s, n], &[e, n, m], &[s, m]),
        GroupedGemm::WeightGrad(_) => (&[s, n], &[s, m], &[e, n, m]),
    };
    let result = op.one_of("c", c.dtype(), &[dtype, DType::F32])?;
    let at = Operands { a: op.input("a", a, dtype, ca)?, b: op.input("b", b, dtype, cb)?, c: op.output("c", &c, result, cc)? };
    let sizes = Sizes { e, n, m, s };
    if s == 0 {
        return if kind == GroupedGemm::WeightGrad(Beta::Zero) { elementwise::fill(cuda, c, 0.0) } else { Ok(()) };
    }
    // 16-byte rows and addresses, and tiles of 256 columns that are not mostly empty.
    let aligned = [at.a, at.b].iter().all(|x| x.is_multiple_of(16)) && n % 8 == 0 && m % 8 == 0 && at.c.is_multiple_of(16);
    let cols = if kind == GroupedGemm::Forward { n } else { m };
    if dtype == DType::BF16 && cuda.device.arch() == "sm_90a" && aligned && cols >= 128 {
        return hopper(cuda, kind, sizes, at, result, offsets);
    }
    portable(cuda, kind, sizes, at, dtype, result, offsets)
}

/// Depth of a step of the weight gradient in `kernels/gemm_sm90a.cu`.
const WEIGHT_DEPTH: u32 = 32;

/// `kernels/gemm_sm90a.cu`: as many blocks as multiprocessors, tiles of 128 x 256.
fn hopper(cuda: &Cuda, kind: GroupedGemm, z: Sizes, at: Operands, result: DType, offsets: u64) -> Result<()> {
    let map = |base, rows, cols, box_rows| TensorMap::new(&cuda.device, base, rows, cols, box_rows);
    let beside = |base, cols, boxes| TensorMap::beside(&cuda.device, base, z.s, cols, WEIGHT_DEPTH, boxes);
    let weight = matches!(kind, GroupedGemm::WeightGrad(_));
    let whole_boxes = weight && z.n.is_multiple_of(64) && z.m.is_multiple_of(64);
    let matrices = z.e * z.n;
    let (kernel, ta, tb) = match kind {
        GroupedGemm::Forward => ("grouped_forward", map(at.a, z.s, z.m, 128)?, map(at.b, matrices, z.m, 256)?),
        GroupedGemm::InputGrad => ("grouped_input", map(at.a, z.s, z.n, 128)?, map(at.b, matrices, z.m, 64)?),
        GroupedGemm::WeightGrad(_) if whole_boxes => ("grouped_weight", beside(at.a, z.n, 2)?, beside(at.b, z.m, 4)?),
        GroupedGemm::WeightGrad(_) => ("grouped_weight", map(at.a, z.s, z.n, WEIGHT_DEPTH)?, map(at.b, z.s, z.m, WEIGHT_DEPTH)?),
    };
    const STAGE: usize = (128 + 256) * 64 * 2;
    const HELD: usize = 2 * (64 * 256 * 4 + 128);
    let shared = if weight { 2 * STAGE + HELD } else { 4 * STAGE };
    let grid = Grid::line(cuda.device.multiprocessors, 384).shared(shared);
    // OUT_F32, OUT_ADD and BESIDE of the kernel.
    let how = (result == DType::F32) as i32 | if adds(kind) { 2 } else { 0 } | if whole_boxes { 4 } else { 0 };
    let (e, n, m) = (z.e as i32, z.n as i32, z.m as i32);
    let mut pointers: [*mut c_void; 8] = [
        (&raw const ta).cast_mut().cast(),
        (&raw const tb).cast_mut().cast(),
        (&raw const at.c).cast_mut().cast(),
        (&raw const how).cast_mut().cast(),
        (&raw const offsets).cast_mut().cast(),
        (&raw const e).cast_mut().cast(),
        (&raw const n).cast_mut().cast(),
        (&raw const m).cast_mut().cast(),
    ];
    // SAFETY: each pointer leads to an argument of the kernel's type.
    unsafe { cuda.kernels.launch_raw("gemm_sm90a.cu", Variant::PLAIN, kernel, grid, &mut pointers)? };
    Ok(())
}

fn adds(kind: GroupedGemm) -> bool {
    kind == GroupedGemm::WeightGrad(Beta::One)
}

fn portable(cuda: &Cuda, kind: GroupedGemm, z: Sizes, at: Operands, dtype: DType, result: DType, offsets: u64) -> Result<()> {
    let bf16 = dtype == DType::BF16;
    let tile = if bf16 { 128 } else { 64 };
    let shared = if bf16 { 3 * 2 * 128 * 40 * 2 } else { 0 };
    let (kernel, cols) = match kind {
        GroupedGemm::Forward => ("grouped_forward", z.n),
        GroupedGemm::InputGrad => ("grouped_input", z.m),
        GroupedGemm::WeightGrad(_) => ("grouped_weight", z.m),
    };
    // The host does not know how many rows an expert has: every expert may add one partly filled tile.
    let blocks = match kind {
        GroupedGemm::WeightGrad(_) => [cols.div_ceil(tile), z.n.div_ceil(tile), z.e],
        _ => [cols.div_ceil(tile), if z.s == 0 { 0 } else { z.s / tile + z.e }, 1],
    };
    let aligned = vectors(dtype, z.n, &[at.a, at.b]) && vectors(dtype, z.m, &[at.a, at.b]);
    let grid = Grid { blocks, threads: 256, shared };
    let a = args![at.c, result == DType::F32, adds(kind), at.a, at.b, offsets, z.e, z.n, z.m, aligned];
    Ok(cuda.kernels.launch("gemm_grouped.cu", Variant::of(dtype, false), kernel, grid, a)?)
}
