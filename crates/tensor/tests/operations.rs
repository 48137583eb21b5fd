//! The table of operations on the CPU: against naive references, f32 against f64, and for equal bits.

mod conformance;

use temper_tensor::{DType, cpu::Cpu};

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
