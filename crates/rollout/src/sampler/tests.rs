use super::*;
use proptest::prelude::*;

const LOGITS: [f64; 6] = [1.0, 3.0, 2.0, -1.0, 3.0, 0.5];

fn hot(temperature: f64) -> Sampling {
    Sampling { temperature, seed: 7, ..Sampling::default() }
}

fn softmax(x: &[f64]) -> Vec<f64> {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = x.iter().map(|v| (v - max).exp()).sum();
    x.iter().map(|v| (v - max).exp() / sum).collect()
}

/// The distribution after the filters, written as directly as possible: whole sorts, probabilities that sum to one.
fn brute_force(logits: &[f64], s: &Sampling) -> Vec<f64> {
    let mut p = softmax(&logits.iter().map(|l| l / s.temperature).collect::<Vec<_>>());
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|a, b| logits[*b].partial_cmp(&logits[*a]).unwrap().then(a.cmp(b)));
    let renormalise = |p: &mut Vec<f64>| {
        let sum: f64 = p.iter().sum();
        p.iter_mut().for_each(|x| *x /= sum);
    };
    if s.top_k > 0 {
        order.iter().skip(s.top_k).for_each(|id| p[*id] = 0.0);
        renormalise(&mut p);
    }
    let mut sum = 0.0;
    for id in &order {
        if sum >= s.top_p {
            p[*id] = 0.0;
        }
        sum += p[*id];
    }
    renormalise(&mut p);
    let max = p.iter().copied().fold(0.0, f64::max);
    p.iter_mut().filter(|x| **x < s.min_p * max).for_each(|x| *x = 0.0);
    renormalise(&mut p);
    p
}

fn frequencies(logits: &[f64], s: &Sampling, draws: usize) -> Vec<f64> {
    let mut n = vec![0.0; logits.len()];
    for i in 0..draws {
        n[sample(logits, s, &[], i).unwrap().token as usize] += 1.0 / draws as f64;
    }
    n
}

#[test]
fn frequencies_match_the_distribution() {
    let settings = [
        hot(1.0),
        hot(0.5),
        hot(2.0),
        Sampling { top_k: 3, ..hot(1.0) },
        Sampling { top_p: 0.6, ..hot(1.5) },
        Sampling { min_p: 0.3, ..hot(1.5) },
        Sampling { top_k: 4, top_p: 0.9, min_p: 0.2, ..hot(2.5) },
    ];
    const DRAWS: usize = 40_000;
    for s in settings {
        let expected = brute_force(&LOGITS, &s);
        for (id, (f, p)) in frequencies(&LOGITS, &s, DRAWS).iter().zip(&expected).enumerate() {
            // Five standard deviations of a binomial share.
            let bound = 5.0 * (p * (1.0 - p) / DRAWS as f64).sqrt() + 1e-12;
            assert!((f - p).abs() <= bound, "{s:?}: id {id} drawn {f}, probability {p}");
        }
    }
}

#[test]
fn greedy_takes_the_lowest_id_among_equals_and_reports_the_models_log_probability() {
    let choice = sample(&LOGITS, &Sampling::default(), &[], 0).unwrap();
    assert_eq!(choice.token, 1);
    assert!((choice.log_prob - softmax(&LOGITS)[1].ln()).abs() < 1e-14);
    let filtered = sample(&LOGITS, &Sampling { top_k: 1, ..hot(3.0) }, &[], 5).unwrap();
    assert_eq!(filtered, choice, "log-probabilities are the model's, whatever temperature and filters");
}

#[test]
fn edges_of_the_filters() {
    let only =
        |s: &Sampling| frequencies(&LOGITS, s, 300).iter().enumerate().filter(|(_, f)| **f > 0.0).map(|(id, _)| id).collect::<Vec<_>>();
    assert_eq!(only(&Sampling { top_k: 1, ..hot(1.0) }), [1], "the lower id of two equals");
    assert_eq!(only(&Sampling { top_k: 2, ..hot(1.0) }), [1, 4]);
    assert_eq!(only(&Sampling { top_k: 600, ..hot(30.0) }).len(), 6, "more than there are keeps all");
    assert_eq!(only(&Sampling { top_p: 1e-9, ..hot(1.0) }), [1], "never nothing");
    assert_eq!(only(&Sampling { min_p: 1.0, ..hot(1.0) }), [1, 4], "both of the largest");
    // Four equal ids: half of the mass is exactly two of them.
    let flat = Sampling { top_p: 0.5, ..hot(1.0) };
    let kept: Vec<f64> = frequencies(&[0.0; 4], &flat, 300);
    assert!(kept[0] > 0.0 && kept[1] > 0.0 && kept[2..] == [0.0, 0.0]);
}

#[test]
fn a_wide_nucleus_goes_beyond_the_first_guess() {
    let logits = vec![0.0; 10_000];
    let ids = filter(&logits, &Sampling { top_p: 0.75, ..hot(1.0) }, &|_| 1.0);
    assert_eq!(ids.len(), 7_500);
}

#[test]
fn banned_and_extreme_logits() {
    let inf = f64::NEG_INFINITY;
    assert!((0..50).all(|i| sample(&[inf, 0.0, inf], &hot(1.0), &[], i).is_ok_and(|c| c.token == 1)));
    assert!(sample(&[1e300, -1e300, 0.0], &hot(1e-3), &[], 0).is_ok_and(|c| c.token == 0 && c.log_prob == 0.0));
    assert_eq!(sample(&[0.0, f64::NAN], &Sampling::default(), &[], 0), Err(LogitFault::NaN(1)));
    assert_eq!(sample(&[0.0, f64::INFINITY], &hot(1.0), &[], 0), Err(LogitFault::Infinite(1)));
    assert_eq!(sample(&[inf, inf], &hot(1.0), &[], 0), Err(LogitFault::Nothing));
    assert_eq!(sample(&[], &hot(1.0), &[], 0), Err(LogitFault::Nothing));
}

#[test]
fn repetition_penalty_counts_each_token_once() {
    let s = Sampling { repetition_penalty: 2.0, ..Sampling::default() };
    assert_eq!(penalise(&[3.0, -3.0, 1.0], &[0, 1, 0, 0], 2.0), [1.5, -6.0, 1.0]);
    assert_eq!(sample(&[3.0, 2.0], &s, &[0, 0], 0).unwrap().token, 1);
    assert_eq!(sample(&[3.0, 2.0], &s, &[9_999], 0).unwrap().token, 0, "ids outside the logits are passed over");
}

#[test]
fn draws_depend_on_seed_stream_and_index_only() {
    let s = hot(1.0);
    let at = |s: &Sampling, i| sample(&LOGITS, s, &[], i).unwrap().token;
    let row = |s: &Sampling| (0..40).map(|i| at(s, i)).collect::<Vec<_>>();
    assert_eq!(row(&s), (0..40).rev().map(|i| at(&s, i)).rev().collect::<Vec<_>>());
    assert_ne!(row(&s), row(&Sampling { seed: 8, ..s }));
    assert_ne!(row(&s), row(&Sampling { stream: 1, ..s }));
}

#[test]
fn neighbouring_draws_are_independent() {
    let logits = [0.7, 0.0, -0.4];
    let p = softmax(&logits);
    const DRAWS: usize = 40_000;
    let drawn: Vec<usize> = (0..=DRAWS).map(|i| sample(&logits, &hot(1.0), &[], i).unwrap().token as usize).collect();
    for (a, b) in (0..9).map(|i| (i / 3, i % 3)) {
        let share = drawn.windows(2).filter(|w| w[0] == a && w[1] == b).count() as f64 / DRAWS as f64;
        let expected = p[a] * p[b];
        // Overlapping pairs are correlated, which at most doubles the variance of the share.
        let bound = 5.0 * (2.0 * expected * (1.0 - expected) / DRAWS as f64).sqrt();
        assert!((share - expected).abs() <= bound, "pair {a}, {b}: {share}, expected {expected}");
    }
}

#[test]
fn settings_outside_their_range_are_named() {
    let bad = [
        (Sampling { temperature: -0.1, ..hot(1.0) }, "temperature"),
        (Sampling { temperature: f64::NAN, ..hot(1.0) }, "temperature"),
        (Sampling { top_p: 0.0, ..hot(1.0) }, "top_p"),
        (Sampling { top_p: 1.1, ..hot(1.0) }, "top_p"),
        (Sampling { min_p: 2.0, ..hot(1.0) }, "min_p"),
        (Sampling { repetition_penalty: 0.0, ..hot(1.0) }, "repetition_penalty"),
    ];
    for (s, key) in bad {
        assert!(s.check().is_err_and(|e| e.to_string().contains(key)));
    }
    assert!(hot(0.8).check().is_ok());
}

proptest! {
    /// Only ids that the brute force keeps are ever drawn, for any logits and settings.
    #[test]
    fn never_draws_a_filtered_id(
        logits in prop::collection::vec(-20.0f64..20.0, 1..400),
        temperature in 0.05f64..5.0,
        top_k in 0usize..50,
        top_p in 0.01f64..1.0,
        min_p in 0.0f64..0.5,
        seed in any::<u64>(),
    ) {
        let s = Sampling { temperature, top_k, top_p, min_p, seed, ..Sampling::default() };
        let p = brute_force(&logits, &s);
        for i in 0..20 {
            let id = sample(&logits, &s, &[], i).unwrap().token as usize;
            // At a border the two sums may round differently; the neighbour drawn then has a probability within 1e-9 of it.
            let softened = brute_force(&logits, &Sampling { top_p: (top_p + 1e-9).min(1.0), min_p: min_p - 1e-9, ..s });
            prop_assert!(p[id] > 0.0 || softened[id] > 0.0, "id {} of {}", id, logits.len());
        }
    }
}
