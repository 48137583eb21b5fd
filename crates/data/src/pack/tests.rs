use super::*;
use proptest::prelude::*;

fn shares(weights: &[(u32, f64)]) -> Vec<Share> {
    let mut from = 0;
    weights
        .iter()
        .map(|(n, weight)| {
            from += n;
            Share { documents: from - n..from, weight: *weight }
        })
        .collect()
}

proptest! {
    /// Every document is trained exactly once an epoch, none overflows, and the same numbers give the same order.
    #[test]
    fn packing_keeps_every_document(lengths in prop::collection::vec(1_u32..60, 0..200), seed: u64, epoch in 0_u64..5, shuffle: bool) {
        let order = Order { seed, shuffle, pack: Some(64) };
        let shares = shares(&[(lengths.len() as u32, 1.0)]);
        let packed = sequences(&lengths, &shares, order, epoch);
        for sequence in &packed {
            prop_assert!(!sequence.is_empty());
            prop_assert!(sequence.iter().map(|d| lengths[*d as usize]).sum::<u32>() <= 64);
        }
        let mut all: Vec<u32> = packed.iter().flatten().copied().collect();
        all.sort_unstable();
        prop_assert_eq!(all, (0..lengths.len() as u32).collect::<Vec<_>>());
        prop_assert_eq!(&packed, &sequences(&lengths, &shares, order, epoch));
    }

    /// Over many epochs every document of a source is seen as often as its weight says, give or take one.
    #[test]
    fn weights_are_kept_over_epochs(n in 1_u32..20, weight in 0.1_f64..3.0, epochs in 1_u64..12, seed: u64) {
        let order = Order { seed, shuffle: true, pack: None };
        let mut seen = vec![0_u64; n as usize];
        for epoch in 0..epochs {
            for s in sequences(&vec![1; n as usize], &shares(&[(n, weight)]), order, epoch) {
                seen[s[0] as usize] += 1;
            }
        }
        let want = weight * epochs as f64;
        for count in seen {
            prop_assert!((count as f64 - want).abs() <= 1.0 + 1e-9, "{} {}", count, want);
        }
    }
}

#[test]
fn best_fit_fills_the_gaps() {
    let lengths = [6, 5, 4, 3, 2, 4];
    let packed = sequences(&lengths, &shares(&[(6, 1.0)]), Order { seed: 0, shuffle: false, pack: Some(8) }, 0);
    // 6+2, 5+3, 4+4, each in file order.
    assert_eq!(packed, [vec![0, 4], vec![1, 3], vec![2, 5]]);
}

#[test]
fn epochs_differ_and_seeds_differ() {
    let lengths = vec![1; 100];
    let run = |seed, epoch| sequences(&lengths, &shares(&[(100, 1.0)]), Order { seed, shuffle: true, pack: None }, epoch);
    assert_ne!(run(1, 0), run(1, 1));
    assert_ne!(run(1, 0), run(2, 0));
    assert_eq!(run(1, 1), run(1, 1));
    let kept = sequences(&lengths, &shares(&[(100, 1.0)]), Order { seed: 1, shuffle: false, pack: None }, 3);
    assert!(kept.iter().enumerate().all(|(i, s)| *s == [i as u32]));
}

#[test]
fn long_documents_are_packed_close() {
    // Lengths as of a chat set: most short, some long.
    let lengths: Vec<u32> = (0..20_000_u32).map(|i| 20 + (i.wrapping_mul(2_654_435_761) >> 22)).collect();
    let packed = sequences(&lengths, &shares(&[(20_000, 1.0)]), Order { seed: 3, shuffle: true, pack: Some(2048) }, 0);
    let filled = lengths.iter().map(|l| f64::from(*l)).sum::<f64>() / (packed.len() as f64 * 2048.0);
    assert!(filled > 0.995, "{filled}");
}
