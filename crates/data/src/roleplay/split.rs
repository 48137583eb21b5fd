//! The order of the samples and the validation part, both from hashes: independent of the order of the files.

use std::collections::BTreeMap;

use super::RoleplayOptions;
use super::select::Sample;
use super::tables::Language;

/// The result, each part in training order.
pub(super) struct Split {
    pub train: Vec<Sample>,
    pub validation: Vec<Sample>,
}

/// Shuffles the samples and sets whole characters aside for validation, so that no character is in both parts.
///
/// All seeds of a language that play one character go together. Characters are tried in random order and taken while
/// they fit into the share asked for; where none fits, the smallest is taken.
pub(super) fn split(mut samples: Vec<Sample>, options: &RoleplayOptions) -> Split {
    samples.sort_by_cached_key(|sample| (rank(options.seed, "sample", &sample.id()), sample.id()));
    let mut characters: BTreeMap<(Language, &str), usize> = BTreeMap::new();
    for sample in &samples {
        *characters.entry((sample.language, sample.character.as_str())).or_default() += 1;
    }
    let mut order: Vec<_> = characters.into_iter().collect();
    order.sort_by_cached_key(|((language, character), _)| rank(options.seed, language.name(), character));

    let target = (samples.len() as f64 * options.validation).round() as usize;
    let mut chosen = Vec::new();
    let mut count = 0;
    for (character, size) in &order {
        if count + size <= target {
            count += size;
            chosen.push(*character);
        }
    }
    if chosen.is_empty() && options.validation > 0.0 && order.len() > 1 {
        chosen.extend(order.iter().min_by_key(|(_, size)| *size).map(|(character, _)| *character));
    }
    if chosen.len() == order.len() {
        chosen.pop();
    }
    let held: Vec<bool> = samples.iter().map(|sample| chosen.contains(&(sample.language, sample.character.as_str()))).collect();
    let mut split = Split { train: Vec::new(), validation: Vec::new() };
    for (sample, held) in samples.into_iter().zip(held) {
        if held { split.validation.push(sample) } else { split.train.push(sample) }
    }
    split
}

/// A pseudo-random rank that depends on the seed and the name alone.
fn rank(seed: u64, domain: &str, name: &str) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes()).update(domain.as_bytes()).update(&[0]).update(name.as_bytes());
    *hasher.finalize().as_bytes()
}
