//! What workers write: a file for each rank, rank 0 also to the screen, and of the others the warnings, folded.

use crate::report::ranks_text;
use std::{
    collections::{HashMap, VecDeque},
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Lines of stderr that are kept for the report of a process that dies.
const TAIL: usize = 12;
/// Most bytes of a line; longer ones are cut in pieces.
const LINE: usize = 64 << 10;
/// Most bytes that wait for the run folder; more is counted and left out.
const WAITING: usize = 4 << 20;
/// How long a warning waits for other ranks that say the same.
const FOLD: Duration = Duration::from_millis(500);
/// Most different warnings that are shown.
const WARNINGS: usize = 1000;

/// A stream of the screen.
pub(crate) type ToScreen = Arc<Mutex<dyn Write + Send>>;

/// Where a supervisor shows things. Rank 0's output passes through it unchanged.
#[derive(Clone)]
pub struct Screen {
    /// Stdout.
    pub out: Arc<Mutex<dyn Write + Send>>,
    /// Stderr.
    pub err: Arc<Mutex<dyn Write + Send>>,
    /// Whether stderr is a terminal.
    pub terminal: bool,
}

impl Screen {
    /// Shows a line on stderr.
    pub(crate) fn say(&self, text: &str) {
        // Where a progress bar stands, the line takes its place; the bar is drawn again below.
        let clear = if self.terminal { "\r\x1b[2K" } else { "" };
        // Where nobody listens any more, nothing is lost but the line.
        let _ = writeln!(self.err.lock().unwrap_or_else(PoisonError::into_inner), "{clear}{text}");
    }
}

/// The name of a rank's log.
pub(crate) fn log_name(rank: usize) -> String {
    format!("rank-{rank:05}.log")
}

/// The log of one rank. The run folder may not be there yet, and must not be made by us: until it is, lines wait in memory.
#[derive(Default)]
pub(crate) struct RankLog(Mutex<Log>);

#[derive(Default)]
struct Log {
    file: Option<File>,
    waiting: Vec<u8>,
    left_out: usize,
    tail: VecDeque<String>,
    /// The last panic's own lines, which a backtrace would push out of the tail.
    panic: Vec<String>,
}

/// The line of a panic, which its message follows.
fn is_panic(line: &str) -> bool {
    line.contains(" panicked at ")
}

impl RankLog {
    fn lock(&self) -> std::sync::MutexGuard<'_, Log> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends to `folder`'s file of this rank from now on, with what has waited.
    pub(crate) fn open(&self, folder: &Path, rank: usize) -> io::Result<PathBuf> {
        let path = folder.join(log_name(rank));
        fs::create_dir_all(folder)?;
        let mut file = File::options().create(true).append(true).open(&path)?;
        let mut log = self.lock();
        file.write_all(&std::mem::take(&mut log.waiting))?;
        if log.left_out > 0 {
            writeln!(file, "[{} bytes left out here: the run folder was not there yet]", std::mem::take(&mut log.left_out))?;
        }
        log.file = Some(file);
        Ok(path)
    }

    /// Takes a line.
    pub(crate) fn line(&self, line: &str) {
        let log = &mut *self.lock();
        let bytes = [line.as_bytes(), b"\n"].concat();
        match &mut log.file {
            // A full disk must not end the job: training itself says so soon enough.
            Some(file) => drop(file.write_all(&bytes)),
            None if log.waiting.len() + bytes.len() <= WAITING => log.waiting.extend(bytes),
            None => log.left_out += bytes.len(),
        }
    }

    fn error_line(&self, line: &str) {
        self.line(line);
        let log = &mut *self.lock();
        if is_panic(line) {
            log.panic = vec![line.into()];
        } else if log.panic.len() == 1 {
            log.panic.push(line.into());
        }
        if log.tail.len() == TAIL {
            log.tail.pop_front();
        }
        log.tail.push_back(line.into());
    }

    /// The last lines of stderr, with a panic that is further up.
    pub(crate) fn tail(&self) -> Vec<String> {
        let log = self.lock();
        let further_up = log.panic.iter().filter(|line| !log.tail.contains(line));
        further_up.chain(&log.tail).cloned().collect()
    }
}

/// Which of the two streams of a process.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    Out,
    Err,
}

/// Reads a stream to its end: bytes to `through`, lines to the log, warnings to `warn`.
pub(crate) fn pump(mut from: impl Read, which: Which, log: &RankLog, mut through: Option<ToScreen>, mut warn: impl FnMut(String)) {
    let mut partial = vec![];
    let mut buffer = [0; 8192];
    let mut take = |bytes: &[u8]| {
        let line = plain(bytes);
        match which {
            Which::Out => log.line(&line),
            Which::Err => log.error_line(&line),
        }
        if is_warning(&line) {
            warn(line);
        }
    };
    loop {
        let n = match from.read(&mut buffer) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Ok(0) | Err(_) => break, // a terminal ends with an error
            Ok(n) => n,
        };
        let bytes = buffer.get(..n).unwrap_or_default();
        if let Some(to) = &through {
            let mut to = to.lock().unwrap_or_else(PoisonError::into_inner);
            let written = to.write_all(bytes).and_then(|()| to.flush());
            drop(to);
            if written.is_err() {
                through = None; // nobody listens any more; the log still does
            }
        }
        partial.extend_from_slice(bytes);
        while let Some(end) = partial.iter().position(|b| *b == b'\n') {
            let rest = partial.split_off(end + 1);
            partial.truncate(end);
            take(&partial);
            partial = rest;
        }
        if partial.len() > LINE {
            take(&std::mem::take(&mut partial));
        }
    }
    if !plain(&partial).trim().is_empty() {
        take(&partial);
    }
}

/// A line as it stays on the screen: without colours and what a carriage return overwrote.
fn plain(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let text = text.trim_end_matches('\r');
    let text = text.rsplit_once('\r').map_or(text, |(_, last)| last);
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c != '\x1b' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('[') => drop(chars.by_ref().find(|c| ('@'..='~').contains(c))),
            Some(']') => drop(chars.by_ref().find(|c| *c == '\x07' || *c == '\\')),
            _ => {}
        }
    }
    out
}

/// Whether a line is one that the user should see whichever rank writes it: tracing's, NCCL's, Rust's and C libraries' usual forms.
fn is_warning(line: &str) -> bool {
    let line = line.trim_start();
    let begins = ["WARN", "ERROR", "warning:", "error:"];
    begins.iter().any(|word| line.starts_with(word)) || line.contains(" NCCL WARN ")
}

/// Warnings of many ranks, each shown once.
#[derive(Default)]
pub(crate) struct Fold {
    seen: HashMap<String, Seen>,
    left_out: usize,
}

struct Seen {
    ranks: Vec<usize>,
    since: Instant,
    shown: bool,
}

impl Fold {
    /// Takes a line. Rank 0's are on the screen already.
    pub(crate) fn take(&mut self, rank: usize, line: String, now: Instant) {
        if !self.seen.contains_key(&line) && self.seen.len() == WARNINGS {
            self.left_out += 1;
            return;
        }
        let seen = self.seen.entry(line).or_insert(Seen { ranks: vec![], since: now, shown: false });
        seen.shown |= rank == 0;
        if !seen.ranks.contains(&rank) {
            seen.ranks.push(rank);
        }
    }

    /// Lines whose time has come; all that wait when `now` is none.
    pub(crate) fn due(&mut self, now: Option<Instant>) -> Vec<String> {
        let ripe = |s: &Seen| !s.shown && now.is_none_or(|now| now.duration_since(s.since) >= FOLD);
        let mut due: Vec<(&String, &mut Seen)> = self.seen.iter_mut().filter(|(_, seen)| ripe(seen)).collect();
        due.sort_by_key(|(_, seen)| seen.since);
        let lines = due.into_iter().map(|(line, seen)| {
            seen.shown = true;
            format!("[{}] {}", ranks_text(&seen.ranks), line.trim())
        });
        let mut lines: Vec<String> = lines.collect();
        if now.is_none() && self.left_out > 0 {
            lines.push(format!("{} more warnings are in the logs only", std::mem::take(&mut self.left_out)));
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_reaches_screen_and_log() {
        let dir = tempfile::tempdir().unwrap();
        let log = RankLog::default();
        let screen = Arc::new(Mutex::new(Vec::new()));
        let bytes: &[u8] = b"\x1b[32mone\x1b[0m\n 10%\r 20%\r\x1b[2K WARN two\nlast";
        let mut warned = vec![];
        pump(bytes, Which::Err, &log, Some(screen.clone()), |w| warned.push(w));
        assert_eq!(*screen.lock().unwrap(), bytes, "passes through unchanged");
        assert_eq!(warned, [" WARN two"]);
        assert_eq!(log.tail(), ["one", " WARN two", "last"]);
        assert!(log.lock().file.is_none());
        let path = log.open(&dir.path().join("logs"), 3).unwrap();
        log.line("after");
        assert!(path.ends_with("logs/rank-00003.log"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\n WARN two\nlast\nafter\n");
    }

    #[test]
    fn a_reader_that_is_gone_and_endless_lines_stop_nothing() {
        struct Gone;
        impl Write for Gone {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let log = RankLog::default();
        let bytes = [vec![b'x'; 3 * LINE], b"\nend\n".to_vec()].concat();
        pump(&*bytes, Which::Err, &log, Some(Arc::new(Mutex::new(Gone))), |_| ());
        assert_eq!(log.tail().last().unwrap(), "end");
        for _ in 0..WAITING / LINE + 1 {
            log.line(&"y".repeat(LINE));
        }
        assert!(log.lock().left_out > 0);
    }

    #[test]
    fn one_warning_of_many_ranks_is_one_line() {
        let (mut fold, now) = (Fold::default(), Instant::now());
        for rank in [3, 1, 2, 3, 7] {
            fold.take(rank, "WARN slow disk".into(), now);
        }
        fold.take(5, "WARN only here".into(), now + FOLD);
        fold.take(2, "WARN also on rank 0".into(), now);
        fold.take(0, "WARN also on rank 0".into(), now);
        assert!(fold.due(Some(now)).is_empty());
        assert_eq!(fold.due(Some(now + FOLD)), ["[ranks 1-3, 7] WARN slow disk"]);
        assert_eq!(fold.due(None), ["[rank 5] WARN only here"]);
        fold.take(4, "WARN slow disk".into(), now);
        assert!(fold.due(None).is_empty(), "shown once");
    }
}
