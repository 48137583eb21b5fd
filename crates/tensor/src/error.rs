//! What can go wrong at the boundary of an operation.

/// Result of a tensor operation.
pub type Result<T> = std::result::Result<T, Error>;

/// A failed operation. Shape and dtype errors are programming errors of the caller and name the op.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An argument has the wrong shape.
    #[error("{op}: {what} has shape {found:?}, expected {expected}")]
    Shape {
        /// Name of the operation.
        op: &'static str,
        /// Which argument.
        what: &'static str,
        /// Its shape.
        found: Vec<usize>,
        /// The shape it should have, in words.
        expected: String,
    },
    /// An argument has a dtype the operation does not take.
    #[error("{op}: {what} has dtype {found}, expected {expected}")]
    DType {
        /// Name of the operation.
        op: &'static str,
        /// Which argument.
        what: &'static str,
        /// Its dtype.
        found: crate::DType,
        /// The dtype it should have, in words.
        expected: String,
    },
    /// An index (token id, expert, position) lies outside its table.
    #[error("{op}: {what} {index} is outside 0..{limit}")]
    Index {
        /// Name of the operation.
        op: &'static str,
        /// What the index stands for.
        what: &'static str,
        /// The index found.
        index: i64,
        /// One past the largest legal index.
        limit: usize,
    },
    /// The backend failed (out of memory, driver error).
    #[error("{0}")]
    Backend(String),
}
