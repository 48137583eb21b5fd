//! [`Fan`]: one sink that is many.

use crate::{Curve, EventLog, Result, TensorBoard};
use std::path::Path;
use temper_train::events::{Event, Sink};

/// Hands every event to each of its sinks, in the order they were added.
#[derive(Default)]
pub struct Fan {
    sinks: Vec<Box<dyn Sink>>,
}

impl Fan {
    /// A fan without sinks.
    pub fn new() -> Self {
        Self::default()
    }

    /// The sinks of a run folder, which must exist: `events.jsonl`, `loss.svg` and, if asked for, `tensorboard/`.
    ///
    /// A folder that holds an earlier part of the run is continued.
    ///
    /// # Errors
    /// When a file cannot be opened.
    pub fn for_run(dir: &Path, tensorboard: bool) -> Result<Self> {
        let events = dir.join("events.jsonl");
        // The curve reads what the log holds so far, so it comes first.
        let mut fan = Self::new().with(Curve::open(dir.join("loss.svg"), &events)?).with(EventLog::open(&events)?);
        if tensorboard {
            fan = fan.with(TensorBoard::open(&dir.join("tensorboard"))?);
        }
        Ok(fan)
    }

    /// Adds a sink.
    #[must_use]
    pub fn with(mut self, sink: impl Sink + 'static) -> Self {
        self.sinks.push(Box::new(sink));
        self
    }
}

impl Sink for Fan {
    fn event(&mut self, event: &Event) {
        for sink in &mut self.sinks {
            sink.event(event);
        }
    }

    fn evaluating(&mut self, done: usize, of: usize) {
        for sink in &mut self.sinks {
            sink.evaluating(done, of);
        }
    }
}
