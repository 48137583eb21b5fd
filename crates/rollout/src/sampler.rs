//! Drawing a token from logits.
//!
//! Legend: V vocabulary.

use crate::error::LogitFault;
use crate::{Error, Result};
use temper_tensor::Rng;

/// How tokens are drawn. Applied in this order, which is Hugging Face's: repetition penalty, temperature, top-k, top-p, min-p.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the most likely token (the lowest id among equals) and ignores the filters.
    pub temperature: f64,
    /// Keeps the k most likely tokens (lower ids first among equals); 0 keeps all.
    pub top_k: usize,
    /// Keeps the fewest most likely tokens whose probabilities sum to at least this; 1 keeps all.
    pub top_p: f64,
    /// Drops tokens less likely than this share of the most likely one; 0 drops none.
    pub min_p: f64,
    /// Divides positive and multiplies negative logits of tokens already in prompt or answer; 1 changes nothing.
    pub repetition_penalty: f64,
    /// Token i of the answer depends on (`seed`, `stream`, i) and its logits only, never on what else is in the batch.
    pub seed: u64,
    /// Tells answers to one prompt with one seed apart.
    pub stream: u64,
}

impl Default for Sampling {
    /// Greedy.
    fn default() -> Sampling {
        Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 0, stream: 0 }
    }
}

impl Sampling {
    /// Refuses values outside their range.
    pub fn check(&self) -> Result<()> {
        let rules: [(&'static str, f64, bool, &'static str); 4] = [
            ("temperature", self.temperature, self.temperature >= 0.0 && self.temperature.is_finite(), "give 0 (greedy) or more"),
            ("top_p", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, "give more than 0 and at most 1 (1 keeps all tokens)"),
            ("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "give 0 (keeps all tokens) to 1"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite(),
                "give more than 0 (1 changes nothing)",
            ),
        ];
        match rules.into_iter().find(|(_, _, fine, _)| !fine) {
            Some((key, found, _, expected)) => Err(Error::Sampling { key, found, expected }),
            None => Ok(()),
        }
    }

    /// Uniform in [0, 1) for token `index` of the answer.
    fn uniform(&self, index: usize) -> f64 {
        (Rng::new(self.seed, self.stream).at(index as u64) >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// A drawn token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// The token.
    pub token: u32,
    /// Log-softmax of the logits at the token, before penalty, temperature and filters.
    pub log_prob: f64,
}

/// Draws token `index` of an answer from `logits`, of length V. `history` is prompt and answer so far, for the repetition penalty.
///
/// # Errors
/// When no distribution follows from the logits: a NaN, plus infinity, or nothing above minus infinity. Minus infinity bans a token.
pub fn sample(logits: &[f64], sampling: &Sampling, history: &[u32], index: usize) -> std::result::Result<Choice, LogitFault> {
    let model_max = largest(logits)?;
    let model_log_sum = model_max + logits.iter().map(|l| (l - model_max).exp()).sum::<f64>().ln();
    let penalised;
    let scores = if sampling.repetition_penalty == 1.0 {
        logits
    } else {
        penalised = penalise(logits, history, sampling.repetition_penalty);
        &penalised
    };
    let token = if sampling.temperature == 0.0 { most_likely(scores) } else { draw(scores, sampling, sampling.uniform(index)) };
    Ok(Choice { token: token as u32, log_prob: logits[token] - model_log_sum })
}

/// The largest logit, after checking all.
fn largest(logits: &[f64]) -> std::result::Result<f64, LogitFault> {
    let mut max = f64::NEG_INFINITY;
    for (id, &logit) in logits.iter().enumerate() {
        if logit.is_nan() {
            return Err(LogitFault::NaN(id));
        }
        if logit == f64::INFINITY {
            return Err(LogitFault::Infinite(id));
        }
        max = max.max(logit);
    }
    if max == f64::NEG_INFINITY { Err(LogitFault::Nothing) } else { Ok(max) }
}

/// Keskar et al. 2019 (CTRL), as Hugging Face applies it: once per distinct token.
fn penalise(logits: &[f64], history: &[u32], penalty: f64) -> Vec<f64> {
    let mut scores = logits.to_vec();
    let mut seen = history.to_vec();
    seen.sort_unstable();
    seen.dedup();
    for id in seen {
        if let Some(score) = scores.get_mut(id as usize) {
            *score = if *score > 0.0 { *score / penalty } else { *score * penalty };
        }
    }
    scores
}

/// The lowest id among the largest scores.
fn most_likely(scores: &[f64]) -> usize {
    scores.iter().enumerate().fold(0, |best, (id, score)| if *score > scores[best] { id } else { best })
}

/// Inverse of the cumulative distribution at `u`, over the tokens that the filters keep.
fn draw(scores: &[f64], sampling: &Sampling, u: f64) -> usize {
    let best = most_likely(scores);
    // Relative to the most likely token, whose weight is 1, so nothing overflows.
    let weight = |id: usize| ((scores[id] - scores[best]) / sampling.temperature).exp();
    let kept = filter(scores, sampling, &weight);
    let mut rest = u * kept.iter().map(|id| weight(*id)).sum::<f64>();
    let mut last = best;
    for id in kept {
        let w = weight(id);
        if rest < w {
            return id;
        }
        if w > 0.0 {
            last = id;
        }
        rest -= w;
    }
    last // rounding left a sliver above the sum
}

/// The tokens that survive top-k, top-p and min-p; always the most likely one among them.
fn filter(scores: &[f64], sampling: &Sampling, weight: &impl Fn(usize) -> f64) -> Vec<usize> {
    let mut ids: Vec<usize> = (0..scores.len()).collect();
    if sampling.top_k > 0 {
        keep_best(&mut ids, sampling.top_k, scores);
    }
    if sampling.top_p < 1.0 {
        nucleus(&mut ids, sampling.top_p, scores, weight);
    }
    if sampling.min_p > 0.0 {
        ids.retain(|id| weight(*id) >= sampling.min_p);
    }
    ids
}

/// Leaves the fewest most likely ids whose weights sum to at least `share` of all (Holtzman et al. 2020).
fn nucleus(ids: &mut Vec<usize>, share: f64, scores: &[f64], weight: &impl Fn(usize) -> f64) {
    let enough = share * ids.iter().map(|id| weight(*id)).sum::<f64>();
    // A few ids nearly always suffice, so only those are sorted; more are taken when they do not.
    let mut first = 256;
    loop {
        let mut head = ids.clone();
        keep_best(&mut head, first, scores);
        head.sort_unstable_by(|a, b| by_score(scores, *a, *b));
        let mut sum = 0.0;
        let end = head.iter().position(|id| {
            sum += weight(*id);
            sum >= enough
        });
        if end.is_some() || head.len() == ids.len() {
            head.truncate(end.map_or(head.len(), |last| last + 1));
            *ids = head;
            return;
        }
        first *= 16;
    }
}

/// Leaves the `k` best ids, in any order.
fn keep_best(ids: &mut Vec<usize>, k: usize, scores: &[f64]) {
    if k < ids.len() {
        ids.select_nth_unstable_by(k, |a, b| by_score(scores, *a, *b));
        ids.truncate(k);
    }
}

/// Higher scores first, lower ids first among equals.
fn by_score(scores: &[f64], a: usize, b: usize) -> std::cmp::Ordering {
    scores[b].total_cmp(&scores[a]).then(a.cmp(&b))
}

#[cfg(test)]
mod tests;
