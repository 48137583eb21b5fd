//! The line between the head and the nodes of other hosts: events one way, orders the other.

use crate::error::{Error, Result, doing};
use crate::message::{Event, Messages, Order, seconds, send};
use crate::node::Input;
use crate::supervisor::Patience;
use std::{
    io,
    net::{TcpListener, TcpStream},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, Sender},
    },
    thread,
    time::{Duration, Instant},
};

/// Time between signs of life.
const ALIVE: Duration = Duration::from_secs(1);
/// Most time that a message may take.
const WRITE: Duration = Duration::from_secs(10);
/// Between two attempts to reach the head.
const AGAIN: Duration = Duration::from_millis(200);

/// The head's side: a place for each node but the first, which is the head's own.
pub(crate) type Lines = Arc<Mutex<Vec<Option<TcpStream>>>>;

/// Waits for nodes at `port`; what they report goes to `events`.
pub(crate) fn listen(port: u16, nodes: usize, token: String, patience: Patience, events: Sender<(usize, Event)>) -> Result<Lines> {
    let what = format!("port {port}, where the other nodes report (the port after MASTER_PORT)");
    let listener = TcpListener::bind(("::", port)).or_else(|_| TcpListener::bind(("0.0.0.0", port))).map_err(doing(what))?;
    let lines: Lines = Arc::new(Mutex::new((0..nodes).map(|_| None).collect()));
    let places = lines.clone();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (places, token, events) = (places.clone(), token.clone(), events.clone());
            thread::spawn(move || serve(stream, &places, &token, patience, &events));
        }
    });
    Ok(lines)
}

/// Reads one node; strangers and second claims to a place are turned away.
fn serve(stream: TcpStream, lines: &Lines, token: &str, patience: Patience, events: &Sender<(usize, Event)>) {
    let Ok(writer) = prepared(&stream, patience) else { return };
    let mut messages = Messages::new(stream);
    let Ok(Event::Joined { token: theirs, node, host, ranks }) = messages.next() else { return };
    if theirs != token {
        return;
    }
    match lines.lock().unwrap_or_else(PoisonError::into_inner).get_mut(node) {
        Some(place @ None) => *place = Some(writer),
        _ => return,
    }
    let _ = events.send((node, Event::Joined { token: theirs, node, host, ranks }));
    loop {
        match messages.next() {
            Ok(Event::Alive) => {}
            Ok(event) => drop(events.send((node, event))),
            Err(error) => {
                let _ = events.send((node, Event::Gone(lost(&error, patience))));
                return;
            }
        }
    }
}

fn prepared(stream: &TcpStream, patience: Patience) -> io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(patience.silence))?;
    stream.set_write_timeout(Some(WRITE))?;
    stream.try_clone()
}

fn lost(error: &io::Error, patience: Patience) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => "its supervisor ended".into(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => format!("no sign of life for {}", seconds(patience.silence)),
        _ => format!("the connection to its supervisor broke: {error}"),
    }
}

/// Gives an order to a node. One that cannot be reached is noticed by the reader.
pub(crate) fn order(lines: &Lines, node: usize, order: &Order) {
    if let Some(Some(stream)) = lines.lock().unwrap_or_else(PoisonError::into_inner).get(node) {
        let _ = send(stream, order);
    }
}

/// A node's side: connects to the head, then carries events there and orders here until either is gone.
pub(crate) fn join(
    head: (&str, u16),
    joined: &Event,
    patience: Patience,
    events: Receiver<(usize, Event)>,
    inputs: Sender<Input>,
) -> Result<()> {
    let deadline = Instant::now() + patience.gather;
    let stream = loop {
        match TcpStream::connect(head) {
            Ok(stream) => break stream,
            Err(error) if Instant::now() > deadline => {
                let waited = seconds(patience.gather);
                let what = format!("the first node's supervisor at {}:{} cannot be reached within {waited}: {error}", head.0, head.1);
                return Err(Error::Supervisor(format!(
                    "{what}. Did it start, and is MASTER_ADDR its address on a network that this node shares?"
                )));
            }
            Err(_) => thread::sleep(AGAIN),
        }
    };
    let writer = prepared(&stream, patience).map_err(doing("the connection to the first node's supervisor"))?;
    send(&writer, joined).map_err(doing("telling the first node's supervisor"))?;
    thread::spawn(move || {
        loop {
            let event = match events.recv_timeout(ALIVE) {
                Ok((_, event)) => event,
                Err(RecvTimeoutError::Timeout) => Event::Alive,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            if send(&writer, &event).is_err() {
                return; // the reader notices too
            }
        }
    });
    thread::spawn(move || {
        let mut messages = Messages::new(stream);
        loop {
            let order = match messages.next() {
                Ok(order) => order,
                Err(error) => Order::Gone(format!("the first node is gone: {}", lost(&error, patience))),
            };
            let last = matches!(order, Order::End(_) | Order::Gone(_));
            if inputs.send(Input::Order(order)).is_err() || last {
                return;
            }
        }
    });
    Ok(())
}

/// Sends a sign of life to every node when it is time.
pub(crate) fn keep_alive(lines: &Lines, last: &mut Instant) {
    if last.elapsed() < ALIVE {
        return;
    }
    *last = Instant::now();
    let count = lines.lock().unwrap_or_else(PoisonError::into_inner).len();
    (0..count).for_each(|node| order(lines, node, &Order::Alive));
}
