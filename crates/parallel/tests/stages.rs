//! Layers over stages: every layer once, embedding and head once, and refusals with a remedy that works.

use proptest::prelude::*;
use temper_parallel::{PipelineRule, Stages, balanced_split};

#[test]
fn by_hand() {
    let stages = Stages::new(8, 2, 2, &[]).unwrap();
    let of = |stage, chunk| stages.layers_of(stage, chunk);
    assert_eq!([of(0, 0), of(1, 0), of(0, 1), of(1, 1)], [0..2, 2..4, 4..6, 6..8]);
    assert_eq!((of(2, 0), of(0, 2)), (0..0, 0..0));
    let stages = Stages::new(40, 2, 2, &[22, 18]).unwrap();
    let of = |stage, chunk| stages.layers_of(stage, chunk);
    assert_eq!([of(0, 0), of(1, 0), of(0, 1), of(1, 1)], [0..11, 11..20, 20..31, 31..40]);
    assert_eq!((stages.stages(), stages.chunks()), (2, 2));
    assert_eq!(balanced_split(36, 8), [4, 4, 4, 5, 5, 5, 5, 4]);
    assert_eq!(balanced_split(7, 1), [7]);
}

#[test]
fn refusals_name_the_numbers_and_the_nearest() {
    for (layers, pp, vpp, split, rule, said) in [
        (
            36,
            8,
            1,
            vec![],
            PipelineRule::Split,
            "36 layers do not divide over pp 8 x vpp 1. Ask for an uneven split, e.g. split=4/4/4/5/5/5/5/4, or take pp=6 or 9.",
        ),
        (94, 2, 2, vec![], PipelineRule::Split, "Ask for an uneven split, e.g. split=48/46, or take vpp=1."),
        (48, 4, 5, vec![], PipelineRule::Split, "48 layers do not divide over pp 4 x vpp 5. Take vpp=4."),
        (50, 4, 3, vec![], PipelineRule::Split, "Take vpp=1 with an uneven split."),
        (24, 64, 1, vec![], PipelineRule::Stages, "pp 64 x vpp 1 stages for 24 layers"),
        (24, 0, 1, vec![], PipelineRule::Stages, "at least 1 of each"),
        (24, usize::MAX, usize::MAX, vec![], PipelineRule::Stages, "Take fewer"),
        (
            24,
            2,
            1,
            vec![12, 13],
            PipelineRule::Split,
            "25 layers; pp is 2 and the model has 24. Give one count of at least 1 a stage, together all layers, e.g. split=12/12.",
        ),
        (24, 2, 1, vec![24, 0], PipelineRule::Split, "at least 1"),
        (24, 2, 1, vec![24], PipelineRule::Split, "1 stages"),
        (24, 2, 1, vec![usize::MAX, 25], PipelineRule::Split, "the model has 24"),
        (
            94,
            2,
            2,
            vec![47, 47],
            PipelineRule::Interleaving,
            "the 47 layers of stage 0 do not divide over vpp 2. Take vpp=1, or split=48/46.",
        ),
    ] {
        let refusal = Stages::new(layers, pp, vpp, &split).unwrap_err();
        assert_eq!(refusal.rule, rule, "{refusal}");
        assert!(refusal.to_string().contains(said), "{refusal}");
    }
}

/// The split that a refusal shows, as numbers.
fn shown(refusal: &str) -> Option<Vec<usize>> {
    let text = refusal.split("split=").nth(1)?;
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '/').unwrap_or(text.len());
    Some(text[..end].split('/').map(|n| n.parse().unwrap()).collect())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_layer_lies_once_and_in_order(units in proptest::collection::vec(1usize..7, 1..12), vpp in 1usize..5, even in any::<bool>()) {
        let counts: Vec<usize> = units.iter().map(|n| vpp * if even { units[0] } else { *n }).collect();
        let (layers, pp) = (counts.iter().sum::<usize>(), counts.len());
        let stages = Stages::new(layers, pp, vpp, if even { &[] } else { &counts }).unwrap();
        let chunks = (0..vpp).flat_map(|chunk| (0..pp).map(move |stage| (stage, chunk)));
        let all: Vec<usize> = chunks.clone().flat_map(|(s, c)| stages.layers_of(s, c)).collect();
        prop_assert_eq!(all, (0..layers).collect::<Vec<_>>());
        for (s, c) in chunks {
            prop_assert_eq!(stages.layers_of(s, c).len(), counts[s] / vpp);
            prop_assert_eq!(stages.has_embedding(s, c), (s, c) == (0, 0));
            prop_assert_eq!(stages.has_head(s, c), (s, c) == (pp - 1, vpp - 1));
        }
    }

    /// A split that a refusal shows is one that works.
    #[test]
    fn what_is_shown_works(layers in 1usize..100, pp in 1usize..12, vpp in 1usize..5, balanced in any::<bool>()) {
        let split = if balanced { balanced_split(layers, pp) } else { Vec::new() };
        if let Err(refusal) = Stages::new(layers, pp, vpp, &split)
            && let Some(split) = shown(&refusal.to_string())
        {
            prop_assert!(Stages::new(layers, pp, vpp, &split).is_ok(), "{}", refusal);
        }
    }
}
