//! Training loops.
//!
//! Owns: the SFT loop, losses, the learning rate, and the events a run reports.
//!
//! Must not know: the command line, HTTP.

pub mod events;
