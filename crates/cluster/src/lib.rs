//! Processes and hosts: who starts the ranks of a job, watches them, and says what went wrong.
//!
//! Owns: what this process is among those of its job ([`Rendezvous`]); the supervisor of a host ([`Supervisor`]) and, on the first
//! host, of the job; the worker's word to it ([`Worker`]); the comparison of what ranks run with ([`Fingerprint`]); logs of ranks; the
//! report of the first failure; hostfiles and the start by ssh ([`launch`]).
//!
//! Must not know: layers, tensors, devices, what the workers do.
//!
//! ```text
//! worker  --Told-->  node    --Event-->  head     worker.rs -> node.rs -> job.rs (decides)
//!         <-Answer-          <--Order--           over 127.0.0.1; between hosts by link.rs
//! ```

mod env;
mod error;
mod fingerprint;
pub mod hosts;
mod job;
pub mod launch;
mod link;
mod logs;
mod message;
mod node;
mod process;
mod report;
mod supervisor;
mod worker;

pub use env::{Rendezvous, VARIABLES};
pub use error::{Error, Result};
pub use fingerprint::{Difference, Fingerprint, differences};
pub use logs::Screen;
pub use message::{Failed, Kind};
pub use node::Workers;
pub use supervisor::{Patience, Seat, Stop, Supervisor};
pub use worker::{SUPERVISOR, Standing, Worker};
