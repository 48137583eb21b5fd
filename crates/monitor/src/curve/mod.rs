//! [`Curve`]: `loss.svg`, the losses of a run as a picture that any browser shows.

mod axis;
mod svg;

use crate::history::History;
use crate::losses::Losses;
use crate::{Result, at};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use temper_train::events::{Event, Sink};

/// How long a picture may be out of date.
const INTERVAL: Duration = Duration::from_secs(5);

/// Draws the loss curve again every few seconds, at evaluations, at checkpoints and at the end.
pub struct Curve {
    path: PathBuf,
    history: History,
    /// When the picture was last drawn; none before the first time.
    drawn: Option<Instant>,
    /// Whether points came since.
    stale: bool,
    losses: Losses,
}

impl Curve {
    /// A curve drawn into `svg`. Points of an earlier part of the run are taken from its log `events`, when there is one.
    ///
    /// # Errors
    /// When the log exists but cannot be read.
    pub fn open(svg: PathBuf, events: &Path) -> Result<Self> {
        let history = History::read(events).map_err(at(events))?;
        Ok(Self { losses: Losses::new(&svg), path: svg, history, drawn: None, stale: false })
    }

    fn draw(&mut self) {
        let written = replace(&self.path, &svg::picture(&self.history, &self.name()));
        self.losses.note(written);
        self.drawn = Some(Instant::now());
        self.stale = false;
    }

    /// The run's name: that of its folder.
    fn name(&self) -> String {
        let folder = std::path::absolute(&self.path).ok().and_then(|path| Some(path.parent()?.file_name()?.to_string_lossy().into_owned()));
        folder.unwrap_or_else(|| "run".to_string())
    }
}

impl Sink for Curve {
    fn event(&mut self, event: &Event) {
        self.stale |= self.history.event(event);
        let due = match event {
            Event::Start(_) | Event::Notice(_) => false,
            Event::Step(_) => self.drawn.is_none_or(|at| at.elapsed() >= INTERVAL),
            Event::Eval(_) | Event::Checkpoint(_) | Event::End(_) => self.stale,
        };
        if due {
            self.draw();
        }
        if matches!(event, Event::End(_)) {
            self.losses.close();
        }
    }
}

/// A run that stops with an error leaves its last points too.
impl Drop for Curve {
    fn drop(&mut self) {
        if self.stale {
            self.draw();
        }
    }
}

/// Puts `text` in the place of the file at once, so that no reader sees half a picture.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let new = path.with_file_name(format!(".{name}.new"));
    fs::write(&new, text).and_then(|()| fs::rename(&new, path)).inspect_err(|_| {
        let _ = fs::remove_file(&new);
    })
}
