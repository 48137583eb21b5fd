//! The number types of a run, chosen once from the configuration and the backend.

use crate::{Error, Result};
use temper_config::{FloatType, Resolved};
use temper_tensor::{DType, Ops};

/// Types of what a run holds, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    /// Weights and activations.
    pub weights: DType,
    /// Gradients of weights.
    pub grads: DType,
    /// Adam's moments.
    pub moments: DType,
    /// Moments and remainders lie in host memory.
    pub offload: bool,
}

/// The tensor type of a configured one.
pub fn dtype_of(float: FloatType) -> DType {
    match float {
        FloatType::Float32 => DType::F32,
        FloatType::Bfloat16 => DType::BF16,
    }
}

impl Precision {
    /// The types of a run; writes what was chosen for "auto", and why, into the configuration.
    ///
    /// # Errors
    /// Names the key whose type the backend does not have.
    pub fn choose(resolved: &mut Resolved, ops: &dyn Ops) -> Result<Precision> {
        let wanted = resolved.config.precision.clone();
        let weights = match wanted.dtype {
            Some(float) => dtype_of(float),
            None => {
                let preferred = ops.dtypes()[0];
                resolved.config.precision.dtype = Some(if preferred == DType::BF16 { FloatType::Bfloat16 } else { FloatType::Float32 });
                resolved.explain("precision.dtype", format!("what {} is made for", ops.name()));
                preferred
            }
        };
        let offload = resolved.config.memory.offload_optimizer;
        let precision = Precision { weights, grads: dtype_of(wanted.grads), moments: dtype_of(wanted.moments), offload };
        for (key, dtype) in [("dtype", precision.weights), ("grads", precision.grads), ("moments", precision.moments)] {
            if !ops.dtypes().contains(&dtype) {
                let name = ops.name();
                return Err(Error::Input(format!("precision.{key}: {name} does not compute in {dtype}. Remove the key, or run on a GPU")));
            }
        }
        if offload && !ops.on_device() {
            let name = ops.name();
            resolved.notices.push(format!("memory.offload_optimizer does nothing here: {name} has all tensors in host memory"));
        }
        if precision.grads == DType::BF16 && precision.weights != DType::BF16 {
            let remedy = "Set it to float32, or precision.dtype to bfloat16";
            return Err(Error::Input(format!(
                "precision.grads: bfloat16 gradients of float32 weights lose what the weights keep. {remedy}"
            )));
        }
        Ok(precision)
    }
}
