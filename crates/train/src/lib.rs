//! Training loops.
//!
//! Owns: the SFT loop, losses, the learning rate, the events a run reports, and the comparison with golden values and of layouts with one rank.
//!
//! Must not know: the command line, HTTP.

pub mod bench;
pub mod device;
mod error;
pub mod events;
mod fill;
mod findings;
mod guard;
mod host;
pub mod layout;
pub mod lr;
mod measure;
pub mod outcome;
pub mod precision;
pub mod run;
pub mod run_dir;
pub mod setup;
pub mod sft;
mod share;
mod state;
pub mod step;
mod together;
pub mod trace;
pub mod verify;

pub use error::{Error, Result};
