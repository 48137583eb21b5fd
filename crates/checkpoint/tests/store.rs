//! Step checkpoints: bit for bit back, every fault found and named, and no kill or full disk that costs an earlier one.

mod common;

use common::*;
use serde_json::{Value, json};
use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};
use temper_checkpoint::{Error, ExportOptions, Hook, Saved, Sidecar, Store, WeightsFolder, export_checkpoint, store};
use temper_model::param::Param;
use temper_tensor::{DType, Tensor};
use tempfile::{TempDir, tempdir};

struct Run {
    root: TempDir,
    params: Vec<Param>,
    side: Sidecar,
}

impl Run {
    fn new() -> Run {
        let root = tempdir().unwrap();
        let side = side_folder(&root.path().join("base"));
        Run { root, params: [dense(), experts()].concat(), side }
    }

    /// A run with checkpoints at 3, 6 and 9.
    fn with_three() -> Run {
        let run = Run::new();
        for step in [3, 6, 9] {
            run.save(&run.store(), step).unwrap();
        }
        run
    }

    fn dir(&self) -> PathBuf {
        self.root.path().join("run")
    }

    fn store(&self) -> Store {
        Store::new(&self.dir())
    }

    fn data(&self, step: usize) -> [Vec<Vec<f32>>; 3] {
        [0, 1, 2].map(|k| values(&self.params, 3 * step + k))
    }

    fn state(step: usize) -> Value {
        json!({ "cursor": step * 8, "loss_sum": 0.1f64 + 0.2 * step as f64, "rng": u64::MAX })
    }

    fn save(&self, store: &Store, step: usize) -> temper_checkpoint::Result<Saved> {
        let [w, m, v] = self.data(step).map(|d| tensors(&self.params, &d));
        store.save(step, &self.params, &views(&w), &views(&m), &views(&v), &Run::state(step), &self.side)
    }

    #[track_caller]
    fn assert_is(&self, loaded: &Loaded, step: usize) {
        assert_eq!((loaded.step, &loaded.state), (step, &Run::state(step)));
        for (got, want) in [&loaded.weights, &loaded.exp_avg, &loaded.exp_avg_sq].into_iter().zip(self.data(step)) {
            assert_same_bits(got, &want);
        }
    }

    #[track_caller]
    fn assert_latest(&self, step: usize) -> Vec<String> {
        let (loaded, notices) = load_latest(&self.store(), &self.params).unwrap().expect("a checkpoint");
        self.assert_is(&loaded, step);
        notices
    }
}

#[track_caller]
fn assert_same_bits(got: &[Tensor], want: &[Vec<f32>]) {
    for (t, d) in got.iter().zip(want) {
        assert!(t.as_slice::<f32>().unwrap().iter().zip(d).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}

#[test]
fn a_checkpoint_comes_back_bit_for_bit() {
    let run = Run::new();
    assert!(load_latest(&run.store(), &run.params).unwrap().is_none());
    let saved = run.save(&run.store(), 50).unwrap();
    assert_eq!(saved.path, run.dir().join("checkpoints/step-000050"));
    assert_eq!(saved.bytes, snapshot(&saved.path).values().map(|b| b.len() as u64).sum::<u64>());
    assert!(run.assert_latest(50).is_empty());
    run.assert_is(&load_step(&run.store(), 50, &run.params).unwrap(), 50);
    assert!(load_step(&run.store(), 51, &run.params).err().unwrap().to_string().contains("there are 50"));
    let optimizer =
        safetensors::SafeTensors::deserialize(&fs::read(saved.path.join("optimizer.safetensors")).unwrap()).unwrap().names().len();
    assert_eq!(optimizer, 2 * 14);
    assert!(
        safetensors::SafeTensors::deserialize(&fs::read(saved.path.join("optimizer.safetensors")).unwrap())
            .unwrap()
            .tensor(&format!("exp_avg_sq.{Q_PROJ}"))
            .is_ok()
    );
}

/// NaN payloads, negative zeros and subnormals are values like any other; a state's f64 comes back to the last bit.
#[test]
fn odd_values_survive() {
    let run = Run::new();
    let params = vec![param("w", &[4], &[("w", &[4])])];
    let odd = vec![[0x7fc0_0001u32, 0x8000_0000, 1, 0xff80_0001].map(f32::from_bits).to_vec()];
    let t = tensors(&params, &odd);
    let floats: Vec<f64> = (1..2000).map(|i| (i as f64 * 0.7389).sin() / i as f64).collect();
    run.store().save(1, &params, &views(&t), &views(&t), &views(&t), &json!(floats), &run.side).unwrap();
    let (loaded, _) = load_latest(&run.store(), &params).unwrap().unwrap();
    for got in [&loaded.weights, &loaded.exp_avg, &loaded.exp_avg_sq] {
        assert_same_bits(got, &odd);
    }
    assert_eq!(serde_json::from_value::<Vec<f64>>(loaded.state).unwrap(), floats);
}

fn edit(f: PathBuf, change: impl Fn(&mut Vec<u8>)) -> PathBuf {
    let mut bytes = fs::read(&f).unwrap();
    change(&mut bytes);
    fs::write(&f, bytes).unwrap();
    f
}

/// One bit of the byte three quarters into the file.
fn flip(bytes: &mut [u8]) {
    let i = bytes.len() * 3 / 4;
    bytes[i] ^= 16;
}

fn gone(f: PathBuf) -> PathBuf {
    fs::remove_file(&f).unwrap();
    f
}

/// The faults of a public report: damage to one file of the newest checkpoint.
#[test]
fn every_damage_is_named_and_passed_over() {
    let big = |dir: &Path| snapshot(dir).into_iter().max_by_key(|f| f.1.len()).map(|f| dir.join(f.0)).unwrap();
    let small = |dir: &Path| snapshot(dir).into_iter().min_by_key(|f| f.1.len()).map(|f| dir.join(f.0)).unwrap();
    type Damage<'a> = Box<dyn Fn(&Path) -> PathBuf + 'a>;
    let faults: Vec<(&str, Damage)> = vec![
        ("cut", Box::new(|d| edit(big(d), |b| b.truncate(b.len() - 64)))),
        ("flipped-byte", Box::new(|d| edit(big(d), |b| flip(b)))),
        ("zero-length", Box::new(|d| edit(big(d), Vec::clear))),
        ("file-gone", Box::new(|d| gone(big(d)))),
        ("small-file-gone", Box::new(|d| gone(small(d)))),
        ("flipped-state", Box::new(|d| edit(d.join("state.json"), |b| flip(b)))),
        ("manifest-cut", Box::new(|d| edit(d.join("manifest.json"), |b| b.truncate(40)))),
        ("manifest-gone", Box::new(|d| gone(d.join("manifest.json")))),
        (
            "empty-dir",
            Box::new(|d| {
                snapshot(d).into_keys().for_each(|f| drop(gone(d.join(f))));
                d.to_path_buf()
            }),
        ),
    ];
    for (fault, damage) in faults {
        let run = Run::with_three();
        let file = damage(&run.store().step_dir(9));
        let before = snapshot(&run.dir());
        let found = store::verify(&run.store().step_dir(9)).expect_err(fault).to_string();
        assert!(found.contains(&*file.to_string_lossy()), "{fault}: {found}");
        let notices = run.assert_latest(6);
        assert!(
            notices.len() == 1 && notices[0].contains("step-000009") && notices[0].contains(&*file.to_string_lossy()),
            "{fault}: {notices:?}"
        );
        assert!(load_step(&run.store(), 9, &run.params).err().unwrap().to_string().contains(&*file.to_string_lossy()), "{fault}");
        assert!(store::verify(&run.store().step_dir(6)).is_ok());
        run.store().prune(1, 0).unwrap();
        assert_eq!(snapshot(&run.dir()), before, "{fault}: nothing is deleted");
        // The run goes on: the next save is good, and what is plainly damaged is still there to look at.
        let store = run.store();
        run.save(&store, 12).unwrap();
        store.prune(1, 0).unwrap();
        assert!(run.store().step_dir(9).exists() || fault.starts_with("flipped"), "{fault}");
        run.assert_latest(12);
    }
}

#[test]
fn incomplete_folders_and_leftovers_are_told_apart() {
    let run = Run::with_three();
    let dir = run.store().dir();
    fs::create_dir(dir.join("step-000012")).unwrap();
    fs::copy(dir.join("step-000009/model.safetensors"), dir.join("step-000012/model.safetensors")).unwrap();
    fs::create_dir(dir.join(".tmp-step-000012")).unwrap();
    fs::write(dir.join(".tmp-step-000012/model.safetensors"), "half").unwrap();
    fs::create_dir(dir.join(".tmp-step-000015-1")).unwrap();
    fs::write(dir.join("latest"), "step-000003").unwrap();
    let listed = run.store().list().unwrap();
    assert_eq!(listed.iter().map(|l| (l.step, l.fault.is_some())).collect::<Vec<_>>(), [(3, false), (6, false), (9, false), (12, true)]);
    assert!(listed[3].fault.as_ref().unwrap().to_string().starts_with("incomplete: "));
    let notices = run.assert_latest(9);
    assert!(notices.iter().any(|n| n.contains(".tmp-step-000012") && n.contains("ignored")), "{notices:?}");
    assert!(notices.iter().any(|n| n.contains("step-000012 is passed over") && n.contains("incomplete")), "{notices:?}");
    // Process 1 always lives, so its folder may be in use; the other one is nobody's.
    let notices = run.store().prune(0, 0).unwrap();
    assert!(notices.len() == 1 && notices[0].contains(".tmp-step-000012:"), "{notices:?}");
    assert!(!dir.join(".tmp-step-000012").exists() && dir.join(".tmp-step-000015-1").exists());
    run.assert_latest(9);
}

#[test]
fn when_all_are_bad_each_is_listed_and_none_is_deleted() {
    let run = Run::with_three();
    for step in [3, 6, 9] {
        let path = run.store().step_dir(step).join("model.safetensors");
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() - 64]).unwrap();
    }
    let before = snapshot(&run.dir());
    let error = load_latest(&run.store(), &run.params).err().unwrap();
    assert!(matches!(error, Error::NoneWhole { .. }) && !error.is_bad_input());
    for step in ["step-000003", "step-000006", "step-000009", "model.safetensors"] {
        assert!(error.to_string().contains(step), "{error}");
    }
    run.store().prune(1, 0).unwrap();
    assert_eq!(snapshot(&run.dir()), before);
}

#[test]
fn pruning_keeps_the_newest_the_multiples_and_the_one_just_saved() {
    let steps = |run: &Run| run.store().list().unwrap().iter().map(|l| l.step).collect::<Vec<_>>();
    let run = Run::new();
    let store = run.store();
    for step in 1..=7 {
        run.save(&store, step).unwrap();
    }
    store.prune(0, 0).unwrap();
    assert_eq!(steps(&run), [1, 2, 3, 4, 5, 6, 7]);
    store.prune(2, 3).unwrap();
    assert_eq!(steps(&run), [3, 6, 7]);
    // After going back to step 2 the new checkpoint is not the one with the highest number.
    run.save(&store, 2).unwrap();
    store.prune(1, 0).unwrap();
    assert_eq!(steps(&run), [2, 7]);
    assert_eq!(fs::read_dir(store.dir()).unwrap().count(), 2);
}

fn killed_at(limit: usize) -> (Hook, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let seen = count.clone();
    let hook = Hook::new(move |_| if seen.fetch_add(1, Ordering::Relaxed) < limit { Ok(()) } else { Err(io::Error::other("killed")) });
    (hook, count)
}

#[test]
fn a_kill_at_any_operation_of_a_save_costs_nothing() {
    let probe = Run::new();
    let (hook, count) = killed_at(usize::MAX);
    let store = probe.store().with_hook(hook);
    probe.save(&store, 3).unwrap();
    let first = count.load(Ordering::Relaxed);
    probe.save(&store, 6).unwrap();
    store.prune(1, 0).unwrap();
    let all = count.load(Ordering::Relaxed) - first;
    let mut committed = 0;
    for limit in 0..all {
        let run = Run::new();
        run.save(&run.store(), 3).unwrap();
        let store = run.store().with_hook(killed_at(limit).0);
        let result = run.save(&store, 6).and_then(|_| store.prune(1, 0));
        assert!(result.is_err(), "killed before operation {limit} of {all}");
        let (loaded, _) = load_latest(&run.store(), &run.params).unwrap().unwrap();
        run.assert_is(&loaded, loaded.step);
        committed += usize::from(loaded.step == 6);
        // The run goes on as if nothing had happened, and nothing stays behind.
        let store = run.store();
        run.save(&store, 6).unwrap();
        store.prune(1, 0).unwrap();
        assert!(run.assert_latest(6).is_empty());
        assert_eq!(fs::read_dir(run.store().dir()).unwrap().count(), 1);
    }
    assert!(committed > 3 && committed < all / 2, "{committed} of {all}");
}

/// What a power cut could lose is on disk before the name that vouches for it.
#[test]
fn everything_is_synced_before_the_rename_and_the_rename_after() {
    let run = Run::new();
    let ops = Arc::new(std::sync::Mutex::new(Vec::new()));
    let record = ops.clone();
    let hook = Hook::new(move |op| {
        record.lock().unwrap().push((op.action, op.path.to_path_buf()));
        Ok(())
    });
    run.save(&run.store().with_hook(hook), 3).unwrap();
    let ops = ops.lock().unwrap();
    let rename = ops.iter().position(|o| o.0 == "rename").unwrap();
    let (before, after) = ops.split_at(rename);
    let last = |action: &str, path: &Path| before.iter().rposition(|o| o.0 == action && o.1 == path);
    for (_, path) in before.iter().filter(|o| o.0 == "write") {
        assert!(last("sync", path) > last("write", path), "{}", path.display());
    }
    let folder = before.iter().find(|o| o.0 == "write").unwrap().1.parent().unwrap();
    assert!(last("sync", folder) > before.iter().rposition(|o| o.0 == "create"));
    let manifest = before.iter().rposition(|o| o.0 == "create").unwrap();
    assert!(before[manifest].1.ends_with("manifest.json"), "the manifest is written last");
    assert!(after.iter().any(|o| o.0 == "sync" && o.1 == run.store().dir()));
}

#[test]
fn saving_a_step_again_replaces_it_in_one_operation() {
    let run = Run::with_three();
    let (hook, count) = killed_at(usize::MAX);
    run.save(&run.store().with_hook(hook), 9).unwrap();
    for limit in 0..count.load(Ordering::Relaxed) {
        let _ = run.save(&run.store().with_hook(killed_at(limit).0), 9);
        run.assert_latest(9);
    }
}

#[test]
fn a_full_disk_is_named_and_costs_no_checkpoint() {
    for (action, file) in [
        ("create", "step-000012"),
        ("write", "model.safetensors"),
        ("write", "optimizer.safetensors"),
        ("sync", "model.safetensors"),
        ("write", "manifest.json"),
        ("rename", "step-000012"),
    ] {
        let run = Run::with_three();
        let before = snapshot(&run.dir());
        let full = Hook::new(move |op| {
            let name = op.path.file_name().unwrap().to_string_lossy().into_owned();
            let hit = op.action == action && name.contains(file);
            if hit { Err(io::Error::from(io::ErrorKind::StorageFull)) } else { Ok(()) }
        });
        let error = run.save(&run.store().with_hook(full), 12).unwrap_err();
        assert!(!error.is_bad_input() && error.to_string().contains(file) && error.to_string().contains("no storage space"), "{error}");
        assert_eq!(snapshot(&run.dir()), before, "{action} {file}");
        assert_eq!(fs::read_dir(run.store().dir()).unwrap().count(), 3, "{action} {file}");
        run.assert_latest(9);
    }
}

/// The system itself refuses here, no hook.
#[test]
fn the_systems_own_refusal_is_reported() {
    let run = Run::new();
    run.save(&run.store(), 3).unwrap();
    // Nothing can be made below a file.
    let other = Store::new(&run.side.model_dir.join("config.json"));
    let error = run.save(&other, 1).unwrap_err();
    assert!(error.to_string().contains("checkpoints") && !error.is_bad_input(), "{error}");
    run.assert_latest(3);
}

#[test]
fn a_checkpoint_of_another_model_is_refused() {
    let run = Run::with_three();
    let error = load_latest(&run.store(), &dense()[..5]).map(|_| ());
    assert!(error.is_ok(), "unused tensors are no fault");
    let mut other = run.params.clone();
    other[0].pieces[0].shape = vec![10, 16];
    assert!(load_latest(&run.store(), &other).err().unwrap().is_bad_input());
}

#[test]
fn a_step_folder_is_a_model_and_exports_by_itself() {
    let run = Run::with_three();
    let step = run.store().step_dir(9);
    fs::remove_dir_all(&run.side.model_dir).unwrap();
    let [w, _, _] = run.data(9);
    let (back, _) = WeightsFolder::open(&step).unwrap().load(&run.params, DType::F32).unwrap();
    assert_same_bits(&back, &w);
    let out = run.root.path().join("out");
    export_checkpoint(&step, &out, &ExportOptions { dtype: Some(DType::F32), ..ExportOptions::default() }).unwrap();
    let (back, notices) = WeightsFolder::open(&out).unwrap().load(&run.params, DType::F32).unwrap();
    assert_same_bits(&back, &w);
    assert!(notices.is_empty());
    assert_eq!(
        names(&out),
        ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"].map(String::from).into()
    );
    assert!(fs::read_to_string(out.join("config.json")).unwrap().contains("\"torch_dtype\": \"float32\""));
    // Without a type it is the one the model came in.
    let out = run.root.path().join("auto");
    export_checkpoint(&step, &out, &ExportOptions::default()).unwrap();
    assert!(fs::read_to_string(out.join("config.json")).unwrap().contains("\"torch_dtype\": \"bfloat16\""));
    assert_eq!(WeightsFolder::open(&out).unwrap().tensor(Q_PROJ).unwrap().bytes.len(), 2 * 16 * 8);
}

#[test]
fn users_paths_are_told_apart() {
    let run = Run::with_three();
    use store::Located::{Run as IsRun, Step};
    assert!(matches!(Store::locate(&run.dir()).unwrap(), IsRun(s) if s.list().unwrap().len() == 3));
    assert!(matches!(Store::locate(&run.store().dir()).unwrap(), IsRun(s) if s.list().unwrap().len() == 3));
    assert!(matches!(Store::locate(&run.store().step_dir(6)).unwrap(), Step(p) if p.ends_with("step-000006")));
    assert!(Store::locate(&run.side.model_dir).unwrap_err().is_bad_input());
    let (latest, notices) = run.store().latest_whole().unwrap();
    assert!(latest.ends_with("step-000009") && notices.is_empty());
}
