//! A supervisor: the node of this host, and on the first host also the head of the job.

use crate::error::{Error, Result};
use crate::job::{Act, Job, Terms};
use crate::link::{self, Lines};
use crate::logs::Screen;
use crate::message::{Event, Order};
use crate::node::{Input, Node, TICK, Workers, secret};
use std::{
    net::TcpListener,
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread,
    time::{Duration, Instant},
};

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// A worker or node that gives no sign of life for so long is lost. It gives one every second.
    pub silence: Duration,
    /// As `silence`, for a worker that has only been started.
    pub start: Duration,
    /// From the first failure to the SIGTERM: so long the other ranks may fail in their own words, and an error that another rank
    /// caused waits for that rank's own.
    pub settle: Duration,
    /// From the first failure to the SIGKILL of what is left.
    pub stop: Duration,
    /// How long the nodes may take to come together.
    pub gather: Duration,
    /// How long device memory may take to be free again.
    pub memory: Duration,
}

impl Default for Patience {
    fn default() -> Patience {
        let [silence, start, settle, stop, gather, memory] = [20, 120, 2, 8, 300, 60].map(Duration::from_secs);
        Patience { silence, start, settle, stop, gather, memory }
    }
}

/// Which supervisor of the job this is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seat {
    /// The only one.
    Only,
    /// The first of several: rank 0 runs here, and this one decides.
    First {
        /// Supervisors of the job.
        nodes: usize,
        /// This host as the others reach it, and the port of rank 0; the port after it is this supervisor's.
        master: (String, u16),
        /// What all of them know and nobody else.
        token: String,
    },
    /// Another of several.
    Other {
        /// Which, from 1.
        node: usize,
        /// As of the first.
        master: (String, u16),
        /// As of the first.
        token: String,
    },
}

/// A supervisor to be run.
pub struct Supervisor {
    /// Which of the job's.
    pub seat: Seat,
    /// What it runs.
    pub workers: Workers,
    /// Ranks of the whole job, where they are known beforehand.
    pub world: Option<usize>,
    /// How often the job is started again after a failure.
    pub restarts: usize,
    /// How long things may take.
    pub patience: Patience,
    /// Where things are shown.
    pub screen: Screen,
    /// Whether there is a checkpoint to go on from: asked before a restart.
    pub resumable: Box<dyn Fn() -> bool>,
}

/// Tells a supervisor to stop: the first time in order, the second time at once.
#[derive(Clone)]
pub struct Stop(Sender<()>);

impl Stop {
    /// A handle, and what [`Supervisor::run`] takes.
    pub fn new() -> (Stop, Receiver<()>) {
        let (sender, receiver) = channel();
        (Stop(sender), receiver)
    }

    /// Tells it.
    pub fn press(&self) {
        // A supervisor that has ended needs no telling.
        let _ = self.0.send(());
    }
}

impl Supervisor {
    /// Runs the job to its end; returns its exit code, that of the rank that failed first.
    ///
    /// # Errors
    /// When the supervisor itself cannot work. What happens to ranks is told and is in the exit code.
    pub fn run(self, stops: &Receiver<()>) -> Result<u8> {
        match self.seat.clone() {
            Seat::Only => self.lead(1, None, secret(), stops),
            Seat::First { nodes, master, token } => self.lead(nodes, Some(master), token, stops),
            Seat::Other { node, master, token } => self.follow(node, (master.0, master.1.saturating_add(1)), token, stops),
        }
    }

    fn lead(self, nodes: usize, master: Option<(String, u16)>, token: String, stops: &Receiver<()>) -> Result<u8> {
        let (events, reported) = channel();
        let (inputs, orders) = channel();
        let lines = match &master {
            Some((_, port)) => Some(link::listen(port.saturating_add(1), nodes, token.clone(), self.patience, events.clone())?),
            None => None,
        };
        let joined = Event::Joined { token, node: 0, host: host(), ranks: self.workers.count };
        let terms = Terms {
            patience: self.patience,
            nodes,
            world: self.world,
            restarts: self.restarts,
            name: secret().chars().take(12).collect(),
            logs: self.workers.logs.clone(),
            master: Box::new(move || master.clone().unwrap_or_else(|| ("127.0.0.1".into(), free_port()))),
            resumable: self.resumable,
        };
        let screen = self.screen.clone();
        let node = Node::new(0, self.workers, self.patience, self.screen, events.clone(), inputs.clone())?;
        let own = thread::spawn(move || node.run(&orders));
        let _ = events.send((0, joined));
        let head = Head { job: Job::new(terms, Instant::now()), inputs, lines, screen };
        let code = head.run(&reported, &events, stops);
        // The node has been ordered to end; its workers are gone.
        let _ = own.join();
        Ok(code)
    }

    fn follow(self, index: usize, head: (String, u16), token: String, stops: &Receiver<()>) -> Result<u8> {
        let (events, reported) = channel();
        let (inputs, orders) = channel();
        let joined = Event::Joined { token, node: index, host: host(), ranks: self.workers.count };
        let (screen, patience) = (self.screen.clone(), self.patience);
        let node = Node::new(index, self.workers, self.patience, self.screen, events.clone(), inputs.clone())?;
        // A thread of its own, since looking up a name and connecting listen to nobody.
        let address = format!("{}:{}", head.0, head.1);
        let joining = thread::spawn(move || link::join((&head.0, head.1), &joined, patience, reported, inputs));
        while !joining.is_finished() {
            if pressed(stops) {
                screen.say(&format!("error: stopped while waiting for the first node's supervisor at {address}: nothing was started here"));
                return Ok(130);
            }
        }
        joining.join().unwrap_or_else(|_| Err(Error::Supervisor("joining the first node's supervisor panicked".into())))?;
        let own = thread::spawn(move || node.run(&orders));
        while !own.is_finished() {
            if pressed(stops) {
                let _ = events.send((index, Event::Stop));
            }
        }
        Ok(own.join().unwrap_or(1))
    }
}

/// The head's loop around its [`Job`].
struct Head {
    job: Job,
    inputs: Sender<Input>,
    lines: Option<Lines>,
    screen: Screen,
}

impl Head {
    fn run(mut self, reported: &Receiver<(usize, Event)>, events: &Sender<(usize, Event)>, stops: &Receiver<()>) -> u8 {
        let mut alive = Instant::now();
        loop {
            while stops.try_recv().is_ok() {
                let _ = events.send((0, Event::Stop));
            }
            let acts = match reported.recv_timeout(TICK) {
                Ok((node, event)) => self.job.take(node, event, Instant::now()),
                Err(_) => vec![],
            };
            let ticked = self.job.tick(Instant::now());
            for act in acts.into_iter().chain(ticked) {
                if let Some(code) = self.perform(act) {
                    return code;
                }
            }
            if let Some(lines) = &self.lines {
                link::keep_alive(lines, &mut alive);
            }
        }
    }

    fn perform(&self, act: Act) -> Option<u8> {
        match act {
            Act::Say(text) => self.screen.say(&text),
            Act::Order(0, order) => drop(self.inputs.send(Input::Order(order))),
            Act::Order(node, order) => {
                if let Some(lines) = &self.lines {
                    link::order(lines, node, &order);
                }
            }
            Act::Over(code) => {
                let _ = self.inputs.send(Input::Order(Order::End(code)));
                return Some(code);
            }
        }
        None
    }
}

/// Whether the supervisor is told to stop within a tick.
fn pressed(stops: &Receiver<()>) -> bool {
    match stops.recv_timeout(TICK) {
        Ok(()) => true,
        Err(RecvTimeoutError::Timeout) => false,
        Err(RecvTimeoutError::Disconnected) => {
            thread::sleep(TICK);
            false
        }
    }
}

/// This host's name.
fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// A port that is free now, on the loopback. Another process may take it in between; the start then fails and says so.
fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).and_then(|l| l.local_addr()).map_or(29_500, |a| a.port())
}
