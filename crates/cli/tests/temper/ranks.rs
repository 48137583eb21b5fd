//! Ranks that are processes: a supervisor over real training, and the start on several hosts.

use crate::hosts::Hosts;
use crate::job::{Job, signal};
use crate::support::{Case, close, column, command, copy, essences, finish, in_shell};
use rustix::process::Signal;
use std::{
    fs,
    net::TcpListener,
    os::unix::fs::PermissionsExt,
    process::Command,
    time::{Duration, Instant},
};

#[test]
fn a_rank_killed_in_training_is_named_and_the_job_goes_on_from_its_checkpoint() {
    let case = Case::tiny();
    let long = ["train.steps=60", "checkpoint.every=5", "checkpoint.keep_last=0", "checkpoint.export=false"];
    case.sft("config.toml", &[&long[..], &["log.dir=whole"]].concat()).ok();
    let sets = [&long[..], &["log.dir=killed"]].concat();
    let mut job = Job::sft(&case, &sets, &["--ranks", "1", "--restarts", "1"]);
    job.until("a checkpoint", || case.has("killed/checkpoints/step-000005"));
    signal(job.ranks()[0], Signal::KILL);
    let done = job.finish().ok().says(&["error: rank 0 was ended by SIGKILL", "Last heard of it: training, step", "restart 1 of 1"]);
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
    let mut job = Job::sft(&case, &sets, &["--ranks", "1", "--restarts", "2"]);
    job.training(&case, "run", 1);
    signal(job.id(), Signal::TERM);
    let done = job.finish().exits(1).says(&["stopping after the step under way and a checkpoint", "error: interrupted after step"]);
    assert!(!done.stderr.contains("restart"), "{done:#?}");
    assert_eq!(done.stderr.matches("stopping after").count(), 1);
    assert_eq!(case.checkpoints("run").len(), 1);
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

/// An ssh that stays on this host, and runs the second one's line of shell, `$2`, by a command.
fn fake_ssh(case: &Case, second: &str) -> String {
    case.write("ssh", &format!("#!/bin/sh\nif [ \"$1\" = localhost ]; then {second}; fi\nexec sh -c \"$2\"\n"));
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
    let (ssh, port) = (fake_ssh(&case, "exec sh -c \"$(echo \"$2\" | sed s/optim.lr=1e-3/optim.lr=2e-3/)\""), two_free_ports());
    let args = ["launch", "--hostfile", "hosts", "--ssh", &ssh, "--port", &port, "--", "sft", "config.toml", "--set", "optim.lr=1e-3"];
    let done = case.temper(&args).exits(2);
    let done = done.says(&["error: the ranks were not started alike", "config.optim.lr  0.001 on rank 0; 0.002 on rank 1"]);
    assert!(!case.has("run"), "{done:#?}");

    case.write("hosts", "127.0.0.1\ngpu 8\n");
    case.temper(&args).exits(2).says(&["error: hosts:2: \"8\" is not understood"]);
    case.temper(&["launch", "--hostfile", "hosts", "--", "plan"]).exits(2).says(&["comes `sft CONFIG.toml ...`, not \"plan\""]);
}

/// Two hosts that see different folders under the same name: first with other data, then with all alike but the run folder, which they
/// should share.
#[test]
fn hosts_with_folders_of_their_own_do_not_train() {
    let case = Case::tiny();
    case.write("hosts", "127.0.0.1:1\nlocalhost:1\n");
    let own = case.path("../other-host");
    fs::create_dir(&own).unwrap();
    let second = format!("exec unshare -m sh -c \"mount --bind {} {} && $2\"", own.display(), case.dir.display());
    let (ssh, port) = (fake_ssh(&case, &second), two_free_ports());
    if !Command::new(&ssh).args(["localhost", "true"]).status().unwrap().success() {
        return println!("SKIPPED: no folder can be mounted here");
    }
    copy(&case.dir, &own);
    let args = ["launch", "--hostfile", "hosts", "--ssh", &ssh, "--port", &port, "--", "sft", "config.toml"];
    fs::write(own.join("chat.jsonl"), case.read("chat.jsonl").replacen("Row a", "Row z", 1)).unwrap();
    let done = case.temper(&args).exits(2).says(&["error: the ranks were not started alike", "data.train, file 1"]);
    assert!(!case.has("run") && !own.join("run").exists(), "{done:#?}");

    fs::copy(case.path("chat.jsonl"), own.join("chat.jsonl")).unwrap();
    let done =
        case.temper(&args).exits(2).says(&["rank 1 (", "run: rank 0", "does not see", "must lie on a file system that all hosts share"]);
    assert!(!case.has("run/events.jsonl") && !own.join("run").exists(), "{done:#?}");

    // A run of one host cannot be resumed by two that do not share it, and none of its checkpoints is called damaged.
    case.sft("config.toml", &["parallel.dp=2", "checkpoint.every=2"]).ok();
    let again = [&args[..], &["--resume", "--set", "train.steps=6"]].concat();
    let done = case.temper(&again).exits(2).says(&["rank 1 (", "must lie on a file system that all hosts share"]);
    assert!(!done.stderr.contains("damaged") && !done.stderr.contains("incomplete"), "{done:#?}");
}

/// Each stage has half of the layers, and reads no more; what the other has is no stranger to the model.
#[test]
fn ranks_read_what_they_hold_and_say_so() {
    let case = Case::tiny();
    let file = fs::metadata(case.path("../common/tiny-qwen3/model.safetensors")).unwrap().len();
    let sets = ["train.steps=2", "checkpoint.export=false"];
    let started = |dir: &str| case.events(dir).into_iter().find(|e| e["event"] == "start").unwrap()["loaded"].clone();
    let one = case.sft("config.toml", &[&sets[..], &["log.dir=one"]].concat()).ok();
    one.says(&["read   ", " GB/s"]);
    let alone = started("one");
    assert_eq!((alone["ranks"].as_u64(), &alone["bytes"]), (Some(1), &alone["all_bytes"]));

    let done = case.sft("config.toml", &[&sets[..], &["log.dir=two", "parallel.pp=2"]].concat()).ok().says(&[" GB/s  (2 ranks: "]);
    assert!(!done.stdout.contains("no place in this model") && !case.notices("two").contains("no place in this model"), "{done:#?}");
    let loaded = started("two");
    let bytes = |key: &str| loaded[key].as_u64().unwrap();
    assert!(bytes("bytes") < file * 6 / 10, "{loaded} of {file}");
    assert!(bytes("wanted_bytes") <= bytes("bytes") && bytes("all_bytes") < file, "{loaded} of {file}");
    // Both stages together have every tensor once.
    assert!(bytes("all_bytes") >= alone["wanted_bytes"].as_u64().unwrap(), "{loaded}, alone {alone}");

    let more = ["train.steps=3", "checkpoint.export=false", "log.dir=two", "parallel.tp=2"];
    case.resume("config.toml", &more).ok().says(&["read   "]);
    let resumed = case.events("two").into_iter().filter(|e| e["event"] == "start").nth(1).unwrap();
    assert_eq!(resumed["loaded"]["ranks"], 2, "{resumed}");
}

/// A model of 100 MB of weights: who resumes holds no tensor a second time. `mem_peak_bytes` is VmHWM, of rank 0.
#[test]
fn a_resume_needs_no_more_memory_than_training() {
    let case = Case::tiny();
    copy(&case.path("../common/tiny-qwen3"), &case.path("larger"));
    let mut config = case.json("larger/config.json");
    let sizes = [("hidden_size", 512), ("num_hidden_layers", 8), ("intermediate_size", 1536), ("head_dim", 64)];
    sizes.into_iter().chain([("num_attention_heads", 8), ("num_key_value_heads", 4)]).for_each(|(key, n)| config[key] = n.into());
    config["layer_types"] = vec!["full_attention"; 8].into();
    case.write("larger/config.json", &config.to_string());
    let sets = ["model.path=larger", "model.init=random", "data.seq_len=64", "checkpoint.export=false", "checkpoint.every=0"];
    for (layout, dir) in [("parallel.dp=1", "log.dir=one"), ("parallel.dp=2", "log.dir=two")] {
        let with = |steps| [&sets[..], &[layout, dir, steps]].concat();
        case.sft("config.toml", &with("train.steps=2")).ok();
        case.resume("config.toml", &with("train.steps=4")).ok();
        let peaks = column(&case.steps(dir.trim_start_matches("log.dir=")), "mem_peak_bytes");
        println!("{layout}: {peaks:?}");
        // The first step of each process; at the second a save has begun, which holds copies.
        assert!(peaks[2] <= 1.03 * peaks[0], "{layout}: {peaks:?}");
    }
}

/// Arguments of a launch on the hosts of the file `hosts` by a script for ssh, which has the host's name in `$1` and the line of shell
/// for it in `$2`.
fn by_script(case: &Case, script: &str) -> Vec<String> {
    case.write("ssh", &format!("#!/bin/sh\n{script}\n"));
    fs::set_permissions(case.path("ssh"), fs::Permissions::from_mode(0o755)).unwrap();
    let (ssh, port) = (case.path("ssh").display().to_string(), two_free_ports());
    ["launch", "--hostfile", "hosts", "--ssh", &ssh, "--port", &port, "--", "sft", "config.toml"].map(String::from).into()
}

/// Whichever host it is, ssh's own words come first, and the exit code is not ssh's.
#[test]
fn a_host_that_ssh_does_not_reach_ends_the_others() {
    let case = Case::tiny();
    let args = by_script(&case, "case $1 in no*) echo no route >&2; exit 255;; esac\nexec sh -c \"$2\"");
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    for hosts in ["127.0.0.1:1\nnowhere:1\n", "nowhere:1\n127.0.0.1:1\n", "nowhere:1\nnorway:1\n"] {
        case.write("hosts", hosts);
        let began = Instant::now();
        let done = case.temper(&args).exits(1).says(&["no route", "ssh failed: it ended with 255, before a supervisor ran there"]);
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
        assert!(done.stderr.find("no route") < done.stderr.find("error: no"), "{done:#?}");
        assert_eq!(done.stderr.matches("error: no").count(), 1, "{done:#?}");
    }
}

/// One host is never reached: a word ends the launch, what it has started here, and the host that waits for that one.
#[test]
fn a_launch_is_stopped_while_an_ssh_hangs() {
    for (hosts, word) in [("127.0.0.1:1\nnowhere:1\n", Signal::INT), ("nowhere:1\n127.0.0.1:1\n", Signal::TERM)] {
        let case = Case::tiny();
        case.write("hosts", hosts);
        let args = by_script(&case, "[ $1 = nowhere ] && { echo > hangs; sleep 1000; exit 1; }\nexec sh -c \"$2\"");
        let mut job = Job::start(&case, &args.iter().map(String::as_str).collect::<Vec<_>>());
        job.until("an ssh that hangs", || case.has("hangs"));
        let began = Instant::now();
        match word {
            Signal::INT => job.ctrl_c(),
            _ => signal(job.id(), word),
        }
        let done = job.finish().exits(130).says(&["stopping: not every host has begun"]);
        assert!(began.elapsed() < Duration::from_secs(25), "{:?}: {done:#?}", began.elapsed());
        assert!(!done.stderr.contains("failed"), "nobody is blamed: {done:#?}");
    }
}

/// An ssh that asks on the terminal would wait for ever, as it is in the background there.
#[test]
fn an_ssh_that_asks_for_a_password_is_named() {
    if Command::new("script").arg("--version").output().is_err() {
        return println!("SKIPPED: no script(1) here, which gives a terminal");
    }
    let case = Case::tiny();
    case.write("hosts", "127.0.0.1:1\n");
    let args = by_script(&case, "read answer < /dev/tty\nexec sh -c \"$2\"");
    let launch = command(&case.dir, &args.iter().map(String::as_str).collect::<Vec<_>>());
    let done = finish(in_shell("exec script -qec \"$(printf '%s ' \"$0\" \"$@\")\" /dev/null", &launch)).exits(1);
    done.says(&["error: 127.0.0.1: ", "ssh waits for an answer (a password,", "log in without questions"]);
}

/// A Ctrl-C in the launcher's terminal is heard by the launcher alone: the run is saved, which an ssh that ends at it would prevent.
#[test]
fn a_launched_run_ends_in_order_at_a_ctrl_c() {
    let case = Case::tiny();
    case.write("hosts", "127.0.0.1 slots=2\n");
    let args = by_script(&case, "exec sh -c \"$2\"");
    let endless = ["--set", "train.steps=100000", "--set", "checkpoint.every=0", "--set", "checkpoint.export=false"];
    let mut job = Job::start(&case, &args.iter().map(String::as_str).chain(endless).collect::<Vec<_>>());
    job.until("a step", || case.has("run/events.jsonl") && case.steps("run").len() > 1);
    job.ctrl_c();
    let done = job.finish().exits(1).says(&["the hosts are told to stop", "error: interrupted after step", "1 other rank stopped; logs: "]);
    assert!(!done.stderr.contains("failed") && !case.checkpoints("run").is_empty(), "{done:#?}");
}

/// What is given for ssh and never runs anything is named, whatever its exit code says.
#[test]
fn a_launch_by_what_is_no_ssh_fails_aloud() {
    let case = Case::tiny();
    case.write("hosts", "127.0.0.1:1\n");
    for (ssh, code) in [("false", "ended with 1"), ("echo hi", "ended with 0")] {
        let args = ["launch", "--hostfile", "hosts", "--ssh", ssh, "--port", &two_free_ports(), "--", "sft", "config.toml"];
        case.temper(&args).exits(1).says(&["error: 127.0.0.1: ", code, "before a supervisor ran there", "--ssh"]);
    }
}

/// A supervisor that stands still for a while (Ctrl-Z, a paused machine) does not take its ranks for dead when it goes on.
#[test]
fn a_stopped_supervisor_goes_on() {
    let case = Case::tiny();
    let sets = ["train.steps=100000", "checkpoint.every=0", "checkpoint.export=false"];
    let mut job = Job::sft(&case, &sets, &["--ranks", "2", "--silence", "3"]);
    job.training(&case, "run", 2);
    signal(job.id(), Signal::STOP);
    std::thread::sleep(Duration::from_secs(5));
    let before = case.steps("run").len();
    signal(job.id(), Signal::CONT);
    job.until("more steps", || case.steps("run").len() > before + 2);
    signal(job.id(), Signal::TERM);
    job.finish().exits(1).says(&["error: interrupted after step"]);
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
    let done = case.resume("config.toml", &run("log.dir=many", &["parallel.dp=2"])).ok();
    done.says(&["resumed from", "step-000003 (step 3); its layout was tp 2, pp 2, and is now dp 2", "2 ranks: dp 2"]);
    let starts: Vec<_> = case.events("many").into_iter().filter(|e| e["event"] == "start").collect();
    assert_eq!((&starts[0]["ranks"], &starts[0]["layout"]), (&4.into(), &"tp 2, pp 2".into()));
    assert_eq!((&starts[1]["ranks"], &starts[1]["layout"], &starts[1]["resumed_from"]), (&2.into(), &"dp 2".into(), &3.into()));
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

/// With dp alone every replica has the whole model: the first answers, with the words of the model that it exported.
#[test]
fn the_sample_prompt_is_answered_where_a_rank_has_the_whole_model() {
    let case = Case::tiny();
    let prompt = "log.sample_prompt=1 + 1 = ?";
    let done = case.sft("config.toml", &["parallel.dp=2", prompt]).ok();
    let (_, reply) = done.stdout.split_once("> 1 + 1 = ?\n").unwrap_or_else(|| panic!("{done:#?}"));
    let said = case.temper(&["generate", "run/hf", "--chat", "1 + 1 = ?", "--max-tokens", "128", "--temperature", "0"]).ok().stdout;
    assert!(!said.trim().is_empty() && reply.starts_with(said.trim()), "{said:?}: {done:#?}");

    let done = case.sft("config.toml", &["parallel.tp=2", prompt, "log.dir=tp"]).ok();
    let (note, step) = (done.stdout.find("in this layout (tp 2) no rank has the whole model"), done.stdout.find("step 1/4"));
    assert!(note.is_some() && note < step && !done.stdout.contains("> 1 + 1"), "told before the training: {done:#?}");
}

/// Two hosts that have nothing in common but a cable and their files: what is launched on them trains as one rank does, and ends when the
/// cable is pulled.
#[test]
fn ranks_of_two_hosts_train_over_the_network() {
    let hosts = match Hosts::two(2) {
        Ok(hosts) => hosts,
        Err(why) => return println!("SKIPPED: no network namespaces here: {why}"),
    };
    let case = Case::tiny();
    case.write("hosts", "10.77.2.1 slots=2\n10.77.2.2 slots=2\n");
    let [a, b] = &hosts.names;
    case.write("ssh", &format!("#!/bin/sh\n[ $1 = 10.77.2.1 ] && host={a} || host={b}\nexec ip netns exec $host sh -c \"$2\"\n"));
    fs::set_permissions(case.path("ssh"), fs::Permissions::from_mode(0o755)).unwrap();
    let ssh = case.path("ssh").display().to_string();
    let launch = ["launch", "--hostfile", "hosts", "--ssh", &ssh, "--port", "29500", "--", "sft", "config.toml", "--set", "parallel.tp=2"];
    case.sft("config.toml", &["log.dir=one"]).ok();
    case.temper(&[&launch[..], &["--set", "parallel.pp=2"]].concat()).ok().says(&["4 ranks: tp 2, pp 2"]);
    close(&column(&case.steps("run"), "loss"), &column(&case.steps("one"), "loss"), 1e-4);

    let endless = ["--silence", "3", "--set", "train.steps=100000", "--set", "checkpoint.every=0", "--set", "log.dir=cut"];
    let mut job = Job::start(&case, &[&launch[..], &endless].concat());
    job.until("a step", || case.has("cut/events.jsonl") && case.steps("cut").len() > 1);
    hosts.cut();
    let done = job.finish();
    assert!(done.code != 0 && done.stderr.contains("is gone: no sign of life for 3.0 s"), "{done:#?}");
}
