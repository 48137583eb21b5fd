//! The order of samples in an epoch and their packing into sequences: pure functions of seed and epoch.
//!
//! An epoch is shuffled as a whole, cut into windows of [`WINDOW`] documents, each window is packed by best fit
//! decreasing, and the sequences of the epoch are shuffled again. Which documents meet in a sequence, and when a
//! sequence is trained, is therefore random; nothing depends on ranks, micro-batches or earlier epochs.

use std::collections::BTreeMap;
use std::ops::Range;

/// Documents that are packed together. Large enough for best fit to leave almost no gaps.
pub(crate) const WINDOW: usize = 16_384;

/// Indices of the documents of one sequence.
pub(crate) type Sequence = Vec<u32>;

/// How the documents of an epoch become sequences.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Order {
    /// Of all shuffling.
    pub seed: u64,
    /// Otherwise documents keep their order, and sequences that of their first document.
    pub shuffle: bool,
    /// Tokens of a packed sequence; `None` gives every document a sequence of its own.
    pub pack: Option<usize>,
}

/// Documents of one source: their range of indices, and how often each is seen in an epoch.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Share {
    pub documents: Range<u32>,
    pub weight: f64,
}

/// The sequences of an epoch. `lengths` are those of all documents.
pub(crate) fn sequences(lengths: &[u32], shares: &[Share], order: Order, epoch: u64) -> Vec<Sequence> {
    let mut documents: Vec<u32> = shares.iter().enumerate().flat_map(|(i, s)| chosen(s, order, i as u64, epoch)).collect();
    if order.shuffle {
        Rng::new(&[order.seed, 1, epoch]).shuffle(&mut documents);
    }
    let Some(capacity) = order.pack else { return documents.into_iter().map(|d| vec![d]).collect() };
    let mut sequences: Vec<Sequence> = documents.chunks(WINDOW).flat_map(|w| best_fit(w, lengths, capacity)).collect();
    if order.shuffle {
        Rng::new(&[order.seed, 2, epoch]).shuffle(&mut sequences);
    }
    sequences
}

/// The documents of a source that an epoch trains: all of them for every whole unit of weight, and for the rest the
/// next part of a fixed permutation, so that successive epochs rotate through the source.
fn chosen(share: &Share, order: Order, source: u64, epoch: u64) -> Vec<u32> {
    let all: Vec<u32> = share.documents.clone().collect();
    let whole = share.weight.max(0.0).floor();
    let fraction = share.weight.max(0.0) - whole;
    let mut out = Vec::with_capacity((all.len() as f64 * share.weight.max(0.0)) as usize + 1);
    for _ in 0..whole as usize {
        out.extend_from_slice(&all);
    }
    if fraction > 0.0 && !all.is_empty() {
        let mut ring = all;
        if order.shuffle {
            Rng::new(&[order.seed, 3, source]).shuffle(&mut ring);
        }
        // Positions on the endless repetition of the ring, rounded so that they join from epoch to epoch.
        let position = |epoch: u64| (epoch as f64 * fraction * ring.len() as f64 + 0.5).floor() as u64;
        let picked = (position(epoch)..position(epoch + 1)).map(|i| ring[(i % ring.len() as u64) as usize]);
        let mut picked: Vec<u32> = picked.collect();
        picked.sort_unstable();
        out.extend(picked);
    }
    out
}

/// Best fit decreasing: the longest document first, each into the fullest sequence that still takes it.
/// A document longer than `capacity` has a sequence of its own.
fn best_fit(documents: &[u32], lengths: &[u32], capacity: usize) -> Vec<Sequence> {
    let length = |position: usize| documents.get(position).and_then(|d| lengths.get(*d as usize)).map_or(0, |l| *l as usize);
    let mut by_length: Vec<usize> = (0..documents.len()).collect();
    by_length.sort_by_key(|p| (std::cmp::Reverse(length(*p)), *p));
    let mut bins: Vec<Vec<usize>> = Vec::new();
    let mut room: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for position in by_length {
        let need = length(position);
        let fit = room.range_mut(need..).next().and_then(|(left, bins)| Some((*left, bins.pop()?, bins.is_empty())));
        let (left, bin) = match fit {
            Some((left, bin, emptied)) => {
                if emptied {
                    room.remove(&left);
                }
                (left, bin)
            }
            None => {
                bins.push(Vec::new());
                (capacity.max(need), bins.len() - 1)
            }
        };
        bins[bin].push(position);
        if left > need {
            room.entry(left - need).or_default().push(bin);
        }
    }
    bins.iter_mut().for_each(|b| b.sort_unstable());
    bins.sort_unstable();
    bins.into_iter().map(|b| b.into_iter().map(|p| documents[p]).collect()).collect()
}

/// SplitMix64 (Steele, Lea, Flood 2014): small, seedable by several numbers, the same everywhere.
pub(crate) struct Rng(u64);

impl Rng {
    /// A stream for these numbers.
    pub fn new(seeds: &[u64]) -> Self {
        let mut rng = Self(0);
        for seed in seeds {
            rng.0 = rng.next() ^ seed;
        }
        rng
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Fisher and Yates.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            // The high half of a 128-bit product: uniform but for a bias of 2^-64.
            let j = (u128::from(self.next()) * (i as u128 + 1)) >> 64;
            items.swap(i, j as usize);
        }
    }
}

#[cfg(test)]
mod tests;
