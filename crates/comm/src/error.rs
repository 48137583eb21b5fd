//! What can go wrong between ranks.

use std::time::Duration;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// A failure of communication. Every variant names the group, the operation and the rank of the job that is to blame, where known.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// A rank stayed silent.
    #[error("{place}: nothing from rank {from} within {}: {found}. Look at that rank's log; if it is merely slow, raise the timeout", crate::recorder::seconds(*.after))]
    Timeout {
        /// Where this rank stands.
        place: String,
        /// The silent rank of the job.
        from: usize,
        /// How long it was waited for.
        after: Duration,
        /// What the silent rank does, as far as it can be learned.
        found: String,
    },
    /// A rank is gone.
    #[error("{place}: rank {from} is gone: {cause}. Its own log has the reason")]
    Lost {
        /// Where this rank stands.
        place: String,
        /// The rank of the job that is gone.
        from: usize,
        /// How that was noticed.
        cause: String,
    },
    /// Two ranks do different things.
    #[error("{place}: rank {from} is elsewhere: {found}. All ranks must run the same program, configuration and data")]
    Mismatch {
        /// Where this rank stands.
        place: String,
        /// The other rank of the job.
        from: usize,
        /// What it does.
        found: String,
    },
    /// An operation was called with buffers that do not fit.
    #[error("{place}: {what}")]
    Call {
        /// Group and operation.
        place: String,
        /// What does not fit.
        what: String,
    },
    /// Ranks could not be connected, or a library of the transport failed.
    #[error("{0}")]
    Transport(String),
}
