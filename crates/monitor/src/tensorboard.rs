//! [`TensorBoard`]: event files that TensorBoard reads.
//!
//! Framing (tensorflow/core/lib/io/record_writer.cc): length as u64, its masked CRC, the record, its masked CRC, all little
//! endian; the CRC is CRC-32C. Records are `Event` messages (tensorflow/core/util/event.proto) in protobuf wire format.

use crate::losses::Losses;
use crate::{Result, at};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use temper_train::events::{Eval, Event, Sink, Step};

/// Writes scalars under `train/` and `eval/` to a new event file.
pub struct TensorBoard {
    file: File,
    /// Length up to the last whole record.
    whole: u64,
    losses: Losses,
}

impl TensorBoard {
    /// Makes a new event file in `dir` (made when absent). A resumed run adds a file: TensorBoard shows both as one, and
    /// drops what the earlier one holds from the resumed step on.
    ///
    /// # Errors
    /// When folder or file cannot be made.
    pub fn open(dir: &Path) -> Result<Self> {
        std::fs::create_dir_all(dir).map_err(at(dir))?;
        let (file, path) = new_file(dir)?;
        let mut board = Self { file, whole: 0, losses: Losses::new(&path) };
        let version = message(|m| m.double(1, now()).bytes(3, b"brain.Event:2"));
        board.append(&version).map_err(at(&path))?;
        Ok(board)
    }

    fn append(&mut self, event: &[u8]) -> io::Result<()> {
        let record = frame(event);
        self.file.write_all(&record).and_then(|()| self.file.flush()).inspect_err(|_| {
            // A torn record would end TensorBoard's reading for good: take it back.
            let _ = self.file.set_len(self.whole);
        })?;
        self.whole += record.len() as u64;
        Ok(())
    }
}

impl Sink for TensorBoard {
    fn event(&mut self, event: &Event) {
        let record = match event {
            // SessionLog START: TensorBoard forgets what it has from this step on.
            Event::Start(start) => message(|m| m.double(1, now()).varint(2, start.step as u64).bytes(7, &message(|m| m.varint(1, 1)))),
            Event::Step(step) => scalars(step.step, &of_step(step)),
            Event::Eval(eval) => scalars(eval.step, &of_eval(eval)),
            Event::End(_) => return self.losses.close(),
            Event::Checkpoint(_) | Event::Notice(_) => return,
        };
        let written = self.append(&record);
        self.losses.note(written);
    }
}

fn of_step(step: &Step) -> Vec<(&'static str, f64)> {
    let mut values = vec![
        ("train/loss", step.loss),
        ("train/grad_norm", step.grad_norm),
        ("train/learning_rate", step.lr),
        ("train/epoch", step.epoch),
        ("train/tokens_per_second", step.tokens_per_s),
        ("train/trained_tokens", step.trained_tokens as f64),
        ("train/step_seconds", step.wall_s),
        ("train/model_tflops", step.model_tflops),
        ("train/memory_gib", step.mem_peak_bytes as f64 / (1u64 << 30) as f64),
    ];
    let optional = [("train/aux_loss", step.aux_loss), ("train/z_loss", step.z_loss), ("train/mfu", step.mfu)];
    values.extend(optional.into_iter().filter_map(|(tag, value)| Some((tag, value?))));
    values
}

fn of_eval(eval: &Eval) -> Vec<(&'static str, f64)> {
    vec![("eval/loss", eval.loss), ("eval/perplexity", eval.perplexity), ("eval/seconds", eval.wall_s)]
}

/// An `Event` with a `Summary` of simple values.
fn scalars(step: usize, values: &[(&str, f64)]) -> Vec<u8> {
    let summary = message(|summary| {
        values
            .iter()
            .fold(summary, |summary, (tag, value)| summary.bytes(1, &message(|m| m.bytes(1, tag.as_bytes()).float(2, *value as f32))))
    });
    message(|m| m.double(1, now()).varint(2, step as u64).bytes(5, &summary))
}

/// Seconds since 1970.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

/// `events.out.tfevents.SECONDS.HOST.PID.N`, as TensorFlow names them; never one that exists.
fn new_file(dir: &Path) -> Result<(File, PathBuf)> {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host: String = host.trim().chars().filter(|c| c.is_ascii_alphanumeric() || "-_.".contains(*c)).collect();
    let host = if host.is_empty() { "localhost" } else { &host };
    let mut n = 0;
    loop {
        let path = dir.join(format!("events.out.tfevents.{:010}.{host}.{}.{n}", now() as u64, std::process::id()));
        match File::options().create_new(true).append(true).open(&path) {
            Ok(file) => return Ok((file, path)),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => n += 1,
            Err(e) => return Err(at(&path)(e)),
        }
    }
}

/// A record with its length and checksums.
fn frame(record: &[u8]) -> Vec<u8> {
    let length = (record.len() as u64).to_le_bytes();
    let mut out = Vec::with_capacity(record.len() + 16);
    out.extend(length);
    out.extend(masked_crc(&length).to_le_bytes());
    out.extend(record);
    out.extend(masked_crc(record).to_le_bytes());
    out
}

/// TensorFlow's masking: a checksum of data that holds checksums would be weak.
fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// A protobuf message under construction.
struct Message(Vec<u8>);

fn message(build: impl FnOnce(Message) -> Message) -> Vec<u8> {
    build(Message(Vec::new())).0
}

impl Message {
    fn key(mut self, field: u32, wire_type: u32) -> Self {
        self.push_varint(u64::from(field << 3 | wire_type));
        self
    }

    fn push_varint(&mut self, mut n: u64) {
        while n >= 0x80 {
            self.0.push(n as u8 | 0x80);
            n >>= 7;
        }
        self.0.push(n as u8);
    }

    fn varint(self, field: u32, n: u64) -> Self {
        let mut m = self.key(field, 0);
        m.push_varint(n);
        m
    }

    fn double(self, field: u32, x: f64) -> Self {
        let mut m = self.key(field, 1);
        m.0.extend(x.to_le_bytes());
        m
    }

    fn bytes(self, field: u32, bytes: &[u8]) -> Self {
        let mut m = self.key(field, 2);
        m.push_varint(bytes.len() as u64);
        m.0.extend(bytes);
        m
    }

    fn float(self, field: u32, x: f32) -> Self {
        let mut m = self.key(field, 5);
        m.0.extend(x.to_le_bytes());
        m
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc_is_castagnoli() {
        // RFC 3720, B.4: 32 bytes of zeros, and the digits every CRC catalogue uses.
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn records_are_framed_byte_for_byte() {
        // Made by tensorboard 2.21 (RecordWriter over event_pb2), like the record below.
        let event = message(|m| m.double(1, 1.7e9).bytes(3, b"brain.Event:2"));
        let expected = "1800000000000000a37f4b220900000040fc54d9411a0d627261696e2e4576656e743a32eced8f9d";
        assert_eq!(hex(&frame(&event)), expected);
    }

    #[test]
    fn scalars_are_encoded_byte_for_byte() {
        let summary = message(|m| m.bytes(1, &message(|m| m.bytes(1, b"train/loss").float(2, 1.5))));
        let event = message(|m| m.double(1, 1.7e9).varint(2, 300).bytes(5, &summary));
        assert_eq!(
            hex(&frame(&event)),
            "2100000000000000017becf60900000040fc54d94110ac022a130a110a0a747261696e2f6c6f7373150000c03f84c0aa1a"
        );
    }

    #[test]
    fn varints_carry_64_bits() {
        let bytes = |n| message(|m| m.varint(2, n));
        assert_eq!(bytes(1), [0x10, 1]);
        assert_eq!(bytes(127), [0x10, 0x7f]);
        assert_eq!(bytes(128), [0x10, 0x80, 1]);
        assert_eq!(bytes(u64::MAX), [0x10, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]);
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }
}
