//! What happens before the first step: everything is checked and can be stopped while the folders are as they were.

use crate::job::{Job, signal, until};
use crate::support::{Case, contents, copy};
use rustix::process::Signal;
use std::{fs, process::Command};

#[test]
fn places_that_cannot_be_written_are_bad_input() {
    let case = Case::tiny();
    case.write("file", "");
    for dir in ["file", "file/run", "/dev/null/run", "/proc/run"] {
        let set = format!("log.dir={dir}");
        case.sft("config.toml", &[&set]).exits(2).says(&["error: log.dir: ", "Choose another log.dir"]);
    }
    case.temper(&["plan", "--model", "Qwen3-8B", "--gpus", "8", "--svg", "absent/plan.svg"]).exits(2).says(&["--svg absent/plan.svg"]);
    let done = case.sft("config.toml", &["log.dir=file", "parallel.dp=2"]).exits(2).says(&["log.dir: "]);
    assert!(!done.stderr.contains("logs: "), "{done:#?}");
    // The folder is good, but what a resume writes on in it is not.
    case.sft("config.toml", &[]).ok();
    fs::remove_file(case.path("run/events.jsonl")).unwrap();
    fs::create_dir(case.path("run/events.jsonl")).unwrap();
    case.resume("config.toml", &["train.steps=5"]).exits(2).says(&["log.dir: ", "run/events.jsonl"]);
    case.temper(&["checkpoint", "export", "run", "--out", "file/model"]).exits(2).says(&["file/model"]);
}

#[test]
fn files_that_are_absent_are_named_with_what_they_are_for() {
    let case = Case::tiny();
    fs::write(case.path("hosts"), b"gpu-1\n\xff\n").unwrap();
    for (args, said) in [
        (&["sft", "absent.toml"][..], &["absent.toml: the configuration cannot be read", "Give a TOML file"][..]),
        (
            &["generate", "../common/tiny-tokenizer", "--prompt", "a"],
            &["config.json: the model's configuration cannot be read", "Give a Hugging Face"],
        ),
        (&["verify", "../common/tiny-qwen3", "--golden", "absent"], &["--golden absent", "Give a safetensors file"]),
        (&["checkpoint", "list", "absent"], &["absent: ", "Give the folder of a run"]),
        (&["launch", "--hostfile", "absent", "--", "sft", "config.toml"], &["--hostfile absent", "one host a line"]),
        (&["launch", "--hostfile", "hosts", "--", "sft", "config.toml"], &["--hostfile hosts: line 2 is not UTF-8"]),
        (&["sft", "config.toml", "--trace", "absent/trace.json"], &["--trace absent/trace.json", "Give a file in a folder that exists"]),
    ] {
        case.temper(args).exits(2).says(said);
    }
}

#[test]
fn an_earlier_run_stays_where_it_is_until_all_is_checked() {
    let case = Case::tiny();
    case.sft("config.toml", &["train.steps=2"]).ok();
    let before = contents(&case.path("run"));
    let args = Case::sft_args("config.toml", &[], &["--trace", "trace.json", "--trace-steps", "99"]);
    case.temper(&args).exits(2).says(&["--trace-steps: this run goes from step 1 to 4"]);
    assert!(!case.has("run.1") && before == contents(&case.path("run")));
    case.sft("config.toml", &[]).ok().says(&["held an earlier run"]);
    assert!(case.has("run.1/events.jsonl"));
}

/// The tokenizer is a pipe that nobody fills, so that the run stands still while it reads.
#[test]
fn a_run_that_still_reads_can_be_stopped_in_order() {
    let case = Case::tiny();
    case.sft("config.toml", &["train.steps=2"]).ok();
    let before = contents(&case.path("run"));
    copy(&case.path("../common/tiny-qwen3"), &case.path("slow"));
    fs::remove_file(case.path("slow/tokenizer.json")).unwrap();
    assert!(Command::new("mkfifo").arg(case.path("slow/tokenizer.json")).status().unwrap().success());
    for (ranks, words) in [("1", "error: stopped before the first step"), ("2", "stopped before the first step")] {
        let mut job = Job::sft(&case, &["model.path=slow"], &["--ranks", ranks]);
        let id = job.id();
        job.until("a process that hears signals", || hears_sigterm(id));
        if ranks == "2" {
            until("the ranks", || job.ranks().len() == 2);
        }
        signal(id, Signal::TERM);
        job.finish().exits(130).says(&[words]);
        assert!(!case.has("run.1") && before == contents(&case.path("run")));
    }
}

/// Whether a process has a handler for SIGTERM.
fn hears_sigterm(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|l| u64::from_str_radix(l.strip_prefix("SigCgt:")?.trim(), 16).ok());
    caught.is_some_and(|bits| bits & (1 << 14) != 0)
}
