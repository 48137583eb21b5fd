//! The worker's side of the control channel: it tells its supervisor what it does and how it ends, and ends when nobody supervises it.

use crate::error::{Error, Result, doing};
use crate::fingerprint::Fingerprint;
use crate::message::{Answer, Doing, Failed, Messages, Told, send};
use rustix::process::{Signal, getpid, kill_process};
use std::{
    net::TcpStream,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

/// The variable by which a worker knows its supervisor: `address/token/job/attempt/new`, or `.../resume`.
pub const SUPERVISOR: &str = "TEMPER_SUPERVISOR";

/// Time between heartbeats.
const BEAT: Duration = Duration::from_secs(1);
/// Least time between heartbeats, however often the worker does something new.
const LEAST: Duration = Duration::from_millis(50);
/// Most time that a message to the supervisor may take; it is on this host and only reads.
const WRITE: Duration = Duration::from_secs(5);

/// What the supervisor gives its worker in [`SUPERVISOR`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lead {
    pub(crate) address: String,
    pub(crate) token: String,
    pub(crate) job: String,
    pub(crate) attempt: usize,
    pub(crate) resume: bool,
}

impl Lead {
    pub(crate) fn to_text(&self) -> String {
        format!("{}/{}/{}/{}/{}", self.address, self.token, self.job, self.attempt, if self.resume { "resume" } else { "new" })
    }

    fn parse(text: &str) -> Option<Lead> {
        let parts: Vec<&str> = text.split('/').collect();
        let [address, token, job, attempt, begin @ ("new" | "resume")] = parts[..] else { return None };
        let [address, token, job] = [address, token, job].map(str::to_string);
        Some(Lead { address, token, job, attempt: attempt.parse().ok()?, resume: begin == "resume" })
    }
}

/// Says where the rank stands among the others, if anywhere: asked with every heartbeat.
pub type Standing = Box<dyn Fn() -> Option<String> + Send>;

/// A worker under a supervisor.
pub struct Worker {
    lead: Lead,
    shared: Arc<Shared>,
    answers: Mutex<Receiver<Answer>>,
}

struct Shared {
    stream: Mutex<TcpStream>,
    doing: Mutex<Now>,
    /// Something new is being done.
    news: Condvar,
    standing: Mutex<Option<Standing>>,
}

struct Now {
    doing: Doing,
    since: Instant,
    /// The supervisor knows.
    told: bool,
}

impl Now {
    fn new(doing: Doing) -> Now {
        Now { doing, since: Instant::now(), told: false }
    }
}

impl Shared {
    fn tell(&self, told: &Told) -> std::io::Result<()> {
        send(&mut *lock(&self.stream), told)
    }

    fn beat(&self) -> std::io::Result<()> {
        // Taken before it is known what to say, so that what is older is never said after what is newer.
        let mut stream = lock(&self.stream);
        let mut doing = {
            let mut now = lock(&self.doing);
            now.told = true;
            Doing { for_ms: now.since.elapsed().as_millis() as u64, ..now.doing.clone() }
        };
        doing.standing = lock(&self.standing).as_ref().and_then(|ask| ask());
        send(&mut *stream, &Told::Doing(doing))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Worker {
    /// Connects to the supervisor that the environment names; `None` when there is none. From here on this process ends as soon as
    /// that supervisor does, however it does.
    ///
    /// # Errors
    /// When the variable is no such thing, or the supervisor cannot be reached.
    pub fn from_env(local_rank: usize) -> Result<Option<Worker>> {
        let Some(text) = std::env::var_os(SUPERVISOR) else { return Ok(None) };
        let text = text.to_string_lossy();
        let lead =
            Lead::parse(&text).ok_or_else(|| Error::Input(format!("{SUPERVISOR}={text}: only temper sets this variable; unset it")))?;
        die_with_parent();
        let stream = TcpStream::connect(&lead.address).map_err(doing(format!("the supervisor at {}", lead.address)))?;
        let set = stream.set_nodelay(true).and_then(|()| stream.set_write_timeout(Some(WRITE))).and_then(|()| stream.try_clone());
        let reader = set.map_err(doing("the supervisor's connection"))?;
        let shared = Arc::new(Shared {
            stream: Mutex::new(stream),
            doing: Mutex::new(Now::new(Doing::default())),
            news: Condvar::new(),
            standing: Mutex::default(),
        });
        let hello = Told::Hello { token: lead.token.clone(), local_rank };
        shared.tell(&hello).map_err(doing("telling the supervisor"))?;
        let (sender, answers) = channel();
        thread::spawn(move || listen(reader, &sender));
        let beating = shared.clone();
        // The listener notices when nobody hears the beats any more.
        thread::spawn(move || {
            while beating.beat().is_ok() {
                thread::sleep(LEAST);
                drop(beating.news.wait_timeout_while(lock(&beating.doing), BEAT - LEAST, |now| now.told));
            }
        });
        Ok(Some(Worker { lead, shared, answers: Mutex::new(answers) }))
    }

    /// A name that all ranks of this start have in common and no other start has.
    pub fn job(&self) -> String {
        format!("{}.{}", self.lead.job, self.lead.attempt)
    }

    /// The how manieth start of the job this is, from 1.
    pub fn attempt(&self) -> usize {
        self.lead.attempt
    }

    /// Whether the supervisor wants the work to go on from the last checkpoint, whatever the arguments say.
    pub fn resume(&self) -> bool {
        self.lead.resume
    }

    /// Says what the worker does from now on, with the number of the training step if it is one. The supervisor knows a new phase when
    /// this returns, and a new step of the same phase soon.
    pub fn doing(&self, phase: &str, step: Option<u64>) {
        let new = Now::new(Doing { phase: phase.into(), step, ..Doing::default() });
        let old = std::mem::replace(&mut *lock(&self.shared.doing), new);
        if old.doing.phase == phase {
            return self.shared.news.notify_one();
        }
        // The listener ends this process when nobody hears.
        let _ = self.shared.beat();
    }

    /// Adds to every heartbeat where the rank stands among the others.
    pub fn standing(&self, ask: Standing) {
        *lock(&self.shared.standing) = Some(ask);
    }

    /// Tells what this rank runs with and waits until all ranks are known to run with the same.
    ///
    /// # Errors
    /// When the supervisor does not answer. Where ranks differ it ends them all instead.
    pub fn preflight(&self, print: Fingerprint, patience: Duration) -> Result<()> {
        self.shared.tell(&Told::Fingerprint(print)).map_err(doing("telling the supervisor"))?;
        match lock(&self.answers).recv_timeout(patience) {
            Ok(Answer::Go) => Ok(()),
            Err(RecvTimeoutError::Timeout) => {
                let what = "not all ranks told what they run with; those that did not may still be starting, or be stuck reading the model or the data";
                Err(Error::Supervisor(format!("after {} s {what}", patience.as_secs())))
            }
            Err(RecvTimeoutError::Disconnected) => Err(Error::Supervisor("the supervisor is gone".into())),
        }
    }

    /// Everything is read and checked, and the run folder is there.
    pub fn ready(&self) {
        self.say(&Told::Ready);
    }

    /// The work is done.
    pub fn done(&self) {
        self.say(&Told::Done);
    }

    /// The work has failed. Returns whether the supervisor knows, and will show it.
    pub fn failed(&self, failed: Failed) -> bool {
        self.shared.tell(&Told::Failed(failed)).is_ok()
    }

    fn say(&self, told: &Told) {
        // A supervisor that is gone ends this process, by the listener.
        let _ = self.shared.tell(told);
    }
}

/// A worker that is stopped does not hear that its supervisor is gone; the kernel ends it all the same. Where there is no such service
/// (and under launchers that put a process between), the connection must do.
fn die_with_parent() {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL)); // refuses only what is no signal
}

/// Passes answers on; ends the process with its supervisor. Nothing is cleaned up: what a collective or a device call blocks would
/// block that too, and checkpoints survive an end at any moment.
fn listen(stream: TcpStream, answers: &Sender<Answer>) {
    let mut messages = Messages::new(stream);
    while let Ok(answer) = messages.next() {
        let _ = answers.send(answer);
    }
    let _ = kill_process(getpid(), Signal::KILL);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_says_all() {
        let lead = Lead { address: "127.0.0.1:5".into(), token: "ab".into(), job: "j".into(), attempt: 2, resume: true };
        assert_eq!(Lead::parse(&lead.to_text()), Some(lead));
        for bad in ["", "1", "a:1/t/j/x/new", "a:1/t/j/1/old", "a:1/t/j/1/new/more"] {
            assert_eq!(Lead::parse(bad), None, "{bad}");
        }
    }
}
