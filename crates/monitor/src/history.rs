//! The points of the loss curve: from the events as they come, or from an earlier part of the run in `events.jsonl`.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;
use temper_train::events::Event;

/// A value at a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Point {
    pub step: usize,
    /// NaN where the loss was not finite.
    pub value: f64,
}

/// Losses by step, ascending.
#[derive(Debug, Default)]
pub(crate) struct History {
    pub train: Vec<Point>,
    pub eval: Vec<Point>,
    /// Last step of the run.
    pub steps: usize,
}

impl History {
    /// Reads a log; an absent one is an empty history. Lines that are no events are counted in a warning.
    pub fn read(path: &Path) -> io::Result<Self> {
        let mut history = Self::default();
        let file = match File::open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(history),
            Err(e) => return Err(e),
        };
        let mut strange = 0u64;
        let (mut reader, mut line) = (BufReader::new(file), Vec::new());
        while reader.read_until(b'\n', &mut line)? > 0 {
            match serde_json::from_slice::<serde_json::Value>(&line) {
                Ok(event) => history.line(&event),
                Err(_) => strange += u64::from(!line.trim_ascii().is_empty()),
            }
            line.clear();
        }
        if strange > 0 {
            tracing::warn!("{}: {strange} lines are not events; the loss curve is drawn without them", path.display());
        }
        Ok(history)
    }

    /// Takes a logged event. JSON has no NaN: it was written as null, which the event type cannot read back.
    fn line(&mut self, event: &serde_json::Value) {
        let step = |key: &str| event[key].as_u64().and_then(|step| usize::try_from(step).ok());
        let loss = event["loss"].as_f64().unwrap_or(f64::NAN);
        match (event["event"].as_str(), step("step")) {
            (Some("start"), Some(first)) => self.start(first, step("steps").unwrap_or(0)),
            (Some("step"), Some(step)) => push(&mut self.train, step, loss),
            (Some("eval"), Some(step)) => push(&mut self.eval, step, loss),
            _ => {}
        }
    }

    /// Takes an event of this run. Returns whether the curve changed.
    pub fn event(&mut self, event: &Event) -> bool {
        match event {
            Event::Start(start) => self.start(start.step, start.steps),
            Event::Step(step) => push(&mut self.train, step.step, step.loss),
            Event::Eval(eval) => push(&mut self.eval, eval.step, eval.loss),
            Event::Checkpoint(_) | Event::Notice(_) | Event::End(_) => return false,
        }
        true
    }

    /// A run that goes on at `first` replaces what an earlier attempt did from there on.
    fn start(&mut self, first: usize, steps: usize) {
        self.train.retain(|p| p.step < first);
        self.eval.retain(|p| p.step < first);
        self.steps = steps;
    }
}

/// Adds a point; a step that is there already (or lies before the last) is replaced by the newer value.
fn push(points: &mut Vec<Point>, step: usize, value: f64) {
    let value = if value.is_finite() { value } else { f64::NAN };
    let keep = points.partition_point(|p| p.step < step);
    points.truncate(keep);
    points.push(Point { step, value });
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_resume_forgets_what_it_does_again() {
        let mut history = History::default();
        for event in [
            json!({ "event": "start", "step": 1, "steps": 9 }),
            json!({ "event": "step", "step": 1, "loss": 3.0 }),
            json!({ "event": "step", "step": 2, "loss": null }),
            json!({ "event": "eval", "step": 2, "loss": 2.5 }),
            json!({ "event": "step", "step": 3, "loss": 1.0 }),
            json!({ "event": "eval", "step": 3, "loss": 1.0 }),
            json!({ "event": "start", "step": 3, "steps": 12 }),
        ] {
            history.line(&event);
        }
        assert_eq!(history.train.iter().map(|p| p.step).collect::<Vec<_>>(), [1, 2]);
        assert!(history.train[1].value.is_nan(), "a loss that was not finite is not a number, and not zero");
        assert_eq!(history.eval, [Point { step: 2, value: 2.5 }]);
        assert_eq!(history.steps, 12);
    }
}
