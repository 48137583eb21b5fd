//! Ranks that are processes: a supervisor over real training, and the start on several hosts.

use crate::support::{Case, Done, command, essences, wait};
use std::{
    fs,
    io::Read,
    net::TcpListener,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

const DEADLINE: Duration = Duration::from_secs(60);

fn start(case: &Case, args: &[&str]) -> Child {
    command(&case.dir, args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Output is small here: it fits the pipes.
fn finish(mut child: Child) -> Done {
    let code = wait(&mut child).unwrap_or(-1);
    let (mut stdout, mut stderr) = (String::new(), String::new());
    child.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    Done { code, stdout, stderr }
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < DEADLINE, "{what} never came");
        thread::sleep(Duration::from_millis(2));
    }
}

/// The workers of a supervisor, by rank.
fn workers(supervisor: u32) -> Vec<u32> {
    let rank = |pid: u32| {
        let text = fs::read(format!("/proc/{pid}/environ")).ok()?;
        text.split(|b| *b == 0).find_map(|v| String::from_utf8_lossy(v).strip_prefix("RANK=")?.parse::<usize>().ok())
    };
    let children = fs::read_dir(format!("/proc/{supervisor}/task")).into_iter().flatten().flatten();
    let children = children.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let pids = children.flat_map(|text| text.split_whitespace().map(|p| p.parse().unwrap()).collect::<Vec<u32>>());
    let mut found: Vec<(usize, u32)> = pids.filter_map(|pid| Some((rank(pid)?, pid))).collect();
    found.sort_unstable();
    found.into_iter().map(|(_, pid)| pid).collect()
}

fn signal(name: &str, pid: u32) {
    assert!(Command::new("kill").args([name, &pid.to_string()]).status().unwrap().success());
}

#[test]
fn a_rank_killed_in_training_is_named_and_the_job_goes_on_from_its_checkpoint() {
    let case = Case::tiny();
    let long = ["train.steps=60", "checkpoint.every=5", "checkpoint.keep_last=0", "checkpoint.export=false"];
    case.sft("config.toml", &[&long[..], &["log.dir=whole"]].concat()).ok();
    let sets = [&long[..], &["log.dir=killed"]].concat();
    let job = start(&case, &Case::sft_args("config.toml", &sets, &["--ranks", "1", "--restarts", "1"]));
    until("a checkpoint", || case.has("killed/checkpoints/step-000005"));
    signal("-KILL", workers(job.id())[0]);
    let done = finish(job).ok().says(&["error: rank 0 was ended by SIGKILL", "Last heard of it: training, step", "restart 1 of 1"]);
    let done = done.says(&["starting again from the last checkpoint", "resumed from"]);
    assert!(done.stderr.contains("logs: ") && case.read("killed/logs/rank-00000.log").contains("resumed from"), "{done:#?}");
    // Steps that were trained twice, before the kill and after the resume, are equal too.
    let whole = essences(&case.steps("whole"));
    let mut killed = essences(&case.steps("killed"));
    killed.sort_by_key(|step| step[0].as_u64());
    killed.dedup();
    assert_eq!(whole, killed);
}

#[test]
fn a_supervised_run_is_interrupted_like_any_other() {
    let case = Case::tiny();
    let sets = ["train.steps=100000", "checkpoint.export=false"];
    let job = start(&case, &Case::sft_args("config.toml", &sets, &["--ranks", "1", "--restarts", "2"]));
    until("a step", || case.has("run/events.jsonl") && !case.steps("run").is_empty());
    signal("-TERM", job.id());
    let done = finish(job).exits(1).says(&["stopping after the step under way and a checkpoint", "error: interrupted after step"]);
    assert!(!done.stderr.contains("restart"), "{done:#?}");
    assert_eq!(done.stderr.matches("stopping after").count(), 1);
    assert_eq!(case.checkpoints("run").len(), 1);
}

/// Ranks that exchange by TCP: one is killed while they train, and all are gone.
#[test]
fn two_ranks_end_together() {
    let case = Case::tiny();
    let sets = ["train.steps=100000", "parallel.dp=2", "checkpoint.every=0"];
    let job = start(&case, &Case::sft_args("config.toml", &sets, &[]));
    until("a step", || case.has("run/events.jsonl") && !case.steps("run").is_empty());
    let pids = workers(job.id());
    assert_eq!(pids.len(), 2);
    signal("-KILL", pids[1]);
    let began = Instant::now();
    let done = finish(job).exits(137).says(&[
        "error: rank 1 was ended by SIGKILL",
        "Last heard of it: training, step",
        "1 other rank stopped because of it",
    ]);
    assert!(began.elapsed() < Duration::from_secs(10), "{done:#?}");
    assert!(case.read("run/logs/rank-00000.log").contains("rank 1 is gone"));
    assert!(pids.iter().all(|pid| !Path::new(&format!("/proc/{pid}")).exists()));
}

#[test]
fn a_fault_of_the_input_is_told_once() {
    let case = Case::tiny();
    case.write("chat.jsonl", "{\"messages\": 3}\n");
    let done = case.temper(&["sft", "config.toml", "--ranks", "2", "--restarts", "2"]).exits(2);
    assert_eq!(done.stderr.matches("error:").count(), 1, "{done:#?}");
    assert!(!case.has("run"));
    case.temper(&["sft", "config.toml", "--ranks", "3", "--set", "parallel.tp=2"]).exits(2).says(&["[parallel]", "tp 2"]);
}

/// An ssh that stays on this host, and gives the second one another learning rate.
fn fake_ssh(case: &Case) -> String {
    let script = "#!/bin/sh\nif [ \"$1\" = localhost ]; then exec sh -c \"$(echo \"$2\" | sed s/optim.lr=1e-3/optim.lr=2e-3/)\"; fi\nexec sh -c \"$2\"\n";
    case.write("ssh", script);
    fs::set_permissions(case.path("ssh"), fs::Permissions::from_mode(0o755)).unwrap();
    case.path("ssh").display().to_string()
}

fn two_free_ports() -> String {
    let free = |port| TcpListener::bind(("127.0.0.1", port));
    loop {
        let port = free(0).unwrap().local_addr().unwrap().port();
        if port < u16::MAX && free(port).is_ok() && free(port + 1).is_ok() {
            return port.to_string();
        }
    }
}

#[test]
fn hosts_that_read_different_configurations_do_not_begin() {
    let case = Case::tiny();
    case.write("hosts", "127.0.0.1 slots=1\nlocalhost:1\n");
    let (ssh, port) = (fake_ssh(&case), two_free_ports());
    let args = ["launch", "--hostfile", "hosts", "--ssh", &ssh, "--port", &port, "--", "sft", "config.toml", "--set", "optim.lr=1e-3"];
    let done = case.temper(&args).exits(2);
    let done = done.says(&["error: the ranks were not started alike", "config.optim.lr  0.001 on rank 0; 0.002 on rank 1"]);
    assert!(!case.has("run"), "{done:#?}");

    case.write("hosts", "127.0.0.1\ngpu 8\n");
    case.temper(&args).exits(2).says(&["error: hosts:2: \"8\" is not understood"]);
    case.temper(&["launch", "--hostfile", "hosts", "--", "plan"]).exits(2).says(&["comes `sft CONFIG.toml ...`, not \"plan\""]);
}

#[test]
fn a_host_that_ssh_does_not_reach_ends_the_others() {
    let case = Case::tiny();
    case.write("hosts", "127.0.0.1:1\nnowhere:1\n");
    case.write("ssh", "#!/bin/sh\n[ \"$1\" = nowhere ] && { echo no route >&2; exit 255; }\nexec sh -c \"$2\"\n");
    fs::set_permissions(case.path("ssh"), fs::Permissions::from_mode(0o755)).unwrap();
    let (ssh, port) = (case.path("ssh").display().to_string(), two_free_ports());
    let began = Instant::now();
    let args = ["launch", "--hostfile", "hosts", "--ssh", &ssh, "--port", &port, "--", "sft", "config.toml"];
    let done = case.temper(&args);
    assert_ne!(done.code, 0);
    assert!(began.elapsed() < Duration::from_secs(30));
    done.says(&["[nowhere] no route", "error: nowhere: ", "failed"]);
}

/// The quickstart's kind of run as one rank, then begun by four ranks and ended by two in another layout: the same losses, and a model
/// that any program loads.
#[test]
fn a_run_goes_on_in_another_layout_as_if_one_rank_had_done_it_all() {
    let case = Case::tiny();
    let sets = ["train.steps=6", "checkpoint.every=3", "checkpoint.keep_last=0", "train.global_batch=4"];
    let run = |dir: &'static str, more: &[&'static str]| [&sets[..], &[dir], more].concat();
    case.sft("config.toml", &run("log.dir=one", &[])).ok();
    case.sft("config.toml", &run("log.dir=many", &["parallel.tp=2", "parallel.pp=2"])).ok();
    fs::remove_dir_all(case.path("many/checkpoints/step-000006")).unwrap();
    fs::remove_dir_all(case.path("many/hf")).unwrap();
    case.resume("config.toml", &run("log.dir=many", &["parallel.dp=2"])).ok().says(&["resumed from", "step 3"]);
    let loss = |dir: &str| -> Vec<(u64, f64)> {
        let step = |s: &serde_json::Value| (s["step"].as_u64().unwrap(), s["loss"].as_f64().unwrap());
        case.steps(dir).iter().map(step).collect()
    };
    let one = loss("one");
    // Steps 4 to 6 were done twice: before the checkpoint was taken away and after.
    let many = loss("many");
    assert_eq!(many.len(), 9, "{many:?}");
    for (step, found) in many {
        let (_, want) = one[step as usize - 1];
        assert!((found - want).abs() < 1e-4 * want, "step {step}: {found}, one rank {want}");
    }
    assert!(case.path("many/hf/model.safetensors").exists() && case.path("many/hf/config.json").exists());
    case.temper(&["checkpoint", "verify", case.path("many/checkpoints/step-000003").to_str().unwrap()]).ok();
}
