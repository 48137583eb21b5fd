//! From the rows of a file to tokenised samples, in parallel.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::mpsc;

use rayon::prelude::*;
use temper_config::LossOn;

use super::samples::Samples;
use crate::mask::{Masked, Masker, TokenMask, token_mask};
use crate::stats::SourceStats;
use crate::{BadRow, ChatTemplate, Conversation, Encoded, Error, Tokenizer, read_source};

/// Rows, and bytes of content, that travel together from the reader to the workers.
const BATCH_ROWS: usize = 512;
const BATCH_BYTES: usize = 4 << 20;

/// A conversation as text and tokens with its mask.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Encoding {
    pub text: String,
    pub encoded: Encoded,
    pub mask: TokenMask,
}

/// Turns conversations into tokens with a mask.
pub(crate) struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    masker: Masker,
    loss: LossOn,
}

impl<'a> Encoder<'a> {
    /// For a template, a tokenizer and a loss rule.
    pub fn new(template: &ChatTemplate, tokenizer: &'a Tokenizer, loss: LossOn) -> Self {
        Self { tokenizer, masker: Masker::new(template.clone(), loss, tokenizer.added_tokens()), loss }
    }

    /// Encodes one conversation, or says why it cannot be trained.
    pub fn encode(&self, conversation: &Conversation) -> Result<Encoding, String> {
        let Masked { text, spans } = self.masker.mask(conversation)?;
        if u32::try_from(text.len()).is_err() {
            return Err(format!("the rendered text has {} bytes; the most is {}", text.len(), u32::MAX));
        }
        let encoded = self.tokenizer.encode(&text).map_err(|e| e.to_string())?;
        let mask = token_mask(self.tokenizer, &text, &encoded, &spans).map_err(|e| e.to_string())?;
        Ok(Encoding { text, encoded, mask })
    }

    /// Hash of everything that decides the tokens and masks of a row.
    pub fn digest(&self) -> blake3::Hash {
        let mut hash = blake3::Hasher::new();
        hash.update(self.tokenizer.digest().as_bytes());
        hash.update(self.masker.template().digest().as_bytes());
        hash.update(format!("{:?}", self.loss).as_bytes());
        hash.finalize()
    }
}

/// Reads and encodes a whole file; rows keep the file's order whatever the number of workers.
pub(crate) fn encode_source(
    index: u32,
    path: &Path,
    encoder: &Encoder<'_>,
    workers: &rayon::ThreadPool,
) -> Result<(Samples, SourceStats), Error> {
    let mut samples = Samples::default();
    let mut stats = SourceStats { file: path.to_path_buf(), ..SourceStats::default() };
    let report = std::thread::scope(|scope| {
        let (sender, receiver) = mpsc::sync_channel(4);
        let reader = scope.spawn(move || read_in_batches(index, path, &sender));
        for batch in receiver {
            let encoded = workers.install(|| batch.into_par_iter().map(|row| encode_row(encoder, path, row)).collect::<Vec<_>>());
            for result in encoded {
                match result {
                    Ok((row, e)) => {
                        stats.mask_mismatches += e.mask.mismatches as u64;
                        stats.border_tokens += e.mask.border_tokens as u64;
                        samples.push(row, &e.encoded.ids, &e.mask.spans);
                    }
                    Err(bad) => stats.add_bad(bad),
                }
            }
        }
        reader.join().unwrap_or_else(|_| Err(Error::file(path, "the reader failed", "report this file as a bug")))
    })?;
    stats.rows = report.rows;
    stats.blank_lines = report.blank_lines;
    stats.format = report.format.map(|f| format!("{f:?}").to_lowercase());
    stats.warnings = report.warnings;
    Ok((samples, stats))
}

type Row = Result<Conversation, BadRow>;

fn read_in_batches(index: u32, path: &Path, sender: &mpsc::SyncSender<Vec<Row>>) -> Result<crate::SourceReport, Error> {
    let (mut batch, mut bytes) = (Vec::new(), 0);
    let report = read_source(index, path, &mut |row| {
        bytes += row.as_ref().map_or(0, |c| c.messages.iter().map(|m| m.content.len()).sum());
        batch.push(row);
        if batch.len() >= BATCH_ROWS || bytes >= BATCH_BYTES {
            bytes = 0;
            if sender.send(std::mem::take(&mut batch)).is_err() {
                return ControlFlow::Break(());
            }
        }
        ControlFlow::Continue(())
    })?;
    // A receiver that has gone has its own error to tell.
    let _ = sender.send(batch);
    Ok(report)
}

fn encode_row(encoder: &Encoder<'_>, path: &Path, row: Row) -> Result<(u64, Encoding), BadRow> {
    let conversation = row?;
    match encoder.encode(&conversation) {
        Ok(encoding) => Ok((conversation.id.row, encoding)),
        Err(reason) => Err(BadRow { file: path.to_path_buf(), row: conversation.id.row, column: None, reason }),
    }
}
