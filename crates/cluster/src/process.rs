//! One worker's process: how it is started, watched and ended, and what the system says of it.

use crate::message::Exit;
use rustix::{
    process::{Pid, Signal, kill_process, kill_process_group},
    pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt},
    termios::{OptionalActions, tcgetattr, tcgetwinsize, tcsetattr, tcsetwinsize},
};
use std::{
    fs::File,
    io::{self, Read},
    os::{
        fd::OwnedFd,
        unix::process::{CommandExt, ExitStatusExt},
    },
    process::{Child, Command, Stdio},
};

/// A stream of a process.
pub(crate) type Stream = Box<dyn Read + Send>;

/// A worker's process. It leads a process group of its own, so that a Ctrl-C in the terminal reaches its supervisor alone.
pub(crate) struct Process {
    child: Child,
    pid: Pid,
    exit: Option<Exit>,
}

impl Process {
    /// Starts it; returns also its stdout and stderr. With `terminal` its stderr is one, so that a progress bar works through it.
    pub(crate) fn start(mut command: Command, terminal: bool) -> io::Result<(Process, Stream, Stream)> {
        let pty = if terminal { Some(pty()?) } else { None };
        command.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0);
        let ours = match pty {
            Some((ours, theirs)) => {
                command.stderr(theirs);
                Some(ours)
            }
            None => {
                command.stderr(Stdio::piped());
                None
            }
        };
        let mut child = command.spawn()?;
        drop(command); // its end of the terminal: reading ours ends when the process has closed the last
        let out = child.stdout.take().map(|s| Box::new(s) as Stream);
        let err = match ours {
            Some(fd) => Some(Box::new(File::from(fd)) as Stream),
            None => child.stderr.take().map(|s| Box::new(s) as Stream),
        };
        let (Some(out), Some(err)) = (out, err) else { return Err(io::Error::other("no pipes")) };
        let pid = Pid::from_child(&child);
        Ok((Process { child, pid, exit: None }, out, err))
    }

    /// Its number.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// How it ended, when it has.
    pub(crate) fn exit(&mut self) -> Option<Exit> {
        if self.exit.is_none() {
            // An error here means that there is no such child any more.
            self.exit = match self.child.try_wait() {
                Ok(None) => None,
                Ok(Some(status)) => Some(status.signal().map_or(Exit::Code(status.code().unwrap_or(1)), Exit::Signal)),
                Err(_) => Some(Exit::Code(1)),
            };
        }
        self.exit
    }

    /// Asks it to stop.
    pub(crate) fn ask(&mut self) {
        if self.exit().is_none() {
            let _ = kill_process(self.pid, Signal::TERM);
        }
    }

    /// Ends it, and what it may have started.
    pub(crate) fn kill(&mut self) {
        if self.exit().is_none() {
            let _ = kill_process_group(self.pid, Signal::KILL);
        }
    }

    /// What the system says it does.
    pub(crate) fn state(&self) -> String {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid.as_raw_nonzero())).unwrap_or_default();
        let pid = self.pid.as_raw_nonzero();
        // The state follows the name, which is in brackets and may hold anything.
        let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
        let what = match state {
            Some('T' | 't') => "is stopped, by SIGSTOP or a debugger",
            Some('D') => "is stuck in the kernel: storage or a driver does not answer",
            Some('Z' | 'X') => "is dead",
            Some('R') => "is running",
            Some('S' | 'I') => "is asleep",
            _ => "cannot be looked at",
        };
        format!("its process {pid} {what}")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        let _ = self.child.wait();
    }
}

/// A terminal of the size of ours: our end, and the one for the process. Bytes pass through it as they are.
fn pty() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let ours = openpt(flags)?;
    grantpt(&ours)?;
    unlockpt(&ours)?;
    let theirs = ioctl_tiocgptpeer(&ours, flags)?;
    let mut modes = tcgetattr(&theirs)?;
    modes.make_raw();
    tcsetattr(&theirs, OptionalActions::Now, &modes)?;
    if let Ok(size) = tcgetwinsize(io::stderr()) {
        tcsetwinsize(&theirs, size)?;
    }
    Ok((ours, theirs))
}
