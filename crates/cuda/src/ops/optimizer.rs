//! AdamW: `kernels/optimizer.cu`.

use super::Op;
use crate::Cuda;
use crate::kernels::{Grid, Variant, args};
use temper_tensor::{AdamW, DType, Result, View, ViewMut};

const FILE: &str = "optimizer.cu";

/// The optimizer's tensors of a bf16 weight whose exact f32 master is kept beside it.
///
/// The master is the bf16 weight plus a signed 16-bit remainder of its bits, held in an F16 tensor whose bits, not whose
/// values, are meant: `bits(master) = (bits(weight) << 16) + remainder`.
pub struct MasterState<'a> {
    /// The weight, BF16.
    pub weight: ViewMut<'a>,
    /// The remainders, F16 (as bits).
    pub remainder: ViewMut<'a>,
    /// First moment, F32 or BF16.
    pub m: ViewMut<'a>,
    /// Second moment, of the type of the first.
    pub v: ViewMut<'a>,
}

/// Types of an AdamW step, for tests that go through all of them.
#[derive(Clone, Copy, Debug)]
pub struct AdamWTypes {
    /// Type of the moments.
    pub moments: DType,
    /// Type of the gradient.
    pub grad: DType,
}

impl AdamWTypes {
    /// All supported ones.
    pub const ALL: [AdamWTypes; 4] = [
        AdamWTypes { moments: DType::F32, grad: DType::F32 },
        AdamWTypes { moments: DType::F32, grad: DType::BF16 },
        AdamWTypes { moments: DType::BF16, grad: DType::F32 },
        AdamWTypes { moments: DType::BF16, grad: DType::BF16 },
    ];
}

/// One of four kernel names by the types of moments and gradient.
fn named(op: Op, m: DType, grad: DType, names: [&'static str; 4]) -> Result<&'static str> {
    let i = |what, d| op.activation(what, d).map(|d| (d == DType::BF16) as usize);
    Ok(names[2 * i("m", m)? + i("grad", grad)?])
}

pub fn adamw(c: &Cuda, w: ViewMut, m: ViewMut, v: ViewMut, grad: View, step: AdamW) -> Result<()> {
    let op = Op("adamw");
    let names = match op.activation("w", w.dtype())? {
        DType::F32 => ["adamw_f32_f32_f32", "adamw_f32_f32_bf16", "adamw_f32_bf16_f32", "adamw_f32_bf16_bf16"],
        _ => ["adamw_bf16_f32_f32", "adamw_bf16_f32_bf16", "adamw_bf16_bf16_f32", "adamw_bf16_bf16_bf16"],
    };
    let kernel = named(op, m.dtype(), grad.dtype(), names)?;
    launch(c, op, kernel, [w, m, v], 0, grad, step, None)
}

impl Cuda {
    /// One AdamW step on an exact f32 master (see [`MasterState`]). `scale`, F32 `[1]`, multiplies the gradient besides
    /// `step.grad_scale`, so that clipping needs no answer from the device ([`Cuda::clip_factor`]).
    pub fn adamw_master(&self, state: MasterState, grad: View, step: AdamW, scale: Option<View>) -> Result<()> {
        let op = Op("adamw_master");
        op.one_of("weight", state.weight.dtype(), &[DType::BF16])?;
        let names = ["adamw_master_f32_f32", "adamw_master_f32_bf16", "adamw_master_bf16_f32", "adamw_master_bf16_bf16"];
        let kernel = named(op, state.m.dtype(), grad.dtype(), names)?;
        let rest = op.output("remainder", &state.remainder, DType::F16, state.weight.shape())?;
        launch(self, op, kernel, [state.weight, state.m, state.v], rest, grad, step, scale)
    }

    /// Splits f32 `values` into bf16 weights and remainders.
    pub fn master_split(&self, weight: ViewMut, remainder: ViewMut, values: View) -> Result<()> {
        let op = Op("master_split");
        let w = op.output("weight", &weight, DType::BF16, values.shape())?;
        let r = op.output("remainder", &remainder, DType::F16, values.shape())?;
        let x = op.input("values", values, DType::F32, values.shape())?;
        let n = values.numel();
        Ok(self.kernels.launch(FILE, Variant::PLAIN, "master_split", Grid::line(self.flat_blocks(n), 256), args![w, r, x, n])?)
    }

    /// Joins bf16 weights and remainders to f32 `values`.
    pub fn master_join(&self, values: ViewMut, weight: View, remainder: View) -> Result<()> {
        let op = Op("master_join");
        let x = op.output("values", &values, DType::F32, weight.shape())?;
        let w = op.input("weight", weight, DType::BF16, weight.shape())?;
        let r = op.input("remainder", remainder, DType::F16, weight.shape())?;
        let n = weight.numel();
        Ok(self.kernels.launch(FILE, Variant::PLAIN, "master_join", Grid::line(self.flat_blocks(n), 256), args![x, w, r, n])?)
    }

    /// `factor[0] = min(1, limit / (sqrt(squares[0]) + 1e-6))`: gradient clipping from the F64 `[1]` sum of squares.
    pub fn clip_factor(&self, factor: ViewMut, squares: View, limit: f64) -> Result<()> {
        let op = Op("clip_factor");
        let (f, s) = (op.output("factor", &factor, DType::F32, &[1])?, op.input("squares", squares, DType::F64, &[1])?);
        Ok(self.kernels.launch(FILE, Variant::PLAIN, "clip_factor", Grid::line(1, 1), args![f, s, limit as f32])?)
    }
}

fn launch(
    c: &Cuda,
    op: Op,
    kernel: &'static str,
    [w, m, v]: [ViewMut; 3],
    rest: u64,
    grad: View,
    step: AdamW,
    scale: Option<View>,
) -> Result<()> {
    let shape = w.shape();
    let moments = m.dtype();
    let (pm, pv) = (op.output("m", &m, moments, shape)?, op.output("v", &v, moments, shape)?);
    let (pw, g) = (op.address("w", w.as_view())?, op.input("grad", grad, grad.dtype(), shape)?);
    let scale = scale.map(|s| op.input("scale", s, DType::F32, &[1])).transpose()?.unwrap_or(0);
    let t = step.step as f64;
    let step_size = step.lr / (1.0 - step.beta1.powf(t));
    let v_scale = 1.0 / (1.0 - step.beta2.powf(t)).sqrt();
    let n = w.numel();
    let by4 = [pw, rest, pm, pv, g].iter().all(|x| x.is_multiple_of(16));
    let a = args![
        pw,
        rest,
        pm,
        pv,
        g,
        n,
        step.lr as f32,
        step.beta1 as f32,
        step.beta2 as f32,
        step.eps as f32,
        step.weight_decay as f32,
        step_size as f32,
        v_scale as f32,
        step.grad_scale as f32,
        scale,
        by4
    ];
    Ok(c.kernels.launch(FILE, Variant::PLAIN, kernel, Grid::line(c.flat_blocks(n.div_ceil(4)), 256), a)?)
}
