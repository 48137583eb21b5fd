//! How ranks agree that a piece of work succeeded everywhere, or learn whose failure ended it.
//!
//! While a rank works, its messages go round once a second: everyone tells rank 0 how it stands and rank 0 tells everyone what follows.
//! So a group's patience need cover a beat only, however long the work takes, and a failure stops the others within one. All
//! messages are of one size, in host memory.

use crate::{Class, Error, Result};
use std::{
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};
use temper_comm::Comm;
use temper_tensor::{Tensor, View};

/// Longest time between two messages of a rank that still works.
const BEAT: Duration = Duration::from_secs(1);
/// Words of a message, 4 KiB.
const WORDS: usize = 1024;
/// Words before the text.
const HEAD: usize = 3;

/// Tells a job that another rank failed, so that its own work is in vain.
#[derive(Default)]
pub(crate) struct Stop(AtomicBool);

impl Stop {
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// How a rank stands, or how all of them do.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Standing {
    Busy,
    /// With rank 0's word to all.
    Done(String),
    Failed {
        rank: usize,
        class: Class,
        message: String,
    },
}

/// Does `job` on rank 0 of a group while the others wait, however long it takes: none of them misses another or ends before it is done.
///
/// # Errors
/// The same on all ranks: [`Error::OfRank`] with that of rank 0. [`Error::Comm`] on a rank that no longer reaches it.
pub fn on_first<T>(comm: &dyn Comm, job: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
    let job = |_: &Stop| Ok((if comm.rank() == 0 { Some(job()?) } else { None }, String::new()));
    Ok(agree(comm, job)?.0)
}

/// Does `job` on every rank of a group. Succeeds when it does everywhere, with this rank's result and the word that rank 0's job
/// gave along with its own; a group of one does without messages.
///
/// # Errors
/// The same on all ranks: [`Error::OfRank`] with the first failure. [`Error::Comm`] on a rank that no longer reaches rank 0.
pub(crate) fn agree<T>(comm: &dyn Comm, job: impl FnOnce(&Stop) -> Result<(T, String)>) -> Result<(T, String)> {
    let stop = Stop::default();
    if comm.size() == 1 {
        return job(&stop);
    }
    let desk = Desk::default();
    thread::scope(|scope| {
        let rounds = scope.spawn(|| rounds(comm, &desk, &stop));
        let panicking = Panicking { desk: &desk, rank: comm.rank() };
        let result = job(&stop);
        desk.put(match &result {
            Ok((_, word)) => Standing::Done(word.clone()),
            Err(e) => Standing::Failed { rank: comm.rank(), class: e.class(), message: e.to_string() },
        });
        std::mem::forget(panicking);
        let in_vain = stop.is_set();
        let agreed = rounds.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        match (agreed, result) {
            (Ok(Standing::Failed { rank, class, message }), _) => Err(Error::OfRank { rank, class, message }),
            (Ok(Standing::Done(word)), Ok((value, _))) => Ok((value, word)),
            // This rank's own failure comes before that of reaching the others with it.
            (Err(_), Err(own)) if !in_vain => Err(own),
            (Err(lost), _) => Err(lost),
            (Ok(_), Err(own)) => Err(own),
            (Ok(Standing::Busy), Ok(_)) => Err(Error::OfRank { rank: 0, class: Class::Lost, message: "ended without a result".into() }),
        }
    })
}

/// Where a job leaves its standing for the messages to take.
#[derive(Default)]
struct Desk {
    standing: Mutex<Option<Standing>>,
    changed: Condvar,
}

impl Desk {
    fn lock(&self) -> MutexGuard<'_, Option<Standing>> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, standing: Standing) {
        *self.lock() = Some(standing);
        self.changed.notify_all();
    }

    /// The standing, as soon as it is final or a beat has passed.
    fn take(&self) -> Standing {
        let wait = self.changed.wait_timeout_while(self.lock(), BEAT, |standing| standing.is_none());
        wait.unwrap_or_else(PoisonError::into_inner).0.clone().unwrap_or(Standing::Busy)
    }
}

/// Reports a job that panicked, for the other ranks not to wait for it.
struct Panicking<'d> {
    desk: &'d Desk,
    rank: usize,
}

impl Drop for Panicking<'_> {
    fn drop(&mut self) {
        self.desk.put(Standing::Failed { rank: self.rank, class: Class::Failed, message: "its thread panicked; see its log".into() });
    }
}

/// Messages until all are done or one has failed. The last of them sets `stop`.
fn rounds(comm: &dyn Comm, desk: &Desk, stop: &Stop) -> Result<Standing> {
    loop {
        let own = desk.take();
        let round = if comm.rank() == 0 { lead(comm, own) } else { follow(comm, &own) };
        if !matches!(round, Ok(Standing::Busy | Standing::Done(_))) {
            stop.0.store(true, Ordering::Relaxed);
        }
        match round? {
            Standing::Busy => {}
            end => return Ok(end),
        }
    }
}

/// Rank 0 of a round: hears all, decides, tells all.
fn lead(comm: &dyn Comm, own: Standing) -> Result<Standing> {
    let mut all = own;
    let mut lost = Vec::new();
    for rank in 1..comm.size() {
        let standing = receive(comm, rank).unwrap_or_else(|e| {
            lost.push(rank);
            Standing::Failed { rank, class: Class::Lost, message: e.to_string() }
        });
        all = match (all, standing) {
            (failed @ Standing::Failed { .. }, _) | (_, failed @ Standing::Failed { .. }) => failed,
            (Standing::Busy, _) | (_, Standing::Busy) => Standing::Busy,
            (done, Standing::Done(_)) => done,
        };
    }
    for rank in (1..comm.size()).filter(|r| !lost.contains(r)) {
        let sent = send(comm, &all, rank);
        if lost.is_empty() {
            sent?;
        }
    }
    Ok(all)
}

/// Another rank of a round.
fn follow(comm: &dyn Comm, own: &Standing) -> Result<Standing> {
    send(comm, own, 0)?;
    receive(comm, 0)
}

fn send(comm: &dyn Comm, standing: &Standing, to: usize) -> Result<()> {
    let words = standing.words();
    Ok(comm.send(View::host(&words, &[WORDS]), to)?.wait()?)
}

fn receive(comm: &dyn Comm, from: usize) -> Result<Standing> {
    let mut words = Tensor::from_vec(vec![0i32; WORDS], &[WORDS]);
    comm.recv(words.view_mut(), from)?.wait()?;
    Ok(Standing::parse(words.as_slice().unwrap_or_default()))
}

impl Standing {
    const CLASSES: [Class; 4] = [Class::Failed, Class::BadInput, Class::NotWhole, Class::Lost];

    fn words(&self) -> Vec<i32> {
        let (state, rank, text) = match self {
            Standing::Busy => (0, 0, ""),
            Standing::Done(word) => (1, 0, word.as_str()),
            Standing::Failed { rank, class, message } => {
                (2 + Standing::CLASSES.iter().position(|c| c == class).unwrap_or(0), *rank, message.as_str())
            }
        };
        let text = fitted(text);
        let mut words = vec![state as i32, rank as i32, text.len() as i32];
        words.extend(text.as_bytes().chunks(4).map(|four| {
            let mut word = [0; 4];
            word[..four.len()].copy_from_slice(four);
            i32::from_le_bytes(word)
        }));
        words.resize(WORDS, 0);
        words
    }

    fn parse(words: &[i32]) -> Standing {
        let [state, rank, len, text @ ..] = words else { return Standing::Busy };
        let mut bytes: Vec<u8> = text.iter().flat_map(|w| w.to_le_bytes()).collect();
        bytes.truncate(usize::try_from(*len).unwrap_or(0));
        let text = String::from_utf8_lossy(&bytes).into_owned();
        match state {
            0 => Standing::Busy,
            1 => Standing::Done(text),
            n => {
                let class = usize::try_from(n - 2).ok().and_then(|i| Standing::CLASSES.get(i)).copied().unwrap_or(Class::Failed);
                Standing::Failed { rank: usize::try_from(*rank).unwrap_or(0), class, message: text }
            }
        }
    }
}

/// A text as long as a message may hold; what is cut says so.
fn fitted(text: &str) -> std::borrow::Cow<'_, str> {
    const CUT: &str = " ... (cut)";
    let room = (WORDS - HEAD) * 4;
    if text.len() <= room {
        return text.into();
    }
    let mut end = room - CUT.len();
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}{CUT}", &text[..end]).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back() {
        let failed = |message: &str| Standing::Failed { rank: 7, class: Class::NotWhole, message: message.into() };
        for standing in [Standing::Busy, Standing::Done("\u{e9}t\u{e9}".into()), failed("why")] {
            assert_eq!(Standing::parse(&standing.words()), standing);
        }
        let Standing::Failed { message, .. } = Standing::parse(&failed(&"\u{e9}".repeat(5000)).words()) else { panic!() };
        assert!(message.len() > 4000 && message.ends_with("\u{e9} ... (cut)"));
        assert_eq!(Standing::parse(&[]), Standing::Busy);
    }

    /// The others are held until the first is done, which takes longer than they would wait for a message; its error is theirs.
    #[test]
    fn the_others_wait_for_the_first_however_long_it_takes() {
        const PATIENCE: Duration = Duration::from_secs(4);
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            for world in temper_comm::threads(3, PATIENCE) {
                let done = &done;
                scope.spawn(move || {
                    use temper_comm::World;
                    let comm = world.host_group("all", &[0, 1, 2]).unwrap();
                    let first = on_first(&*comm, || {
                        thread::sleep(PATIENCE + BEAT);
                        done.store(true, Ordering::Relaxed);
                        Ok(5)
                    });
                    assert!(done.load(Ordering::Relaxed), "rank {} did not wait", comm.rank());
                    assert_eq!(first.unwrap(), (comm.rank() == 0).then_some(5));
                    let failed = on_first::<()>(&*comm, || Err(Error::bad(std::path::Path::new("hf"), "no")));
                    assert!(matches!(&failed, Err(Error::OfRank { rank: 0, message, .. }) if message == "hf: no"), "{failed:?}");
                });
            }
        });
    }
}
