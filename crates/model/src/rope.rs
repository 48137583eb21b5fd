//! Tables of the rotary embedding.

use crate::Result;
use temper_config::Arch;
use temper_tensor::{DType, Ops, Tensor};

/// Cosines and sines of `p * theta^(-2i/D)` for positions p in 0..P and i in 0..D/2; each [P, D/2] of the stat dtype.
pub struct RopeTables {
    /// Cosines.
    pub cos: Tensor,
    /// Sines.
    pub sin: Tensor,
}

impl RopeTables {
    /// Tables for positions `0..positions`, for activations of type `dtype`. Angles are computed in f64.
    pub fn new(ops: &dyn Ops, arch: &Arch, positions: usize, dtype: DType) -> Result<RopeTables> {
        let half = arch.head_dim / 2;
        let frequency: Vec<f64> = (0..half).map(|i| arch.rope_theta.powf(-2.0 * i as f64 / arch.head_dim as f64)).collect();
        let table = |f: fn(f64) -> f64| -> Result<Tensor> {
            let values: Vec<f64> = (0..positions).flat_map(|p| frequency.iter().map(move |w| f(p as f64 * w))).collect();
            upload(ops, &values, &[positions, half], dtype.stat())
        };
        Ok(RopeTables { cos: table(f64::cos)?, sin: table(f64::sin)? })
    }
}

/// Host values as a float tensor of `dtype` on the backend.
pub(crate) fn upload(ops: &dyn Ops, values: &[f64], shape: &[usize], dtype: DType) -> Result<Tensor> {
    if dtype == DType::F64 {
        return Ok(ops.from_host(temper_tensor::View::host(values, shape))?);
    }
    let single: Vec<f32> = values.iter().map(|v| *v as f32).collect();
    let f32s = ops.from_host(temper_tensor::View::host(&single, shape))?;
    if dtype == DType::F32 {
        return Ok(f32s);
    }
    let mut out = ops.alloc(dtype, shape)?;
    ops.copy(out.view_mut(), f32s.view())?;
    Ok(out)
}
