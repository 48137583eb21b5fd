//! Which training samples are held out for evaluation.

use std::collections::HashSet;

use temper_config::Data;

use super::samples::Samples;

/// For each training source, the indices of samples held out by `data.eval_split`.
///
/// The samples with the smallest hashes of their tokens: independent of order and seed, and equal samples go to the
/// same side, so that nothing evaluated was trained. At least one sample is held out and one is left for training.
pub(crate) fn held_out(sources: &[Samples], config: &Data) -> Vec<HashSet<usize>> {
    let mut out = vec![HashSet::new(); sources.len()];
    if config.eval_split <= 0.0 || !config.eval.is_empty() {
        return out;
    }
    let mut hashes: Vec<(u64, usize, usize)> =
        sources.iter().enumerate().flat_map(|(s, samples)| samples.iter().enumerate().map(move |(i, x)| (x.hash(), s, i))).collect();
    hashes.sort_unstable();
    let wanted = (config.eval_split * hashes.len() as f64).round() as usize;
    let Some(last) = hashes.get(wanted.clamp(1, hashes.len().saturating_sub(1).max(1)) - 1).map(|h| h.0) else { return out };
    if hashes.last().is_some_and(|h| h.0 == last) {
        // All samples are equal, or there is only one.
        return out;
    }
    for (_, source, sample) in hashes.into_iter().take_while(|h| h.0 <= last) {
        if let Some(set) = out.get_mut(source) {
            set.insert(sample);
        }
    }
    out
}
