//! A job of several ranks that runs while a test watches and disturbs it.

use crate::support::{Case, Done, command, drain, in_shell, wait};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use std::{
    fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Nothing that a test waits for takes longer, however loaded the machine.
const DEADLINE: Duration = Duration::from_secs(60);

/// Waits for something that must come.
#[track_caller]
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < DEADLINE, "{what} never came");
        thread::sleep(Duration::from_millis(2));
    }
}

/// A supervisor and its ranks.
pub struct Job {
    dir: PathBuf,
    child: Child,
    output: [JoinHandle<String>; 2],
}

impl Job {
    /// Starts `temper` with these arguments in the folder of a case.
    pub fn start(case: &Case, args: &[&str]) -> Job {
        Job::spawn(case, command(&case.dir, args))
    }

    /// Starts a training run.
    pub fn sft(case: &Case, sets: &[&str], more: &[&str]) -> Job {
        Job::start(case, &Case::sft_args("config.toml", sets, more))
    }

    /// As [`Job::sft`], with writes beyond a limit refused and not punished by a signal.
    pub fn sft_on_small_disk(case: &Case, sets: &[&str]) -> Job {
        let temper = command(&case.dir, &Case::sft_args("config.toml", sets, &[]));
        Job::spawn(case, in_shell("trap '' XFSZ; exec \"$0\" \"$@\"", &temper))
    }

    fn spawn(case: &Case, mut command: Command) -> Job {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn().unwrap();
        let output = [drain(child.stdout.take()), drain(child.stderr.take())];
        Job { dir: case.dir.clone(), child, output }
    }

    /// A Ctrl-C in the terminal, which its whole process group gets.
    pub fn ctrl_c(&self) {
        kill_process_group(Pid::from_raw(self.id() as i32).unwrap(), Signal::INT).unwrap();
    }

    /// The supervisor's process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for something that must come while the job runs.
    #[track_caller]
    pub fn until(&mut self, what: &str, mut done: impl FnMut() -> bool) {
        let began = Instant::now();
        while !done() {
            let ended = self.child.try_wait().unwrap().is_some();
            if ended || began.elapsed() > DEADLINE {
                drop(self.child.kill());
                panic!("{what} never came; the job {}: {:#?}", if ended { "ended" } else { "was killed" }, self.collect());
            }
            thread::sleep(Duration::from_micros(200));
        }
    }

    fn collect(&mut self) -> Done {
        let code = wait(&mut self.child).unwrap_or(-1);
        let [stdout, stderr] = std::mem::replace(&mut self.output, [0; 2].map(|_| thread::spawn(String::new)));
        Done { code, stdout: stdout.join().unwrap(), stderr: stderr.join().unwrap() }
    }

    /// How it ended. No process of it is left.
    #[track_caller]
    pub fn finish(mut self) -> Done {
        let done = self.collect();
        self.gone();
        done
    }

    /// Waits until no process of the job's folder is left.
    #[track_caller]
    pub fn gone(&self) {
        until("the end of all processes", || !processes().any(|pid| lives_in(pid, &self.dir)));
    }

    /// The processes of the ranks, in their order.
    pub fn ranks(&self) -> Vec<u32> {
        let mut found: Vec<(usize, u32)> =
            processes().filter(|pid| parent(*pid) == Some(self.id())).filter_map(|p| Some((rank(p)?, p))).collect();
        found.sort_unstable();
        found.into_iter().map(|(_, pid)| pid).collect()
    }

    /// Waits for a step of run `run` to be done by all of `n` ranks; their processes.
    #[track_caller]
    pub fn training(&mut self, case: &Case, run: &str, n: usize) -> Vec<u32> {
        self.until("a step", || {
            case.has(&format!("{run}/events.jsonl")) && case.read(&format!("{run}/events.jsonl")).contains("\"step\":2,")
        });
        let ranks = self.ranks();
        assert_eq!(ranks.len(), n);
        ranks
    }

    /// Stops processes at a moment when `is_so`, which is asked again once they stand still.
    #[track_caller]
    pub fn freeze(&mut self, pids: &[u32], what: &str, is_so: impl Fn() -> bool) {
        self.until(what, || {
            if !is_so() {
                return false;
            }
            pids.iter().for_each(|pid| signal(*pid, Signal::STOP));
            until("a standstill", || pids.iter().all(|pid| stands_still(*pid)));
            let caught = is_so();
            if !caught {
                thaw(pids);
            }
            caught
        });
    }
}

impl Drop for Job {
    /// A test that fails leaves no processes either.
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

pub fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

pub fn thaw(pids: &[u32]) {
    pids.iter().for_each(|pid| signal(*pid, Signal::CONT));
}

fn processes() -> impl Iterator<Item = u32> {
    fs::read_dir("/proc").unwrap().filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok())
}

/// Whether a process that is not a zombie works in a folder.
fn lives_in(pid: u32, dir: &Path) -> bool {
    fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd.starts_with(dir))
}

/// Fields of a process or thread after its name: state, parent, ...
fn stat(path: &str) -> Option<Vec<String>> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.rsplit_once(')')?.1.split_whitespace().map(str::to_string).collect())
}

fn parent(pid: u32) -> Option<u32> {
    stat(&format!("/proc/{pid}/stat"))?.get(1)?.parse().ok()
}

fn rank(pid: u32) -> Option<usize> {
    let text = fs::read(format!("/proc/{pid}/environ")).ok()?;
    text.split(|b| *b == 0).find_map(|v| String::from_utf8_lossy(v).strip_prefix("RANK=")?.parse().ok())
}

fn stands_still(pid: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let states = threads.filter_map(|t| stat(t.path().join("stat").to_str()?)?.first().cloned());
    states.into_iter().all(|state| state == "T")
}
