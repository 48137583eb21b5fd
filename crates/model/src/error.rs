//! What can go wrong in the networks.

/// Result of a model operation.
pub type Result<T> = std::result::Result<T, Error>;

/// A failed model operation.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An operation of the backend failed.
    #[error(transparent)]
    Tensor(#[from] temper_tensor::Error),
    /// Ranks could not exchange what a layer needs.
    #[error(transparent)]
    Comm(#[from] temper_comm::Error),
    /// A parameter that a layer needs holds no tensor.
    #[error("parameter {0} has no weights: load or initialise it before running the model")]
    MissingWeights(String),
    /// The architecture lacks a parameter that a layer needs (a bug of the declaration).
    #[error("the declaration has no parameter {0}")]
    Undeclared(String),
    /// A gradient was added to although its sum over ranks was begun (a bug of the caller).
    #[error("{0}: a gradient came after its sum over ranks was begun")]
    ClosedSum(String),
    /// The mesh lacks a group that the layout of a parameter needs (a bug of the caller).
    #[error("the mesh has no group of {0} neighbours that hold copies of the same heads")]
    NoGroup(usize),
    /// A batch contradicts itself.
    #[error("batch: {0}")]
    Batch(String),
    /// A backward pass was given activations that were dropped and not computed again (a bug of the caller).
    #[error("backward: some activations were dropped and not computed again")]
    Incomplete,
    /// A stage was asked for that this rank does not hold (a bug of the caller).
    #[error("another rank has the {0}")]
    OtherStage(&'static str),
    /// The architecture cannot be run.
    #[error("architecture: {0}")]
    Arch(String),
}
