//! Checkpoints of several ranks, which are threads here: from any layout to any other bit for bit, through every fault.

#[path = "../common/mod.rs"]
mod common;

mod coverage;
mod faults;
mod killed;
mod layouts;
mod ranks;
mod speed;
