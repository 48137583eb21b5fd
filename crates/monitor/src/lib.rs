//! What a run shows.
//!
//! Owns: the sinks of a run's events: the log file ([`EventLog`]), TensorBoard files ([`TensorBoard`]), the loss curve
//! ([`Curve`]), the terminal ([`Progress`]), and [`Fan`], which hands every event to all of them.
//!
//! Must not know: training internals. It sees `temper_train::events` and nothing else.
//!
//! A sink that cannot write says so once, as a warning that names the file; training goes on.

mod curve;
mod event_log;
mod fan;
mod history;
mod losses;
mod progress;
mod tensorboard;
mod words;

pub use curve::Curve;
pub use event_log::EventLog;
pub use fan::Fan;
pub use progress::{Progress, Target};
pub use tensorboard::TensorBoard;
pub use words::size;

/// Why a sink cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("log.dir: {path} cannot be written: {source}. Choose another log.dir, or correct that file")]
pub struct Error {
    /// The file.
    pub path: std::path::PathBuf,
    /// The system's error.
    pub source: std::io::Error,
}

impl Error {
    /// Whether the run folder that the user chose is at fault.
    pub fn is_bad_input(&self) -> bool {
        temper_train::run_dir::is_of_the_path(&self.source)
    }
}

/// Result of opening a sink.
pub type Result<T> = std::result::Result<T, Error>;

/// Names the file in an error of the system.
fn at(path: &std::path::Path) -> impl Fn(std::io::Error) -> Error {
    |source| Error { path: path.to_path_buf(), source }
}
