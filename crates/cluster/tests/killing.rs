//! What becomes of a job when something in it dies, hangs or differs: the right words, in seconds, and nothing left behind.

mod common;

use common::{Job, gone_within, two_free_ports};
use rustix::process::{Pid, Signal, kill_process};
use std::{
    fs,
    time::{Duration, Instant},
};

#[test]
fn as_supervisor_or_worker() {
    common::take_role();
}

fn signal(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

#[test]
fn ranks_that_are_done_end_the_job() {
    let job = Job::new(4, "1=warn 2=warn-too 3=warn-alone");
    let done = job.run().exits(0, 15).says(&["[ranks 1-2] WARN the disk is slow"]).says(&["[rank 3] host:1:2 [0] NCCL WARN odd"]);
    assert!(done.out.contains("out of rank 0") && !done.out.contains("out of rank 1"), "{done:#?}");
    for rank in 0..4 {
        assert!(job.log(rank).contains(&format!("out of rank {rank}\n")), "{}", job.log(rank));
    }
    assert!(job.log(1).contains("\n WARN the disk is slow\n"));
    gone_within(&job.pids(4), Duration::ZERO);
}

#[test]
fn the_first_failure_is_told_once_and_its_followers_are_counted() {
    let job = Job::new(4, "2=own");
    job.run()
        .exits(7, 15)
        .says(&["error: rank 2: the device is out of memory", "3 other ranks stopped because of it; logs: "])
        .never_says("is gone");
    assert!(job.log(2).contains("error: the device is out of memory"));
    assert!(job.log(1).contains("error: all_reduce: rank 0 is gone"), "{}", job.log(1));
}

#[test]
fn the_same_failure_of_all_is_told_once() {
    Job::new(4, "all=same").run().exits(1, 15).says(&[": the disk is full", "3 other ranks failed in the same way"]);
}

#[test]
fn a_bad_input_has_its_exit_code_and_leaves_nothing() {
    let job = Job::new(2, "all=early").with("TEST_RESTARTS", 3);
    let done = job.run().exits(2, 15).says(&[
        "error: data.jsonl: no such file",
        "1 other rank failed in the same way",
        "no restart: the same input",
    ]);
    assert!(!job.dir.path().join("run").exists());
    let spare = job.dir.path().join("tmp");
    assert!(!done.err.contains("logs: ") && fs::read_dir(spare).unwrap().next().is_none(), "{done:#?}");
}

#[test]
fn an_early_failure_leaves_logs_outside_the_run_folder_and_says_where() {
    let job = Job::new(2, "1=unready");
    let done = job.run().exits(7, 15).says(&["error: rank 1: the device is out of memory", "1 other rank stopped because of it; logs: "]);
    assert!(!job.dir.path().join("run").exists());
    let logs = done.err.split("logs: ").nth(1).and_then(|t| t.lines().next()).unwrap();
    assert!(fs::read_to_string(format!("{logs}/rank-00001.log")).unwrap().contains("error: the device is out"));
}

#[test]
fn a_killed_worker_is_named_with_what_it_did() {
    let words = ["error: rank 1 was ended by SIGKILL (", "Last heard of it: forward, step 7", "2 other ranks stopped because of it"];
    Job::new(3, "1=kill").run().exits(137, 15).says(&words).never_says("is gone");
}

#[test]
fn a_worker_that_dies_is_told_with_its_last_words() {
    let done = Job::new(3, "2=abort").run();
    done.exits(134, 15).says(&["error: rank 2 was ended by SIGABRT", "| corrupted size vs. prev_size", "2 other ranks stopped"]);
    let done = Job::new(3, "2=panic").run();
    done.exits(101, 15).says(&[
        "error: rank 2 ended without a word, with exit code 101",
        "| index 5 is out of bounds",
        "2 other ranks stopped",
    ]);
    Job::new(2, "1=leave").run().exits(1, 15).says(&["error: rank 1 ended without a word, with exit code 0"]);
}

/// The others notice first, after a second; the supervisor knows whom they mean.
#[test]
fn a_stopped_worker_is_named() {
    let job = Job::new(3, "1=stop");
    job.run().exits(1, 15).says(&["error: rank 1 ", "forward, step 7"]);
    gone_within(&job.pids(3), Duration::ZERO);
}

/// Nobody waits for it, so only its heartbeats can tell.
#[test]
fn a_stopped_worker_is_found_by_its_silence() {
    let job = Job::new(1, "0=stop");
    job.run().exits(1, 15).says(&["error: rank 0 has given no sign of life for", "is stopped, by SIGSTOP", "forward, step 7"]);
    gone_within(&job.pids(1), Duration::ZERO);
}

/// It beats, and so is found by the others, of whom most complain of rank 0, which only passes it on.
#[test]
fn a_worker_that_hangs_is_named() {
    let words = [
        "error: rank 2 keeps the others waiting: it lives, and says what it does: backward, step 7",
        "the first of them: rank 0: all_reduce",
    ];
    Job::new(4, "2=hang all=endless").run().exits(1, 15).says(&words);
}

#[test]
fn a_worker_deaf_to_sigterm_is_killed_in_time() {
    let job = Job::new(3, "1=own 2=deaf");
    job.run().exits(7, 10).says(&["error: rank 1: the device is out of memory", "2 other ranks stopped because of it"]);
    gone_within(&job.pids(3), Duration::ZERO);
}

#[test]
fn a_killed_supervisor_takes_its_workers_along() {
    let job = Job::new(3, "all=endless");
    let running = job.start();
    let pids = job.pids(3);
    std::thread::sleep(Duration::from_millis(1000)); // nothing of theirs is written any more: a closed pipe would end them too
    signal(running.child.id() as i32, Signal::KILL);
    gone_within(&pids, Duration::from_secs(5));
    assert_eq!(running.finish().code, -1);
}

#[test]
fn the_first_signal_lets_the_workers_save_and_the_second_ends_them() {
    let job = Job::new(3, "all=endless");
    let running = job.start();
    let pids = job.pids(3);
    std::thread::sleep(Duration::from_millis(700));
    signal(running.child.id() as i32, Signal::TERM);
    running.finish().exits(1, 15).says(&[
        "stopping after the step under way",
        "error: interrupted after step 7, which is saved",
        "2 other ranks",
    ]);
    gone_within(&pids, Duration::ZERO);

    let job = Job::new(2, "all=deaf");
    let running = job.start();
    let pids = job.pids(2);
    std::thread::sleep(Duration::from_millis(700));
    signal(running.child.id() as i32, Signal::INT);
    std::thread::sleep(Duration::from_millis(500));
    signal(running.child.id() as i32, Signal::INT);
    running.finish().exits(130, 8).says(&["stopping after the step under way"]);
    gone_within(&pids, Duration::ZERO);
}

#[test]
fn ranks_that_read_different_configurations_do_not_begin() {
    let words =
        ["error: the ranks were not started alike", "config.optim.lr  1e-5 on ranks 0-1, 3; 2e-5 on rank 2", "3 other ranks stopped"];
    Job::new(4, "2=config").with("TEST_RESTARTS", 2).run().exits(2, 15).says(&words);
    let words = ["warning: ranks differ in what may be meant so", "NCCL_SOCKET_IFNAME  eth0 on ranks 0-1; eth1 on rank 2"];
    Job::new(3, "2=variable").run().exits(0, 15).says(&words);
}

#[test]
fn a_failed_job_starts_again_as_often_as_it_may() {
    let job = Job::new(2, "1=first-checkpoint").with("TEST_RESTARTS", 1);
    let words = ["error: rank 1: the disk is full", "restart 1 of 1", "starting again from the last checkpoint"];
    job.run().exits(0, 20).says(&words);
    assert!(job.log(1).contains("attempt 1 resume false") && job.log(1).contains("attempt 2 resume true"), "{}", job.log(1));

    let done = Job::new(2, "0=kill").with("TEST_RESTARTS", 2).run().exits(137, 30);
    let done = done.says(&["restart 1 of 2", "restart 2 of 2", "no restart: all 2 are used up"]);
    assert_eq!(done.err.matches("starting again from the beginning, as there is no checkpoint yet").count(), 2, "{done:#?}");
}

#[test]
fn device_memory_must_be_free_again() {
    let job = Job::new(2, "1=memory").with("TEST_RESTARTS", 1);
    fs::write(job.dir.path().join("memory"), (8u64 << 30).to_string()).unwrap();
    job.run()
        .exits(1, 20)
        .says(&["restart 1 of 1", "device memory is not free again after 2.0 s: device 0: 0.0 GiB free, but 8.0 GiB before"]);
}

/// Two supervisors, one job.
#[test]
fn nodes_fail_and_stop_together() {
    let nodes = |acts: &str| {
        let port = two_free_ports();
        let node = |n: usize| Job::new(2, acts).with("TEST_NODE", n).with("TEST_NODES", 2).with("TEST_PORT", port).with("TEST_WORLD", 4);
        (node(0), node(1))
    };
    let (first, second) = nodes("3=own");
    let (a, b) = (first.start(), second.start());
    a.finish().exits(7, 15).says(&["error: rank 3 (", "the device is out of memory", "3 other ranks stopped because of it"]);
    b.finish().exits(7, 15);
    assert!(first.log(1).contains("rank 1 of 4") && second.log(3).contains("rank 3 of 4"));

    let (first, second) = nodes("all=endless");
    let (a, b) = (first.start(), second.start());
    let pids = [first.pids(2), second.pids(2)].concat();
    std::thread::sleep(Duration::from_millis(700));
    signal(b.child.id() as i32, Signal::TERM);
    a.finish().exits(1, 15).says(&["stopping after", "interrupted after step 7", "3 other ranks"]);
    b.finish().exits(1, 15);
    gone_within(&pids, Duration::ZERO);

    let (first, second) = nodes("all=endless");
    let (a, b) = (first.start(), second.start());
    let pids = [first.pids(2), second.pids(2)].concat();
    signal(b.child.id() as i32, Signal::KILL);
    a.finish().exits(1, 15).says(&["is gone: its supervisor ended", "3 other ranks stopped"]);
    gone_within(&pids, Duration::from_secs(5));
    drop(b.finish());

    let (first, second) = nodes("all=endless");
    let (a, b) = (first.start(), second.start());
    let pids = [first.pids(2), second.pids(2)].concat();
    signal(a.child.id() as i32, Signal::KILL);
    b.finish().exits(1, 15).says(&["the first node is gone: its supervisor ended: this node's workers are ended"]);
    gone_within(&pids, Duration::from_secs(5));
    drop(a.finish());
}

#[test]
fn nodes_must_bring_what_the_job_needs() {
    let port = two_free_ports();
    let node = |n: usize| Job::new(2, "").with("TEST_NODE", n).with("TEST_NODES", 2).with("TEST_PORT", port).with("TEST_WORLD", 8);
    let (first, second) = (node(0), node(1));
    let (a, b) = (first.start(), second.start());
    a.finish().exits(2, 15).says(&["error: the job needs 8 ranks, but its 2 nodes bring 4 ("]);
    b.finish().exits(2, 15);
    let missing = Job::new(1, "").with("TEST_NODE", 0).with("TEST_NODES", 3).with("TEST_PORT", two_free_ports());
    missing.run().exits(1, 20).says(&["error: 2 of 3 nodes did not come within 10 s: number 1, 2"]);
}

/// Whether a process catches a signal; one that does not yet is ended by it.
fn catches(pid: i32, signal: Signal) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|l| l.strip_prefix("SigCgt:")).and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    caught.is_some_and(|mask| mask >> (signal.as_raw() - 1) & 1 == 1)
}

/// The first node never comes, for which the others have patience: a word ends them sooner.
#[test]
fn a_node_that_waits_for_the_first_can_be_stopped() {
    for word in [Signal::INT, Signal::TERM] {
        let job = Job::new(1, "").with("TEST_NODE", 1).with("TEST_NODES", 2).with("TEST_PORT", two_free_ports());
        let running = job.with("TEST_GATHER", 300).start();
        let pid = running.child.id() as i32;
        let began = Instant::now();
        while !catches(pid, word) {
            assert!(began.elapsed() < Duration::from_secs(30), "it never listens to {word:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
        signal(pid, word);
        running.finish().exits(130, 30).says(&["stopped while waiting for the first node's supervisor at 127.0.0.1:"]);
    }
}
