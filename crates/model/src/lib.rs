//! The networks.
//!
//! Owns: layers with explicit forward and backward, the architectures, and the declaration of every parameter
//! (Hugging Face names, shapes, sharding rule, decay, initialisation).
//!
//! Must not know: files, schedules, data parallelism.
pub mod param;
