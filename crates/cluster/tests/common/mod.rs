//! Jobs of real processes. This test binary is also the supervisor and the workers: it starts itself again, with a role.

mod worker;

use std::{
    collections::HashMap,
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use temper_cluster::{Patience, SUPERVISOR, Screen, Seat, Stop, Supervisor, Workers};
use tempfile::TempDir;

/// No job of these tests takes longer: past this it hangs.
const DEADLINE: Duration = Duration::from_secs(40);
/// Waits that fit a test.
const PATIENCE: Patience = Patience {
    silence: Duration::from_secs(3),
    start: Duration::from_secs(20),
    settle: Duration::from_secs(1),
    stop: Duration::from_secs(4),
    gather: Duration::from_secs(10),
    memory: Duration::from_secs(2),
};

/// The name of the test that takes on roles.
const ROLES: &str = "as_supervisor_or_worker";

/// What that test does: nothing when the tests are run, its role when a test has started this binary.
pub fn take_role() {
    if std::env::var_os(SUPERVISOR).is_some() {
        worker::run();
    }
    if std::env::var_os("TEST_RANKS").is_some() {
        std::process::exit(supervise().into());
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn supervise() -> u8 {
    let number = |name: &str| variable(name).and_then(|v| v.parse::<usize>().ok());
    let dir = PathBuf::from(variable("TEST_DIR").unwrap());
    let master = || ("127.0.0.1".to_string(), number("TEST_PORT").unwrap() as u16);
    let token = "secret".to_string();
    let seat = match (number("TEST_NODE"), number("TEST_NODES")) {
        (Some(0), Some(nodes)) => Seat::First { nodes, master: master(), token },
        (Some(node), _) => Seat::Other { node, master: master(), token },
        _ => Seat::Only,
    };
    let memory = dir.join("memory");
    let workers = Workers {
        program: std::env::current_exe().unwrap(),
        arguments: [ROLES, "--exact", "--nocapture"].map(Into::into).into(),
        variables: vec![],
        count: number("TEST_RANKS").unwrap(),
        logs: dir.join("run/logs"),
        device_free: Box::new(move |_| fs::read_to_string(&memory).ok()?.trim().parse().ok()),
    };
    let checkpoint = dir.join("run/checkpoint");
    let (stop, stops) = Stop::new();
    ctrlc::set_handler(move || stop.press()).unwrap();
    let supervisor = Supervisor {
        seat,
        workers,
        world: number("TEST_WORLD"),
        restarts: number("TEST_RESTARTS").unwrap_or(0),
        patience: Patience { gather: number("TEST_GATHER").map_or(PATIENCE.gather, |s| Duration::from_secs(s as u64)), ..PATIENCE },
        screen: Screen { out: Arc::new(Mutex::new(io::stdout())), err: Arc::new(Mutex::new(io::stderr())), terminal: false },
        resumable: Box::new(move || checkpoint.exists()),
    };
    supervisor.run(&stops).unwrap()
}

/// A job to be run: what each rank does, in `worker.rs`'s words.
pub struct Job {
    pub dir: TempDir,
    variables: HashMap<String, String>,
}

impl Job {
    /// `acts`: `rank=act`, separated by blanks; the other ranks work until they are done.
    pub fn new(ranks: usize, acts: &str) -> Job {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("tmp")).unwrap();
        let variables = [("TEST_RANKS", ranks.to_string()), ("TEST_ACTS", acts.into()), ("TEST_DIR", dir.path().display().to_string())];
        let variables = variables.into_iter().chain([("TMPDIR", dir.path().join("tmp").display().to_string())]);
        Job { variables: variables.map(|(name, value)| (name.to_string(), value)).collect(), dir }
    }

    pub fn with(mut self, name: &str, value: impl ToString) -> Job {
        self.variables.insert(name.into(), value.to_string());
        self
    }

    pub fn start(&self) -> Running {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([ROLES, "--exact", "--nocapture"])
            .envs(&self.variables)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (out, err) = (drain(child.stdout.take()), drain(child.stderr.take()));
        Running { child, out, err, began: Instant::now() }
    }

    pub fn run(&self) -> Done {
        self.start().finish()
    }

    /// The process ids of the workers, as they wrote them down; waits for so many.
    pub fn pids(&self, count: usize) -> Vec<i32> {
        let began = Instant::now();
        loop {
            let names = fs::read_dir(self.dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
            let mut pids: Vec<(usize, i32)> = names
                .filter_map(|n| n.strip_prefix("pid-")?.split_once('-').map(|(rank, pid)| (rank.parse().unwrap(), pid.parse().unwrap())))
                .collect();
            pids.sort_unstable();
            if pids.len() >= count {
                return pids.into_iter().map(|(_, pid)| pid).collect();
            }
            assert!(began.elapsed() < DEADLINE, "{} of {count} workers", pids.len());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// The log of a rank.
    pub fn log(&self, rank: usize) -> String {
        fs::read_to_string(self.dir.path().join(format!("run/logs/rank-{rank:05}.log"))).unwrap_or_default()
    }
}

/// A job under way.
pub struct Running {
    pub child: Child,
    out: JoinHandle<String>,
    err: JoinHandle<String>,
    began: Instant,
}

impl Running {
    pub fn finish(mut self) -> Done {
        let code = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status.code().unwrap_or(-1);
            }
            if self.began.elapsed() > DEADLINE {
                self.child.kill().unwrap();
                panic!("hangs: {}", self.err.join().unwrap());
            }
            thread::sleep(Duration::from_millis(5));
        };
        let took = self.began.elapsed();
        Done { code, out: self.out.join().unwrap(), err: self.err.join().unwrap(), took }
    }
}

fn drain(stream: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = vec![];
        stream.unwrap().read_to_end(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// What a job did.
#[derive(Debug)]
pub struct Done {
    pub code: i32,
    pub out: String,
    pub err: String,
    pub took: Duration,
}

impl Done {
    #[track_caller]
    pub fn exits(self, code: i32, seconds: u64) -> Done {
        assert_eq!(self.code, code, "{self:#?}");
        assert!(self.took < Duration::from_secs(seconds), "{self:#?}");
        self
    }

    /// Stderr has these texts, in this order, each once.
    #[track_caller]
    pub fn says(self, texts: &[&str]) -> Done {
        let mut rest = self.err.as_str();
        for text in texts {
            assert_eq!(self.err.matches(text).count(), 1, "{text:?} once in {self:#?}");
            rest = rest.split_once(text).unwrap_or_else(|| panic!("{text:?} comes too early in {self:#?}")).1;
        }
        self
    }

    #[track_caller]
    pub fn never_says(self, text: &str) -> Done {
        assert!(!self.err.contains(text), "{text:?} in {self:#?}");
        self
    }
}

/// Whether a process is there (a zombie counts as gone).
pub fn lives(pid: i32) -> bool {
    let stat = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}

/// All of these processes are gone within this time.
#[track_caller]
pub fn gone_within(pids: &[i32], limit: Duration) {
    let began = Instant::now();
    while pids.iter().any(|pid| lives(*pid)) {
        assert!(began.elapsed() < limit, "alive: {:?}", pids.iter().filter(|pid| lives(**pid)).collect::<Vec<_>>());
        thread::sleep(Duration::from_millis(10));
    }
}

/// A port and its successor that nobody listens on.
pub fn two_free_ports() -> u16 {
    let free = |port| std::net::TcpListener::bind(("127.0.0.1", port));
    loop {
        let port = free(0).unwrap().local_addr().unwrap().port();
        if port < u16::MAX && free(port).is_ok() && free(port + 1).is_ok() {
            return port;
        }
    }
}
