//! Courses of events, without processes.

use super::*;
use crate::message::{Exit, Failed, Kind};

const SECOND: Duration = Duration::from_secs(1);

fn job(nodes: usize, restarts: usize) -> (Job, Instant) {
    let now = Instant::now();
    let terms = Terms {
        patience: Patience::default(),
        nodes,
        world: None,
        restarts,
        name: "j".into(),
        logs: "run/logs".into(),
        master: Box::new(|| ("127.0.0.1".into(), 5)),
        resumable: Box::new(|| true),
    };
    (Job::new(terms, now), now)
}

fn joined(node: usize, ranks: usize) -> Event {
    Event::Joined { token: String::new(), node, host: format!("gpu-{node}"), ranks }
}

/// A job of one node with so many ranks, all under way.
fn under_way(ranks: usize, restarts: usize) -> (Job, Instant) {
    let (mut job, now) = job(1, restarts);
    job.take(0, joined(0, ranks), now);
    for rank in 0..ranks {
        job.take(0, Event::Told(rank, Told::Fingerprint(Fingerprint::default())), now);
    }
    job.take(0, Event::Told(0, Told::Ready), now);
    (job, now)
}

fn failed(rank: usize, message: &str, kind: Kind) -> Event {
    Event::Told(rank, Told::Failed(Failed { message: message.into(), code: 3, kind }))
}

fn exited(rank: usize, exit: Exit) -> Event {
    Event::Exited { rank, exit, tail: vec![] }
}

fn said(acts: &[Act]) -> String {
    let texts = acts.iter().filter_map(|a| match a {
        Act::Say(text) => Some(text.as_str()),
        _ => None,
    });
    texts.collect::<Vec<_>>().join("\n")
}

fn orders(acts: &[Act]) -> Vec<&Order> {
    acts.iter().filter_map(|a| if let Act::Order(_, order) = a { Some(order) } else { None }).collect()
}

#[test]
fn ranks_go_on_when_all_have_told_the_same_and_end_with_zero() {
    let (mut job, now) = job(2, 0);
    assert_eq!(job.take(1, joined(1, 1), now), [], "waits for the first node");
    let acts = job.take(0, joined(0, 2), now);
    let firsts: Vec<_> =
        orders(&acts).iter().map(|o| if let Order::Start(s) = o { (s.first, s.world, s.attempt) } else { panic!() }).collect();
    assert_eq!(firsts, [(0, 3, 1), (2, 3, 1)]);
    assert_eq!(job.take(0, Event::Told(0, Told::Fingerprint(Fingerprint::default())), now), []);
    assert_eq!(job.take(0, Event::Told(1, Told::Fingerprint(Fingerprint::default())), now), []);
    let acts = job.take(1, Event::Told(2, Told::Fingerprint(Fingerprint::default())), now);
    assert_eq!(orders(&acts), [&Order::Go, &Order::Go]);
    for (node, rank) in [(0, 0), (0, 1), (1, 2)] {
        job.take(node, Event::Told(rank, Told::Done), now);
        let acts = job.take(node, exited(rank, Exit::Code(0)), now);
        assert_eq!(acts.last() == Some(&Act::Over(0)), rank == 2);
    }
}

#[test]
fn a_rank_s_own_failure_is_told_before_those_it_caused_which_came_first() {
    let (mut job, now) = under_way(4, 0);
    for rank in [0, 1] {
        assert_eq!(job.take(0, failed(rank, "rank 3 is gone", Kind::Secondary { of: 3 }), now), []);
    }
    let acts = job.take(0, exited(3, Exit::Signal(11)), now + SECOND);
    assert!(said(&acts).starts_with("error: rank 3 was ended by SIGSEGV"), "{acts:?}");
    assert_eq!(orders(&job.tick(now + SECOND)), Vec::<&Order>::new());
    assert_eq!(orders(&job.tick(now + 2 * SECOND)), [&Order::Ask]);
    assert_eq!(orders(&job.tick(now + 8 * SECOND)), [&Order::Kill]);
    let acts: Vec<Act> = [0, 1, 2].into_iter().flat_map(|rank| job.take(0, exited(rank, Exit::Signal(9)), now + 8 * SECOND)).collect();
    assert_eq!(said(&acts), "3 other ranks stopped because of it; logs: run/logs");
    assert_eq!(acts.last(), Some(&Act::Over(139)));
}

/// The ranks of a save learn of one's full disk together; whoever is first to leave tells it, and the others miss that one.
#[test]
fn a_failure_that_others_pass_on_is_told_as_the_one_s_whose_it_is() {
    let (mut job, now) = under_way(3, 0);
    let acts = job.take(0, failed(0, "cannot write x: disk full", Kind::Passed { of: 2 }), now);
    assert_eq!(said(&acts), "error: rank 2: cannot write x: disk full");
    job.take(0, failed(2, "rank 0 is gone", Kind::Secondary { of: 0 }), now);
    job.take(0, failed(1, "cannot write x: disk full", Kind::Passed { of: 2 }), now);
    let acts: Vec<Act> = [0, 1, 2].into_iter().flat_map(|rank| job.take(0, exited(rank, Exit::Code(1)), now)).collect();
    assert_eq!(said(&acts), "2 other ranks stopped because of it; logs: run/logs");
    assert_eq!(acts.last(), Some(&Act::Over(3)));
}

/// 0 waits for 3, and 1 and 2 for 0: the one behind it is 3, whoever is heard first.
#[test]
fn who_keeps_all_waiting_is_found_through_those_that_pass_it_on() {
    for order in [[(0, 3), (1, 0), (2, 0)], [(2, 0), (0, 3), (1, 0)], [(2, 0), (1, 0), (0, 3)]] {
        let (mut job, now) = under_way(4, 0);
        job.take(0, Event::Told(3, Told::Doing(Doing { phase: "training".into(), step: Some(7), standing: None, for_ms: 65_000 })), now);
        for (rank, of) in order {
            job.take(0, failed(rank, &format!("nothing from rank {of}"), Kind::Secondary { of }), now);
        }
        let acts = job.tick(now + 2 * SECOND);
        let text = said(&acts);
        assert!(
            text.starts_with("error: rank 3 keeps the others waiting: it lives, and says what it does: training, step 7, for 65 s"),
            "{text}"
        );
        assert!(text.ends_with("the first of them: rank 0: nothing from rank 3"), "{text}");
        assert_eq!(orders(&acts), [&Order::Ask]);
    }
}

#[test]
fn a_process_that_not_even_sigkill_ends_does_not_hold_the_job() {
    let (mut job, now) = under_way(2, 1);
    job.take(0, Event::Silent { rank: 1, for_ms: 20_000, process: "its process 5 is stuck".into() }, now);
    job.tick(now + 8 * SECOND);
    job.take(0, exited(0, Exit::Signal(9)), now + 8 * SECOND);
    let acts = job.tick(now + 18 * SECOND);
    assert!(said(&acts).contains("rank 1 cannot be ended"), "{acts:?}");
    assert_eq!(acts.last(), Some(&Act::Over(1)));
}

#[test]
fn a_restart_waits_for_memory_and_has_a_budget() {
    let (mut job, now) = under_way(1, 1);
    let acts = job.take(0, exited(0, Exit::Signal(9)), now);
    assert!(said(&acts).ends_with("restart 1 of 1, when all is free again"), "{acts:?}");
    assert_eq!(orders(&acts), [&Order::Free]);
    let acts = job.take(0, Event::Idle(Ok(())), now);
    assert!(matches!(orders(&acts)[..], [Order::Start(Start { attempt: 2, resume: true, .. })]), "{acts:?}");
    let acts = job.take(0, exited(0, Exit::Code(0)), now);
    assert!(said(&acts).contains("error: rank 0 ended without a word"), "{acts:?}");
    assert!(said(&acts).ends_with("no restart: all 1 are used up"), "{acts:?}");
    assert_eq!(acts.last(), Some(&Act::Over(1)));

    let (mut job, now) = under_way(1, 1);
    job.take(0, exited(0, Exit::Signal(9)), now);
    let acts = job.take(0, Event::Idle(Err("device 0: 1 GiB".into())), now);
    assert!(said(&acts).contains("on gpu-0 device memory is not free again"), "{acts:?}");
    assert_eq!(acts.last(), Some(&Act::Over(137)));
}

#[test]
fn an_interruption_is_no_failure_to_hurry_or_retry() {
    let (mut job, now) = under_way(2, 5);
    let acts = job.take(0, Event::Stop, now);
    assert_eq!(orders(&acts), [&Order::Ask]);
    let acts = job.take(0, failed(1, "interrupted after step 5", Kind::Interrupted), now);
    assert_eq!(acts, []);
    assert_eq!(job.take(0, exited(1, Exit::Code(3)), now), []);
    assert_eq!(job.tick(now + 100 * SECOND), [], "the other one still saves");
    job.take(0, failed(0, "interrupted after step 5", Kind::Interrupted), now);
    let acts = job.take(0, exited(0, Exit::Code(3)), now);
    assert_eq!(said(&acts), "error: interrupted after step 5\n1 other rank stopped; logs: run/logs");
    assert_eq!(acts.last(), Some(&Act::Over(3)));
    // Slurm tells every node at once: that is one stop, not two.
    let (mut job, now) = self::job(2, 0);
    job.take(0, joined(0, 1), now);
    job.take(1, joined(1, 1), now);
    assert_eq!(orders(&job.take(0, Event::Stop, now)), [&Order::Ask, &Order::Ask]);
    assert_eq!(job.take(1, Event::Stop, now), []);
    assert_eq!(orders(&job.take(1, Event::Stop, now)), [&Order::Kill, &Order::Kill]);
}

#[test]
fn a_node_that_is_gone_fails_its_first_rank_and_is_not_waited_for() {
    let (mut job, now) = job(2, 3);
    job.take(0, joined(0, 2), now);
    job.take(1, joined(1, 2), now);
    let acts = job.take(1, Event::Gone("its supervisor ended".into()), now);
    assert!(said(&acts).starts_with("error: node 1 (gpu-1) is gone: its supervisor ended. Last heard of rank 2 (gpu-1):"), "{acts:?}");
    job.take(0, failed(0, "rank 2 is gone", Kind::Secondary { of: 2 }), now);
    job.take(0, exited(0, Exit::Code(3)), now);
    let acts = job.take(0, exited(1, Exit::Signal(15)), now + 3 * SECOND);
    assert!(said(&acts).contains("no restart: gpu-1 is gone"), "{acts:?}");
    assert_eq!(acts.last(), Some(&Act::Over(1)));
}

/// A run folder never came to be: what only the logs tell is kept, what was said is not.
#[test]
fn logs_are_kept_outside_the_run_folder_only_where_they_are_told_of() {
    let unready = |event: Event, code: u8| {
        let (mut job, now) = job(1, 0);
        job.take(0, joined(0, 2), now);
        job.take(0, event, now);
        job.tick(now + 2 * SECOND);
        let acts: Vec<Act> = [0, 1].into_iter().flat_map(|rank| job.take(0, exited(rank, Exit::Code(code.into())), now)).collect();
        (orders(&acts).contains(&&Order::SpareLogs), said(&acts))
    };
    let told = |code| Event::Told(1, Told::Failed(Failed { message: "no".into(), code, kind: Kind::Own }));
    let (kept, text) = unready(told(1), 1);
    assert!(kept && text.contains("; logs: ") && text.ends_with("temper-j"), "{text}");
    let (kept, text) = unready(told(2), 2);
    assert!(!kept && text == "1 other rank stopped because of it", "{text}");
}

#[test]
fn what_would_come_to_the_same_end_is_not_started_again() {
    let (mut job, now) = under_way(1, 3);
    let acts = job.take(0, failed(0, "the run has diverged", Kind::Lasting), now);
    assert_eq!(said(&acts), "error: rank 0: the run has diverged");
    let acts = job.take(0, exited(0, Exit::Code(3)), now);
    assert!(said(&acts).ends_with("no restart: it would come to the same end"), "{acts:?}");
    assert_eq!(acts.last(), Some(&Act::Over(3)));
}
