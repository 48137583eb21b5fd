//! From a configuration to batches: every sample tokenised, masked, cut and counted before the first step.

mod cut;
mod encode;
mod loader;
mod samples;
mod split;

use std::path::Path;
use std::sync::Arc;

use temper_config::{Data, Train};

use crate::pack::{Order, Share, sequences};
use crate::stats::{Lengths, Packing, Report, SourceStats};
use crate::{ChatTemplate, Error, MicroBatch, SampleId, Tokenizer, cache};
pub use cut::CutCounts;
pub(crate) use cut::{Dropped, Piece, cut};
pub(crate) use encode::{Encoder, Encoding};
pub use loader::Loader;
pub(crate) use samples::{Sample, Samples};

/// Seed of the evaluation's order, the same in every run.
const EVAL_SEED: u64 = 0;

/// All samples of a run, for training and evaluation.
#[derive(Clone, Debug)]
pub struct Dataset {
    content: Arc<Content>,
    report: Report,
    fingerprint: String,
    max_bad_rows: f64,
}

/// What batches are made of.
#[derive(Debug)]
struct Content {
    /// Training files, then evaluation files.
    samples: Vec<Samples>,
    seq_len: usize,
    packing: bool,
    train: Documents,
    eval: Documents,
}

/// Pieces of samples in the order of their files, with what packing needs to know of them.
#[derive(Debug, Default)]
struct Documents {
    pieces: Vec<Piece>,
    lengths: Vec<u32>,
    shares: Vec<Share>,
}

impl Dataset {
    /// Reads, renders, tokenises, masks and cuts everything that `[data]` names; uses and fills the cache.
    ///
    /// Bad rows are counted, not fatal: training calls [`Self::ensure_trainable`] before its first step.
    ///
    /// # Errors
    /// A file that cannot be read at all; an impossible option.
    pub fn build(config: &Data, tokenizer: &Tokenizer, template: &ChatTemplate) -> Result<Self, Error> {
        let workers = pool(config.workers)?;
        let encoder = Encoder::new(template, tokenizer, config.loss);
        let mut report = Report::default();
        if template.reads_clock() {
            report
                .notices
                .push(format!("template {} writes today's date into the text; set its date by data.template_args", template.name()));
        }
        let mut samples = Vec::new();
        for (index, source) in config.train.iter().chain(&config.eval).enumerate() {
            let index = u32::try_from(index).unwrap_or(u32::MAX);
            let cache = config.cache_dir.as_deref();
            let (encoded, stats) = encode_cached(index, &source.path, &encoder, &workers, cache, &mut report.notices)?;
            samples.push(encoded);
            report.sources.push(stats);
        }
        report.notices.extend(report.sources.iter().filter_map(SourceStats::mask_notice));
        let content = Content::new(config, samples, &mut report);
        let fingerprint = content.fingerprint(config);
        let dataset = Self { content: Arc::new(content), report, fingerprint, max_bad_rows: config.max_bad_rows };
        dataset.tell();
        Ok(dataset)
    }

    /// Refuses data that a training run must not start on.
    ///
    /// # Errors
    /// More bad rows than `data.max_bad_rows` allows, listing the first; nothing left to train, naming `seq_len`.
    pub fn ensure_trainable(&self) -> Result<(), Error> {
        let r = &self.report;
        let share = r.bad_rows as f64 / r.rows.max(1) as f64;
        if share > self.max_bad_rows {
            let examples: String = r.bad_examples().take(5).map(|b| format!("\n  {b}")).collect();
            return Err(Error::Option {
                option: "data.max_bad_rows",
                found: format!("{} of {} rows are bad, more than {}:{examples}\n", r.bad_rows, r.rows, self.max_bad_rows),
                remedy: "correct the rows, or raise the limit to train without them".into(),
            });
        }
        if r.trained_tokens == 0 {
            let seq_len = self.content.seq_len;
            return Err(Error::Option {
                option: "data.seq_len",
                found: format!(
                    "no trainable token is left at seq_len = {seq_len}: of {} rows {} are bad, {} are over-long and dropped, {} have no \
                     trained token within seq_len; the longest sample has {} tokens",
                    r.rows, r.bad_rows, r.cut.dropped_over_long, r.cut.dropped_no_trained_token, r.lengths.max
                ),
                remedy: "raise data.seq_len, set data.over_long = \"split\", or check data.loss".into(),
            });
        }
        Ok(())
    }

    /// The batches of a training run.
    pub fn train_plan(&self, train: &Train) -> Loader {
        Loader::new(self.content.clone(), train)
    }

    /// The evaluation set, `micro_batch` sequences to a batch; with `max_sequences` above 0 only so many sequences,
    /// the same in every run.
    pub fn eval_batches(&self, micro_batch: usize, max_sequences: usize) -> Vec<MicroBatch> {
        let content = &self.content;
        let order = Order { seed: EVAL_SEED, shuffle: true, pack: content.packing.then_some(content.seq_len) };
        let mut all = sequences(&content.eval.lengths, &content.eval.shares, order, 0);
        if max_sequences > 0 {
            all.truncate(max_sequences);
        }
        all.chunks(micro_batch.max(1)).map(|s| content.micro_batch(&content.eval, s)).collect()
    }

    /// Hash of all tokens, masks and pieces: equal data sets train equally, whatever the layout or the cache.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Counts of everything kept and left out.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Everything left out also stands in the log.
    fn tell(&self) {
        let r = &self.report;
        tracing::info!(rows = r.rows, bad = r.bad_rows, samples = r.kept, tokens = r.tokens, trained = r.trained_tokens, "data");
        let c = &r.cut;
        if c.over_long + c.dropped_no_trained_token > 0 {
            tracing::warn!(
                over_long = c.over_long,
                dropped_over_long = c.dropped_over_long,
                truncated = c.truncated,
                split = c.split,
                dropped_no_trained_token = c.dropped_no_trained_token,
                "samples left out or cut"
            );
        }
        for bad in r.bad_examples().take(5) {
            tracing::warn!("bad row: {bad}");
        }
        for notice in &r.notices {
            tracing::warn!("{notice}");
        }
    }
}

fn pool(workers: usize) -> Result<rayon::ThreadPool, Error> {
    rayon::ThreadPoolBuilder::new().num_threads(workers).build().map_err(|e| Error::Option {
        option: "data.workers",
        found: format!("{workers} threads cannot be started: {e}"),
        remedy: "use fewer".into(),
    })
}

/// From the cache where it holds the source, else by encoding it (and filling the cache).
fn encode_cached(
    index: u32,
    path: &Path,
    encoder: &Encoder<'_>,
    workers: &rayon::ThreadPool,
    folder: Option<&Path>,
    notices: &mut Vec<String>,
) -> Result<(Samples, SourceStats), Error> {
    let Some(folder) = folder else { return encode::encode_source(index, path, encoder, workers) };
    let place = cache::place(folder, path, encoder.digest())?;
    match cache::load(&place, path) {
        Ok(Some(found)) => return Ok(found),
        Ok(None) => {}
        Err(why) => notices.push(format!("the cache {} is made again: {why}", place.display())),
    }
    let (samples, stats) = encode::encode_source(index, path, encoder, workers)?;
    if let Err(e) = cache::store(&place, &samples, &stats) {
        notices.push(format!("{} is not cached: {}: {e}", path.display(), folder.display()));
    }
    Ok((samples, stats))
}

impl Content {
    /// Splits, cuts and counts. Evaluation sees every sample once, whatever its weight in training.
    fn new(config: &Data, samples: Vec<Samples>, report: &mut Report) -> Self {
        let held_out = split::held_out(&samples[..config.train.len().min(samples.len())], config);
        let mut content =
            Self { samples, seq_len: config.seq_len, packing: config.packing, train: Documents::default(), eval: Documents::default() };
        let (mut train, mut eval) = (Documents::default(), Documents::default());
        for (index, source) in config.train.iter().enumerate() {
            let out = held_out.get(index);
            content.cut_source(index, source.weight, config, &mut train, &mut report.cut, &mut report.kept, |i| !is_in(out, i));
            content.cut_source(index, 1.0, config, &mut eval, &mut report.cut, &mut report.eval, |i| is_in(out, i));
        }
        for i in 0..config.eval.len() {
            content.cut_source(config.train.len() + i, 1.0, config, &mut eval, &mut report.cut, &mut report.eval, |_| true);
        }
        content.train = train;
        content.eval = eval;
        content.count(report);
        content
    }

    fn cut_source(
        &self,
        index: usize,
        weight: f64,
        config: &Data,
        documents: &mut Documents,
        counts: &mut CutCounts,
        kept: &mut u64,
        mut wanted: impl FnMut(usize) -> bool,
    ) {
        let first = documents.pieces.len();
        let Some(samples) = self.samples.get(index) else { return };
        for (i, sample) in samples.iter().enumerate().filter(|(i, _)| wanted(*i)) {
            let Ok(ranges) = cut(sample, config.over_long, config.seq_len, counts) else { continue };
            *kept += 1;
            for (piece, (start, end)) in (0..).zip(ranges) {
                documents.pieces.push(Piece { source: index as u32, sample: i as u32, piece, start, end });
                documents.lengths.push(end - start);
            }
        }
        documents.shares.push(Share { documents: first as u32..documents.pieces.len() as u32, weight });
    }

    fn count(&self, report: &mut Report) {
        report.rows = report.sources.iter().map(|s| s.rows).sum();
        report.bad_rows = report.sources.iter().map(|s| s.bad_rows).sum();
        report.documents = self.train.pieces.len() as u64;
        report.tokens = self.train.lengths.iter().map(|l| u64::from(*l)).sum();
        let trained = |p: &Piece| self.sample(p).trained(p.start as usize, p.end as usize) as u64;
        report.trained_tokens = self.train.pieces.iter().map(trained).sum();
        report.trained_share = report.trained_tokens as f64 / report.tokens.max(1) as f64;
        let all = self.samples.iter().flat_map(Samples::iter);
        report.lengths = Lengths::of(all.map(|s| u32::try_from(s.ids.len()).unwrap_or(u32::MAX)).collect());
        let order = Order { seed: EVAL_SEED, shuffle: true, pack: self.packing.then_some(self.seq_len) };
        let first_epoch = sequences(&self.train.lengths, &self.train.shares, order, 0);
        let tokens: u64 = first_epoch.iter().flatten().filter_map(|d| self.train.lengths.get(*d as usize)).map(|l| u64::from(*l)).sum();
        let room = first_epoch.len().max(1) as f64 * self.seq_len as f64;
        report.packing =
            Packing { enabled: self.packing, seq_len: self.seq_len, sequences: first_epoch.len() as u64, efficiency: tokens as f64 / room };
    }

    fn sample(&self, piece: &Piece) -> Sample<'_> {
        self.samples.get(piece.source as usize).map_or(Sample { row: 0, ids: &[], spans: &[] }, |s| s.get(piece.sample as usize))
    }

    /// Lays sequences end to end.
    fn micro_batch(&self, documents: &Documents, sequences: &[Vec<u32>]) -> MicroBatch {
        let mut batch = MicroBatch { cu_seqlens: vec![0], ..MicroBatch::default() };
        for piece in sequences.iter().flatten().filter_map(|d| documents.pieces.get(*d as usize)) {
            let sample = self.sample(piece);
            let (start, end) = (piece.start as usize, piece.end as usize);
            batch.push_document(
                sample.ids.get(start..end).unwrap_or_default(),
                &sample.weights(start, end),
                SampleId { source: piece.source, row: sample.row, piece: piece.piece },
            );
        }
        batch
    }

    fn fingerprint(&self, config: &Data) -> String {
        let mut hash = blake3::Hasher::new();
        hash.update(format!("1 {} {}", config.seq_len, config.packing).as_bytes());
        for documents in [&self.train, &self.eval] {
            hash.update(b"part");
            for share in &documents.shares {
                hash.update(format!("{:?} {}", share.documents, share.weight).as_bytes());
            }
            for piece in &documents.pieces {
                let sample = self.sample(piece);
                hash.update(bytemuck::cast_slice(&[piece.piece, piece.start, piece.end]));
                hash.update(bytemuck::cast_slice(sample.ids));
                for span in sample.spans {
                    hash.update(bytemuck::cast_slice(&[span.start, span.end, span.weight.to_bits()]));
                }
            }
        }
        hash.finalize().to_hex().to_string()
    }
}

fn is_in(set: Option<&std::collections::HashSet<usize>>, i: usize) -> bool {
    set.is_some_and(|s| s.contains(&i))
}

#[cfg(test)]
mod tests;
