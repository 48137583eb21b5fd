//! The tokenised samples of one file, laid end to end.

use bytemuck::cast_slice;

use crate::TokenSpan;

/// Samples of one source in columns: N samples, T tokens, S trained spans.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Samples {
    /// Row of the file, [N].
    pub rows: Vec<u64>,
    /// Token ids, [T].
    pub ids: Vec<u32>,
    /// End of each sample in `ids`, [N].
    pub ends: Vec<u64>,
    /// Trained spans, in tokens of their sample, [S].
    pub spans: Vec<TokenSpan>,
    /// End of each sample in `spans`, [N].
    pub span_ends: Vec<u64>,
}

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sample<'a> {
    pub row: u64,
    pub ids: &'a [u32],
    pub spans: &'a [TokenSpan],
}

impl Samples {
    /// Number of samples.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Adds a sample.
    pub fn push(&mut self, row: u64, ids: &[u32], spans: &[TokenSpan]) {
        self.rows.push(row);
        self.ids.extend_from_slice(ids);
        self.ends.push(self.ids.len() as u64);
        self.spans.extend_from_slice(spans);
        self.span_ends.push(self.spans.len() as u64);
    }

    /// Sample `i`; an empty one past the end.
    pub fn get(&self, i: usize) -> Sample<'_> {
        let range = |ends: &[u64]| {
            let start = i.checked_sub(1).and_then(|p| ends.get(p)).copied().unwrap_or(0);
            start as usize..ends.get(i).copied().unwrap_or(start) as usize
        };
        Sample {
            row: self.rows.get(i).copied().unwrap_or(0),
            ids: self.ids.get(range(&self.ends)).unwrap_or_default(),
            spans: self.spans.get(range(&self.span_ends)).unwrap_or_default(),
        }
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = Sample<'_>> {
        (0..self.len()).map(|i| self.get(i))
    }

    /// Whether the columns fit each other: what a cache must show before it is believed.
    pub fn consistent(&self) -> bool {
        let ascending = |ends: &[u64], total: usize| {
            ends.len() == self.rows.len() && ends.is_sorted() && ends.last().copied().unwrap_or(0) == total as u64
        };
        ascending(&self.ends, self.ids.len())
            && ascending(&self.span_ends, self.spans.len())
            && self.iter().all(|s| s.spans.iter().all(|p| p.start < p.end && p.end as usize <= s.ids.len()))
    }
}

impl Sample<'_> {
    /// Hash of the tokens: decides between training and evaluation, equal for equal samples.
    pub fn hash(&self) -> u64 {
        let hash = blake3::hash(cast_slice(self.ids));
        u64::from_le_bytes(std::array::from_fn(|i| hash.as_bytes()[i]))
    }

    /// Weight of each token of `start..end` as a target. The first has no token before it to be predicted from.
    pub fn weights(&self, start: usize, end: usize) -> Vec<f32> {
        let mut weights = vec![0.0; end.saturating_sub(start)];
        for span in self.spans {
            let from = (span.start as usize).max(start + 1);
            let to = (span.end as usize).min(end);
            if from < to {
                weights[from - start..to - start].fill(span.weight);
            }
        }
        weights
    }

    /// Number of targets in `start..end`.
    pub fn trained(&self, start: usize, end: usize) -> usize {
        let inside = |s: &TokenSpan| (s.end as usize).min(end).saturating_sub((s.start as usize).max(start + 1));
        self.spans.iter().filter(|s| s.weight > 0.0).map(inside).sum()
    }
}
