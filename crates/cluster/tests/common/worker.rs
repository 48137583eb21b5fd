//! A worker that does as its test wants, with a data plane of one byte: every rank is linked to rank 0, and on every link each side
//! says every tenth of a second that it is there.

use rustix::process::{Signal, getpid, kill_process};
use std::{
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::PathBuf,
    process::exit,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};
use temper_cluster::{Failed, Fingerprint, Kind, Rendezvous, Worker};

const SIGN: Duration = Duration::from_millis(100);
/// Silence on a link after which the other side is given up.
const PATIENCE: Duration = Duration::from_secs(1);

/// The act of this rank, one word; `first-ACT` is done in the first attempt only.
fn act(rank: usize, attempt: usize) -> String {
    let acts = std::env::var("TEST_ACTS").unwrap();
    let mine = acts.split_whitespace().filter_map(|a| a.split_once('=')).find(|(r, _)| *r == rank.to_string() || *r == "all");
    let act = mine.map_or("work", |(_, act)| act);
    match act.strip_prefix("first-") {
        Some(act) if attempt == 1 => act.into(),
        Some(_) => "work".into(),
        None => act.into(),
    }
}

/// Acts that do not end a rank.
const QUIET: [&str; 7] = ["work", "warn", "warn-too", "warn-alone", "endless", "variable", "deaf"];

pub fn run() -> ! {
    let me = Rendezvous::from_env().unwrap().unwrap();
    let worker = Worker::from_env(me.local_rank).unwrap().unwrap();
    let act = act(me.rank, worker.attempt());
    let dir = PathBuf::from(std::env::var("TEST_DIR").unwrap());
    fs::write(dir.join(format!("pid-{}-{}", me.rank, std::process::id())), "").unwrap();
    eprintln!("rank {} of {} attempt {} resume {}", me.rank, me.size, worker.attempt(), worker.resume());
    let asked = Arc::new(AtomicBool::new(false));
    let asking = asked.clone();
    ctrlc::set_handler(move || asking.store(true, Ordering::Relaxed)).unwrap();

    worker.doing("reading", None);
    if act == "early" {
        fail(&worker, "data.jsonl: no such file", 2, Kind::Own);
    }
    if act == "unready" {
        fail(&worker, "the device is out of memory", 7, Kind::Own);
    }
    let mut print = Fingerprint::of_process("1");
    print.must("config.optim.lr", if act == "config" { "2e-5" } else { "1e-5" });
    print.should("NCCL_SOCKET_IFNAME", if act == "variable" { "eth1" } else { "eth0" });
    if worker.preflight(print, Duration::from_secs(20)).is_err() {
        exit(3);
    }
    let (lost, losses) = channel();
    let quiet = Arc::new(AtomicBool::new(false));
    connect(&me, &lost, &quiet);
    if me.rank == 0 {
        fs::create_dir_all(dir.join("run")).unwrap();
    }
    worker.ready();
    worker.doing("forward", Some(7));
    thread::sleep(Duration::from_millis(300)); // all linked
    let pid = getpid();
    match act.as_str() {
        "own" => fail(&worker, "the device is out of memory", 7, Kind::Own),
        "same" => fail(&worker, "the disk is full", 1, Kind::Own),
        "checkpoint" => {
            fs::write(dir.join("run/checkpoint"), "").unwrap();
            fail(&worker, "the disk is full", 1, Kind::Own)
        }
        "memory" => {
            fs::write(dir.join("memory"), "0").unwrap();
            fail(&worker, "the disk is full", 1, Kind::Own)
        }
        "panic" => panic!("index 5 is out of bounds"),
        "kill" => kill_process(pid, Signal::KILL).unwrap(),
        "stop" => kill_process(pid, Signal::STOP).unwrap(),
        "leave" => exit(0),
        "abort" => {
            eprintln!("corrupted size vs. prev_size");
            std::process::abort()
        }
        "hang" => {
            quiet.store(true, Ordering::Relaxed);
            worker.doing("backward", Some(7));
            loop {
                thread::sleep(SIGN);
            }
        }
        "deaf" => loop {
            thread::sleep(SIGN); // to SIGTERM and to the others
        },
        _ => {}
    }
    if act == "warn" || act == "warn-too" {
        eprintln!(" WARN the disk is slow");
    }
    if act == "warn-alone" {
        eprintln!("host:1:2 [0] NCCL WARN odd");
    }
    println!("out of rank {}", me.rank);
    // However slow the machine is to end a rank, the others are not done before it has.
    let long = act == "endless" || (0..me.size).any(|rank| !QUIET.contains(&self::act(rank, worker.attempt()).as_str()));
    let began = Instant::now();
    while long || began.elapsed() < Duration::from_millis(400) {
        if asked.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(300)); // saves
            fail(&worker, "interrupted after step 7, which is saved", 1, Kind::Interrupted);
        }
        if let Ok(of) = losses.recv_timeout(Duration::from_millis(20)) {
            fail(&worker, &format!("all_reduce: rank {of} is gone"), 1, Kind::Secondary { of });
        }
    }
    worker.done();
    thread::sleep(Duration::from_millis(300)); // for the others to finish
    exit(0)
}

fn fail(worker: &Worker, message: &str, code: u8, kind: Kind) -> ! {
    if !worker.failed(Failed { message: message.into(), code, kind }) {
        eprintln!("error: {message}");
    }
    exit(code.into())
}

fn connect(me: &Rendezvous, lost: &Sender<usize>, quiet: &Arc<AtomicBool>) {
    if me.rank == 0 {
        let listener = TcpListener::bind(&*me.master).unwrap();
        for _ in 1..me.size {
            let mut stream = listener.accept().unwrap().0;
            let mut rank = [0];
            stream.read_exact(&mut rank).unwrap();
            link(stream, rank[0].into(), lost, quiet);
        }
        return;
    }
    let mut stream = loop {
        match TcpStream::connect(&*me.master) {
            Ok(stream) => break stream,
            Err(_) => thread::sleep(Duration::from_millis(20)),
        }
    };
    stream.write_all(&[me.rank as u8]).unwrap();
    link(stream, 0, lost, quiet);
}

fn link(stream: TcpStream, of: usize, lost: &Sender<usize>, quiet: &Arc<AtomicBool>) {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let (mut reader, mut writer, lost, quiet) = (stream.try_clone().unwrap(), stream, lost.clone(), quiet.clone());
    thread::spawn(move || {
        while quiet.load(Ordering::Relaxed) || writer.write_all(b".").is_ok() {
            thread::sleep(SIGN);
        }
    });
    thread::spawn(move || {
        while matches!(reader.read(&mut [0; 64]), Ok(1..)) {}
        let _ = lost.send(of);
    });
}
