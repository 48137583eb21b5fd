//! Exactly what is trained, for people to look at.

use std::ops::ControlFlow;
use std::path::PathBuf;

use serde::Serialize;
use temper_config::Data;

use crate::dataset::{CutCounts, Dropped, Encoder, Encoding, Samples, cut};
use crate::{BadRow, ChatTemplate, Error, IGNORE, MicroBatch, Tokenizer, read_source};

/// A document as it is trained.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PreviewLine {
    /// The text: as rendered, or the part of it that a cut sample keeps.
    pub text: String,
    /// Token ids, `[T]`.
    pub input_ids: Vec<i32>,
    /// The token itself where it is trained (predicted from those before it), else -100; not shifted, `[T]`.
    pub labels: Vec<i32>,
    /// Weights of the labels, only where some are neither 0 nor 1, `[T]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_weights: Option<Vec<f32>>,
    /// The file.
    pub file: PathBuf,
    /// Row of the file, from 1.
    pub row: u64,
    /// Piece of a split sample, from 0.
    pub piece: u32,
    /// Tokens of the whole sample, where over-length left only this part of it. Not known of a batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cut_from: Option<usize>,
    /// Number of labels that are trained.
    pub trained_tokens: usize,
    /// Sequence of the batch that the document lies in, for packed batches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch: Option<usize>,
}

/// What a preview delivers for a row.
#[derive(Clone, Debug, PartialEq)]
pub enum PreviewItem {
    /// A document that is trained.
    Line(PreviewLine),
    /// A row that is bad.
    Bad(BadRow),
    /// A good row of which nothing is trained, and why.
    Dropped(BadRow),
}

/// A stretch of decoded tokens that are all trained, or all not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Run {
    /// Decoded text.
    pub text: String,
    /// Whether it is trained.
    pub trained: bool,
    /// Number of tokens.
    pub tokens: usize,
}

/// Hands the documents of the training files to `sink`, in file order, until it breaks: no cache, no shuffling,
/// nothing read beyond what is shown.
///
/// # Errors
/// A file that cannot be read at all.
pub fn preview(
    config: &Data,
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    sink: &mut dyn FnMut(PreviewItem) -> ControlFlow<()>,
) -> Result<(), Error> {
    let encoder = Encoder::new(template, tokenizer, config.loss);
    for (index, source) in (0..).zip(&config.train) {
        let mut flow = ControlFlow::Continue(());
        read_source(index, &source.path, &mut |row| {
            let encoded = row.and_then(|c| {
                let bad = |reason| BadRow { file: source.path.clone(), row: c.id.row, column: None, reason };
                Ok((c.id.row, encoder.encode(&c).map_err(bad)?))
            });
            flow = match encoded {
                Ok((row, encoding)) => show(config, &source.path, row, &encoding, sink),
                Err(bad) => sink(PreviewItem::Bad(bad)),
            };
            flow
        })?;
        if flow.is_break() {
            break;
        }
    }
    Ok(())
}

/// One row: its documents, or why there are none.
fn show(
    config: &Data,
    file: &std::path::Path,
    row: u64,
    encoding: &Encoding,
    sink: &mut dyn FnMut(PreviewItem) -> ControlFlow<()>,
) -> ControlFlow<()> {
    let Encoding { text, encoded, mask } = encoding;
    let mut samples = Samples::default();
    samples.push(row, &encoded.ids, &mask.spans);
    let sample = samples.get(0);
    let ranges = match cut(sample, config.over_long, config.seq_len, &mut CutCounts::default()) {
        Ok(ranges) => ranges,
        Err(why) => {
            let reason = match why {
                Dropped::OverLong => format!("dropped: {} tokens, more than seq_len = {}", sample.ids.len(), config.seq_len),
                Dropped::NoTrainedToken => "dropped: no trained token".to_string(),
            };
            return sink(PreviewItem::Dropped(BadRow { file: file.to_path_buf(), row, column: None, reason }));
        }
    };
    for (piece, (start, end)) in (0..).zip(ranges) {
        let (from, to) = (start as usize, end as usize);
        let weights = sample.weights(from, to);
        let bytes = |token: usize| encoded.offsets.get(token).map_or(text.len(), |o| o.0 as usize);
        let whole = to - from == sample.ids.len();
        let part = if whole { Some(text.as_str()) } else { text.get(bytes(from)..bytes(to)) };
        let mut line = line(sample.ids.get(from..to).unwrap_or_default(), &weights, part.unwrap_or(text), file, row, piece);
        line.cut_from = (!whole).then_some(sample.ids.len());
        sink(PreviewItem::Line(line))?;
    }
    ControlFlow::Continue(())
}

fn line(ids: &[u32], weights: &[f32], text: &str, file: &std::path::Path, row: u64, piece: u32) -> PreviewLine {
    let input_ids: Vec<i32> = ids.iter().map(|id| i32::try_from(*id).unwrap_or(i32::MAX)).collect();
    let labels: Vec<i32> = input_ids.iter().zip(weights).map(|(id, w)| if *w > 0.0 { *id } else { IGNORE }).collect();
    PreviewLine {
        text: text.to_string(),
        trained_tokens: labels.iter().filter(|l| **l != IGNORE).count(),
        input_ids,
        labels,
        loss_weights: weights.iter().any(|w| *w != 0.0 && *w != 1.0).then(|| weights.to_vec()),
        file: file.to_path_buf(),
        row,
        piece,
        cut_from: None,
        batch: None,
    }
}

/// The documents of a batch as they are trained; `batch` numbers it. The text is decoded from the tokens.
///
/// # Errors
/// The decoder's own.
pub fn preview_batch(config: &Data, tokenizer: &Tokenizer, batch: &MicroBatch, number: usize) -> Result<Vec<PreviewLine>, Error> {
    let files: Vec<_> = config.train.iter().chain(&config.eval).map(|s| s.path.clone()).collect();
    let mut lines = Vec::new();
    for (bounds, sample) in batch.cu_seqlens.windows(2).zip(&batch.samples) {
        let (Ok(from), Ok(to)) = (usize::try_from(bounds[0]), usize::try_from(bounds[1])) else { continue };
        let ids: Vec<u32> = batch.ids.get(from..to).unwrap_or_default().iter().map(|id| id.cast_unsigned()).collect();
        // Targets are shifted by one; the first token of a document is never one.
        let shifted = batch.weights.get(from..to.max(from + 1) - 1).unwrap_or_default();
        let weights: Vec<f32> = std::iter::once(0.0).chain(shifted.iter().copied()).take(ids.len()).collect();
        let file = files.get(sample.source as usize).cloned().unwrap_or_default();
        let mut document = line(&ids, &weights, &tokenizer.decode(&ids, false)?, &file, sample.row, sample.piece);
        document.batch = Some(number);
        lines.push(document);
    }
    Ok(lines)
}

/// The tokens of a line as stretches of text, trained and not, for colouring.
///
/// # Errors
/// The decoder's own.
pub fn runs(tokenizer: &Tokenizer, line: &PreviewLine) -> Result<Vec<Run>, Error> {
    let mut runs = Vec::new();
    let pairs: Vec<(u32, bool)> = line.input_ids.iter().zip(&line.labels).map(|(id, l)| (id.cast_unsigned(), *l != IGNORE)).collect();
    for run in pairs.chunk_by(|a, b| a.1 == b.1) {
        let ids: Vec<u32> = run.iter().map(|(id, _)| *id).collect();
        let trained = run.first().is_some_and(|r| r.1);
        runs.push(Run { text: tokenizer.decode(&ids, false)?, trained, tokens: ids.len() });
    }
    Ok(runs)
}

#[cfg(test)]
mod tests;
