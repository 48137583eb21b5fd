//! What the processes of a job say to each other about their lives, apart from the data plane.
//!
//! Three parties: a worker is one rank; a node watches the workers of its host; the head watches the nodes and decides. Workers tell
//! their node ([`Told`]) and are answered ([`Answer`]); nodes report to the head ([`Event`]) and obey it ([`Order`]). Every message is
//! one line of JSON.

use crate::fingerprint::Fingerprint;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    fmt,
    io::{self, BufRead, BufReader, Read, Write},
    time::Duration,
};

/// Longest message. A fingerprint has some hundred short items.
const LONGEST: u64 = 4 << 20;

/// What a worker tells its node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Told {
    /// The first message of a connection.
    Hello {
        /// The secret of this start.
        token: String,
        /// The worker among those of its node.
        local_rank: usize,
    },
    /// What the worker runs with; [`Answer::Go`] follows when all ranks run with the same.
    Fingerprint(Fingerprint),
    /// A heartbeat.
    Doing(Doing),
    /// Everything is read and checked, the run folder is there.
    Ready,
    /// The work is done.
    Done,
    /// The work has failed; nothing follows.
    Failed(Failed),
}

/// What a node answers its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// All ranks run with the same: the first collective may begin.
    Go,
}

/// What a rank does.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Doing {
    /// In a word or two: `reading`, `training`.
    pub phase: String,
    /// Training step under way, from 1.
    pub step: Option<u64>,
    /// Where it stands among the other ranks, e.g. the collective it waits in.
    pub standing: Option<String>,
    /// Milliseconds since it began.
    pub for_ms: u64,
}

impl fmt::Display for Doing {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.phase.as_str() {
            "" => write!(f, "starting")?,
            phase => write!(f, "{phase}")?,
        }
        if let Some(step) = self.step {
            write!(f, ", step {step}")?;
        }
        if let Some(standing) = &self.standing {
            write!(f, ", {standing}")?;
        }
        write!(f, ", for {}", seconds(Duration::from_millis(self.for_ms)))
    }
}

/// Seconds for people: `0.4 s`, `12 s`.
pub(crate) fn seconds(d: Duration) -> String {
    if d < Duration::from_secs(10) { format!("{:.1} s", d.as_secs_f64()) } else { format!("{} s", d.as_secs()) }
}

/// Why a worker's work has failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failed {
    /// The error, as a user is to read it.
    pub message: String,
    /// The exit code that goes with it.
    pub code: u8,
    /// Whose fault it is.
    pub kind: Kind,
}

/// Whose fault a failure is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// The rank's own.
    Own,
    /// The rank's own, and a new start from the last checkpoint would come to the same end.
    Lasting,
    /// Another rank is gone or silent, and this one cannot go on without it.
    Secondary {
        /// That rank.
        of: usize,
    },
    /// Another rank's own: it has told this one, which passes it on in the other's words.
    Passed {
        /// That rank.
        of: usize,
    },
    /// Nobody's: it was asked to stop, and did so in order.
    Interrupted,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exit {
    /// By itself, with this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
}

/// What a node reports. Ranks are those of the job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// The first message of a node.
    Joined {
        /// The secret of the job.
        token: String,
        /// The node, from 0.
        node: usize,
        /// Its host's name.
        host: String,
        /// Ranks it brings.
        ranks: usize,
    },
    /// A worker has told something.
    Told(usize, Told),
    /// A worker's process has ended, and all it wrote was read.
    Exited {
        /// Its rank.
        rank: usize,
        /// How.
        exit: Exit,
        /// The last lines of its stderr.
        tail: Vec<String>,
    },
    /// A worker has not been heard of for too long.
    Silent {
        /// Its rank.
        rank: usize,
        /// Milliseconds since it was.
        for_ms: u64,
        /// What the system says of its process.
        process: String,
    },
    /// A warning or error that a worker wrote.
    Echo(usize, String),
    /// Something about the node itself that the user should know.
    Notice(String),
    /// No worker of this start is left, and device memory is free again; or what holds it back.
    Idle(Result<(), String>),
    /// The user, or who started this node, wants the job to stop.
    Stop,
    /// The node is there, though nothing happens.
    Alive,
    /// The head's own note that a node is gone.
    Gone(String),
}

/// What the head wants of a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Order {
    /// Start the workers.
    Start(Start),
    /// All ranks run with the same: let the workers go on.
    Go,
    /// The run folder is there: logs belong into it.
    Logs,
    /// No run folder came to be: write the logs where a user can be sent to.
    SpareLogs,
    /// Ask the workers to stop, in order (SIGTERM).
    Ask,
    /// End the workers (SIGKILL).
    Kill,
    /// The workers are gone: report when device memory is free again.
    Free,
    /// The job is over: leave with this exit code.
    End(u8),
    /// The head is there, though nothing happens.
    Alive,
    /// A node's own note that the head is gone.
    Gone(String),
}

/// A start of the workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// The how manieth, from 1.
    pub attempt: usize,
    /// Go on from the last checkpoint.
    pub resume: bool,
    /// The node's first rank.
    pub first: usize,
    /// Ranks of the job.
    pub world: usize,
    /// Where rank 0 listens for the data plane, `host:port`.
    pub master: (String, u16),
    /// A name that no other start has.
    pub job: String,
}

/// Writes one message.
pub(crate) fn send(mut to: impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    to.write_all(&line)
}

/// Reads messages, one a line.
pub(crate) struct Messages<R>(BufReader<R>);

impl<R: Read> Messages<R> {
    pub(crate) fn new(from: R) -> Messages<R> {
        Messages(BufReader::new(from))
    }

    /// The next message.
    ///
    /// # Errors
    /// `UnexpectedEof` when the other side is gone, `InvalidData` for what is no message.
    pub(crate) fn next<T: DeserializeOwned>(&mut self) -> io::Result<T> {
        let mut line = vec![];
        self.0.by_ref().take(LONGEST).read_until(b'\n', &mut line)?;
        match line.last() {
            None => Err(io::ErrorKind::UnexpectedEof.into()),
            Some(b'\n') => Ok(serde_json::from_slice(&line)?),
            Some(_) => Err(io::Error::new(io::ErrorKind::InvalidData, "a message is cut off, or too long")),
        }
    }

    pub(crate) fn stream(&self) -> &R {
        self.0.get_ref()
    }
}
