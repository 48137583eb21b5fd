//! What clusters do to jobs: ranks of real training are killed, stopped and cut off at chosen moments. Each job ends within seconds with
//! the word that names the cause, leaves no process and no broken checkpoint, and goes on as if nothing had happened.

use crate::job::{Job, signal, thaw};
use crate::support::{Case, Done, close, column, copy, essence, essences, names};
use rustix::process::{Pid, Resource, Rlimit, Signal, getpid, prlimit, set_child_subreaper};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

/// A run that would go on for ever and saves at every step.
const ENDLESS: [&str; 5] =
    ["train.steps=100000", "optim.schedule=constant", "optim.warmup=0", "checkpoint.export=false", "checkpoint.every=1"];
/// From the disturbance to the end of the job: well below the eight seconds after which the supervisor kills, and a loaded machine.
const SOON: Duration = Duration::from_secs(30);

/// Two ranks that divide the batch, and the same run as a pipeline and as one rank.
const DP: &str = "parallel.dp=2";
const PP: &str = "parallel.pp=2";
const ONE: &str = "parallel.dp=1";

fn sets<'a>(layout: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&ENDLESS[..], &[layout, "log.dir=run"], more].concat()
}

/// The folder of the save under way.
fn temporary(case: &Case) -> Option<PathBuf> {
    let dir = case.path("run/checkpoints");
    let found = fs::read_dir(dir).ok()?.filter_map(|e| e.ok()?.file_name().into_string().ok());
    found.filter(|n| n.starts_with(".tmp-step-")).map(|n| case.path("run/checkpoints").join(n)).next()
}

/// Whether a save is under way, after one that is done, with some files there and others not.
fn saving(case: &Case, there: &[&str], not: &[&str]) -> bool {
    let Some(dir) = temporary(case) else { return false };
    !case.checkpoints("run").is_empty()
        && dir.is_dir()
        && there.iter().all(|f| dir.join(f).exists())
        && !not.iter().any(|f| dir.join(f).exists())
}

/// Everything saved is whole; the run goes on in its own layout, bit for bit as one that nothing happened to, and in another to rounding.
#[track_caller]
fn goes_on(case: &Case, layout: &str, other: &str) {
    case.temper(&["checkpoint", "verify", "run"]).ok();
    let steps = format!("train.steps={}", case.checkpoints("run").last().unwrap() + 3);
    copy(&case.path("run"), &case.path("other"));
    let short = |layout, dir| [&ENDLESS[1..], &["checkpoint.every=0", &steps, layout, dir]].concat();
    case.sft("config.toml", &short(layout, "log.dir=whole")).ok();
    let whole = case.steps("whole");
    case.resume("config.toml", &short(layout, "log.dir=run")).ok().says(&["resumed from"]);
    let trained = case.steps("run");
    assert_eq!(trained.last().unwrap()["step"], whole.last().unwrap()["step"]);
    for step in &trained {
        let undisturbed = step["step"].as_u64().and_then(|n| whole.get(n as usize - 1));
        assert!(undisturbed.is_none_or(|w| essence(w) == essence(step)), "{step}, undisturbed {undisturbed:?}");
    }
    assert!(!names(&case.path("run/checkpoints")).iter().any(|n| n.starts_with('.')), "nothing of a cut save is left");

    case.resume("config.toml", &short(other, "log.dir=other")).ok().says(&["resumed from"]);
    let trained = case.steps("other");
    let (want, found) = (&whole[whole.len() - 3..], &trained[trained.len() - 3..]);
    for (key, tolerance) in [("loss", 1e-5), ("grad_norm", 1e-4)] {
        close(&column(found, key), &column(want, key), tolerance);
    }
}

#[track_caller]
fn killed(job: Job, victim: usize, others: &str) -> Done {
    let began = Instant::now();
    let done = job.finish().exits(137).says(&[&format!("error: rank {victim} was ended by SIGKILL"), "Last heard of it: ", others]);
    assert!(began.elapsed() < SOON, "{:?}: {done:#?}", began.elapsed());
    assert_eq!(done.stderr.matches("error:").count(), 1, "{done:#?}");
    done
}

#[test]
fn a_rank_killed_in_training_ends_all_and_costs_what_was_not_saved() {
    for (layout, other, victim) in [(DP, PP, 1), (PP, ONE, 0)] {
        let case = Case::tiny();
        let mut job = Job::sft(&case, &sets(layout, &["checkpoint.every=3"]), &[]);
        let ranks = job.training(&case, "run", 2);
        job.until("a checkpoint", || !case.checkpoints("run").is_empty());
        signal(ranks[victim], Signal::KILL);
        killed(job, victim, "1 other rank stopped because of it");
        assert!(case.read(&format!("run/logs/rank-0000{}.log", 1 - victim)).contains(&format!("rank {victim} is gone")));
        goes_on(&case, layout, other);
    }
}

/// One rank stands still until all others wait for it in a collective, and dies then.
#[test]
fn a_rank_that_others_wait_for_is_killed() {
    let case = Case::tiny();
    let layout = "parallel={tp=2,pp=2}";
    let mut job = Job::sft(&case, &sets(layout, &["checkpoint.every=2"]), &[]);
    let ranks = job.training(&case, "run", 4);
    job.until("a checkpoint", || !case.checkpoints("run").is_empty());
    signal(ranks[2], Signal::STOP);
    let written = || fs::metadata(case.path("run/events.jsonl")).unwrap().len();
    let (mut before, mut since) = (0, Instant::now());
    job.until("a standstill of all", || {
        if written() != before {
            (before, since) = (written(), Instant::now());
        }
        since.elapsed() > Duration::from_secs(1)
    });
    signal(ranks[2], Signal::KILL);
    killed(job, 2, "3 other ranks stopped because of it");
    goes_on(&case, layout, DP);
}

/// Moments of a save at which a rank dies, by what is on disk.
#[test]
fn a_rank_killed_in_a_save_costs_that_save_at_most() {
    let [data, record] = ["rank-00001.bin", "rank-00001.json"];
    type Files<'a> = &'a [&'a str];
    let moments: [(&str, usize, Files, Files); 5] = [
        ("before it writes", 1, &[], &[data]),
        ("while it writes", 1, &[data], &[record]),
        ("the first rank, while it writes", 0, &["rank-00000.bin"], &["rank-00000.json"]),
        ("the first rank, while it commits", 0, &["tensors.json"], &[]),
        ("while another commits", 1, &["tensors.json"], &[]),
    ];
    for (what, victim, there, not) in moments {
        let case = Case::tiny();
        let mut job = Job::sft(&case, &sets(DP, &[]), &[]);
        let ranks = job.training(&case, "run", 2);
        job.freeze(&ranks, what, || saving(&case, there, not));
        let before = case.checkpoints("run");
        signal(ranks[victim], Signal::KILL);
        thaw(&[ranks[1 - victim]]);
        killed(job, victim, "1 other rank stopped because of it");
        let after = case.checkpoints("run");
        // What the victim had not yet written cannot have been committed; once all is written, the first rank may commit it alone.
        assert!(before == after || there == ["tensors.json"] && victim == 1, "{what}: {before:?}, then {after:?}");
        goes_on(&case, DP, PP);
    }
}

/// The first rank has said all it has to say and waits for the other, which has written next to nothing.
#[test]
fn nothing_is_committed_before_every_rank_has_written() {
    let case = Case::tiny();
    let mut job = Job::sft(&case, &sets(DP, &[]), &[]);
    let ranks = job.training(&case, "run", 2);
    job.freeze(&ranks, "a save that one has begun", || saving(&case, &["rank-00001.bin"], &["rank-00001.json", "rank-00000.json"]));
    let (before, dir) = (case.checkpoints("run"), temporary(&case).unwrap());
    thaw(&ranks[..1]);
    job.until("all that the first rank writes", || dir.join("rank-00000.json").exists());
    // Longer than ranks take to agree: time for a first rank that does not wait to show it.
    let since = Instant::now();
    job.until("what must not come", || since.elapsed() > Duration::from_millis(1500) || case.checkpoints("run") != before);
    assert!(dir.exists() && !dir.join("tensors.json").exists());
    signal(ranks[1], Signal::KILL);
    killed(job, 1, "1 other rank stopped because of it");
    assert_eq!(case.checkpoints("run"), before);
    assert!(!dir.exists(), "whoever is left takes away what was begun");
    goes_on(&case, DP, ONE);
}

#[test]
fn a_stopped_rank_is_named_in_training_and_in_a_save() {
    for in_a_save in [false, true] {
        let case = Case::tiny();
        let mut job = Job::sft(&case, &sets(DP, &[]), &["--silence", "5"]);
        let ranks = job.training(&case, "run", 2);
        if in_a_save {
            job.freeze(&ranks, "a save", || saving(&case, &["rank-00001.bin"], &["rank-00001.json"]));
            thaw(&ranks[..1]);
        } else {
            job.until("a checkpoint", || !case.checkpoints("run").is_empty());
            signal(ranks[1], Signal::STOP);
        }
        let began = Instant::now();
        job.finish().exits(1).says(&[
            "error: rank 1 has given no sign of life for",
            "is stopped, by SIGSTOP",
            "1 other rank stopped because of it",
        ]);
        assert!(began.elapsed() < SOON);
        goes_on(&case, DP, PP);
    }
}

/// Long before the supervisor misses it, the rank that waits for it does.
#[test]
fn a_stopped_rank_is_named_by_the_one_that_waits_for_it() {
    let case = Case::tiny();
    let mut job = Job::sft(&case, &sets(DP, &["checkpoint.every=2"]), &["--silence", "60", "--patience", "4"]);
    let ranks = job.training(&case, "run", 2);
    job.until("a checkpoint", || !case.checkpoints("run").is_empty());
    signal(ranks[1], Signal::STOP);
    let began = Instant::now();
    job.finish().exits(1).says(&["error: rank 1 keeps the others waiting", "nothing from rank 1 within 4.0 s", "its process is stopped"]);
    assert!(began.elapsed() < SOON);
    goes_on(&case, DP, PP);
}

/// Not even ranks that stand still in a save outlive the supervisor. As in a container, the processes that it leaves behind come to one
/// of the same session, which neither collects them nor has the system wake those that are stopped.
#[test]
fn a_killed_supervisor_takes_all_ranks_along() {
    set_child_subreaper(Some(getpid())).unwrap();
    for frozen in [false, true] {
        let case = Case::tiny();
        let mut job = Job::sft(&case, &sets(DP, &[]), &[]);
        let ranks = job.training(&case, "run", 2);
        if frozen {
            job.freeze(&ranks, "a save", || saving(&case, &["rank-00001.bin"], &["rank-00001.json"]));
        } else {
            job.until("a checkpoint", || !case.checkpoints("run").is_empty());
        }
        signal(job.id(), Signal::KILL);
        job.finish().exits(-1);
        if frozen {
            assert!(temporary(&case).is_some());
        }
        goes_on(&case, DP, PP);
    }
}

/// A limit on the size of one rank's files stands for its full disk.
#[test]
fn the_full_disk_of_one_rank_is_told_once_in_its_own_words() {
    for victim in [0, 1] {
        let case = Case::tiny();
        let mut job = Job::sft_on_small_disk(&case, &sets(DP, &[]));
        let ranks = job.training(&case, "run", 2);
        job.until("a checkpoint", || !case.checkpoints("run").is_empty());
        let room = Rlimit { current: Some(64 << 10), maximum: Some(64 << 10) };
        prlimit(Some(Pid::from_raw(ranks[victim] as i32).unwrap()), Resource::Fsize, room).unwrap();
        let began = Instant::now();
        let done = job
            .finish()
            .exits(1)
            .says(&[&format!("error: rank {victim}: cannot write "), &format!("rank-0000{victim}.bin: File too large")]);
        assert!(began.elapsed() < SOON);
        assert_eq!(done.stderr.matches("error:").count(), 1, "{done:#?}");
        done.says(&["1 other rank "]);
        assert!(temporary(&case).is_none());
        goes_on(&case, DP, PP);
    }
}

/// A disk of a few megabytes, where this may be mounted.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(at: PathBuf, size: &str) -> Option<SmallDisk> {
        fs::create_dir(&at).unwrap();
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", size, "none"]).arg(&at).output();
        let done = mounted.is_ok_and(|o| o.status.success());
        if !done {
            println!("SKIPPED: no disk can be mounted here");
        }
        done.then_some(SmallDisk(at))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        drop(Command::new("umount").arg("-l").arg(&self.0).status());
    }
}

#[test]
fn a_disk_that_is_really_full_keeps_what_was_saved() {
    let case = Case::tiny();
    let Some(_disk) = SmallDisk::mount(case.path("run"), "size=4m") else { return };
    let began = Instant::now();
    let done = case.sft("config.toml", &sets(DP, &["checkpoint.keep_last=0"])).exits(1);
    done.says(&["error: rank ", "No space left on device", "1 other rank "]);
    assert!(began.elapsed() < SOON);
    assert!(temporary(&case).is_none());
    case.temper(&["checkpoint", "verify", "run"]).ok();
    fs::remove_dir_all(case.path("run/checkpoints/step-000001")).unwrap();
    fs::remove_dir_all(case.path("run/checkpoints/step-000002")).unwrap();
    goes_on(&case, DP, PP);
}

#[test]
fn damage_to_what_ranks_saved_is_named_and_an_older_checkpoint_taken() {
    let case = Case::tiny();
    fn with<'a>(layout: &'a str, dir: &'a str) -> Vec<&'a str> {
        [&ENDLESS[1..], &["checkpoint.every=2", "checkpoint.keep_last=0", "train.steps=6", layout, dir]].concat()
    }
    case.sft("config.toml", &with(DP, "log.dir=whole")).ok();
    let whole = case.steps("whole");
    let edit = |path: PathBuf, change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = fs::read(&path).unwrap();
        change(&mut bytes);
        fs::write(path, bytes).unwrap();
    };
    type Damage<'a> = &'a dyn Fn(&Path);
    let damages: [(&str, &str, Damage, &str); 5] = [
        ("cut", "rank-00001.bin", &|d| edit(d.join("rank-00001.bin"), &|b| b.truncate(b.len() - 64)), "bytes instead of"),
        ("flipped", "rank-00000.bin", &|d| edit(d.join("rank-00000.bin"), &|b| b[5000] ^= 4), "other contents"),
        ("gone", "rank-00001.bin", &|d| fs::remove_file(d.join("rank-00001.bin")).unwrap(), "is missing"),
        ("record", "rank-00001.json", &|d| edit(d.join("rank-00001.json"), &|b| b[200] ^= 1), "other contents"),
        ("unfinished", "manifest.json", &|d| fs::remove_file(d.join("manifest.json")).unwrap(), "incomplete"),
    ];
    for ((name, file, damage, said), layout) in damages.into_iter().zip([PP, "parallel.tp=2", ONE, DP, PP]) {
        copy(&case.path("whole"), &case.path(name));
        damage(&case.path(name).join("checkpoints/step-000006"));
        case.temper(&["checkpoint", "verify", name]).exits(1).says(&[file, said]);
        let dir = format!("log.dir={name}");
        let asked = case.temper(&Case::sft_args("config.toml", &with(layout, &dir), &["--resume", "6"]));
        asked.exits(1).says(&["step-000006", file]);
        assert_eq!(case.steps(name).len(), 6);
        let done = case.resume("config.toml", &with(layout, &dir)).ok();
        done.says(&["step-000006 is passed over", file, "(step 4)"]);
        let (want, found) = (&whole[4..], &case.steps(name)[6..]);
        close(&column(found, "loss"), &column(want, "loss"), 1e-5);
        if layout == DP {
            assert_eq!(essences(found), essences(want));
        }
        case.temper(&["checkpoint", "verify", name]).ok();
    }
}
