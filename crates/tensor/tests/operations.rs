//! The table of operations on the CPU: against naive references, f32 against f64, and for equal bits.

mod conformance;

use std::{collections::BTreeSet, sync::Arc};
use temper_tensor::{DType, Level, Traced, cpu::Cpu};

#[test]
fn f64_agrees_with_the_naive_references() {
    conformance::check(&Cpu::new(2), DType::F64, 1e-10);
}

#[test]
fn f32_agrees_with_f64() {
    conformance::compare(&Cpu::new(2), DType::F32, &Cpu::new(2), DType::F64, 1e-5);
}

#[test]
fn bits_do_not_depend_on_threads_or_repetition() {
    let (one, two, five) = (Cpu::new(1), Cpu::new(2), Cpu::new(5));
    for dtype in [DType::F32, DType::F64] {
        conformance::compare(&two, dtype, &one, dtype, 0.0);
        conformance::compare(&five, dtype, &one, dtype, 0.0);
        conformance::compare(&two, dtype, &two, dtype, 0.0);
    }
}

/// Whatever is recorded, the answer is the wrapped backend's, and each operation is noted under its own name.
#[test]
fn a_recorded_backend_gives_equal_bits() {
    let traced = Traced::new(Arc::new(Cpu::new(1)));
    traced.start(Level::Operations).unwrap();
    conformance::compare(&traced, DType::F32, &Cpu::new(1), DType::F32, 0.0);
    let recording = traced.finish().unwrap();
    let noted: BTreeSet<&str> = recording.calls.iter().map(|call| call.what.name).collect();
    for name in ["gemm", "grouped_gemm", "attention_grad", "paged_attention", "add_rms_norm", "qkv_prepare", "moe_act_grad", "adamw"] {
        assert!(noted.contains(name), "{name}: {noted:?}");
    }
    for call in &recording.calls {
        assert!(call.device.ms() >= 0.0 && call.host.ms() >= 0.0 && call.what.bytes.is_finite(), "{call:?}");
    }
}
