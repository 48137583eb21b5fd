//! The over-long policy: from a sample to the pieces that are trained.

use serde::Serialize;
use temper_config::OverLong;

use super::samples::Sample;

/// A part of a sample that is trained as one document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Index of the source.
    pub source: u32,
    /// Index in the source's samples.
    pub sample: u32,
    /// Number of the piece, from 0.
    pub piece: u32,
    /// First token.
    pub start: u32,
    /// One past the last token.
    pub end: u32,
}

/// What the policy did, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CutCounts {
    /// Samples longer than `seq_len`.
    pub over_long: u64,
    /// Of those, shortened to `seq_len` and kept.
    pub truncated: u64,
    /// Of those, left out.
    pub dropped_over_long: u64,
    /// Of those, cut into pieces and kept.
    pub split: u64,
    /// Pieces kept of split samples.
    pub split_pieces: u64,
    /// Pieces of split samples left out because nothing in them is trained.
    pub split_pieces_untrained: u64,
    /// Samples left out because no trained token is in them (or left in them).
    pub dropped_no_trained_token: u64,
}

/// Why a sample gives no piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dropped {
    OverLong,
    NoTrainedToken,
}

/// Cuts a sample to token ranges of at most `seq_len`, each with something to train.
///
/// Successive pieces share one token: the last of one is the first of the next, which gives the next its context,
/// since the first token of a document is never a target. So every trained token is trained exactly once.
pub(crate) fn cut(sample: Sample<'_>, policy: OverLong, seq_len: usize, counts: &mut CutCounts) -> Result<Vec<(u32, u32)>, Dropped> {
    let length = sample.ids.len();
    let trained = |start: usize, end: usize| sample.trained(start, end) > 0;
    let range = |start: usize, end: usize| (u32::try_from(start).unwrap_or(u32::MAX), u32::try_from(end).unwrap_or(u32::MAX));
    let long = length > seq_len;
    counts.over_long += u64::from(long);
    if long && policy == OverLong::Drop {
        counts.dropped_over_long += 1;
        return Err(Dropped::OverLong);
    }
    let pieces: Vec<_> = match policy {
        OverLong::Split if long => {
            let step = seq_len.saturating_sub(1).max(1);
            let starts = (0..length.saturating_sub(1)).step_by(step);
            let all = starts.len() as u64;
            let kept: Vec<_> = starts.map(|s| (s, (s + seq_len).min(length))).filter(|(s, e)| trained(*s, *e)).collect();
            counts.split_pieces_untrained += all - kept.len() as u64;
            kept.into_iter().map(|(s, e)| range(s, e)).collect()
        }
        _ => Some((0, length.min(seq_len))).filter(|(s, e)| trained(*s, *e)).map(|(s, e)| range(s, e)).into_iter().collect(),
    };
    if pieces.is_empty() {
        counts.dropped_no_trained_token += 1;
        return Err(Dropped::NoTrainedToken);
    }
    if long && policy == OverLong::Split {
        counts.split += 1;
        counts.split_pieces += pieces.len() as u64;
    }
    counts.truncated += u64::from(long && policy == OverLong::Truncate);
    Ok(pieces)
}
