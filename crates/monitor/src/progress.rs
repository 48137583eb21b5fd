//! [`Progress`]: what a person watching sees, a bar on a terminal, plain lines elsewhere.

use crate::losses::Losses;
use crate::words::{count, duration, printable, short, size, thousands};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};
use temper_train::events::{End, Eval, Event, Loading, Notice, Saved, Sink, Start, Step};

/// Between two lines of an evaluation that goes on.
const EVAL_EVERY: Duration = Duration::from_secs(30);

/// Where progress is shown.
pub enum Target {
    /// A bar on stderr; other lines appear above it.
    Bar,
    /// Lines of text.
    Lines(Box<dyn Write + Send>),
}

impl Target {
    /// The bar when stderr is a terminal, else lines to `lines`.
    pub fn detect(lines: Box<dyn Write + Send>) -> Self {
        if std::io::stderr().is_terminal() { Self::Bar } else { Self::Lines(lines) }
    }
}

enum Screen {
    Bar(ProgressBar),
    Lines(Box<dyn Write + Send>, Losses),
}

/// Shows steps, evaluations, checkpoints and notices.
pub struct Progress {
    screen: Screen,
    /// Print every so many steps (lines only).
    every: usize,
    first: usize,
    last: usize,
    pace: Pace,
    /// When the evaluation under way last said how far it is (or began).
    evaluating: Option<Instant>,
}

impl Progress {
    /// Shows on `target`; of the steps, lines show every `every`th, the first and the last.
    pub fn new(target: Target, every: usize) -> Self {
        let screen = match target {
            Target::Bar => Screen::Bar(ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(8))),
            Target::Lines(writer) => Screen::Lines(writer, Losses::new("progress lines")),
        };
        Self { screen, every: every.max(1), first: 1, last: 0, pace: Pace::default(), evaluating: None }
    }

    /// Prints a line, above the bar where there is one.
    fn say(&mut self, line: &str) {
        let line = printable(line);
        match &mut self.screen {
            Screen::Bar(bar) => bar.println(line),
            Screen::Lines(writer, losses) => {
                let written = writeln!(writer, "{line}").and_then(|()| writer.flush());
                losses.note(written);
            }
        }
    }

    fn start(&mut self, start: &Start) {
        (self.first, self.last) = (start.step, start.steps);
        self.say(&start_line(start));
        if let Some(loaded) = &start.loaded {
            self.say(&loaded_line(loaded));
        }
        if let Screen::Bar(bar) = &self.screen {
            let template = "{bar:24.blue/white.dim} {pos}/{len}  {msg}";
            bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("━━─"));
            bar.set_length(start.steps as u64);
            bar.set_position(start.step.saturating_sub(1) as u64);
        }
    }

    fn step(&mut self, step: &Step) {
        self.pace.add(step.wall_s);
        let figures = self.figures(step);
        match &self.screen {
            Screen::Bar(bar) => {
                bar.set_position(step.step as u64);
                bar.set_message(figures);
            }
            Screen::Lines(..) => {
                if step.step.is_multiple_of(self.every) || step.step == self.first || step.step == self.last {
                    let width = self.last.to_string().len();
                    let line = format!("step {:>width$}/{}  {figures}", step.step, self.last);
                    self.say(&line);
                }
            }
        }
    }

    fn figures(&self, step: &Step) -> String {
        let mut parts = vec![format!("loss {}", short(step.loss, 4))];
        parts.extend(step.aux_loss.map(|aux| format!("aux {}", short(aux, 3))));
        parts.push(format!("grad {}", short(step.grad_norm, 2)));
        parts.push(format!("lr {:.1e}", step.lr));
        // Saturates for absurd values; NaN is 0.
        parts.push(format!("{} tok/s", thousands(step.tokens_per_s.round() as u64)));
        let left = self.last.saturating_sub(step.step);
        if left > 0 {
            parts.push(format!("eta {}", duration(self.pace.seconds() * left as f64)));
        }
        parts.push(format!("mem {}", size(step.mem_peak_bytes)));
        if step.skipped {
            parts.push("update skipped".to_string());
        }
        parts.join("  ")
    }
}

impl Sink for Progress {
    fn event(&mut self, event: &Event) {
        match event {
            Event::Start(start) => self.start(start),
            Event::Step(step) => self.step(step),
            Event::Eval(eval) => {
                self.evaluating = None;
                self.say(&eval_line(eval));
            }
            Event::Checkpoint(saved) => self.say(&saved_line(saved)),
            Event::Notice(notice) => self.say(&notice_line(notice)),
            Event::End(end) => {
                self.say(&end_line(end));
                match &mut self.screen {
                    // A line printed later would bring the bar back.
                    Screen::Bar(bar) => bar.finish_and_clear(),
                    Screen::Lines(_, losses) => losses.close(),
                }
            }
        }
    }

    fn evaluating(&mut self, done: usize, of: usize) {
        let text = format!("evaluating: {} of {} micro-batches", thousands(done as u64), thousands(of as u64));
        let since = *self.evaluating.get_or_insert_with(Instant::now);
        match &self.screen {
            Screen::Bar(bar) => bar.set_message(text),
            Screen::Lines(..) if since.elapsed() >= EVAL_EVERY && done < of => {
                self.evaluating = Some(Instant::now());
                self.say(&text);
            }
            Screen::Lines(..) => {}
        }
    }
}

/// Leaves the terminal's last line free when a run stops with an error.
impl Drop for Progress {
    fn drop(&mut self) {
        if let Screen::Bar(bar) = &self.screen
            && !bar.is_finished()
        {
            bar.abandon();
        }
    }
}

fn start_line(start: &Start) -> String {
    let ranks = start.layout.as_ref().map_or(String::new(), |layout| format!("  {} ranks: {layout}", thousands(start.ranks as u64)));
    let active = if start.active_params < start.params { format!(" ({} active)", count(start.active_params)) } else { String::new() };
    format!(
        "start  steps {} to {}  {} parameters{active}  {} samples in {} sequences  {}{ranks}  ready in {}",
        start.step,
        start.steps,
        count(start.params),
        thousands(start.samples as u64),
        thousands(start.sequences as u64),
        start.backend,
        duration(start.startup_s)
    )
}

fn loaded_line(loaded: &Loading) -> String {
    let Loading { bytes: own, wall_s, gb_per_s, ranks, all_bytes, all_gb_per_s, .. } = loaded;
    let all = match ranks {
        1 => String::new(),
        _ => format!("  ({ranks} ranks: {}, {} GB/s)", size(*all_bytes), short(*all_gb_per_s, 2)),
    };
    format!("read   {} in {}, {} GB/s{all}", size(*own), duration(*wall_s), short(*gb_per_s, 2))
}

fn eval_line(eval: &Eval) -> String {
    format!(
        "eval after step {}  loss {}  perplexity {}  {} tokens  {}",
        eval.step,
        short(eval.loss, 4),
        short(eval.perplexity, 3),
        thousands(eval.trained_tokens as u64),
        duration(eval.wall_s)
    )
}

fn saved_line(saved: &Saved) -> String {
    let gb_per_s = saved.bytes as f64 / 1e9 / saved.wall_s.max(1e-9);
    let paused = saved.paused_s.map_or(String::new(), |s| format!(", training paused {}", duration(s)));
    let (bytes, wall) = (size(saved.bytes), duration(saved.wall_s));
    format!("saved step {}  {}  {bytes} in {wall}, {} GB/s{paused}", saved.step, saved.path, short(gb_per_s, 2))
}

fn notice_line(notice: &Notice) -> String {
    match notice.count {
        Some(n) => format!("note  {} ({})", notice.message, thousands(n)),
        None => format!("note  {}", notice.message),
    }
}

fn end_line(end: &End) -> String {
    let skipped = if end.skipped > 0 { format!("  {} updates skipped", thousands(end.skipped)) } else { String::new() };
    let wall = duration(end.wall_s);
    format!("done  step {}  loss {}  {} tokens in {wall}{skipped}", end.step, short(end.loss, 4), thousands(end.tokens))
}

/// Seconds a step, over about the last ten.
#[derive(Default)]
struct Pace {
    sum: f64,
    weight: f64,
}

impl Pace {
    fn add(&mut self, seconds: f64) {
        const KEEP: f64 = 0.9;
        if seconds.is_finite() {
            self.sum = KEEP * self.sum + (1.0 - KEEP) * seconds;
            self.weight = KEEP * self.weight + (1.0 - KEEP);
        }
    }

    fn seconds(&self) -> f64 {
        self.sum / self.weight
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;
    use std::sync::{Arc, Mutex, PoisonError};

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn an_evaluation_that_goes_on_says_how_far_it_is() {
        let out = Shared::default();
        let mut progress = Progress::new(Target::Lines(Box::new(out.clone())), 1);
        progress.evaluating(1, 4000);
        let long_ago = Instant::now().checked_sub(EVAL_EVERY);
        for done in [1200, 1201] {
            progress.evaluating = long_ago.filter(|_| done == 1200).or(progress.evaluating);
            progress.evaluating(done, 4000);
        }
        progress.event(&Event::Eval(Eval { step: 3, loss: 2.0, perplexity: 7.4, trained_tokens: 9, wall_s: 31.0 }));
        let text = String::from_utf8_lossy(&out.0.lock().unwrap()).into_owned();
        assert!(text.starts_with("evaluating: 1,200 of 4,000 micro-batches\neval after step 3  "), "{text}");
        assert!(progress.evaluating.is_none(), "the next evaluation has its own clock");
    }
}
