//! Damage to what is on disk, and disks that refuse.

use super::common::{load_latest, load_step, snapshot};
use super::ranks::*;
use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};
use temper_checkpoint::{Error, Hook, store};
use temper_tensor::DType;
use tempfile::{TempDir, tempdir};

const FROM: Layout = Layout { tp: 2, dp: 2, pp: 1, ep: 1, etp: 1, cuts: 11 };
const TO: Layout = Layout { tp: 1, dp: 3, pp: 1, ep: 1, etp: 1, cuts: 12 };

fn job(root: &TempDir, steps: &[usize]) -> Job {
    let job = Job::new(root.path(), arch(false, true, 20), DType::F32);
    for step in steps {
        job.save(&FROM, *step).into_iter().for_each(|r| drop(r.unwrap()));
    }
    job
}

fn edit(path: PathBuf, change: impl Fn(&mut Vec<u8>)) -> PathBuf {
    let mut bytes = fs::read(&path).unwrap();
    change(&mut bytes);
    fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn every_damage_is_named_and_passed_over() {
    type Damage = fn(&Path) -> PathBuf;
    let faults: [(&str, Damage, &[&str]); 9] = [
        ("a truncated shard", |d| edit(d.join("rank-00002.bin"), |b| b.truncate(b.len() - 8)), &["bytes instead of"]),
        ("a shard that is gone", |d| gone(d.join("rank-00001.bin")), &["is missing"]),
        ("a record that is gone", |d| gone(d.join("rank-00001.json")), &["is missing"]),
        ("a flipped bit", |d| edit(d.join("rank-00003.bin"), |b| flip_at(b, 3, 4)), &["other contents", "in 1 of 1 blocks"]),
        (
            "a flipped bit at the start",
            |d| edit(d.join("rank-00000.bin"), |b| flip_at(b, 0, 1)),
            &["other contents", "weight of model.embed_tokens.weight"],
        ),
        ("a flipped bit of an index", |d| edit(d.join("tensors.json"), |b| flip_at(b, 1, 2)), &["other contents"]),
        ("a flipped bit of a record", |d| edit(d.join("rank-00002.json"), |b| flip_at(b, 1, 2)), &["other contents"]),
        (
            "a record of another step",
            |d| copied(&d.with_file_name("step-000003/rank-00001.json"), d.join("rank-00001.json")),
            &["rank-00001.json"],
        ),
        (
            "a manifest of another step",
            |d| copied(&d.with_file_name("step-000003/manifest.json"), d.join("manifest.json")),
            &["it is the manifest of step 3"],
        ),
    ];
    for (what, damage, words) in faults {
        let root = tempdir().unwrap();
        let job = job(&root, &[3, 6]);
        let file = damage(&job.store().step_dir(6));
        let before = snapshot(&job.dir());
        let found = store::verify(&job.store().step_dir(6)).expect_err(what).to_string();
        let notices = job.assert_resumes(&TO, 3);
        let notice = notices.iter().find(|n| n.contains("step-000006 is passed over")).unwrap_or_else(|| panic!("{what}: {notices:?}"));
        for word in words.iter().chain([&&*file.to_string_lossy()]) {
            assert!(found.contains(word), "{what}: {word:?} is not in: {found}");
            assert!(notice.contains(word), "{what}: {word:?} is not in: {notice}");
        }
        assert_eq!(snapshot(&job.dir()), before, "{what}: nothing is deleted");
        // One process alone passes over it too, and refuses it when it is asked for.
        let params = temper_model::declare(&job.arch);
        let (loaded, notices) = load_latest(&job.store(), &params).unwrap().unwrap();
        assert!(loaded.step == 3 && notices.iter().any(|n| n.contains("step-000006")), "{what}");
        assert!(load_step(&job.store(), 6, &params).err().unwrap().to_string().contains(&*file.to_string_lossy()), "{what}");
        // The run goes on.
        job.save(&TO, 9).into_iter().for_each(|r| drop(r.unwrap()));
        job.assert_resumes(&FROM, 9);
    }
}

fn flip_at(bytes: &mut [u8], numerator: usize, denominator: usize) {
    let i = bytes.len() * numerator / denominator;
    bytes[i] ^= 16;
}

fn gone(path: PathBuf) -> PathBuf {
    fs::remove_file(&path).unwrap();
    path
}

fn copied(from: &Path, to: PathBuf) -> PathBuf {
    fs::copy(from, &to).unwrap();
    to
}

#[test]
fn when_none_is_whole_each_is_named() {
    let root = tempdir().unwrap();
    let job = job(&root, &[3, 6]);
    edit(job.store().step_dir(3).join("rank-00000.bin"), |b| flip_at(b, 1, 2));
    gone(job.store().step_dir(6).join("manifest.json"));
    let error = job.resume(&TO).unwrap_err();
    assert!(matches!(error, Error::NoneWhole { .. }), "{error}");
    for word in ["step-000003", "rank-00000.bin", "step-000006", "incomplete"] {
        assert!(error.to_string().contains(word), "{error}");
    }
    let empty = Job::new(&root.path().join("other"), arch(false, false, 20), DType::F32);
    assert!(empty.resume(&TO).unwrap().is_none());
}

#[test]
fn a_checkpoint_of_another_model_is_refused() {
    let root = tempdir().unwrap();
    let mut job = job(&root, &[3]);
    job.arch.vocab = 24;
    let error = job.resume(&TO).unwrap_err();
    assert!(error.is_bad_input() && error.to_string().contains("shape [20, 8] in the checkpoint, [24, 8] in this model"), "{error}");
    job.arch = arch(true, false, 20);
    job.arch.layers = 3;
    let error = job.resume(&TO).unwrap_err();
    assert!(error.to_string().contains("saved from another model"), "{error}");
}

/// A disk that refuses one rank: all ranks report that rank's error, and nothing else has changed.
#[test]
fn a_full_disk_on_one_rank_ends_the_save_on_all() {
    let cases = [
        (2, "write", "rank-00002.bin"),
        (2, "sync", "rank-00002.bin"),
        (1, "write", "rank-00001.json"),
        (0, "write", "tensors.json"),
        (0, "write", "manifest.json"),
        (0, "create", "step-000006"),
        (0, "rename", "step-000006"),
    ];
    for (broken, action, file) in cases {
        let root = tempdir().unwrap();
        let job = job(&root, &[3]);
        let before = snapshot(&job.dir());
        let full = Hook::new(move |op| {
            let hit = op.action == action && op.path.file_name().is_some_and(|n| n.to_string_lossy().contains(file));
            if hit { Err(io::Error::from(io::ErrorKind::StorageFull)) } else { Ok(()) }
        });
        for result in job.save_hooked(&FROM, 6, |rank| (rank == broken).then(|| full.clone()), &|_, _| ()) {
            let error = result.unwrap_err();
            assert!(!error.is_bad_input());
            let error = error.to_string();
            assert!(error.contains(&format!("rank {broken}: ")) && error.contains(file) && error.contains("no storage space"), "{error}");
        }
        assert_eq!(snapshot(&job.dir()), before, "{action} {file}");
        assert_eq!(fs::read_dir(job.store().dir()).unwrap().count(), 1, "{action} {file}");
        job.assert_resumes(&TO, 3);
    }
}

const LIMITED: &str = "TEMPER_TEST_LIMITED_RUN";

/// The system's own refusal: a process whose files may not grow beyond 64 KiB.
#[test]
fn the_systems_own_refusal_is_reported() {
    let root = tempdir().unwrap();
    let exe = std::env::current_exe().unwrap();
    let script = "trap '' XFSZ; ulimit -f 64; exec \"$0\" --exact faults::limited_child --ignored --nocapture";
    let child = Command::new("bash").args(["-c", script]).arg(exe).env(LIMITED, root.path()).output().unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
    let job = Job::new(root.path(), arch(false, true, 20), DType::F32);
    job.assert_resumes(&TO, 3);
    assert_eq!(fs::read_dir(job.store().dir()).unwrap().count(), 1);
}

#[test]
#[ignore = "the child of another test"]
fn limited_child() {
    let root = PathBuf::from(std::env::var_os(LIMITED).unwrap());
    let mut job = Job::new(&root, arch(false, true, 20), DType::F32);
    job.save(&FROM, 3).into_iter().for_each(|r| drop(r.unwrap()));
    job.arch.vocab = 4000;
    for result in job.save(&FROM, 6) {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("rank-0000") && error.contains("File too large"), "{error}");
    }
}
