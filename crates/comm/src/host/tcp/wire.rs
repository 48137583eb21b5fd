//! What goes over a socket: values in little-endian bytes, handshake letters, and the frames between two linked ranks.
//!
//! A letter is [`MAGIC`], a length (u32) and a body; a frame is a head of [`HEAD`] bytes and a body of the length it names.

use super::super::mailbox::Header;
use crate::{Entry, Operation, Standing, State};
use std::{
    io::{self, ErrorKind, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

/// The first bytes on every connection; the last is the version of the protocol.
const MAGIC: [u8; 8] = *b"temper\0\x01";
/// No letter is longer: the table of 100,000 ranks fits.
const LETTER: usize = 8 << 20;

/// When waiting ends.
#[derive(Clone, Copy)]
pub(super) struct Deadline(Instant);

impl Deadline {
    pub fn after(d: Duration) -> Deadline {
        Deadline(Instant::now() + d)
    }

    pub fn left(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }

    pub fn passed(self) -> bool {
        self.left().is_zero()
    }
}

/// Builds a body.
#[derive(Default)]
pub(super) struct Pack(pub Vec<u8>);

impl Pack {
    pub fn num(mut self, x: u64) -> Pack {
        self.0.extend(x.to_le_bytes());
        self
    }

    pub fn text(self, x: &str) -> Pack {
        let mut pack = self.num(x.len() as u64);
        pack.0.extend(x.as_bytes());
        pack
    }
}

/// Takes a body apart; `None` where it is not what it should be.
pub(super) struct Unpack<'a>(pub &'a [u8]);

impl Unpack<'_> {
    pub fn num(&mut self) -> Option<u64> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*head))
    }

    pub fn size(&mut self) -> Option<usize> {
        usize::try_from(self.num()?).ok()
    }

    pub fn text(&mut self) -> Option<String> {
        let len = self.size()?;
        let (text, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(String::from_utf8_lossy(text).into_owned())
    }
}

/// Sends a letter.
pub(super) fn post(mut stream: &TcpStream, body: &[u8], deadline: Deadline) -> io::Result<()> {
    let mut letter = MAGIC.to_vec();
    letter.extend((body.len() as u32).to_le_bytes());
    letter.extend(body);
    stream.set_write_timeout(Some(deadline.left().max(Duration::from_millis(1))))?;
    stream.write_all(&letter)
}

/// Receives a letter.
pub(super) fn fetch(stream: &TcpStream, deadline: Deadline) -> io::Result<Vec<u8>> {
    let mut head = [0; 12];
    fill(stream, &mut head, deadline)?;
    let (magic, len) = head.split_at(8);
    if magic != MAGIC {
        let what = if magic[..6] == MAGIC[..6] { "another version of temper" } else { "not a rank of temper" };
        return Err(io::Error::new(ErrorKind::InvalidData, what));
    }
    let len = len.try_into().map_or(usize::MAX, |len| u32::from_le_bytes(len) as usize);
    if len > LETTER {
        return Err(io::Error::new(ErrorKind::InvalidData, format!("a letter of {len} bytes")));
    }
    let mut body = vec![0; len];
    fill(stream, &mut body, deadline)?;
    Ok(body)
}

/// `read_exact` within a deadline, however slowly the bytes come.
fn fill(mut stream: &TcpStream, mut buffer: &mut [u8], deadline: Deadline) -> io::Result<()> {
    while !buffer.is_empty() {
        if deadline.passed() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(deadline.left().max(Duration::from_millis(1))))?;
        match stream.read(buffer) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => buffer = &mut buffer[n..],
            Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Bytes of a frame's head: kind, operation, six of nothing, group, number, length of the body.
pub(super) const HEAD: usize = 32;

/// What a frame is.
#[derive(Debug, PartialEq)]
pub(super) enum Frame {
    /// A message of a group.
    Message(u64, Header),
    /// The other rank asks where this one stands.
    Ask,
    /// It says where it stands.
    Answer,
    /// It leaves; the body says why, and is empty when it leaves in order.
    Farewell,
}

impl Frame {
    pub fn head(&self, len: usize) -> [u8; HEAD] {
        let (kind, operation, group, number) = match self {
            Frame::Message(group, header) => (0, header.operation as u8, *group, header.number),
            Frame::Ask => (1, 0, 0, 0),
            Frame::Answer => (2, 0, 0, 0),
            Frame::Farewell => (3, 0, 0, 0),
        };
        let mut head = [0; HEAD];
        (head[0], head[1]) = (kind, operation);
        for (at, value) in [(8, group), (16, number), (24, len as u64)] {
            head[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        head
    }

    /// The frame and the length of its body; `None` for bytes that are no head.
    pub fn parse(head: &[u8; HEAD]) -> Option<(Frame, usize)> {
        let mut numbers = Unpack(&head[8..]);
        let (group, number, len) = (numbers.num()?, numbers.num()?, numbers.size()?);
        let frame = match head[0] {
            0 => Frame::Message(group, Header { operation: Operation::from_code(head[1])?, number }),
            1 => Frame::Ask,
            2 => Frame::Answer,
            3 => Frame::Farewell,
            _ => return None,
        };
        Some((frame, len))
    }
}

/// A standing as the body of an answer.
pub(super) fn pack_standing(standing: &Standing) -> Vec<u8> {
    let entries = standing.running.iter().chain(&standing.last);
    let mut pack = Pack::default().num(standing.running.len() as u64).num(u64::from(standing.last.is_some()));
    for e in entries {
        let peer = e.peer.map_or(u64::MAX, |p| p as u64);
        pack = pack.text(&e.group).num(e.operation as u64).num(e.number).num(peer).num(e.bytes);
        pack = pack.num(e.state as u64).num(e.began.as_millis() as u64).num(e.over.as_millis() as u64);
    }
    pack.0
}

/// The standing in the body of an answer.
pub(super) fn unpack_standing(body: &[u8]) -> Option<Standing> {
    let mut x = Unpack(body);
    let (running, last) = (x.size()?, x.num()?);
    let entry = |x: &mut Unpack| -> Option<Entry> {
        Some(Entry {
            group: x.text()?.into(),
            operation: Operation::from_code(u8::try_from(x.num()?).ok()?)?,
            number: x.num()?,
            peer: usize::try_from(x.num()?).ok().filter(|p| *p != usize::MAX),
            bytes: x.num()?,
            state: *[State::Running, State::Done, State::Failed].get(x.size()?)?,
            began: Duration::from_millis(x.num()?),
            over: Duration::from_millis(x.num()?),
        })
    };
    let running = (0..running).map(|_| entry(&mut x)).collect::<Option<Vec<_>>>()?;
    let last = if last == 1 { Some(entry(&mut x)?) } else { None };
    Some(Standing { running, last })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_packed_comes_out_again_and_rubbish_does_not() {
        let entry = |operation, peer, state| Entry {
            group: "tp".into(),
            operation,
            number: 1 << 40,
            peer,
            bytes: 5,
            state,
            began: Duration::from_millis(7),
            over: Duration::from_millis(3),
        };
        let running = vec![entry(Operation::AllReduce, None, State::Running), entry(Operation::Recv, Some(3), State::Running)];
        for standing in
            [Standing { running, last: None }, Standing { running: vec![], last: Some(entry(Operation::Barrier, None, State::Failed)) }]
        {
            let packed = pack_standing(&standing);
            assert_eq!(unpack_standing(&packed), Some(standing));
            for len in 0..packed.len() {
                assert_eq!(unpack_standing(&packed[..len]), None);
            }
        }
        assert_eq!(unpack_standing(&[0xff; 64]), None);
        for frame in [Frame::Message(9, Header { operation: Operation::Send, number: 2 }), Frame::Ask, Frame::Answer, Frame::Farewell] {
            let head = frame.head(77);
            assert_eq!(Frame::parse(&head), Some((frame, 77)));
        }
        assert_eq!(Frame::parse(b"GET / HTTP/1.1\r\nHost: a.b.c.d.e.f"[..HEAD].try_into().unwrap()), None);
    }
}
