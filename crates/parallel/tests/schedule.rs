//! Schedules run against each other: every pass once, no deadlock, messages in order, activations and idle time as published.

mod common;

use common::{Pipeline, Sends};
use proptest::prelude::*;
use std::collections::BTreeSet;
use temper_parallel::schedule::{Step, Turns, check_interleaving, in_flight, interleaved, one_f_one_b, schedule};
use temper_parallel::{PipelineRule, Stages};

/// All that is promised of one pipeline.
fn holds(p: Pipeline) -> Result<(), String> {
    for (stage, steps) in p.schedules().iter().enumerate() {
        let distinct: BTreeSet<String> = steps.iter().map(|step| format!("{step:?}")).collect();
        let within = |step: &Step| match *step {
            Step::Forward { micro, chunk } | Step::Backward { micro, chunk } => micro < p.micro_batches && chunk < p.chunks,
        };
        if distinct.len() != steps.len() || steps.len() != 2 * p.chunks * p.micro_batches || !steps.iter().all(within) {
            return Err(format!("{p:?}, stage {stage}: not every pass once"));
        }
    }
    let enough = [Sends::Buffered, Sends::AtMost(1), Sends::Exchange];
    for sends in enough.into_iter().filter(|s| p.chunks == 1 || *s != Sends::Exchange) {
        for cost in [(1, 1), (1, 2)] {
            let outcome = p.simulate(p.schedules(), sends, cost).map_err(|e| format!("{p:?}, {sends:?}: {e}"))?;
            let counted: Vec<usize> = (0..p.stages).map(|s| in_flight(s, p.stages, p.chunks, p.micro_batches)).collect();
            if outcome.most_alive != counted {
                return Err(format!("{p:?}: {:?} alive, in_flight says {counted:?}", outcome.most_alive));
            }
            let bound = |s: usize| match p.chunks {
                1 => p.stages - s,
                v => 2 * (p.stages - 1 - s) + (v - 1) * p.stages + 1,
            };
            if (0..p.stages).any(|s| counted[s] > bound(s)) {
                return Err(format!("{p:?}: {counted:?} alive"));
            }
            // In passes of a chunk, so that 1/chunks of a micro-batch is the unit: work, and pp - 1 of each kind of idling.
            let expected = (p.chunks * p.micro_batches + p.stages - 1) * (cost.0 + cost.1);
            if sends == Sends::Buffered && p.micro_batches > 0 && outcome.end != expected {
                return Err(format!("{p:?}, cost {cost:?}: ends at {}, not at {expected}", outcome.end));
            }
        }
    }
    Ok(())
}

#[test]
fn every_small_pipeline_holds() {
    for stages in 1..=7 {
        for micro_batches in 0..=2 * stages + 3 {
            holds(Pipeline::new(stages, 1, micro_batches)).unwrap();
        }
        for (chunks, groups) in (2..=5).flat_map(|c| (0..=4).map(move |g| (c, g))).filter(|_| stages > 1) {
            holds(Pipeline::new(stages, chunks, groups * stages)).unwrap();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn large_pipelines_hold(stages in 2usize..33, chunks in 1usize..9, groups in 1usize..4, more in 0usize..32) {
        let micro_batches = groups * stages + if chunks == 1 { more } else { 0 };
        prop_assert_eq!(holds(Pipeline::new(stages, chunks, micro_batches)), Ok(()));
    }

    /// Whatever the numbers: no panic where no steps are made.
    #[test]
    fn any_numbers_are_answered(stage in any::<usize>(), stages in any::<usize>(), chunks in any::<usize>(), micro_batches in any::<usize>()) {
        prop_assert!(in_flight(stage, stages, chunks, micro_batches) <= chunks.saturating_mul(micro_batches));
        if let Err(refusal) = check_interleaving(stages, chunks, micro_batches) {
            prop_assert_eq!(refusal.rule, PipelineRule::Interleaving);
        }
    }
}

fn text(steps: &[Step]) -> String {
    let one = |step: &Step| match step {
        Step::Forward { micro, chunk } => format!("F{micro}{}", ["", "'"][*chunk]),
        Step::Backward { micro, chunk } => format!("B{micro}{}", ["", "'"][*chunk]),
    };
    steps.iter().map(one).collect::<Vec<_>>().join(" ")
}

/// Figure 4 of Narayanan et al. 2021, both halves: four stages, eight micro-batches, one chunk and two (the second with a
/// prime), first and last device.
#[test]
fn the_published_figures() {
    let of = |stage, chunks| text(&schedule(stage, 4, chunks, 8).unwrap());
    assert_eq!(of(0, 1), "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7");
    assert_eq!(of(3, 1), "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7");
    assert_eq!(of(0, 2), "F0 F1 F2 F3 F0' F1' F2' F3' F4 F5 F6 B0' F7 B1' F4' B2' F5' B3' F6' B0 F7' B1 B2 B3 B4' B5' B6' B7' B4 B5 B6 B7");
    assert_eq!(of(3, 2), "F0 F1 F2 F3 F0' B0' F1' B1' F2' B2' F3' B3' F4 B0 F5 B1 F6 B2 F7 B3 F4' B4' F5' B5' F6' B6' F7' B7' B4 B5 B6 B7");
}

/// Partners: round from the last stage to the first, one chunk later.
#[test]
fn chunks_go_round() {
    let (f, b) = (|chunk| Step::Forward { micro: 0, chunk }, |chunk| Step::Backward { micro: 0, chunk });
    let ends = |step: Step, stage| (step.source(stage, 4, 2), step.target(stage, 4, 2));
    assert_eq!(ends(f(0), 0), (None, Some(1)));
    assert_eq!(ends(f(0), 3), (Some(2), Some(0)));
    assert_eq!(ends(f(1), 0), (Some(3), Some(1)));
    assert_eq!(ends(f(1), 3), (Some(2), None));
    assert_eq!(ends(b(1), 3), (None, Some(2)));
    assert_eq!(ends(b(1), 0), (Some(1), Some(3)));
    assert_eq!(ends(b(0), 3), (Some(0), Some(2)));
    assert_eq!(ends(b(0), 0), (Some(1), None));
    assert_eq!((f(0).source(0, 1, 1), f(0).target(0, 1, 1), b(0).source(0, 1, 1), b(0).target(0, 1, 1)), (None, None, None, None));
}

/// A clockwork without a schedule: every stage acts as soon as its neighbours allow, backward first, and runs ahead by at most
/// the stages that are left.
#[test]
fn one_f_one_b_is_what_a_clockwork_does() {
    for (pp, micro_batches) in (1..9).flat_map(|pp| (1..20).map(move |m| (pp, m))) {
        let (mut forward, mut backward, mut order) = (vec![0; pp], vec![0; pp], vec![Vec::new(); pp]);
        while backward[0] < micro_batches {
            let (f, b) = (forward.clone(), backward.clone());
            for s in 0..pp {
                let may_backward = b[s] < f[s] && (s + 1 == pp || b[s + 1] > b[s]);
                let may_forward = f[s] < micro_batches && (s == 0 || f[s - 1] > f[s]) && f[s] - b[s] < pp - s;
                if may_backward {
                    order[s].push(Step::Backward { micro: b[s], chunk: 0 });
                    backward[s] += 1;
                } else if may_forward {
                    order[s].push(Step::Forward { micro: f[s], chunk: 0 });
                    forward[s] += 1;
                }
            }
        }
        for (s, order) in order.into_iter().enumerate() {
            assert_eq!(order, one_f_one_b(s, pp, micro_batches), "stage {s} of {pp}, {micro_batches} micro-batches");
        }
    }
}

/// What the module says a transport must not do, so that nobody has to find out.
#[test]
fn sends_that_wait_for_their_receive_deadlock() {
    let (plain, interleaved) = (Pipeline::new(2, 1, 2), Pipeline::new(2, 2, 4));
    for (p, sends) in [(plain, Sends::AtMost(0)), (interleaved, Sends::AtMost(0)), (interleaved, Sends::Exchange)] {
        let error = p.simulate(p.schedules(), sends, (1, 1)).unwrap_err();
        assert!(error.starts_with("deadlock"), "{p:?}, {sends:?}: {error}");
    }
}

/// Two stages of several chunks are the one case in which activations and gradients go the same way between the same ranks.
#[test]
fn a_queue_for_both_directions_keeps_the_order_but_needs_room_for_two() {
    for (chunks, groups) in (1..8).flat_map(|c| (1..8).map(move |g| (c, g))) {
        let p = Pipeline { shared_queues: true, ..Pipeline::new(2, chunks, 2 * groups) };
        for sends in [Sends::Buffered, Sends::AtMost(2)] {
            p.simulate(p.schedules(), sends, (1, 2)).unwrap_or_else(|e| panic!("{p:?}, {sends:?}: {e}"));
        }
        let one = p.simulate(p.schedules(), Sends::AtMost(1), (1, 2));
        assert_eq!(one.is_ok(), chunks == 1 || groups == 1, "{p:?}: {one:?}");
    }
}

#[test]
fn refusals_name_the_numbers_and_the_nearest() {
    let said = |stage, stages, chunks, micro_batches| schedule(stage, stages, chunks, micro_batches).unwrap_err().to_string();
    assert!(
        said(0, 4, 2, 18).contains("18 micro-batches are not a multiple of pp 4. Interleaving runs them in groups of pp: take 16 or 20")
    );
    assert!(said(0, 4, 2, 3).contains("take 4 (the"));
    assert!(said(0, 1, 2, 4).contains("vpp 2 without a pipeline"));
    assert!(said(4, 4, 1, 4).contains("stage 4 of 4"));
    assert!(said(0, 4, 0, 4).contains("0 chunks"));
    assert!(interleaved(4, 4, 2, 4).is_err());
    // Fewer micro-batches than stages: slower, not wrong.
    assert_eq!(text(&schedule(0, 4, 1, 2).unwrap()), "F0 F1 B0 B1");
}

/// Layers in the order in which a micro-batch passes them, by the partners of its steps alone.
#[test]
fn a_micro_batch_passes_every_layer_in_order() {
    for (layers, pp, vpp, split) in
        [(24, 4, 3, vec![]), (94, 2, 1, vec![47, 47]), (36, 8, 1, vec![5, 5, 5, 5, 4, 4, 4, 4]), (10, 2, 2, vec![6, 4])]
    {
        let stages = Stages::new(layers, pp, vpp, &split).unwrap();
        let (mut stage, mut chunk, mut passed) = (0, 0, Vec::new());
        loop {
            passed.extend(stages.layers_of(stage, chunk));
            let Some(next) = (Step::Forward { micro: 0, chunk }).target(stage, pp, vpp) else { break };
            chunk += usize::from(next == 0);
            stage = next;
        }
        assert_eq!(passed, (0..layers).collect::<Vec<_>>());
        assert!(stages.has_head(stage, chunk) && stages.has_embedding(0, 0));
    }
}

/// Micro-batches dealt out to replicas one by one, and passes counted as they begin and end.
#[test]
fn turns_are_those_of_the_fullest_replica() {
    for (micro_batches, replicas, stages, chunks) in
        [(30, 8, 1, 1), (3, 8, 1, 1), (5, 1, 4, 3), (20, 4, 4, 3), (18, 2, 4, 2), (9, 2, 2, 1), (7, 3, 2, 2)]
    {
        let turns = Turns::new(micro_batches, replicas, stages, chunks);
        let mut dealt = vec![0; replicas];
        (0..micro_batches).for_each(|i| dealt[i % replicas] += 1);
        assert_eq!(turns.real, *dealt.iter().max().unwrap());
        let group = if chunks > 1 { stages } else { 1 };
        assert!(turns.all.is_multiple_of(group) && turns.all >= turns.real && turns.all < turns.real + group, "{turns:?}");
        for stage in 0..stages {
            let (mut held, mut most) = (BTreeSet::new(), 0);
            for step in schedule(stage, stages, chunks, turns.all).unwrap() {
                match step {
                    Step::Forward { micro, chunk } => drop(held.insert((micro, chunk))),
                    Step::Backward { micro, chunk } => assert!(held.remove(&(micro, chunk))),
                }
                most = most.max(held.iter().filter(|(micro, _)| *micro < turns.real).count());
            }
            assert_eq!(turns.in_flight(stage, stages, chunks), most, "stage {stage} of {stages}, {chunks} chunks, {turns:?}");
        }
    }
}
