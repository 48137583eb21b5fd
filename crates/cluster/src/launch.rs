//! One supervisor per host, started by ssh (or what stands for it), with rank 0's host first.
//!
//! The launcher only starts and passes on: the first host's supervisor heads the job. Each supervisor's stdin is the launcher's
//! word: a line `stop` is a Ctrl-C, its end is the launcher's, and the supervisor ends its workers.

use crate::error::{Error, Result};
use crate::hosts::Host;
use crate::logs::{Screen, ToScreen};
use crate::node::{TICK, secret};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use std::{
    ffi::OsString,
    io::{self, BufRead, Read, Write},
    os::unix::process::CommandExt,
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
/// As [`FOLLOW`], after a word to stop.
const STOP: Duration = Duration::from_secs(8);
/// As [`FOLLOW`], after a second word to stop. A supervisor kills its workers within a second.
const AT_ONCE: Duration = Duration::from_secs(2);
/// The exit code of an ssh that could not do its part.
const LOST: u8 = 255;

/// What a first word to stop is answered with.
const STOPPING: &str = "the hosts are told to stop; once more to stop at once";
/// As [`STOPPING`], where there is nothing to end in order.
const STOPPING_AT_ONCE: &str = "stopping: not every host has begun, so all are ended at once";

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
    /// Starts the hosts and waits for them; returns the exit code of the first host's supervisor, 1 where ssh failed, or 130 where `stops`
    /// ended it before that supervisor could say.
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
        // A group of its own: ssh ends itself at a Ctrl-C, and with it the supervisor that should end the run in order.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn().map_err(|e| {
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

    /// Waits for the end of all; returns the job's exit code.
    fn wait(&self, seats: &mut [Remote], screen: &Screen, stops: &Receiver<()>) -> u8 {
        let (mut deadline, mut presses, mut ssh_failed, mut head_over) = (None::<Instant>, 0, false, false);
        let sooner = |deadline: Option<Instant>, limit| {
            let then = Instant::now() + limit;
            Some(deadline.map_or(then, |d| d.min(then)))
        };
        loop {
            while stops.try_recv().is_ok() {
                presses += 1;
                // Where a host has not begun there is no training to end in order, and who might wait for that host is told by the end.
                let at_once = presses > 1 || ssh_failed || seats.iter().any(|s| !s.begun.load(Ordering::Relaxed));
                if presses == 1 {
                    screen.say(if at_once { STOPPING_AT_ONCE } else { STOPPING });
                }
                seats.iter_mut().for_each(Remote::stop);
                if at_once {
                    seats.iter_mut().for_each(Remote::let_go);
                    deadline = sooner(deadline, if presses > 1 { AT_ONCE } else { STOP });
                }
            }
            for (n, (host, seat)) in self.hosts.iter().zip(seats.iter_mut()).enumerate() {
                // After a word to stop, the end of the head or the failure of another it says nothing of ssh how a host ends.
                let judged = presses == 0 && !ssh_failed && !head_over;
                if let Some(code) = seat.just_ended() {
                    deadline = sooner(deadline, if presses > 0 { STOP } else { FOLLOW });
                    ssh_failed |= judged && self.has_failed(host, code, seat, screen);
                    head_over |= n == 0;
                } else if judged && seat.waits_for_terminal() {
                    deadline = sooner(deadline, FOLLOW);
                    ssh_failed = true;
                    let what = "waits for an answer (a password, or whether the host is known), and has no terminal here";
                    let remedy = "Let it log in without questions: a key in an agent, and the host among the known ones";
                    screen.say(&format!("error: {}: {} {what}. {remedy}", host.name, self.ssh()));
                }
            }
            if ssh_failed {
                seats.iter_mut().for_each(Remote::let_go);
            }
            if seats.iter().all(|s| s.code.is_some()) || deadline.is_some_and(|d| Instant::now() > d) {
                return job_code(seats, ssh_failed, presses);
            }
            thread::sleep(TICK);
        }
    }

    /// Whether it was ssh that failed on a host that ended: with 255 when it could not do its part, and what stands for it may end with
    /// anything before a shell has begun. Says so, after its own words.
    fn has_failed(&self, host: &Host, code: u8, seat: &Remote, screen: &Screen) -> bool {
        let what = match (seat.has_begun(), code) {
            (true, LOST) => "the connection to the supervisor there broke",
            (true, _) => return false,
            (false, _) => "before a supervisor ran there",
        };
        let what = format!("it ended with {code}, {what} (its own words, if any, are above)");
        screen.say(&format!("error: {}: {} failed: {what}; the other hosts are ended. See --ssh", host.name, self.ssh()));
        true
    }

    fn ssh(&self) -> String {
        self.ssh.first().map(|s| s.display().to_string()).unwrap_or_default()
    }
}

/// The exit code of a job: 1 where ssh failed; else the head's, or where only others failed, theirs. Who was told to stop and did not
/// get to say how it ended was stopped.
fn job_code(seats: &[Remote], ssh_failed: bool, presses: usize) -> u8 {
    if ssh_failed {
        return 1;
    }
    // A supervisor's own code: not that of an ssh that was ended, or lost its host. One that a shell could not start has failed.
    let own = |s: &Remote| match s.code {
        Some(LOST) => None,
        Some(126 | 127) => Some(1),
        code => code.filter(|_| s.begun.load(Ordering::Relaxed)),
    };
    let head = seats.first().and_then(own);
    match presses {
        0 => head.filter(|c| *c != 0).or_else(|| seats.iter().filter_map(own).find(|c| *c != 0)).or(head).unwrap_or(1),
        1 => head.unwrap_or(130),
        _ => 130,
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
    /// Its code, when it has ended since this was last asked.
    fn just_ended(&mut self) -> Option<u8> {
        if self.code.is_some() {
            return None;
        }
        let status = self.child.try_wait().ok().flatten()?;
        self.code = Some(status.code().and_then(|c| u8::try_from(c).ok()).unwrap_or(1));
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

    /// Whether it was stopped by the terminal, which it may not ask: it is in the background there.
    fn waits_for_terminal(&self) -> bool {
        let stopped = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let status = || waitid(WaitId::Pid(Pid::from_child(&self.child)), stopped).ok().flatten();
        let signal = if self.code.is_none() { status().and_then(|s| s.stopping_signal()) } else { None };
        signal.is_some_and(|s| [Signal::TTIN, Signal::TTOU].iter().any(|tty| tty.as_raw() == s))
    }

    /// Passes a Ctrl-C on.
    fn stop(&mut self) {
        if let Some(stdin) = &mut self.child.stdin {
            let _ = writeln!(stdin, "stop").and_then(|()| stdin.flush());
        }
    }

    /// Closes its stdin, which ends a supervisor at once; an ssh that has reached none is ended itself.
    fn let_go(&mut self) {
        drop(self.child.stdin.take());
        if !self.begun.load(Ordering::Relaxed) {
            self.kill();
        }
    }

    /// Ends ssh, and what it may have started here.
    fn kill(&mut self) {
        if self.code.is_none() {
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        }
    }

    /// Ends it, and shows what it still says.
    fn end(&mut self) {
        drop(self.child.stdin.take());
        self.kill();
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
