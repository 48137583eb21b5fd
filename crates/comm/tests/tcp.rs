//! Ranks over TCP: how they come together, who is turned away, and what is said when one is killed, stopped or astray.

mod common;

use common::hosts::Hosts;
use common::{check_collectives, everyone, free_address, join_all, joining, tensor};
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};
use temper_comm::{Departure, Error, HostWorld, Reduce, Tcp, World, tcp};

/// What a worker process does is named in this variable; see [`worker_process`].
const ROLE: &str = "TEMPER_TEST_ROLE";

fn all_reduce(world: &HostWorld) -> Result<(), Error> {
    let group = world.group("all", &(0..world.size()).collect::<Vec<_>>())?;
    let mut x = tensor(world.rank(), 1000);
    group.all_reduce(x.view_mut(), Reduce::Sum)?.wait()
}

/// The body of worker processes, which are this test program started anew for this test alone.
#[test]
fn worker_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let var = |name: &str| std::env::var(name).unwrap();
    let (rank, size): (usize, usize) = (var("RANK").parse().unwrap(), var("WORLD_SIZE").parse().unwrap());
    let master = var("MASTER");
    let announce = std::env::var("ANNOUNCE").ok().map(|a| a.parse().unwrap());
    let world = tcp(&Tcp { announce, ..joining(rank, size, &master) }).unwrap();
    match role.as_str() {
        "collectives" => check_collectives(&*everyone(&world), 5_000),
        // The others wait in a second operation that this rank never calls.
        "hang" => {
            all_reduce(&world).unwrap();
            println!("\nin position");
            std::thread::sleep(Duration::from_secs(60));
        }
        "give up" => {
            all_reduce(&world).unwrap();
            world.give_up("the disk is full");
            drop(world);
            std::process::exit(0);
        }
        other => panic!("no role {other}"),
    }
    println!("\nworker is done");
}

/// A worker process, killed when its test ends.
struct Worker(Child);

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Worker {
    /// `prefix` is a command that runs the worker.
    fn start(prefix: &[&str], role: &str, rank: usize, size: usize, master: &str) -> Worker {
        let own = std::env::current_exe().unwrap();
        let mut words = prefix.iter().map(std::ffi::OsStr::new).chain([own.as_os_str()]);
        let mut command = Command::new(words.next().unwrap());
        command.args(words).args(["--exact", "worker_process", "--nocapture"]).stdout(Stdio::piped());
        command.env(ROLE, role).env("RANK", rank.to_string()).env("WORLD_SIZE", size.to_string()).env("MASTER", master);
        Worker(command.spawn().unwrap())
    }

    fn wait_for(&mut self, line: &str) {
        let out: &mut ChildStdout = self.0.stdout.as_mut().unwrap();
        let mut lines = BufReader::new(out).lines();
        assert!(lines.any(|l| l.unwrap().contains(line)), "the worker ended without saying {line:?}");
    }
}

#[test]
fn processes_give_the_results_of_threads() {
    let master = free_address();
    let mut workers: Vec<Worker> = (1..3).map(|rank| Worker::start(&[], "collectives", rank, 3, &master)).collect();
    let world = tcp(&joining(0, 3, &master)).unwrap();
    check_collectives(&*everyone(&world), 5_000);
    workers.iter_mut().for_each(|w| w.wait_for("worker is done"));
}

#[test]
fn a_process_killed_in_a_collective_is_named_within_a_second() {
    let master = free_address();
    let mut worker = Worker::start(&[], "hang", 1, 2, &master);
    let world = tcp(&joining(0, 2, &master)).unwrap();
    all_reduce(&world).unwrap();
    worker.wait_for("in position");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| all_reduce(&world).map_err(|e| (e, Instant::now())));
        std::thread::sleep(Duration::from_millis(200));
        let killed = Instant::now();
        worker.0.kill().unwrap();
        let (error, seen) = waiting.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::Lost { from: 1, .. }), "{error}");
        assert!(error.to_string().contains("killed or crashed"), "{error}");
        assert!(seen - killed < Duration::from_secs(1), "{:?}", seen - killed);
    });
    assert!(matches!(world.gone().as_slice(), [Departure { rank: 1, orderly: false, .. }]), "{:?}", world.gone());
    assert!(all_reduce(&world).is_err(), "and it stays gone");
}

#[test]
fn a_rank_that_gives_up_says_why() {
    let master = free_address();
    let _worker = Worker::start(&[], "give up", 1, 2, &master);
    let world = tcp(&joining(0, 2, &master)).unwrap();
    all_reduce(&world).unwrap();
    let error = all_reduce(&world).unwrap_err().to_string();
    assert!(error.contains("rank 1 is gone: it gave up: the disk is full"), "{error}");
}

/// A rank whose own thread hangs still tells where it stands; a process that is stopped does not.
#[test]
fn a_silent_rank_is_asked_where_it_stands() {
    let master = free_address();
    let mut worker = Worker::start(&[], "hang", 1, 2, &master);
    let world = tcp(&Tcp { patience: Duration::from_secs(3), ..joining(0, 2, &master) }).unwrap();
    all_reduce(&world).unwrap();
    worker.wait_for("in position");
    let error = all_reduce(&world).unwrap_err();
    assert!(matches!(error, Error::Timeout { from: 1, .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("rank 0, all_reduce #0 of group all") && text.contains("it is in no operation; the last, all_reduce #0"),
        "{text}"
    );

    Command::new("kill").args(["-STOP", &worker.0.id().to_string()]).status().unwrap();
    let text = all_reduce(&world).unwrap_err().to_string();
    assert!(text.contains("it does not answer: its process is stopped"), "{text}");
}

#[test]
fn strangers_are_turned_away_without_harm() {
    let master = free_address();
    let talk = |bytes: &[u8]| {
        let mut stream = TcpStream::connect(&master).unwrap();
        stream.write_all(bytes).unwrap();
        stream
    };
    std::thread::scope(|scope| {
        let rank0 = scope.spawn(|| tcp(&joining(0, 2, &master)));
        std::thread::sleep(Duration::from_millis(300));
        // One that says nothing, one that hangs up, one of another protocol, one that claims a letter of 4 GiB.
        let _silent = talk(b"");
        drop(talk(b""));
        let _web = talk(b"GET / HTTP/1.1\r\nHost: temper\r\n\r\n");
        let _greedy = talk(b"temper\0\x01\xff\xff\xff\xff");
        // A worker of another job is told so.
        let stale = tcp(&Tcp { job: "older", ..joining(1, 2, &master) }).map(drop).unwrap_err().to_string();
        assert!(stale.contains("another job") && stale.contains("\"older\""), "{stale}");
        let rank1 = tcp(&joining(1, 2, &master)).unwrap();
        let rank0 = rank0.join().unwrap().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| all_reduce(&rank1).unwrap());
            all_reduce(&rank0).unwrap();
        });
        // The master address no longer answers.
        let mut late = TcpStream::connect(&master);
        assert!(late.as_mut().map_or(true, |s| matches!(s.read(&mut [0]), Ok(0) | Err(_))));
    });
}

/// Every rank gets the same text.
fn refusal(size: usize, join: impl Fn(usize, &str) -> temper_comm::Result<HostWorld> + Sync) -> String {
    let master = free_address();
    let mut texts: Vec<String> = join_all(size, |i| join(i, &master)).into_iter().map(|w| w.map(drop).unwrap_err().to_string()).collect();
    let first = texts.remove(0);
    assert!(texts.iter().all(|t| *t == first), "{first}\n{texts:?}");
    first
}

#[test]
fn ranks_that_cannot_work_together_are_named_to_all() {
    // Threads 0, 1 and 2 join as ranks 0, 1 and 3 of 4.
    let patience = Duration::from_secs(2);
    let text = refusal(3, |i, master| tcp(&Tcp { patience, ..joining([0, 1, 3][i], 4, master) }));
    assert!(text.contains("ranks [2] of 4 did not call"), "{text}");

    let text = refusal(3, |i, master| tcp(&Tcp { fingerprint: ["a", "a", "b"][i], ..joining(i, 3, master) }));
    assert!(text.contains("ranks [0, 1] run \"a\", ranks [2] run \"b\""), "{text}");

    let text = refusal(2, |i, master| tcp(&joining(i, [2, 3][i], master)));
    assert!(text.contains("rank 1") && text.contains("was started for 3 ranks, rank 0 for 2"), "{text}");
}

#[test]
fn two_processes_cannot_be_one_rank() {
    let text = refusal(3, |i, master| tcp(&joining([0, 1, 1][i], 3, master)));
    assert!(text.contains("two processes claim rank 1: one at 127.0.0.1:"), "{text}");
}

#[test]
fn without_rank_0_the_master_address_is_named() {
    let master = free_address();
    let text = tcp(&Tcp { patience: Duration::from_millis(300), ..joining(1, 2, &master) }).map(drop).unwrap_err().to_string();
    assert!(text.contains("rank 1 did not reach rank 0") && text.contains(&master), "{text}");
    assert!(tcp(&joining(2, 2, &master)).is_err());
    let held = std::net::TcpListener::bind(&master).unwrap();
    let text = tcp(&Tcp { patience: Duration::from_millis(300), ..joining(0, 2, &master) }).map(drop).unwrap_err().to_string();
    assert!(text.contains("cannot listen") && text.contains("MASTER_PORT"), "{text}");
    drop(held);
}

#[test]
fn ranks_on_two_hosts_reach_each_other() {
    let hosts = match Hosts::two(1) {
        Ok(hosts) => hosts,
        Err(why) => return eprintln!("SKIPPED: no network namespaces here: {why}"),
    };
    // Ranks 0 and 1 on one host, 2 and 3 on the other: every pair within and between hosts is linked.
    let mut workers: Vec<Worker> = (0..4)
        .map(|rank| Worker::start(&["ip", "netns", "exec", &hosts.names[rank / 2]], "collectives", rank, 4, "10.77.1.1:29500"))
        .collect();
    workers.iter_mut().for_each(|w| w.wait_for("worker is done"));
}
