//! Processes and hosts.
//!
//! Owns: what this process is among those of its job ([`Rendezvous`]).
//!
//! Must not know: layers, tensors.

mod env;

pub use env::{Error, Rendezvous, Result, VARIABLES};
