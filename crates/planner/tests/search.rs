//! The search against brute force: every layout of small clusters, tried one by one without a thought.

mod common;

use common::*;
use temper_model::Parts;
use temper_planner::memory::Overheads;
use temper_planner::*;

/// The highest throughput of all layouts that fit, and how many fit.
fn brute_force(space: &Space) -> (f64, usize) {
    let (gpus, layers) = (space.cluster.gpus, space.network.arch.layers);
    let (mut best, mut fitting) = (0.0f64, 0);
    let upto = 1..=gpus;
    for tp in upto.clone() {
        for cp in upto.clone() {
            for pp in upto.clone() {
                for dp in upto.clone().filter(|dp| tp * cp * pp * dp == gpus) {
                    for ep in upto.clone() {
                        for etp in upto.clone().filter(|etp| tp % etp == 0) {
                            for vpp in 1..=8usize {
                                for micro_batch in 1..=16usize {
                                    for recompute in [Recompute::Full, Recompute::None, Recompute::Selective(Parts::usual())] {
                                        for offload in [Offload::Optimizer, Offload::None] {
                                            let uneven = layers % pp != 0;
                                            if uneven && vpp > 1 {
                                                continue; // not searched: virtual stages of unequal size
                                            }
                                            let split = if uneven { as_even_as_possible(layers, pp) } else { vec![] };
                                            let sequence = true;
                                            let l =
                                                Layout { tp, cp, dp, pp, vpp, ep, etp, sequence, micro_batch, recompute, offload, split };
                                            if !check(space.network, space.cluster, space.job, &l).is_empty() {
                                                continue;
                                            }
                                            let candidate = space.candidate(&l, &stages(space.network, &l).unwrap());
                                            if candidate.skewed <= 0.95 * space.cluster.device.memory_bytes() {
                                                fitting += 1;
                                                best = best.max(candidate.time.tokens_per_s_per_gpu);
                                            }
                                        }
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    (best, fitting)
}

/// What is left over goes to the stages before the last, from the back.
fn as_even_as_possible(layers: usize, pp: usize) -> Vec<usize> {
    let mut split = vec![layers / pp; pp];
    for i in 0..layers % pp {
        split[(2 * pp - 2 - i) % pp] += 1;
    }
    split
}

#[test]
fn the_search_finds_what_brute_force_finds() {
    for (model, gpu, gpus, seq, batch) in [
        ("Qwen3-8B", "h100", 4, 4096, 16),
        ("Qwen3-8B", "a100", 8, 32_768, 8),
        ("Qwen3-30B-A3B", "h100", 8, 4096, 24),
        ("Qwen3-30B-A3B", "l40s", 16, 2048, 32),
        ("Qwen3.6-35B-A3B", "h20", 8, 16_384, 16),
        ("Qwen3-0.6B", "l40s", 6, 2048, 12),
    ] {
        let (network, cluster, job) =
            (network(model), Cluster { per_node: if gpus > 8 { 8 } else { gpus }, ..cluster(gpu, gpus) }, Job::new(seq, batch));
        let space = Space { network: &network, cluster: &cluster, job: &job, overheads: Overheads::GPU };
        let found = search(&space, &LayoutRequest::default());
        let (best, fitting) = brute_force(&space);
        let ours = found.fitting.first().map_or(0.0, |c| c.time.tokens_per_s_per_gpu);
        println!("{model} on {gpus} {gpu}: {ours:.1} tokens/s, {fitting} layouts fit, {} computed", found.tried);
        assert_eq!(ours, best, "{model} on {gpus} {gpu}: {:?}", found.fitting.first());
        assert!(found.fitting.windows(2).all(|w| w[0].time.tokens_per_s_per_gpu >= w[1].time.tokens_per_s_per_gpu));
        assert!(found.fitting.iter().all(|c| c.skewed <= 0.95 * space.cluster.device.memory_bytes()));
        assert_eq!(fitting == 0, found.fitting.is_empty());
    }
}

#[test]
fn wishes_are_kept_and_what_does_not_fit_is_said() {
    let (network, cluster, job) = (network("Qwen3-30B-A3B"), cluster("h100", 16), Job::new(4096, 64));
    let space = Space { network: &network, cluster: &cluster, job: &job, overheads: Overheads::GPU };
    let wish = LayoutRequest::parse("tp=2,recompute=full,mb=2", "").unwrap();
    let found = search(&space, &wish);
    assert!(!found.fitting.is_empty());
    for c in &found.fitting {
        assert_eq!((c.layout.tp, c.layout.recompute, c.layout.micro_batch), (2, Recompute::Full, 2));
    }
    let small = Cluster { gpus: 1, per_node: 1, ..cluster.clone() };
    let none = search(&Space { cluster: &small, ..space }, &LayoutRequest::default());
    assert!(none.fitting.is_empty() && none.smallest.is_some());
    let plan = planned(run("Qwen3-30B-A3B", small, Job::new(4096, 4), ""));
    assert!(!plan.fits() && plan.advice[0].fatal, "{:?}", plan.advice);
}

#[test]
fn runners_up_differ_and_say_why_they_lose() {
    let plan = planned(run("Qwen3-30B-A3B", cluster("h100", 16), Job::new(4096, 64), ""));
    assert!(plan.searched && plan.fits_skewed());
    assert_eq!(plan.runners_up.len(), 3);
    for c in &plan.runners_up {
        assert_ne!(c.layout, plan.layout);
        assert!(c.time.total >= plan.time.total);
        assert!(plan.why_not(c).contains("% time"), "{}", plan.why_not(c));
    }
    if let Some(large) = &plan.too_large {
        assert!(plan.why_not(large).contains("needs"), "{}", plan.why_not(large));
    }
}
