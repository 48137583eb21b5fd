//! The CPU backend: the normative one. Every operation of [`Ops`](crate::Ops) in f64 and f32.
pub mod pool;
