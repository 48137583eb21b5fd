//! What does not divide: planned as it is run, with its waste in the time and in words.

mod common;

use common::*;
use temper_planner::*;

/// The plan of a layout on 8 H100, its step and what it says of waste.
fn plan_of(layout: &str, seq: usize, batch: usize) -> (Plan, String) {
    let plan = planned(run("Qwen3-8B", cluster("h100", 8), Job::new(seq, batch), layout));
    let said = plan.advice.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    (plan, said)
}

const SETTING: &str = ",recompute=full,offload=optimizer";

/// The most micro-batches of a replica, by dealing them out one by one as a run does.
fn dealt(micro_batches: usize, dp: usize) -> usize {
    let mut replicas = vec![0; dp];
    (0..micro_batches).for_each(|i| replicas[i % dp] += 1);
    *replicas.iter().max().unwrap()
}

#[test]
fn every_replica_takes_as_long_as_the_one_with_the_most() {
    for (batch, even) in [(30, 32), (25, 32), (3, 8), (9, 16)] {
        let layout = format!("dp=8{SETTING}");
        let ((odd, said), (whole, nothing)) = (plan_of(&layout, 2048, batch), plan_of(&layout, 2048, even));
        assert_eq!(odd.layout.turns(batch).real, dealt(batch, 8));
        assert_eq!(odd.time.total, whole.time.total, "{batch}: as long as {even} sequences");
        assert_eq!(odd.heaviest.by_purpose, whole.heaviest.by_purpose, "and as much memory");
        near(odd.time.tokens_per_s_per_gpu, whole.time.tokens_per_s_per_gpu * batch as f64 / even as f64, 1e-12);
        assert!(!nothing.contains("fillers") && !nothing.contains("nothing to train"), "{nothing}");
        if batch < 8 {
            assert!(said.contains("5 of 8 replicas have nothing to train: a step has 3 micro-batches"), "{said}");
        } else {
            let fillers = even - batch;
            let words = format!("{fillers} of {even} are fillers of one token, which waste {:.1} %", 100.0 * fillers as f64 / even as f64);
            assert!(said.contains(&words), "{words}: {said}");
        }
    }
    let (_, said) = plan_of(&format!("dp=8{SETTING}"), 2048, 25);
    assert!(said.contains("A global batch of 24 or 32 wastes nothing"), "{said}");
}

/// What is advised is legal: fewer micro-batches than stages are not.
#[test]
fn no_batch_is_advised_that_is_refused() {
    let network = network("Qwen3-8B");
    for (layout, gpus, batch, only) in
        [("pp=2,dp=2", 4, 3, Some("A global batch of 4 wastes")), ("pp=2,dp=4", 8, 9, None), ("pp=4,dp=2", 8, 7, None)]
    {
        let plan = planned(run("Qwen3-8B", cluster("h200", gpus), Job::new(512, batch), layout));
        let said: String = plan.advice.iter().map(|a| format!("{a}\n")).filter(|a| a.contains("wastes nothing")).collect();
        assert!(only.is_none_or(|only| said.contains(only)), "{said}");
        let (_, remedy) = said.split_once("A global batch of ").unwrap_or_else(|| panic!("{layout}"));
        for batch in remedy.split(' ').filter_map(|word| word.parse().ok()) {
            assert_eq!(check(&network, &plan.run.cluster, &Job::new(512, batch), &plan.layout), [], "{layout}: {batch}");
        }
    }
    let wrong = LayoutRequest::parse("pp=2,dp=2,mb=2", "").unwrap().complete(4, false);
    let problems = check(&network, &cluster("h200", 4), &Job::new(512, 3), &wrong);
    assert!(problems.iter().all(|p| !p.remedy.contains("take 2")), "{problems:?}");
}

#[test]
fn interleaved_groups_are_completed() {
    let layout = format!("pp=4,vpp=3,dp=2{SETTING}");
    let ((odd, said), (whole, _)) = (plan_of(&layout, 2048, 10), plan_of(&layout, 2048, 16));
    assert_eq!((odd.layout.turns(10).real, odd.layout.turns(10).all), (5, 8));
    assert!(said.contains("5 micro-batches are not a multiple of pp 4") && said.contains("3 fillers"), "{said}");
    assert!(odd.time.fillers > 0.0 && whole.time.fillers == 0.0);
    assert!(odd.time.total < whole.time.total, "a filler costs less than a micro-batch");
    let even = planned(run("Qwen3-8B", cluster("h100", 8), Job::new(2048, 10), &format!("pp=4,dp=2{SETTING}")));
    assert_eq!(even.time.fillers, 0.0, "1F1B needs none");
    // Fewer are in flight than the schedule would run ahead.
    assert!(odd.stages.iter().all(|s| s.peak.flights <= 5.0));
}

/// 4,097 tokens over cp 2 and tp 2 are 8 x 513.
#[test]
fn sequences_are_filled_up() {
    let layout = format!("tp=2,cp=2,dp=2{SETTING}");
    let ((odd, said), (whole, nothing)) = (plan_of(&layout, 4097, 8), plan_of(&layout, 4104, 8));
    assert_eq!(odd.heaviest.by_purpose.of(memory::Purpose::Moe), whole.heaviest.by_purpose.of(memory::Purpose::Moe));
    near(odd.heaviest.peak_bytes as f64, whole.heaviest.peak_bytes as f64, 1e-6);
    assert!(said.contains("4,097 tokens of a micro-batch are filled up with 7") && said.contains("4104"), "{said}");
    assert!(!nothing.contains("filled up"), "{nothing}");
    assert_eq!(odd.layout.filled(4096.0), 4096.0);
}

/// With some axes given and the rest left open, the search holds what is given, and finds what brute force finds among those layouts.
#[test]
fn given_axes_are_held_in_a_search() {
    let job = Job::new(4096, 30);
    let ask = |layout: &str| planned(run("Qwen3-30B-A3B", cluster("h200", 8), job.clone(), layout));
    let free = ask("");
    for held in ["tp=4,auto", "pp=2,auto", "ep=8,etp=1,auto", "etp=2,tp=2,auto", "mb=3"] {
        let plan = ask(held);
        assert!(plan.searched, "{held}");
        let wish = LayoutRequest::parse(held, "").unwrap();
        let l = &plan.layout;
        for (want, got) in [(wish.tp, l.tp), (wish.pp, l.pp), (wish.ep, l.ep), (wish.etp, l.etp), (wish.micro_batch, l.micro_batch)] {
            assert!(want.is_none_or(|want| want == got), "{held}: {l}");
        }
        let space = plan.run.space();
        let best = search(&space, &LayoutRequest::default()).fitting.into_iter().filter(|c| {
            [(wish.tp, c.layout.tp), (wish.pp, c.layout.pp), (wish.ep, c.layout.ep), (wish.etp, c.layout.etp)]
                .iter()
                .all(|(w, n)| w.is_none_or(|w| w == *n))
        });
        if wish.micro_batch.is_none() {
            assert_eq!(plan.time.tokens_per_s_per_gpu, best.map(|c| c.time.tokens_per_s_per_gpu).fold(0.0, f64::max), "{held}");
        }
        assert!(plan.time.tokens_per_s_per_gpu <= free.time.tokens_per_s_per_gpu, "{held}");
    }
    // What is given goes beyond what the search would try by itself.
    let plan = planned(run("Qwen3-0.6B", cluster("h200", 1), Job::new(128, 64), "mb=32"));
    assert_eq!(plan.layout.micro_batch, 32);
    assert_eq!(ask("tp=1,ep=1,etp=2,auto").layout.etp, 2);
}

/// A chosen layout leaves the reserve free; one that is given may take it, and is told so.
#[test]
fn the_reserve_is_kept_by_whoever_chooses() {
    let free = planned(run("Qwen3-30B-A3B", cluster("h100", 8), Job::new(4096, 32), ""));
    let memory = device("h100").memory_bytes();
    assert!(free.worst() <= 0.95 * memory && free.keeps_reserve(), "{}", free.worst() / memory);
    near(free.reserve(), 0.05 * memory, 1e-12);
    // As much reserve as leaves too little for this layout, given by hand.
    let mut tight = run("Qwen3-30B-A3B", cluster("h100", 8), Job::new(4096, 32), "");
    let (recompute, offload) = (Some(free.layout.recompute), Some(free.layout.offload));
    let axes = LayoutRequest::parse(&free.layout.to_string(), "").unwrap();
    tight.wish = LayoutRequest { recompute, offload, ..axes };
    tight.overheads.reserve = 1.0 - 0.999 * free.worst() / memory;
    let given = planned(tight.clone());
    assert!(given.fits() && given.fits_skewed() && !given.keeps_reserve());
    let warning = given.advice.iter().find(|a| a.found.contains("less than the reserve")).expect("a warning");
    assert!(!warning.fatal, "{warning}");
    tight.wish = LayoutRequest::default();
    let other = planned(tight);
    assert!(other.layout != free.layout && (other.keeps_reserve() || other.runners_up.is_empty()), "{}", other.layout);
}
