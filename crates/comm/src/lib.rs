//! What ranks say to each other.
//!
//! Owns: [`Comm`], the collectives of one process group; [`World`], which makes groups; [`Mesh`], the groups of a layout; the
//! transports between host memories (threads of one process, TCP); the flight [`Recorder`].
//!
//! Must not know: what a group is for.
//!
//! A rule for all of them: every rank of a group calls the same operations in the same order. On host memory this is checked, and
//! a rank that strays, ends or stays silent gives an error on the others that names it.

pub mod bench;
mod comm;
mod error;
mod host;
mod mesh;
mod operation;
mod recorder;
mod solo;

pub use comm::{Comm, Pending, Reduce, Work, World};
pub use error::{Error, Result};
pub use host::{Departure, HostWorld, Tcp, tcp, threads};
pub use mesh::{Axes, Line, Mesh};
pub use operation::Operation;
pub use recorder::{Entry, Recorder, Standing, State, Ticket};
pub use solo::Solo;
