//! Our own kernels: `kernels/*.cu`, embedded in the program, compiled at run time for the device found.
//!
//! A source is compiled once for each [`Variant`] it is used in: the variant's element type and vector width become the
//! macros `T`, `V` and `D`, so the sources are plain C with no templates over them.

mod cache;
mod compile;
mod launch;
mod tensor_map;

pub use compile::{Compiled, Compiler, Resources};
pub(crate) use launch::args;
pub use launch::{Arg, Grid, Kernels};
pub use tensor_map::TensorMap;

use temper_tensor::DType;

/// What a source is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Macro `T`: element type of activations (none for sources that have no such type).
    pub dtype: Option<DType>,
    /// Macro `V`: 16 bytes' worth of elements when true, else 1.
    pub vector: bool,
    /// Macro `D`: largest head size (0 for sources without).
    pub head: u32,
}

impl Variant {
    /// The variant of a source without axes.
    pub const PLAIN: Variant = Variant { dtype: None, vector: false, head: 0 };

    /// For an element type, with 16-byte accesses or without.
    pub fn of(dtype: DType, vector: bool) -> Variant {
        Variant { dtype: Some(dtype), vector, head: 0 }
    }

    /// Elements per access.
    pub fn width(self) -> usize {
        match self.dtype {
            Some(d) if self.vector => 16 / d.size(),
            _ => 1,
        }
    }

    /// Compiler options.
    fn defines(self) -> Vec<String> {
        let mut all = vec![];
        if let Some(d) = self.dtype {
            all.push(format!("-DT={}", if d == DType::BF16 { "bf16" } else { "f32" }));
            all.push(format!("-DV={}", self.width()));
        }
        if self.head > 0 {
            all.push(format!("-DD={}", self.head));
        }
        all
    }
}

/// One file of kernels and the variants it is compiled in.
pub struct Source {
    /// File name in `kernels/`.
    pub file: &'static str,
    /// Its text.
    pub text: &'static str,
    /// Whether it has macros `T` and `V`.
    typed: bool,
    /// Whether the vector width varies (else 1).
    vectored: bool,
    /// Values of macro `D`.
    heads: &'static [u32],
    /// The only architecture it is for, or none for all.
    pub only: Option<&'static str>,
}

/// The header that every source includes.
pub const HEADER: (&str, &str) = ("common.cuh", include_str!("../../kernels/common.cuh"));

macro_rules! source {
    ($file:literal, $typed:expr, $vectored:expr, $heads:expr, $only:expr) => {
        Source {
            file: $file,
            text: include_str!(concat!("../../kernels/", $file)),
            typed: $typed,
            vectored: $vectored,
            heads: $heads,
            only: $only,
        }
    };
}

/// Largest head sizes the attention kernels are compiled for.
pub const HEADS: &[u32] = &[32, 64, 128, 256];

/// Largest head sizes of the attention kernels on tensor cores.
pub const MMA_HEADS: &[u32] = &[64, 128];

/// Every source.
pub static SOURCES: &[Source] = &[
    source!("attention.cu", true, false, HEADS, None),
    source!("attention_mma.cu", false, false, MMA_HEADS, None),
    source!("convert.cu", false, false, &[], None),
    source!("elementwise.cu", true, true, &[], None),
    source!("embedding.cu", true, true, &[], None),
    source!("gemm_grouped.cu", true, false, &[], None),
    source!("gemm_sm90a.cu", false, false, &[], Some("sm_90a")),
    source!("loss.cu", true, true, &[], None),
    source!("moe.cu", true, true, &[], None),
    source!("norm.cu", true, true, &[], None),
    source!("optimizer.cu", false, false, &[], None),
    source!("paged.cu", true, true, &[], None),
    source!("qkv.cu", true, true, &[], None),
    source!("reduce.cu", false, false, &[], None),
    source!("router.cu", false, false, &[], None),
    source!("sdpa.cu", false, false, &[], None),
    source!("sort.cu", false, false, &[], None),
    source!("swiglu.cu", true, true, &[], None),
];

impl Source {
    /// The source of a file name.
    pub fn named(file: &str) -> Option<&'static Source> {
        SOURCES.iter().find(|s| s.file == file)
    }

    /// Every variant in which the source is compiled.
    pub fn variants(&self) -> Vec<Variant> {
        if !self.typed {
            let plain = self.heads.is_empty().then_some(Variant::PLAIN);
            return plain.into_iter().chain(self.heads.iter().map(|&head| Variant { head, ..Variant::PLAIN })).collect();
        }
        let mut all = vec![];
        for dtype in [DType::F32, DType::BF16] {
            for &vector in if self.vectored { &[false, true][..] } else { &[false][..] } {
                if self.heads.is_empty() {
                    all.push(Variant::of(dtype, vector));
                }
                all.extend(self.heads.iter().map(|&head| Variant { head, ..Variant::of(dtype, vector) }));
            }
        }
        all
    }
}
