//! Layouts: Megatron's rank order, constraints, and numbers that make no sense.

mod common;

use common::*;
use proptest::prelude::*;
use std::collections::BTreeSet;
use temper_planner::*;

fn layout(text: &str, gpus: usize, moe: bool) -> Layout {
    LayoutRequest::parse(text, "--layout").unwrap().complete(gpus, moe)
}

/// Members of every group of an axis, from the coordinates of all ranks.
fn groups(l: &Layout, axis: Axis) -> BTreeSet<Vec<usize>> {
    let key = |rank: usize| {
        let ((tp, cp, dp, pp), (etp, ep, edp, _)) = (l.coordinates(rank), l.expert_coordinates(rank));
        match axis {
            Axis::Tp => vec![cp, dp, pp],
            Axis::Cp => vec![tp, dp, pp],
            Axis::Dp => vec![tp, pp],
            Axis::Pp => vec![tp, cp, dp],
            Axis::Etp => vec![ep, edp, pp],
            Axis::Ep => vec![etp, edp, pp],
            Axis::ExpertDp => vec![etp, ep, pp],
        }
    };
    let ranks: Vec<usize> = (0..l.world()).collect();
    ranks.iter().map(|r| ranks.iter().copied().filter(|other| key(*other) == key(*r)).collect()).collect()
}

#[test]
fn ranks_are_in_megatrons_order() {
    // The example of Megatron's RankGenerator: 16 ranks, tp 2, pp 4, dp 2.
    let l = layout("tp=2,pp=4", 16, false);
    assert!(groups(&l, Axis::Tp).contains(&vec![0, 1]));
    assert!(groups(&l, Axis::Dp).contains(&vec![0, 2]) && groups(&l, Axis::Dp).contains(&vec![13, 15]));
    assert!(groups(&l, Axis::Pp).contains(&vec![0, 4, 8, 12]));
    // Experts fold: 64 ranks, tp 8, pp 2, ep 4 with etp 8 and with etp 1.
    let l = layout("tp=8,pp=2,ep=4", 64, true);
    assert_eq!((l.etp, l.expert_dp()), (8, 1));
    assert!(groups(&l, Axis::Ep).contains(&vec![0, 8, 16, 24]));
    let l = layout("tp=8,pp=2,ep=4,etp=1", 64, true);
    assert!(
        groups(&l, Axis::Ep).contains(&vec![0, 1, 2, 3]) && groups(&l, Axis::ExpertDp).contains(&(0..8).map(|i| i * 4).collect::<Vec<_>>())
    );
}

/// Where groups sit on nodes, against the ranks themselves.
#[test]
fn groups_know_the_nodes_that_they_cross() {
    for (text, gpus) in
        [("tp=8,pp=2,ep=4", 64), ("tp=2,cp=2,pp=2,ep=4,etp=1", 32), ("tp=16,pp=2", 64), ("tp=4,cp=4,ep=8,etp=2", 32), ("tp=1,ep=8", 40)]
    {
        let l = layout(text, gpus, true);
        for axis in [Axis::Tp, Axis::Cp, Axis::Dp, Axis::Pp, Axis::Etp, Axis::Ep, Axis::ExpertDp] {
            for per_node in [2, 4, 8] {
                let cluster = Cluster { per_node, ..cluster("h100", gpus) };
                let group = l.group(axis, &cluster);
                let mut fewest = usize::MAX;
                let mut most = 0;
                for members in groups(&l, axis) {
                    assert_eq!(members.len(), group.size, "{text} {axis:?}");
                    let nodes: Vec<usize> = members.iter().map(|r| r / per_node).collect();
                    let distinct: BTreeSet<usize> = nodes.iter().copied().collect();
                    most = most.max(distinct.len());
                    fewest = fewest.min(distinct.iter().map(|n| nodes.iter().filter(|m| *m == n).count()).min().unwrap());
                }
                assert_eq!((group.per_node, group.nodes), (fewest, most), "{text} {axis:?} nodes of {per_node}");
            }
        }
    }
}

#[test]
fn a_layout_reads_as_it_is_written() {
    for text in [
        "tp=8,pp=2,ep=4,etp=8,dp=4,mb=1",
        "tp=1,pp=8,dp=4,mb=2,recompute=full,offload=optimizer,split=5/5/5/5/4/4/4/4",
        "tp=2,pp=2,vpp=3,ep=2,etp=1,cp=2,dp=1,mb=4",
        "tp=2,pp=1,dp=32,sequence=false,mb=1,recompute=selective",
        "tp=1,pp=1,dp=64,mb=1,recompute=norm+moe",
    ] {
        let parsed = LayoutRequest::parse(text, "").unwrap().complete(64, true);
        let again = LayoutRequest::parse(&parsed.to_string(), "").unwrap().complete(64, true);
        assert_eq!(parsed, again, "{text} -> {parsed}");
    }
    for (text, said) in [
        ("tp", "no value"),
        ("tp=0", "at least 1"),
        ("tp=-1", "at least 1"),
        ("tp=2,tp=2", "twice"),
        ("xp=2", "Keys are"),
        ("tp=99999999999999999999999", "whole number"),
        ("recompute=some", "none, selective or full"),
        ("recompute=norm+some", "norm, act, moe, mlp, qkv"),
        ("sequence=1", "true or false"),
        ("offload=disk", "optimizer"),
        ("split=3//4", "whole number"),
        ("split=2+1", "split=2/1"),
        ("split=5-4-4", "split=5/4/4"),
        ("split=0/3", "at least 1"),
        ("split=36/0", "joined by /: split=2/1"),
        ("tp=2,,pp=2", "nothing between two commas"),
        (",tp=2", "nothing between two commas"),
        ("tp=2,", "nothing between two commas"),
        ("tp=é", "whole number"),
    ] {
        let error = LayoutRequest::parse(text, "--layout").unwrap_err().to_string();
        assert!(error.contains(said) && error.starts_with("--layout"), "{text}: {error}");
    }
}

/// etp is tp unless given, where there are experts, and the axes must make up the ranks.
#[test]
fn a_layout_is_laid_over_ranks() {
    let over = |text: &str, ranks| LayoutRequest::parse(text, "--layout").unwrap().over(ranks, true, "--layout");
    let l = over("tp=2, pp=2,ep=4", Some(16)).unwrap();
    assert_eq!((l.tp, l.cp, l.dp, l.pp, l.ep, l.etp), (2, 1, 4, 2, 4, 2));
    assert_eq!(over("tp=2,pp=2,ep=4,etp=1", Some(16)).unwrap().etp, 1);
    assert_eq!(LayoutRequest::parse("tp=2", "").unwrap().over(None, false, "").unwrap().etp, 1, "there is no expert to divide");
    assert_eq!(over("", Some(3)).unwrap().dp, 3);
    assert_eq!(over("tp=2,cp=3", None).unwrap().world(), 6);
    for (text, ranks, words) in [
        ("tp=3", Some(16), "does not make up 16"),
        ("tp=2,dp=4", Some(16), "does not make up 16"),
        ("ep=3", Some(16), "does not divide the 16"),
        ("tp=2,ep=4", None, "does not divide the 2"),
        ("tp=2,ep=2", Some(2), "or etp=1"),
        ("tp=2,ep=4,etp=1", None, "take a smaller ep."),
        ("tp=2,auto", Some(2), "nothing is searched here"),
        ("tp=4294967296,cp=4294967296", Some(16), "does not make up"),
        ("tp=4294967296,cp=4294967296", None, "more ranks than"),
    ] {
        let error = over(text, ranks).unwrap_err().to_string();
        assert!(error.contains(words) && error.starts_with("--layout"), "{text}: {error}");
    }
}

/// By itself a layout has the fewest replicas into which its experts fold.
#[test]
fn a_layout_by_itself_has_room_for_its_experts() {
    let alone = |text: &str| LayoutRequest::parse(text, "--layout").unwrap().alone(true, "--layout");
    for (text, dp) in [("ep=2", 2), ("tp=2,ep=2", 2), ("tp=2,ep=2,etp=1", 1), ("ep=8,cp=2", 4), ("ep=3", 3), ("ep=4,dp=2", 2), ("pp=3", 1)]
    {
        assert_eq!(alone(text).unwrap().dp, dp, "{text}");
    }
    for (text, said) in [("tp=2,auto", "nothing is searched here"), ("tp=4294967296,cp=4294967296", "more ranks than")] {
        let error = alone(text).unwrap_err().to_string();
        assert!(error.contains(said), "{text}: {error}");
    }
}

#[test]
fn every_rule_is_told_with_its_numbers() {
    let moe = "Qwen3-30B-A3B"; // 48 layers, 32 heads, 4 key/value heads, 128 experts of 768
    for (model, gpus, text, batch, rule, said) in [
        ("Qwen3-8B", 8, "tp=2,dp=2", 64, Rule::World, "Take dp=4"),
        ("Qwen3-8B", 12, "tp=3", 48, Rule::Heads, "1, 2, 4, 8, 16, 32"),
        ("Qwen3-14B", 20, "tp=20", 64, Rule::KvHeads, "multiples of 8"),
        ("Qwen3.5-35B-A3B", 32, "tp=32", 64, Rule::Heads, "16 attention heads"),
        ("Qwen3-8B", 8, "ep=2", 64, Rule::NoExperts, "dense"),
        (moe, 24, "ep=3", 96, Rule::Experts, "128 experts"),
        (moe, 8, "tp=1,ep=1,etp=5", 64, Rule::ExpertWidth, "etp=1"),
        (moe, 8, "tp=2,pp=2,ep=4", 64, Rule::ExpertGroup, "4 ranks of a stage"),
        (moe, 64, "pp=64", 64, Rule::Stages, "48 layers"),
        (moe, 32, "pp=32", 64, Rule::Split, "48 layers do not divide"),
        (moe, 8, "pp=2,split=40/9", 64, Rule::Split, "49 layers"),
        (moe, 8, "pp=2,split=48/0", 64, Rule::Zero, ""),
        (moe, 8, "vpp=2", 64, Rule::Interleaving, "without a pipeline"),
        (moe, 8, "mb=3", 64, Rule::Batch, "take 63 or 66"),
        (moe, 8, "pp=8", 4, Rule::MicroBatches, "global batch of at least 8"),
        (moe, 8, "pp=4,mb=2", 12, Rule::MicroBatches, "global batch of at least 14"),
        (moe, 8, "pp=4,vpp=2", 3, Rule::MicroBatches, "2 micro-batches for 4 stages"),
    ] {
        if rule == Rule::Zero {
            assert!(LayoutRequest::parse(text, "").is_err());
            continue;
        }
        let network = network(model);
        let problems = check(&network, &cluster("h100", gpus), &Job::new(4096, batch), &layout(text, gpus, network.arch.moe.is_some()));
        let found = problems.iter().find(|p| p.rule == rule).unwrap_or_else(|| panic!("{text}: {problems:?}"));
        assert!(found.to_string().contains(said), "{text}: {found}");
    }
}

/// Batches, groups of an interleaved schedule and sequences that do not divide are completed by fillers in a run, and so they are planned.
#[test]
fn what_fillers_complete_is_legal() {
    let network = network("Qwen3-30B-A3B");
    for (text, seq, batch) in [("tp=2", 4097, 64), ("cp=4,tp=2", 4099, 64), ("dp=8", 4096, 30), ("dp=8", 4096, 3), ("pp=4,vpp=2", 4096, 36)]
    {
        assert_eq!(check(&network, &cluster("h100", 8), &Job::new(seq, batch), &layout(text, 8, true)), [], "{text}");
    }
}

#[test]
fn the_nearest_layouts_are_legal_and_near() {
    let (network, cluster, job) = (network("Qwen3-30B-A3B"), cluster("h100", 64), Job::new(4096, 256));
    for text in ["tp=8,pp=5", "tp=64,pp=3,ep=9", "tp=3", "pp=7,ep=128,etp=2", "cp=64,tp=64"] {
        let near = nearest(&network, &cluster, &job, &layout(text, 64, true), 3);
        assert_eq!(near.len(), 3, "{text}");
        for l in near {
            assert_eq!(check(&network, &cluster, &job, &l), [], "{text} -> {l}");
        }
    }
    let near = nearest(&network, &cluster, &job, &layout("tp=8,pp=2,ep=4,etp=8,dp=8", 64, true), 1);
    assert_eq!((near[0].tp, near[0].pp, near[0].ep, near[0].dp), (8, 2, 4, 4));
}

fn axis() -> impl Strategy<Value = usize> {
    prop_oneof![4 => 1usize..10, 2 => prop_oneof![Just(16usize), Just(32), Just(64)], 1 => any::<usize>()]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the numbers: no panic, and what passes the check can be planned.
    #[test]
    fn any_numbers_are_answered(
        tp in axis(), cp in axis(), dp in axis(), pp in axis(), vpp in axis(), ep in axis(), etp in axis(), micro_batch in axis(),
        seq in axis(), batch in axis(), gpus in 1usize..65, split in proptest::collection::vec(any::<usize>(), 0..4), model in 0usize..BUILTIN.len(),
    ) {
        let network = network(BUILTIN[model]);
        let l = Layout { tp, cp, dp, pp, vpp, ep, etp, sequence: true, micro_batch, recompute: Recompute::None, offload: Offload::None, split };
        let (cluster, job) = (cluster("h100", gpus), Job::new(seq, batch));
        let problems = check(&network, &cluster, &job, &l);
        prop_assert!(problems.iter().all(|p| !p.found.is_empty() && !p.remedy.is_empty()));
        let _ = (l.world(), l.expert_dp(), l.micro_batches(batch), l.group(Axis::Dp, &cluster), l.to_string());
        if problems.is_empty() {
            let space = Space { network: &network, cluster: &cluster, job: &job, overheads: memory::Overheads::GPU };
            let candidate = space.candidate(&l, &stages(&network, &l).unwrap());
            prop_assert!(candidate.peak.is_finite() && candidate.time.total.is_finite() && candidate.time.total > 0.0);
            prop_assert!(candidate.time.mfu > 0.0 && candidate.time.mfu < 1.0, "{}", candidate.time.mfu);
        }
    }
}
