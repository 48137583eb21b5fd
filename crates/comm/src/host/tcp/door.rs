//! Accepting connections of which some are strangers: port scanners, health checks, workers of an older run. Each is read on a thread
//! of its own with a limit of time, so none can hold up the ranks, and one that says nothing sensible is dropped.

use super::wire::Deadline;
use std::{
    io,
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    time::Duration,
};

/// How long a connection may take to say who it is.
const GREETING: Duration = Duration::from_secs(5);
/// Connections read at a time; more wait in the kernel's queue.
const AT_ONCE: usize = 256;

/// Reads what a connection says first; the error says why it was turned away.
type Greet<T> = dyn Fn(&TcpStream, Deadline) -> io::Result<T> + Send + Sync;

/// A connection, and what it said.
type Greeted<T> = (SocketAddr, io::Result<(T, TcpStream)>);

/// A listener with somebody at the door.
pub(super) struct Door<T> {
    listener: TcpListener,
    greet: Arc<Greet<T>>,
    at_door: usize,
    sender: Sender<Greeted<T>>,
    receiver: Receiver<Greeted<T>>,
    turned_away: usize,
    last: Option<String>,
}

impl<T: Send + 'static> Door<T> {
    pub fn new(listener: TcpListener, greet: Arc<Greet<T>>) -> io::Result<Door<T>> {
        listener.set_nonblocking(true)?;
        let (sender, receiver) = channel();
        Ok(Door { listener, greet, at_door: 0, sender, receiver, turned_away: 0, last: None })
    }

    /// The next connection that said who it is; `None` when there is none within some milliseconds.
    pub fn next(&mut self) -> io::Result<Option<(T, TcpStream)>> {
        while self.at_door < AT_ONCE {
            match self.listener.accept() {
                Ok((stream, address)) => self.read(stream, address)?,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                // The connection was gone before it was accepted.
                Err(e) if matches!(e.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted) => {}
                Err(e) => return Err(e),
            }
        }
        let Ok((address, greeted)) = self.receiver.recv_timeout(Duration::from_millis(5)) else { return Ok(None) };
        self.at_door -= 1;
        match greeted {
            Ok(known) => Ok(Some(known)),
            Err(e) => {
                tracing::warn!(%address, reason = %e, "a connection was turned away");
                self.turned_away += 1;
                self.last = Some(format!("{address}: {e}"));
                Ok(None)
            }
        }
    }

    fn read(&mut self, stream: TcpStream, address: SocketAddr) -> io::Result<()> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        let (greet, sender) = (self.greet.clone(), self.sender.clone());
        let read = move || {
            let greeted = greet(&stream, Deadline::after(GREETING)).map(|known| (known, stream));
            let _ = sender.send((address, greeted)); // nobody is there any more: the connection is dropped
        };
        std::thread::Builder::new().name("temper-door".into()).stack_size(256 << 10).spawn(read)?;
        self.at_door += 1;
        Ok(())
    }

    /// A clause about those turned away, for errors; empty when there were none.
    pub fn strangers(&self) -> String {
        match &self.last {
            None => String::new(),
            Some(last) => format!("; {} connections were turned away, the last from {last}", self.turned_away),
        }
    }
}
