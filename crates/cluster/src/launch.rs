//! One supervisor per host, started by ssh (or what stands for it), with rank 0's host first.
//!
//! The launcher only starts and passes on: the first host's supervisor heads the job. Each supervisor's stdin is the launcher's
//! word: a line `stop` is a Ctrl-C, its end is the launcher's, and the supervisor ends its workers.

use crate::error::{Error, Result};
use crate::hosts::Host;
use crate::logs::{Screen, ToScreen};
use crate::node::{TICK, secret};
use std::{
    ffi::OsString,
    io::{self, BufRead, Read, Write},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{
        Arc, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::Receiver,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Says to a supervisor that a launcher started it, and is the token of its job.
pub const LAUNCHED: &str = "TEMPER_LAUNCH";

/// What a host's shell says on stderr before anything else: the line of shell has reached a shell there.
const BEGUN: &str = "temper launch: begun";

/// How long the supervisors may take to follow the first that ended.
const FOLLOW: Duration = Duration::from_secs(20);

/// A start by ssh.
pub struct Launch {
    /// The hosts; rank 0 runs on the first.
    pub hosts: Vec<Host>,
    /// Workers of each host that its line does not give.
    pub per_node: Option<usize>,
    /// The program that runs a command on a host, with arguments of its own: called with the host's name and one line of shell.
    pub ssh: Vec<OsString>,
    /// Port of rank 0 on the first host; the next is its supervisor's.
    pub port: u16,
    /// The program, by the path that it has on every host.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// The folder that it is run in on every host.
    pub folder: PathBuf,
    /// Variables of this host that every host is to have.
    pub variables: Vec<(String, String)>,
}

impl Launch {
    /// Starts the hosts and waits for them; returns the exit code of the first host's supervisor.
    ///
    /// # Errors
    /// When ssh itself cannot be started, or what it should run is not text.
    pub fn run(&self, screen: &Screen, stops: &Receiver<()>) -> Result<u8> {
        let token = secret();
        let mut seats = vec![];
        for node in 0..self.hosts.len() {
            seats.push(self.start(node, &token, screen)?);
        }
        let code = self.wait(&mut seats, screen, stops);
        for seat in &mut seats {
            seat.end();
        }
        Ok(code)
    }

    fn start(&self, node: usize, token: &str, screen: &Screen) -> Result<Remote> {
        let host = self.hosts.get(node).ok_or_else(|| Error::Input("there is no such host".into()))?;
        let Some((ssh, own)) = self.ssh.split_first() else { return Err(Error::Input("--ssh is empty. Give a program, e.g. ssh".into())) };
        let mut command = Command::new(ssh);
        command.args(own).arg(&host.name).arg(self.line(node, host)?);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(|e| {
            Error::Input(format!("--ssh {}: it cannot be started for {}: {e}. Give a program, e.g. ssh", ssh.display(), host.name))
        })?;
        if let Some(stdin) = &mut child.stdin {
            // The secret is not on a command line, where everybody reads it. An ssh that has failed already is noticed by its end.
            let _ = writeln!(stdin, "{token}");
        }
        let prefix = (node > 0).then(|| format!("[{}] ", host.name));
        let begun = Arc::<AtomicBool>::default();
        let out = child.stdout.take().map(|s| pass(s, prefix.clone(), screen.out.clone(), None));
        let err = child.stderr.take().map(|s| pass(s, prefix, screen.err.clone(), Some(begun.clone())));
        Ok(Remote { child, pumps: out.into_iter().chain(err).collect(), begun, code: None })
    }

    /// The line of shell for a host.
    fn line(&self, node: usize, host: &Host) -> Result<String> {
        let quote = |text: &str| format!("'{}'", text.replace('\'', r"'\''"));
        let master = self.hosts.first().map(Host::address).unwrap_or_default();
        let own = [
            (LAUNCHED, "stdin".to_string()),
            ("RANK", node.to_string()),
            ("WORLD_SIZE", self.hosts.len().to_string()),
            ("LOCAL_RANK", "0".into()),
            ("MASTER_ADDR", master.into()),
            ("MASTER_PORT", self.port.to_string()),
        ];
        let given = self.variables.iter().map(|(name, value)| (name.as_str(), value.clone()));
        let variables: Vec<String> = own.into_iter().chain(given).map(|(name, value)| format!("{name}={}", quote(&value))).collect();
        let text = |part: &std::ffi::OsStr| {
            part.to_str().map(quote).ok_or_else(|| Error::Input(format!("{} is not UTF-8, which ssh cannot carry", part.display())))
        };
        let mut words = vec![text(self.program.as_os_str())?];
        for argument in &self.arguments {
            words.push(text(argument)?);
        }
        if let Some(ranks) = self.per_node.or(host.slots) {
            words.push(format!("--ranks-per-node={ranks}"));
        }
        Ok(format!("echo '{BEGUN}' >&2; cd {} && exec env {} {}", text(self.folder.as_os_str())?, variables.join(" "), words.join(" ")))
    }

    fn wait(&self, seats: &mut [Remote], screen: &Screen, stops: &Receiver<()>) -> u8 {
        let mut deadline: Option<Instant> = None;
        loop {
            while stops.try_recv().is_ok() {
                seats.iter_mut().for_each(Remote::stop);
            }
            let ended: Vec<usize> = (0..seats.len()).filter(|n| seats[*n].ended().is_some()).collect();
            if !ended.is_empty() && deadline.is_none() {
                deadline = Some(Instant::now() + FOLLOW);
                self.ssh_failed(&ended, seats, screen);
            }
            if ended.len() == seats.len() || deadline.is_some_and(|d| Instant::now() > d) {
                // The head's code; where only others failed to start, theirs.
                let codes: Vec<u8> = seats.iter().filter_map(|s| s.code).collect();
                let head = seats.first().and_then(|s| s.code);
                return head.filter(|c| *c != 0).or_else(|| codes.into_iter().find(|c| *c != 0)).or(head).unwrap_or(1);
            }
            thread::sleep(TICK);
        }
    }

    /// ssh ends with 255 when it could not do its part, and what stands for it may end with anything: the others are not left waiting.
    fn ssh_failed(&self, ended: &[usize], seats: &mut [Remote], screen: &Screen) {
        let mut failed = false;
        for n in ended {
            let (Some(host), Some(seat)) = (self.hosts.get(*n), seats.get_mut(*n)) else { continue };
            if seat.has_begun() && seat.code != Some(255) {
                continue;
            }
            let (ssh, code) = (self.ssh.first().map(|s| s.display().to_string()).unwrap_or_default(), seat.code.unwrap_or(1));
            let what = "before a supervisor ran there (its own words, if any, are above); the other hosts are ended. See --ssh";
            screen.say(&format!("error: {}: {ssh} failed: it ended with {code} {what}", host.name));
            seat.code = Some(code.max(1));
            failed = true;
        }
        if failed {
            seats.iter_mut().for_each(|s| drop(s.child.stdin.take()));
        }
    }
}

/// A host's supervisor, at the other end of ssh.
struct Remote {
    child: Child,
    pumps: Vec<JoinHandle<()>>,
    /// [`BEGUN`] was heard.
    begun: Arc<AtomicBool>,
    code: Option<u8>,
}

impl Remote {
    fn ended(&mut self) -> Option<u8> {
        if self.code.is_none() {
            let status = self.child.try_wait().ok().flatten();
            self.code = status.map(|s| s.code().and_then(|c| u8::try_from(c).ok()).unwrap_or(1));
        }
        self.code
    }

    /// Whether a shell there got its line; of one that has ended what it said is heard out first.
    fn has_begun(&self) -> bool {
        let deadline = Instant::now() + Duration::from_secs(1);
        while !self.begun.load(Ordering::Relaxed) && self.pumps.iter().any(|p| !p.is_finished()) && Instant::now() < deadline {
            thread::sleep(TICK);
        }
        self.begun.load(Ordering::Relaxed)
    }

    fn stop(&mut self) {
        if let Some(stdin) = &mut self.child.stdin {
            let _ = writeln!(stdin, "stop").and_then(|()| stdin.flush());
        }
    }

    /// Closes its stdin, which ends it, and shows what it still says.
    fn end(&mut self) {
        drop(self.child.stdin.take());
        if self.code.is_none() {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
        let deadline = Instant::now() + Duration::from_secs(1);
        while self.pumps.iter().any(|p| !p.is_finished()) && Instant::now() < deadline {
            thread::sleep(TICK);
        }
    }
}

/// Passes a stream on: as it is, or line by line with a prefix. `begun` is set by, and takes, the first line that is [`BEGUN`].
fn pass(from: impl Read + Send + 'static, prefix: Option<String>, to: ToScreen, begun: Option<Arc<AtomicBool>>) -> JoinHandle<()> {
    thread::spawn(move || {
        let mut from = io::BufReader::new(from);
        let show = |bytes: &[&[u8]]| {
            let mut to = to.lock().unwrap_or_else(PoisonError::into_inner);
            // A screen that is gone must not block the other side: the rest is read and dropped.
            let _ = bytes.iter().try_for_each(|b| to.write_all(b)).and_then(|()| to.flush());
        };
        if let Some(begun) = begun {
            let mut line = Vec::new();
            while let Ok(1..) = from.read_until(b'\n', &mut line) {
                if line.trim_ascii_end() == BEGUN.as_bytes() {
                    begun.store(true, Ordering::Relaxed);
                    break;
                }
                show(&[prefix.as_deref().unwrap_or_default().as_bytes(), &std::mem::take(&mut line)]);
            }
        }
        match prefix {
            Some(prefix) => {
                for line in from.split(b'\n').map_while(io::Result::ok) {
                    show(&[prefix.as_bytes(), &line, b"\n"]);
                }
            }
            None => {
                let mut buffer = [0; 8192];
                while let Ok(n @ 1..) = from.read(&mut buffer) {
                    show(&[buffer.get(..n).unwrap_or_default()]);
                }
            }
        }
    })
}

/// Reads the job's token from the launcher's first line, then obeys its word: `stop` presses, the end of it presses twice.
///
/// # Errors
/// When there is no first line.
pub fn launched(stop: crate::Stop) -> Result<String> {
    let mut lines = io::BufReader::new(io::stdin()).lines();
    let token = lines.next().and_then(io::Result::ok).filter(|t| !t.is_empty());
    let token =
        token.ok_or_else(|| Error::Input(format!("{LAUNCHED} is set, but stdin does not begin with the token of a launcher; unset it")))?;
    thread::spawn(move || {
        for line in lines.map_while(io::Result::ok) {
            if line == "stop" {
                stop.press();
            }
        }
        stop.press();
        stop.press();
    });
    Ok(token)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn streams_pass_whole_but_for_the_word_that_a_shell_has_begun() {
        let passed = |text: &str, prefix: Option<&str>, begun: Option<Arc<AtomicBool>>| {
            let screen = Arc::new(Mutex::new(Vec::new()));
            pass(io::Cursor::new(text.to_string()), prefix.map(str::to_string), screen.clone(), begun).join().unwrap();
            String::from_utf8(screen.lock().unwrap().clone()).unwrap()
        };
        assert_eq!(passed("start\nstep 1\n 5%\r", None, None), "start\nstep 1\n 5%\r", "stdout, from its first line on");
        assert_eq!(passed("one\ntwo\n", Some("[gpu-2] "), None), "[gpu-2] one\n[gpu-2] two\n");
        let begun = Arc::<AtomicBool>::default();
        assert_eq!(passed(&format!("motd\n{BEGUN}\nnote\n"), Some("[a] "), Some(begun.clone())), "[a] motd\n[a] note\n");
        assert!(begun.load(Ordering::Relaxed));
    }
}
