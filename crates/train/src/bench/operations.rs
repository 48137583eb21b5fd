//! The operations of a recorded step as a table: how long each took, how long it need take, and what was lost.

use serde::Serialize;
use temper_tensor::{Call, Rates, Recording};

/// One line: an operation, where it multiplies matrices one shape of it.
#[derive(Clone, Debug, Serialize)]
pub struct OperationRow {
    /// Name in `Ops`.
    pub name: &'static str,
    /// Shape, form and type; empty where several are added up.
    pub shape: String,
    /// How many times.
    pub calls: usize,
    /// Milliseconds altogether.
    pub ms: f64,
    /// Share of all operations.
    pub share: f64,
    /// Bytes a second over the bytes that must be moved.
    pub gb_per_s: f64,
    /// FLOPs a second of the products; 0 where there are none.
    pub tflops: f64,
    /// Milliseconds it would take at the device's best.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub floor_ms: Option<f64>,
}

impl OperationRow {
    /// Milliseconds beyond the floor.
    pub fn lost_ms(&self) -> f64 {
        self.ms - self.floor_ms.unwrap_or(0.0)
    }
}

/// The operations of a recording, most time lost first. Repeated ones are counted once, at their median.
pub fn operations(recording: &Recording, rates: Option<Rates>) -> Vec<OperationRow> {
    let timed = recording.calls.iter().map(|c| (c.what, c.device.ms()));
    let alone = recording.alone.iter().map(|(call, ms)| (*call, ms.get(ms.len() / 2).copied().unwrap_or(0.0)));
    let every_shape = recording.calls.is_empty();
    let mut rows: Vec<OperationRow> = Vec::new();
    let mut totals: Vec<(f64, f64)> = Vec::new();
    for (call, ms) in timed.chain(alone) {
        let shape = if every_shape || call.flops > 0.0 { call.shape() } else { String::new() };
        let at = rows.iter().position(|r| r.name == call.name && r.shape == shape).unwrap_or_else(|| {
            rows.push(row(&call, shape, rates.is_some()));
            totals.push((0.0, 0.0));
            rows.len() - 1
        });
        let (row, total) = (&mut rows[at], &mut totals[at]);
        row.calls += 1;
        row.ms += ms;
        *total = (total.0 + call.bytes, total.1 + call.flops);
        if let (Some(floor), Some(rates)) = (&mut row.floor_ms, &rates) {
            *floor += call.floor_ms(rates);
        }
    }
    let all: f64 = rows.iter().map(|r| r.ms).sum();
    for (row, (bytes, flops)) in rows.iter_mut().zip(totals) {
        row.share = row.ms / all.max(f64::MIN_POSITIVE);
        row.gb_per_s = bytes / row.ms.max(1e-6) / 1e6;
        row.tflops = flops / row.ms.max(1e-6) / 1e9;
    }
    rows.sort_by(|a, b| b.lost_ms().total_cmp(&a.lost_ms()));
    rows
}

fn row(call: &Call, shape: String, floor: bool) -> OperationRow {
    let floor_ms = floor.then_some(0.0);
    OperationRow { name: call.name, shape, calls: 0, ms: 0.0, share: 0.0, gb_per_s: 0.0, tflops: 0.0, floor_ms }
}
