//! Checkpoints that are damaged, half-written or missing, and a disk that is full.

use crate::support::{Case, contents, copy, essences, names};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// The files of a checkpoint by size, then name.
fn by_size(checkpoint: &Path) -> Vec<PathBuf> {
    let mut files: Vec<(u64, PathBuf)> =
        names(checkpoint).iter().map(|n| checkpoint.join(n)).map(|p| (p.metadata().unwrap().len(), p)).collect();
    files.sort();
    files.into_iter().map(|(_, path)| path).collect()
}

fn big(checkpoint: &Path) -> PathBuf {
    by_size(checkpoint).pop().unwrap()
}

fn cut(file: &Path) {
    let bytes = fs::read(file).unwrap();
    fs::write(file, &bytes[..bytes.len() - 64]).unwrap();
}

fn flip(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    let at = bytes.len() * 3 / 4;
    bytes[at] ^= 16;
    fs::write(file, bytes).unwrap();
}

/// A run of nine steps with checkpoints at 3, 6 and 9.
fn nine_steps() -> Case {
    let case = Case::new("35-damaged-checkpoints");
    case.sft("config.toml", &[]).ok();
    assert_eq!(case.checkpoints("run"), [3, 6, 9]);
    case
}

/// A copy of the run, and the folder of its last checkpoint.
fn copy_of_run(case: &Case, name: &str) -> PathBuf {
    copy(&case.path("run"), &case.path(name));
    case.path(name).join("checkpoints/step-000009")
}

#[test]
fn a_damaged_checkpoint_is_named_and_never_loaded() {
    let case = nine_steps();
    let whole = case.steps("run");
    type Damage = fn(&Path) -> PathBuf;
    let damages: [(&str, Damage); 7] = [
        ("cut", |c| {
            cut(&big(c));
            big(c)
        }),
        ("flipped-byte", |c| {
            flip(&big(c));
            big(c)
        }),
        ("zero-length", |c| {
            let file = big(c);
            fs::write(&file, "").unwrap();
            file
        }),
        ("file-gone", |c| {
            let file = big(c);
            fs::remove_file(&file).unwrap();
            file
        }),
        ("small-file-gone", |c| {
            let file = by_size(c).remove(0);
            fs::remove_file(&file).unwrap();
            file
        }),
        ("manifest-gone", |c| {
            fs::remove_file(c.join("manifest.json")).unwrap();
            c.to_path_buf()
        }),
        ("empty-dir", |c| {
            fs::remove_dir_all(c).unwrap();
            fs::create_dir(c).unwrap();
            c.to_path_buf()
        }),
    ];
    for (name, damage) in damages {
        let checkpoint = copy_of_run(&case, name);
        let file = damage(&checkpoint);
        let file = file.file_name().unwrap().to_str().unwrap();
        let left = contents(&case.path(name).join("checkpoints"));
        case.temper(&["checkpoint", "verify", name]).exits(1).says(&[file]);
        case.temper(&["checkpoint", "verify", checkpoint.to_str().unwrap()]).exits(1);
        let json = case.temper(&["checkpoint", "verify", name, "--json"]).exits(1).json();
        let good: Vec<bool> = json.as_array().unwrap().iter().map(|c| c["good"].as_bool().unwrap()).collect();
        assert_eq!(good, [true, true, false], "{name}");
        let refused = case.temper(&Case::sft_args("config.toml", &[&format!("log.dir={name}")], &["--resume", "9"]));
        refused.exits(1).says(&["step-000009"]);
        assert!(left == contents(&case.path(name).join("checkpoints")), "{name}: a refused resume changes nothing");

        case.resume("config.toml", &[&format!("log.dir={name}")]).ok();
        let notices = case.notices(name);
        assert!(notices.contains("step-000009 is passed over") && notices.contains("(step 6)"), "{name}: {notices}");
        assert_eq!(essences(&whole[6..]), essences(&case.steps(name)[9..]), "{name}");
        assert_eq!(case.checkpoints(name), [3, 6, 9], "{name}");
        case.temper(&["checkpoint", "verify", name]).ok();
    }
}

#[test]
fn a_half_written_newer_checkpoint_is_reported_and_left_alone() {
    let case = nine_steps();
    let last = copy_of_run(&case, "half");
    let half = last.with_file_name("step-000012");
    fs::create_dir(&half).unwrap();
    fs::copy(big(&last), half.join(big(&last).file_name().unwrap())).unwrap();
    let list = case.temper(&["checkpoint", "list", "half", "--json"]).ok().json();
    let whole: Vec<bool> = list.as_array().unwrap().iter().map(|c| c["whole"].as_bool().unwrap()).collect();
    assert_eq!(whole, [true, true, true, false]);
    case.temper(&["checkpoint", "verify", "half"]).exits(1).says(&["step-000012", "incomplete"]);
    case.resume("config.toml", &["log.dir=half"]).ok().says(&["step-000012 is passed over", "already at its last step, 9"]);
    assert_eq!(names(&half).len(), 1);

    // The leftover of a save of another program or machine.
    let last = copy_of_run(&case, "stale");
    copy(&last, &last.with_file_name(".tmp-step-000012"));
    case.temper(&["checkpoint", "verify", "stale"]).ok();
    case.resume("config.toml", &["log.dir=stale"]).ok().says(&[".tmp-step-000012", "(step 9)"]);
    case.resume("config.toml", &["log.dir=stale", "train.steps=10"]).ok();
    assert!(!last.with_file_name(".tmp-step-000012").exists());
}

#[test]
fn when_every_checkpoint_is_damaged_nothing_starts_anew() {
    let case = nine_steps();
    for step in [3, 6, 9] {
        cut(&big(&case.path(&format!("run/checkpoints/step-{step:06}"))));
    }
    let before = contents(&case.path("run"));
    case.resume("config.toml", &[]).exits(1).says(&["step-000003", "step-000006", "step-000009", "nothing was deleted"]);
    case.temper(&["checkpoint", "export", "run", "--out", "out"]).exits(1).says(&["step-000009"]);
    assert!(!case.has("out"));
    assert!(before == contents(&case.path("run")));
}

/// A limit on the size of files stands for a full disk. The shell counts it in blocks of 512 or 1024 bytes.
#[test]
fn a_full_disk_is_named_and_keeps_what_was_saved() {
    let case = nine_steps();
    let limited = "trap '' XFSZ; ulimit -f 100; exec \"$TEMPER\" sft config.toml";
    case.shell(&format!("{limited} --set log.dir=full")).exits(1).says(&["full/checkpoints", "File too large"]);
    assert_eq!(names(&case.path("full/checkpoints")), Vec::<String>::new());
    assert!(!case.has("full/hf"));

    case.shell(&format!("{limited} --set train.steps=12 --resume")).exits(1).says(&["run/checkpoints", "File too large"]);
    assert_eq!(names(&case.path("run/checkpoints")), ["step-000003", "step-000006", "step-000009"]);
    case.temper(&["checkpoint", "verify", "run"]).ok();
    case.shell("trap '' XFSZ; ulimit -f 100; exec \"$TEMPER\" checkpoint export run --out out").exits(1).says(&["File too large"]);
    assert!(!case.has("out"));
}

#[test]
fn a_damaged_checkpoint_of_two_ranks_is_listed_as_one_of_two() {
    let case = Case::tiny();
    case.sft("config.toml", &["parallel.dp=2", "checkpoint.export=false"]).ok().says(&[" KiB in "]);
    let checkpoint = case.path("run/checkpoints/step-000004");
    let listed = |ranks: &str, state: &str| {
        let done = case.temper(&["checkpoint", "list", "run"]).ok().says(&[state, " KiB"]);
        let row = done.stdout.lines().find(|l| l.contains("step-000004")).unwrap();
        assert!(row.split_whitespace().any(|word| word == ranks), "{row}");
    };
    listed("2", "whole");
    cut(&checkpoint.join("rank-00001.bin"));
    listed("2", "damaged");
    fs::remove_file(checkpoint.join("manifest.json")).unwrap();
    listed("?", "incomplete");
    assert!(case.temper(&["checkpoint", "list", "run", "--json"]).ok().json()[0]["ranks"].is_null());
}
