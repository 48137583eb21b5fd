//! AdamW: `kernels/optimizer.cu`.

use super::Op;
use crate::Cuda;
use crate::kernels::{Grid, Variant, args};
use temper_tensor::{AdamW, AdamWState, DType, Result, View, ViewMut};

const FILE: &str = "optimizer.cu";

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

pub fn adamw(c: &Cuda, state: AdamWState, grad: View, clip: View, step: AdamW) -> Result<()> {
    let op = Op("adamw");
    let AdamWState { weight: w, remainder, m, v } = state;
    let names = match (op.activation("weight", w.dtype())?, remainder.is_some()) {
        (DType::F32, false) => ["adamw_f32_f32_f32", "adamw_f32_f32_bf16", "adamw_f32_bf16_f32", "adamw_f32_bf16_bf16"],
        (_, false) => ["adamw_bf16_f32_f32", "adamw_bf16_f32_bf16", "adamw_bf16_bf16_f32", "adamw_bf16_bf16_bf16"],
        (_, true) => {
            op.one_of("weight", w.dtype(), &[DType::BF16])?;
            ["adamw_master_f32_f32", "adamw_master_f32_bf16", "adamw_master_bf16_f32", "adamw_master_bf16_bf16"]
        }
    };
    let kernel = named(op, m.dtype(), grad.dtype(), names)?;
    let shape = w.shape();
    let moments = m.dtype();
    let (pm, pv) = (op.output("m", &m, moments, shape)?, op.output("v", &v, moments, shape)?);
    let (pw, g) = (op.address("weight", w.as_view())?, op.input("grad", grad, grad.dtype(), shape)?);
    let rest = remainder.map(|r| op.output("remainder", &r, DType::F16, shape)).transpose()?.unwrap_or(0);
    let clip = op.input("clip", clip, DType::F32, &[1])?;
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
        clip,
        by4
    ];
    // Many short blocks: 95 % of the floor, where a few waves of long ones reach 92.
    let blocks = n.div_ceil(4 * 256).min(c.device.multiprocessors * 128);
    Ok(c.kernels.launch(FILE, Variant::PLAIN, kernel, Grid::line(blocks, 256), a)?)
}

pub fn clip_factor(c: &Cuda, factor: ViewMut, squares: View, guard: View, limit: f64) -> Result<()> {
    let op = Op("clip_factor");
    let f = op.output("factor", &factor, DType::F32, &[1])?;
    let (s, g) = (op.input("squares", squares, DType::F64, &[1])?, op.input("guard", guard, DType::F64, &[1])?);
    Ok(c.kernels.launch(FILE, Variant::PLAIN, "clip_factor", Grid::line(1, 1), args![f, s, g, limit as f32])?)
}

pub fn master_split(c: &Cuda, weight: ViewMut, remainder: ViewMut, values: View) -> Result<()> {
    let op = Op("master_split");
    let w = op.output("weight", &weight, DType::BF16, values.shape())?;
    let r = op.output("remainder", &remainder, DType::F16, values.shape())?;
    let x = op.input("values", values, DType::F32, values.shape())?;
    let n = values.numel();
    Ok(c.kernels.launch(FILE, Variant::PLAIN, "master_split", Grid::line(c.flat_blocks(n), 256), args![w, r, x, n])?)
}

pub fn master_join(c: &Cuda, values: ViewMut, weight: View, remainder: View) -> Result<()> {
    let op = Op("master_join");
    let x = op.output("values", &values, DType::F32, weight.shape())?;
    let w = op.input("weight", weight, DType::BF16, weight.shape())?;
    let r = op.input("remainder", remainder, DType::F16, weight.shape())?;
    let n = weight.numel();
    Ok(c.kernels.launch(FILE, Variant::PLAIN, "master_join", Grid::line(c.flat_blocks(n), 256), args![x, w, r, n])?)
}
