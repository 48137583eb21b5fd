//! A recording as a file for Perfetto or chrome://tracing ("Trace Event Format", complete events): one track for what the device
//! did, one for when the host asked for it; on each, steps hold phases and phases hold operations.

use crate::{Error, Result};
use serde_json::{Value, json};
use std::path::Path;
use temper_tensor::{Call, Phase, Recording, Span, Timed};

/// The tracks: number, name, and the side of a recorded thing that it shows.
const DEVICE: u32 = 1;
const HOST: u32 = 2;

/// Writes a recording whose first step has this number.
///
/// # Errors
/// When the file cannot be written; it is named.
pub fn write(path: &Path, recording: &Recording, first_step: usize) -> Result<()> {
    let io = |source| Error::Io { path: path.to_path_buf(), source };
    std::fs::write(path, chrome(recording, first_step).to_string()).map_err(io)
}

/// The trace as JSON.
pub fn chrome(recording: &Recording, first_step: usize) -> Value {
    let mut events = vec![
        json!({ "ph": "M", "name": "process_name", "pid": 1, "args": { "name": "temper" } }),
        json!({ "ph": "M", "name": "thread_name", "pid": 1, "tid": DEVICE, "args": { "name": "device" } }),
        json!({ "ph": "M", "name": "thread_name", "pid": 1, "tid": HOST, "args": { "name": "host enqueues" } }),
    ];
    for (i, step) in steps(&recording.phases).enumerate() {
        let number = first_step + i;
        both(&mut events, &step, &format!("step {number}"), "step", &json!({ "step": number }));
    }
    for phase in &recording.phases {
        both(&mut events, phase, phase.what.name(), "phase", &json!({}));
    }
    for call in &recording.calls {
        both(&mut events, call, call.what.name, "operation", &arguments(call));
    }
    json!({ "displayTimeUnit": "ms", "traceEvents": events })
}

/// Whole steps: from each [`Phase::Begin`] to the last phase before the next.
fn steps(phases: &[Timed<Phase>]) -> impl Iterator<Item = Timed<()>> + '_ {
    phases.chunk_by(|_, next| next.what != Phase::Begin).map(|step| {
        let whole = |side: fn(&Timed<Phase>) -> Span| Span {
            start: step.first().map_or(0.0, |p| side(p).start),
            end: step.last().map_or(0.0, |p| side(p).end),
        };
        Timed { what: (), device: whole(|p| p.device), host: whole(|p| p.host) }
    })
}

fn arguments(timed: &Timed<Call>) -> Value {
    let Timed { what: call, device, .. } = timed;
    let mut arguments = json!({ "shape": call.shape(), "ms": device.ms(), "bytes": call.bytes });
    if call.flops > 0.0 {
        arguments["flops"] = call.flops.into();
    }
    arguments
}

fn both<T>(events: &mut Vec<Value>, timed: &Timed<T>, name: &str, category: &str, arguments: &Value) {
    for (track, span) in [(DEVICE, timed.device), (HOST, timed.host)] {
        // Both ends are rounded, so that what touches in time also touches in the file. Nanoseconds, told in microseconds.
        let at = |ms: f64| (ms * 1e6).round() / 1e3;
        let (start, end) = (at(span.start), at(span.end));
        let length = ((end - start) * 1e3).round() / 1e3;
        events.push(json!({
            "ph": "X", "name": name, "cat": category, "pid": 1, "tid": track, "ts": start, "dur": length, "args": arguments
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use temper_tensor::{Level, Ops, Traced, View, cpu::Cpu};

    /// Of any two events on a track, one holds the other or they do not overlap.
    fn nests(events: &[Value]) -> bool {
        let spans: Vec<(u64, i64, i64)> = events
            .iter()
            .filter(|e| e["ph"] == "X")
            .map(|e| {
                let ns = |key: &str| (e[key].as_f64().unwrap() * 1e3).round() as i64;
                (e["tid"].as_u64().unwrap(), ns("ts"), ns("ts") + ns("dur"))
            })
            .collect();
        spans.iter().enumerate().all(|(i, a)| {
            spans[i + 1..].iter().filter(|b| b.0 == a.0).all(|b| {
                let apart = a.2 <= b.1 || b.2 <= a.1;
                apart || (a.1 <= b.1 && b.2 <= a.2) || (b.1 <= a.1 && a.2 <= b.2)
            })
        })
    }

    #[test]
    fn a_trace_parses_and_nests() {
        let traced = Traced::new(Arc::new(Cpu::new(1)));
        let (a, b) = (vec![1f32; 64 * 64], vec![2f32; 64 * 64]);
        let mut c = traced.zeros(temper_tensor::DType::F32, &[64, 64]).unwrap();
        traced.start(Level::Operations).unwrap();
        for _ in 0..2 {
            for phase in [Phase::Begin, Phase::Forward, Phase::Backward, Phase::Between] {
                traced.phase(phase).unwrap();
                traced.add(c.view_mut(), View::host(&a, &[64, 64]), View::host(&b, &[64, 64])).unwrap();
            }
        }
        let recording = traced.finish().unwrap();
        assert_eq!((recording.phases.len(), recording.calls.len()), (6, 8));
        let text = chrome(&recording, 7).to_string();
        let value: Value = serde_json::from_str(&text).unwrap();
        let events = value["traceEvents"].as_array().unwrap();
        let named = |name: &str| events.iter().filter(|e| e["name"] == name).count();
        assert_eq!((named("step 7"), named("step 8"), named("forward"), named("add")), (2, 2, 4, 16));
        assert!(nests(events));
        let add = events.iter().find(|e| e["name"] == "add").unwrap();
        assert_eq!((add["args"]["shape"].as_str(), add["args"]["bytes"].as_f64()), (Some("64x64 float32"), Some(3.0 * 4.0 * 4096.0)));
        // What is recorded later starts anew.
        traced.start(Level::Phases).unwrap();
        traced.add(c.view_mut(), View::host(&a, &[64, 64]), View::host(&b, &[64, 64])).unwrap();
        assert!(traced.finish().unwrap().calls.is_empty());
    }

    #[test]
    fn overlaps_are_seen() {
        let event = |ts: f64, dur: f64| json!({ "ph": "X", "tid": 1, "ts": ts, "dur": dur });
        assert!(nests(&[event(0.0, 4.0), event(1.0, 3.0), event(4.0, 1.0)]));
        assert!(!nests(&[event(0.0, 4.0), event(3.0, 3.0)]));
    }
}
