//! From spans of text to spans of tokens, with the proof that they are the same.

use serde::Serialize;

use super::Span;
use crate::{Encoded, Error, Tokenizer};

/// A stretch of trained tokens of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TokenSpan {
    /// First token.
    pub start: u32,
    /// One past the last token.
    pub end: u32,
    /// Weight of each.
    pub weight: f32,
}

/// The trained tokens of a sample and what was found when checking them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct TokenMask {
    /// In order, not empty, not overlapping.
    pub spans: Vec<TokenSpan>,
    /// Tokens that reach over a border of a span; trained if they start inside.
    pub border_tokens: usize,
    /// Spans whose tokens do not decode to their text.
    pub mismatches: usize,
}

/// Finds the tokens of spans: a token is trained if it starts inside one. Each span is decoded again and compared.
///
/// # Errors
/// The decoder's own.
pub(crate) fn token_mask(tokenizer: &Tokenizer, text: &str, encoded: &Encoded, spans: &[Span]) -> Result<TokenMask, Error> {
    let mut mask = TokenMask::default();
    for span in spans {
        let first = encoded.offsets.partition_point(|(start, _)| (*start as usize) < span.range.start);
        let last = encoded.offsets.partition_point(|(start, _)| (*start as usize) < span.range.end);
        let end_of = |i: usize| encoded.offsets.get(i).map_or(0, |o| o.1 as usize);
        let crosses_in = first > 0 && end_of(first - 1) > span.range.start;
        let crosses_out = last > first && end_of(last - 1) > span.range.end;
        mask.border_tokens += usize::from(crosses_in) + usize::from(crosses_out);
        if first >= last {
            continue;
        }
        let from = if crosses_in { encoded.offsets[first].0 as usize } else { span.range.start };
        let to = if crosses_out { end_of(last - 1) } else { span.range.end };
        let decoded = tokenizer.decode(&encoded.ids[first..last], false)?;
        mask.mismatches += usize::from(!same_text(tokenizer, &decoded, text.get(from..to).unwrap_or_default()));
        let index = |i: usize| u32::try_from(i).unwrap_or(u32::MAX);
        mask.spans.push(TokenSpan { start: index(first), end: index(last), weight: span.weight });
    }
    Ok(mask)
}

/// Whether `decoded` is what `text` decodes to: as it stands, after the normalizer, or but for the blank that
/// sentence-piece decoders drop in front.
fn same_text(tokenizer: &Tokenizer, decoded: &str, text: &str) -> bool {
    if decoded == text {
        return true;
    }
    let normal = tokenizer.normalise(text);
    decoded == normal || decoded.trim_start() == normal.trim_start().trim_start_matches('\u{2581}').replace('\u{2581}', " ").trim_start()
}
