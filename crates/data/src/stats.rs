//! What became of the rows: counts that add up, lengths, packing; for people and for programs.

use std::fmt::Write as _;
use std::path::PathBuf;

use serde::Serialize;

use crate::BadRow;
use crate::dataset::CutCounts;

/// Bad rows kept as examples.
pub(crate) const BAD_EXAMPLES: usize = 50;

/// What reading and encoding one file gave.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SourceStats {
    /// The file.
    pub file: PathBuf,
    /// The row format found.
    pub format: Option<String>,
    /// Rows, good and bad.
    pub rows: u64,
    /// Rows that cannot be trained.
    pub bad_rows: u64,
    /// The first of them.
    pub bad_examples: Vec<BadRow>,
    /// Lines of white space only, skipped.
    pub blank_lines: u64,
    /// Spans whose tokens do not decode to the text that is to be trained.
    pub mask_mismatches: u64,
    /// Tokens that reach over the border of a trained span.
    pub border_tokens: u64,
    /// What the reader warns of.
    pub warnings: Vec<String>,
    /// Whether it came from the cache.
    pub cached: bool,
}

impl SourceStats {
    /// What checking the masks found, if anything.
    pub(crate) fn mask_notice(&self) -> Option<String> {
        let (file, wrong, border) = (self.file.display(), self.mask_mismatches, self.border_tokens);
        (wrong + border > 0).then(|| {
            format!(
                "{file}: {wrong} trained spans do not decode to their text, {border} tokens reach over a border (trained if they start inside)"
            )
        })
    }

    /// Counts a bad row and keeps the first ones.
    pub(crate) fn add_bad(&mut self, bad: BadRow) {
        self.bad_rows += 1;
        if self.bad_examples.len() < BAD_EXAMPLES {
            self.bad_examples.push(bad);
        }
    }
}

/// Lengths of samples in tokens, before any cutting.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Lengths {
    /// Arithmetic mean.
    pub mean: f64,
    /// Half are at most this long.
    pub p50: u32,
    /// 90 %.
    pub p90: u32,
    /// 99 %.
    pub p99: u32,
    /// The longest.
    pub max: u32,
    /// Upper ends (inclusive) and counts of ten or so bins, doubling in width.
    pub histogram: Vec<(u32, u64)>,
}

impl Lengths {
    /// Of these lengths.
    pub(crate) fn of(mut lengths: Vec<u32>) -> Self {
        lengths.sort_unstable();
        // Nearest rank: the smallest length that at least this share does not exceed.
        let rank = |share: f64| ((share * lengths.len() as f64).ceil() as usize).max(1) - 1;
        let at = |share: f64| lengths.get(rank(share)).copied().unwrap_or(0);
        let mean = lengths.iter().map(|l| f64::from(*l)).sum::<f64>() / lengths.len().max(1) as f64;
        let mut histogram = Vec::new();
        let (mut done, mut top) = (0, 16_u32);
        while done < lengths.len() {
            let upto = lengths.partition_point(|l| *l <= top);
            histogram.push((top, (upto - done) as u64));
            done = upto;
            top = top.saturating_mul(2);
        }
        let empty = histogram.iter().take_while(|(_, n)| *n == 0).count();
        histogram.drain(..empty);
        Self { mean, p50: at(0.5), p90: at(0.9), p99: at(0.99), max: at(1.0), histogram }
    }
}

/// How the first epoch fills its sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Packing {
    /// Whether several samples share a sequence.
    pub enabled: bool,
    /// Longest sequence in tokens.
    pub seq_len: usize,
    /// Sequences of the first epoch.
    pub sequences: u64,
    /// Tokens of the first epoch divided by sequences times `seq_len`.
    pub efficiency: f64,
}

/// What a data set consists of and what was left out.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Training and evaluation files.
    pub sources: Vec<SourceStats>,
    /// Rows of all files, good and bad.
    pub rows: u64,
    /// Rows that cannot be trained.
    pub bad_rows: u64,
    /// Samples with at least one trained token, for training.
    pub kept: u64,
    /// Samples for evaluation.
    pub eval: u64,
    /// What the over-long policy did (training and evaluation).
    pub cut: CutCounts,
    /// Documents for training: samples, or pieces of them.
    pub documents: u64,
    /// Their tokens, each sample once.
    pub tokens: u64,
    /// Of those, trained.
    pub trained_tokens: u64,
    /// `trained_tokens / tokens`.
    pub trained_share: f64,
    /// Of all samples, before cutting.
    pub lengths: Lengths,
    /// How the first epoch is packed.
    pub packing: Packing,
    /// Things worth telling.
    pub notices: Vec<String>,
}

impl Report {
    /// The report as a table for people.
    pub fn table(&self) -> String {
        let mut out = String::new();
        let mut line = |name: &str, value: String| {
            let _ = writeln!(out, "{name:<28} {value}");
        };
        let c = &self.cut;
        line("rows", self.rows.to_string());
        line("bad rows", format!("{} ({})", self.bad_rows, percent(self.bad_rows, self.rows)));
        line("samples for training", self.kept.to_string());
        line("samples for evaluation", self.eval.to_string());
        line("dropped: no trained token", c.dropped_no_trained_token.to_string());
        line("over-long", c.over_long.to_string());
        line("  dropped", c.dropped_over_long.to_string());
        line("  truncated", c.truncated.to_string());
        line("  split", format!("{} into {} pieces ({} untrained pieces dropped)", c.split, c.split_pieces, c.split_pieces_untrained));
        line("tokens", self.tokens.to_string());
        line("trained tokens", format!("{} ({})", self.trained_tokens, percent(self.trained_tokens, self.tokens)));
        let l = &self.lengths;
        line("length", format!("mean {:.1}, p50 {}, p90 {}, p99 {}, max {}", l.mean, l.p50, l.p90, l.p99, l.max));
        let p = &self.packing;
        let name = if p.enabled { "packed sequences" } else { "sequences (not packed)" };
        line(name, format!("{} of {} tokens, {:.1} % filled", p.sequences, p.seq_len, 100.0 * p.efficiency));
        out.push_str(&self.histogram());
        for s in &self.sources {
            let format = s.format.as_deref().unwrap_or("?");
            let cached = if s.cached { ", cached" } else { "" };
            let _ = writeln!(out, "{}: {} rows ({format}{cached}), {} bad", s.file.display(), s.rows, s.bad_rows);
            for bad in s.bad_examples.iter().take(5) {
                let _ = writeln!(out, "  {bad}");
            }
            for warning in &s.warnings {
                let _ = writeln!(out, "  {warning}");
            }
        }
        for notice in &self.notices {
            let _ = writeln!(out, "note: {notice}");
        }
        out
    }

    /// Lengths as bars of text.
    pub fn histogram(&self) -> String {
        let most = self.lengths.histogram.iter().map(|(_, n)| *n).max().unwrap_or(0).max(1);
        let mut out = String::new();
        let mut low = 0_u32;
        for (i, (high, count)) in self.lengths.histogram.iter().enumerate() {
            let from = if i == 0 { 1 } else { low };
            let bar = "#".repeat((count * 40).div_ceil(most) as usize);
            let _ = writeln!(out, "{from:>8} - {high:<8} {count:>8} {bar}");
            low = high.saturating_add(1);
        }
        out
    }

    /// The first bad rows of all files, as `file:row: reason`.
    pub fn bad_examples(&self) -> impl Iterator<Item = &BadRow> {
        self.sources.iter().flat_map(|s| &s.bad_examples)
    }
}

fn percent(part: u64, whole: u64) -> String {
    format!("{:.1} %", 100.0 * part as f64 / whole.max(1) as f64)
}
