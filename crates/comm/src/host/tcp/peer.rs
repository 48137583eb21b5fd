//! A link to one other rank: a queue with a thread that sends it, and a thread that receives into the mailbox.
//!
//! The queue holds at most [`QUEUE`] bytes (or one message that is larger). A sender waits for room in it, which means for the
//! network and for the other rank's receiving thread, never for its program: that thread always takes what comes.

use super::super::mailbox::{Absence, Departure, Mailbox};
use super::wire::{Deadline, Frame, HEAD, pack_standing, unpack_standing};
use crate::Recorder;
use std::{
    collections::VecDeque,
    io::{self, ErrorKind, Read, Write},
    net::{Shutdown, TcpStream},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// Bytes that wait to be sent to a rank.
const QUEUE: usize = 256 << 20;
/// Bodies up to so many bytes are sent in one piece with their head.
const SMALL: usize = 64 << 10;
/// How long receiving may take to find why sending failed.
const VERDICT: Duration = Duration::from_millis(500);
const STACK: usize = 256 << 10;

#[derive(Default)]
struct State {
    frames: VecDeque<(Frame, Vec<u8>)>,
    /// Bytes of bodies not yet handed to the system.
    bytes: usize,
    /// This rank leaves: nothing is taken any more.
    leaving: bool,
    /// The sending thread has ended.
    ended: bool,
    /// Why the other rank can no longer be reached.
    gone: Option<String>,
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, limit: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    fn push(&self, frame: Frame, body: Vec<u8>, patience: Duration) -> Result<(), Absence> {
        let deadline = Deadline::after(patience);
        let mut state = self.lock();
        loop {
            if let Some(cause) = &state.gone {
                return Err(Absence::Gone(cause.clone()));
            }
            if state.leaving {
                return Err(Absence::Gone("this rank has left".into()));
            }
            if state.bytes == 0 || state.bytes + body.len() <= QUEUE {
                break;
            }
            if deadline.passed() {
                return Err(Absence::Silent);
            }
            state = self.wait(state, deadline.left());
        }
        state.bytes += body.len();
        state.frames.push_back((frame, body));
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    fn gone(&self, cause: &str) {
        let mut state = self.lock();
        state.gone.get_or_insert_with(|| cause.to_string());
        state.frames.clear();
        state.bytes = 0;
        drop(state);
        self.changed.notify_all();
    }

    fn wait_gone(&self, deadline: Deadline) {
        let mut state = self.lock();
        while state.gone.is_none() && !deadline.passed() {
            state = self.wait(state, deadline.left());
        }
    }

    /// The next frame to send; `None` when there will be none.
    fn pop(&self) -> Option<(Frame, Vec<u8>)> {
        let mut state = self.lock();
        loop {
            match state.frames.pop_front() {
                Some(frame) => return Some(frame),
                None if state.leaving || state.gone.is_some() => return None,
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    fn sent(&self, bytes: usize) {
        let mut state = self.lock();
        state.bytes = state.bytes.saturating_sub(bytes);
        drop(state);
        self.changed.notify_all();
    }
}

/// The link to a rank.
pub(super) struct Peer {
    queue: Arc<Queue>,
    stream: Arc<TcpStream>,
}

impl Peer {
    /// Starts the threads of a link to rank `rank`.
    pub fn start(rank: usize, stream: TcpStream, mailbox: &Arc<Mailbox>, recorder: &Recorder) -> io::Result<Peer> {
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(None)?;
        let (queue, stream) = (Arc::<Queue>::default(), Arc::new(stream));
        let thread = |what: &str| std::thread::Builder::new().name(format!("temper-{what}-{rank}")).stack_size(STACK);
        let (q, s, m) = (queue.clone(), stream.clone(), mailbox.clone());
        thread("send").spawn(move || {
            if let Err(e) = send_all(&q, &s) {
                // Receiving finds out more: a farewell may lie there unread.
                q.wait_gone(Deadline::after(VERDICT));
                gone(&q, &m, Departure { rank, cause: broke(&e), orderly: false });
            }
            q.lock().ended = true;
            q.changed.notify_all();
        })?;
        let (q, s, m, r) = (queue.clone(), stream.clone(), mailbox.clone(), recorder.clone());
        thread("recv").spawn(move || {
            let cause = match receive_all(rank, &q, &s, &m, &r) {
                Ok(()) => "its connection closed without a farewell, so its process was killed or crashed".to_string(),
                Err(e) => broke(&e),
            };
            gone(&q, &m, Departure { rank, cause, orderly: false }); // after a farewell, that remains the cause
        })?;
        Ok(Peer { queue, stream })
    }

    /// Queues a frame, waiting for room at most `patience`.
    pub fn send(&self, frame: Frame, body: Vec<u8>, patience: Duration) -> Result<(), Absence> {
        self.queue.push(frame, body, patience)
    }

    /// Says farewell behind what is queued, and takes nothing more.
    pub fn leave(&self, cause: &str) {
        let mut state = self.queue.lock();
        state.frames.push_back((Frame::Farewell, cause.as_bytes().to_vec()));
        state.leaving = true;
        drop(state);
        self.queue.changed.notify_all();
    }

    /// Waits until all is sent, then lets go of the connection.
    pub fn flush(&self, deadline: Deadline) {
        let mut state = self.queue.lock();
        while !state.ended && !deadline.passed() {
            state = self.queue.wait(state, deadline.left());
        }
        // What was not sent by now will not be. Receiving goes on, for data left unread would reset the connection under the
        // other rank before it has read our last.
        if !state.ended {
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }
}

fn broke(e: &io::Error) -> String {
    match e.kind() {
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
            format!("its connection was reset, so its process was killed or crashed ({e})")
        }
        _ => format!("its connection broke: {e}"),
    }
}

fn gone(queue: &Queue, mailbox: &Mailbox, departure: Departure) {
    queue.gone(&departure.cause);
    mailbox.gone(departure);
}

fn send_all(queue: &Queue, mut stream: &TcpStream) -> io::Result<()> {
    while let Some((frame, body)) = queue.pop() {
        let head = frame.head(body.len());
        if body.len() <= SMALL {
            stream.write_all(&[&head, body.as_slice()].concat())?;
        } else {
            stream.write_all(&head)?;
            stream.write_all(&body)?;
        }
        queue.sent(body.len());
    }
    match stream.shutdown(Shutdown::Write) {
        Err(e) if e.kind() != ErrorKind::NotConnected => Err(e),
        _ => Ok(()),
    }
}

/// Receives until the connection ends.
fn receive_all(rank: usize, queue: &Queue, mut stream: &TcpStream, mailbox: &Mailbox, recorder: &Recorder) -> io::Result<()> {
    loop {
        let mut head = [0; HEAD];
        // An end between frames is an end; within one it is an error.
        match stream.read(&mut head[..1]) {
            Ok(0) => return Ok(()),
            Ok(_) => stream.read_exact(&mut head[1..])?,
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        }
        let invalid = |what: &str| io::Error::new(ErrorKind::InvalidData, what);
        let (frame, len) = Frame::parse(&head).ok_or_else(|| invalid("it sent bytes that are no message"))?;
        let mut body = Vec::new();
        body.try_reserve_exact(len).map_err(|_| invalid("it sent a message that does not fit into memory"))?;
        if stream.take(len as u64).read_to_end(&mut body)? < len {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        match frame {
            Frame::Message(group, header) => mailbox.put(rank, group, header, body),
            // A full queue cannot take the answer now; the other rank then reads that there is none.
            Frame::Ask => drop(queue.push(Frame::Answer, pack_standing(&recorder.standing()), Duration::ZERO)),
            Frame::Answer => {
                mailbox.put_standing(rank, unpack_standing(&body).ok_or_else(|| invalid("it sent an unreadable answer"))?);
            }
            Frame::Farewell => {
                let cause = String::from_utf8_lossy(&body);
                let failure = (!cause.is_empty()).then_some(&*cause);
                gone(queue, mailbox, Departure::farewell(rank, failure, "it left in order: its program ended"));
            }
        }
    }
}
