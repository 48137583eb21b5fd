//! A node: the workers of one host. It starts, watches and ends them as the head orders, and reports what happens.

use crate::env::VARIABLES;
use crate::error::{Result, doing};
use crate::launch::LAUNCHED;
use crate::logs::{RankLog, Screen, ToScreen, Which, pump};
use crate::message::{Answer, Event, Exit, Failed, Kind, Messages, Order, Start, Told, send};
use crate::process::Process;
use crate::report;
use crate::supervisor::Patience;
use crate::worker::{Lead, SUPERVISOR};
use std::{
    ffi::OsString,
    net::{TcpListener, TcpStream},
    path::PathBuf,
    process::Command,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, Sender},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// How often processes are looked at.
pub(crate) const TICK: Duration = Duration::from_millis(25);
/// How long a new connection may take to say who it is.
const HELLO: Duration = Duration::from_secs(10);
/// How long the streams of a process that has ended are read on, in case something it started holds them open.
const DRAIN: Duration = Duration::from_secs(1);
/// Longest time between two looks at the workers that is not taken for a standstill of this process.
const STOOD: Duration = Duration::from_secs(2);
/// How long the connection of a process that has ended may take to be noticed.
const LATE: Duration = Duration::from_millis(300);
/// Device memory that may be missing of what was free at first.
const MEMORY_SLACK: u64 = 512 << 20;
/// How often device memory is looked at.
const MEMORY_EVERY: Duration = Duration::from_millis(500);

/// What a node runs.
pub struct Workers {
    /// The program.
    pub program: PathBuf,
    /// Its arguments, the same for every rank; the rest is in the environment.
    pub arguments: Vec<OsString>,
    /// Variables that a worker gets unless the user has set them.
    pub variables: Vec<(String, String)>,
    /// Workers of this node.
    pub count: usize,
    /// Folder of the logs, made when rank 0 is ready.
    pub logs: PathBuf,
    /// Bytes of free memory of a local rank's device; `None` where there is none, or nothing to ask.
    pub device_free: Box<dyn Fn(usize) -> Option<u64> + Send>,
}

/// What happens to a node.
pub(crate) enum Input {
    Order(Order),
    Connected { attempt: usize, local: usize, stream: TcpStream },
    Told { attempt: usize, local: usize, told: Told },
    Closed { attempt: usize, local: usize },
}

/// One worker.
struct Slot {
    rank: usize,
    process: Process,
    log: Arc<RankLog>,
    pumps: Vec<JoinHandle<()>>,
    /// The connection, once it is there; closed by the worker's end.
    stream: Option<TcpStream>,
    open: bool,
    heard: Instant,
    silent: bool,
    ended: Option<Instant>,
    reported: bool,
}

pub(crate) struct Node {
    index: usize,
    workers: Workers,
    patience: Patience,
    screen: Screen,
    token: String,
    listener: TcpListener,
    events: Sender<(usize, Event)>,
    inputs: Sender<Input>,
    start: Option<Start>,
    slots: Vec<Slot>,
    /// Free memory of the devices before the first start.
    free: Vec<Option<u64>>,
    /// Since when memory is waited for, and when it was last looked at.
    freeing: Option<(Instant, Option<Instant>)>,
    /// When the workers were last watched.
    watched: Instant,
}

impl Node {
    /// `events` takes what it reports, with `index`.
    pub(crate) fn new(
        index: usize,
        workers: Workers,
        patience: Patience,
        screen: Screen,
        events: Sender<(usize, Event)>,
        inputs: Sender<Input>,
    ) -> Result<Node> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(doing("a control channel for the workers"))?;
        listener.set_nonblocking(true).map_err(doing("a control channel for the workers"))?;
        let free = (0..workers.count).map(|local| (workers.device_free)(local)).collect();
        let (slots, start, freeing, token) = (vec![], None, None, String::new());
        Ok(Node { index, workers, patience, screen, token, listener, events, inputs, start, slots, free, freeing, watched: Instant::now() })
    }

    /// Works until ordered to end, or until the head is gone; returns the exit code.
    pub(crate) fn run(mut self, inputs: &Receiver<Input>) -> u8 {
        loop {
            match inputs.recv_timeout(TICK) {
                Ok(Input::Order(Order::End(code))) => return code,
                Ok(Input::Order(Order::Gone(why))) => {
                    self.screen.say(&format!("error: {why}: this node's workers are ended"));
                    return 1;
                }
                Ok(input) => self.take(input),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return 1,
            }
            self.accept();
            self.watch();
            self.free_memory();
        }
    }

    fn report(&self, event: Event) {
        // A head that is gone is noticed by the orders that end.
        let _ = self.events.send((self.index, event));
    }

    fn attempt(&self) -> usize {
        self.start.as_ref().map_or(0, |s| s.attempt)
    }

    fn take(&mut self, input: Input) {
        let now = self.attempt();
        match input {
            Input::Order(order) => self.obey(order),
            Input::Connected { attempt, local, stream } if attempt == now => {
                if let Some(slot) = self.slots.get_mut(local) {
                    (slot.stream, slot.open, slot.heard) = (Some(stream), true, Instant::now());
                }
            }
            Input::Told { attempt, local, told } if attempt == now => self.told(local, told),
            Input::Closed { attempt, local } if attempt == now => {
                if let Some(slot) = self.slots.get_mut(local) {
                    slot.open = false;
                }
            }
            _ => {} // of an earlier start
        }
    }

    fn told(&mut self, local: usize, told: Told) {
        let Some(slot) = self.slots.get_mut(local) else { return };
        slot.heard = Instant::now();
        if let Told::Failed(failed) = &told {
            failed.message.lines().for_each(|line| slot.log.line(&format!("error: {line}")));
        }
        let event = Event::Told(slot.rank, told);
        self.report(event);
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Start(start) => self.begin(start),
            Order::Go => {
                for slot in &self.slots {
                    // A worker that is gone is reported by its end.
                    let _ = slot.stream.as_ref().map(|stream| send(stream, &Answer::Go));
                }
            }
            Order::Logs => self.open_logs(&self.workers.logs),
            Order::SpareLogs => self.open_logs(&spare_logs(&self.start.as_ref().map(|s| s.job.clone()).unwrap_or_default())),
            Order::Ask => self.slots.iter_mut().for_each(|slot| slot.process.ask()),
            Order::Kill => self.slots.iter_mut().for_each(|slot| slot.process.kill()),
            Order::Free => self.freeing = Some((Instant::now(), None)),
            Order::Alive | Order::End(_) | Order::Gone(_) => {}
        }
    }

    fn open_logs(&self, folder: &std::path::Path) {
        for slot in &self.slots {
            if let Err(error) = slot.log.open(folder, slot.rank) {
                return self.report(Event::Notice(format!("note: no logs in {}: {error}", folder.display())));
            }
        }
    }

    fn begin(&mut self, start: Start) {
        self.slots.clear();
        self.token = secret();
        self.start = Some(start.clone());
        for local in 0..self.workers.count {
            let rank = start.first + local;
            if let Err(error) = self.start_worker(&start, local) {
                let message = format!("cannot start {}: {error}", self.workers.program.display());
                self.report(Event::Told(rank, Told::Failed(Failed { message, code: 1, kind: Kind::Own })));
                for unborn in rank..start.first + self.workers.count {
                    self.report(Event::Exited { rank: unborn, exit: Exit::Code(1), tail: vec![] });
                }
                return;
            }
        }
    }

    fn start_worker(&mut self, start: &Start, local: usize) -> std::io::Result<()> {
        let rank = start.first + local;
        let lead = Lead {
            address: self.listener.local_addr()?.to_string(),
            token: self.token.clone(),
            attempt: start.attempt,
            resume: start.resume,
            job: start.job.clone(),
        };
        let mut command = Command::new(&self.workers.program);
        command.args(&self.workers.arguments);
        for name in VARIABLES.iter().chain(&[LAUNCHED]) {
            command.env_remove(name);
        }
        command.envs(self.workers.variables.iter().filter(|(name, _)| std::env::var_os(name).is_none()).map(|(n, v)| (n, v)));
        command.envs([
            (SUPERVISOR, lead.to_text()),
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", start.world.to_string()),
            ("LOCAL_RANK", local.to_string()),
            ("LOCAL_WORLD_SIZE", self.workers.count.to_string()),
            ("MASTER_ADDR", start.master.0.clone()),
            ("MASTER_PORT", start.master.1.to_string()),
        ]);
        let first = rank == 0;
        let (process, out, err) = Process::start(command, first && self.screen.terminal)?;
        let log = Arc::new(RankLog::default());
        log.line(&format!("[rank {rank} of {}: process {}, attempt {}]", start.world, process.id(), start.attempt));
        let pumps = [(out, Which::Out, &self.screen.out), (err, Which::Err, &self.screen.err)].map(|(from, which, screen)| {
            let (log, events, index) = (log.clone(), self.events.clone(), self.index);
            let through: Option<ToScreen> = first.then(|| screen.clone());
            thread::spawn(move || pump(from, which, &log, through, |line| drop(events.send((index, Event::Echo(rank, line))))))
        });
        let heard = Instant::now();
        let (stream, open, silent, ended, reported) = (None, false, false, None, false);
        self.slots.push(Slot { rank, process, log, pumps: pumps.into(), stream, open, heard, silent, ended, reported });
        Ok(())
    }

    /// Takes new connections, each with a thread that reads it.
    fn accept(&self) {
        while let Ok((stream, _)) = self.listener.accept() {
            let (token, attempt, inputs) = (self.token.clone(), self.attempt(), self.inputs.clone());
            thread::spawn(move || serve(stream, &token, attempt, &inputs));
        }
    }

    /// Notices processes that end and those that are silent.
    fn watch(&mut self) {
        let now = Instant::now();
        // While this process itself stood still (stopped, suspended, a paused machine), it heard nobody.
        let stood = now.duration_since(std::mem::replace(&mut self.watched, now));
        if stood > STOOD {
            self.slots.iter_mut().for_each(|slot| slot.heard += stood);
        }
        let mut events = vec![];
        for slot in self.slots.iter_mut().filter(|slot| !slot.reported) {
            if let Some(exit) = slot.process.exit() {
                let since = *slot.ended.get_or_insert(now);
                // One that never connected may have done so just now.
                let heard_out = if slot.stream.is_some() { !slot.open } else { now.duration_since(since) > LATE };
                let read = heard_out && slot.pumps.iter().all(JoinHandle::is_finished);
                if read || now.duration_since(since) > DRAIN {
                    slot.reported = true;
                    slot.log.line(&format!("[rank {} {}]", slot.rank, report::ended(exit)));
                    events.push(Event::Exited { rank: slot.rank, exit, tail: slot.log.tail() });
                }
                continue;
            }
            let limit = if slot.stream.is_some() { self.patience.silence } else { self.patience.start.max(self.patience.silence) };
            let silent = now.duration_since(slot.heard);
            if !slot.silent && silent > limit {
                slot.silent = true;
                events.push(Event::Silent { rank: slot.rank, for_ms: silent.as_millis() as u64, process: slot.process.state() });
            }
        }
        events.into_iter().for_each(|event| self.report(event));
    }

    /// Looks whether the memory of the devices is free again.
    fn free_memory(&mut self) {
        let Some((since, looked)) = self.freeing else { return };
        let now = Instant::now();
        if looked.is_some_and(|at| now.duration_since(at) < MEMORY_EVERY) {
            return;
        }
        let missing = self.free.iter().enumerate().find_map(|(local, before)| {
            let free = (self.workers.device_free)(local)?;
            let before = (*before)?;
            (free + MEMORY_SLACK < before).then(|| {
                let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
                format!("device {local}: {:.1} GiB free, but {:.1} GiB before the first start", gib(free), gib(before))
            })
        });
        let result = match missing {
            None => Ok(()),
            Some(what) if now.duration_since(since) > self.patience.memory => Err(what),
            Some(_) => return self.freeing = Some((since, Some(Instant::now()))),
        };
        self.freeing = None;
        self.report(Event::Idle(result));
    }
}

/// Where logs go when the run folder never came to be.
pub(crate) fn spare_logs(job: &str) -> PathBuf {
    std::env::temp_dir().join(format!("temper-{job}"))
}

/// Reads what one connection says; strangers are turned away.
fn serve(stream: TcpStream, token: &str, attempt: usize, inputs: &Sender<Input>) {
    let set = stream.set_nonblocking(false).and_then(|()| stream.set_read_timeout(Some(HELLO))).and_then(|()| stream.try_clone());
    let Ok(answers) = set else { return };
    let mut messages = Messages::new(stream);
    let Ok(Told::Hello { token: theirs, local_rank: local }) = messages.next() else { return };
    if theirs != token || messages.stream().set_read_timeout(None).is_err() {
        return;
    }
    let _ = inputs.send(Input::Connected { attempt, local, stream: answers });
    while let Ok(told) = messages.next() {
        if inputs.send(Input::Told { attempt, local, told }).is_err() {
            return;
        }
    }
    let _ = inputs.send(Input::Closed { attempt, local });
}

/// A number that nobody guesses, from the system's generator.
pub(crate) fn secret() -> String {
    use std::hash::{BuildHasher, RandomState};
    // Every `RandomState` has keys of its own from the system's random numbers.
    (0..2).map(|n| format!("{:016x}", RandomState::new().hash_one((n, std::process::id())))).collect()
}
