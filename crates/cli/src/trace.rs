//! `--trace`: recording steps of a run into a file.

use crate::exit::BadInput;
use std::{fs::File, ops::RangeInclusive, path::Path, path::PathBuf, sync::Arc};
use temper_tensor::{Level, Traced};
use temper_train::events::{Event, Sink};

/// Most steps that one file takes: more make it too large for a viewer.
const MOST_STEPS: usize = 100;

/// Records some steps of a run: it sees them pass as events.
pub struct StepTrace {
    traced: Arc<Traced>,
    steps: RangeInclusive<usize>,
    file: PathBuf,
}

impl StepTrace {
    /// Steps `steps` of the run that computes on `traced`, whose steps lie in `within`.
    pub fn new(traced: Arc<Traced>, steps: RangeInclusive<usize>, within: RangeInclusive<usize>, file: &Path) -> anyhow::Result<StepTrace> {
        if !within.contains(steps.start()) || !within.contains(steps.end()) {
            let (first, last) = (within.start(), within.end());
            return Err(BadInput(format!("--trace-steps: this run goes from step {first} to {last}. Give steps among these")).into());
        }
        Ok(StepTrace { traced, steps, file: file.to_path_buf() })
    }

    fn begin(&self) -> anyhow::Result<()> {
        Ok(self.traced.start(Level::Operations)?)
    }

    fn end(&self) -> anyhow::Result<()> {
        Ok(temper_train::trace::write(&self.file, &self.traced.finish()?, *self.steps.start())?)
    }
}

impl Sink for StepTrace {
    fn event(&mut self, event: &Event) {
        let done = match event {
            Event::Start(start) if start.step == *self.steps.start() => self.begin(),
            Event::Step(step) if step.step + 1 == *self.steps.start() => self.begin(),
            Event::Step(step) if step.step == *self.steps.end() => self.end(),
            _ => Ok(()),
        };
        if let Err(error) = done {
            crate::out::tell(format_args!("note: no trace: {error}"));
        }
    }
}

/// `--trace-steps`: "3", or "3..5" for 3, 4 and 5.
pub fn steps(text: &str) -> anyhow::Result<RangeInclusive<usize>> {
    let (first, last) = text.split_once("..").unwrap_or((text, text));
    match (first.parse::<usize>(), last.trim_start_matches('=').parse::<usize>()) {
        (Ok(first), Ok(last)) if first >= 1 && first <= last && last - first < MOST_STEPS => Ok(first..=last),
        _ => Err(BadInput(format!("--trace-steps {text}: give a step or a range of at most {MOST_STEPS}, e.g. 3..5")).into()),
    }
}

/// Opens the file without changing it, so that one that cannot be written is known before hours of work.
pub fn check(file: &Path) -> anyhow::Result<()> {
    let existed = file.exists();
    let refused = |e| BadInput(format!("--trace {}: it cannot be written: {e}. Give a file in a folder that exists", file.display()));
    drop(File::options().create(true).append(true).open(file).map_err(refused)?);
    if !existed {
        std::fs::remove_file(file).map_err(refused)?;
    }
    Ok(())
}
