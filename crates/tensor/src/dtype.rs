//! Element types.

use half::{bf16, f16};
use std::fmt;

/// Type of the elements of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// 64-bit float (finite-difference tests).
    F64,
    /// 32-bit float.
    F32,
    /// bfloat16.
    BF16,
    /// IEEE half.
    F16,
    /// 32-bit signed integer: token ids, positions, indices, counts.
    I32,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::BF16 | DType::F16 => 2,
        }
    }

    /// The type in which statistics (softmax sums, norms, loss) of this type are kept: F64 for F64, else F32.
    pub const fn stat(self) -> DType {
        match self {
            DType::F64 => DType::F64,
            _ => DType::F32,
        }
    }

    /// The name used in `config.json` and in this project's configuration.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F64 => "float64",
            DType::F32 => "float32",
            DType::BF16 => "bfloat16",
            DType::F16 => "float16",
            DType::I32 => "int32",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type that can be the element of a tensor.
pub trait Element: bytemuck::Pod + Send + Sync + PartialEq + fmt::Debug + Default {
    /// Its [`DType`].
    const DTYPE: DType;
}

macro_rules! element {
    ($($t:ty => $d:ident),*) => { $(impl Element for $t { const DTYPE: DType = DType::$d; })* };
}
element!(f64 => F64, f32 => F32, bf16 => BF16, f16 => F16, i32 => I32);
