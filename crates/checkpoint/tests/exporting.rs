//! Hugging Face folders out: what is written, what is carried over, and that a kill leaves the old model or the new one.

mod common;

use common::*;
use half::bf16;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::{
    fs, io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};
use temper_checkpoint::{ExportOptions, Hook, Sidecar, WeightsFolder, export};
use temper_model::param::Param;
use temper_tensor::DType;
use tempfile::tempdir;

fn options(dtype: DType) -> ExportOptions {
    ExportOptions { dtype: Some(dtype), ..ExportOptions::default() }
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn run(out: &Path, params: &[Param], data: &[Vec<f32>], side: &Sidecar, options: &ExportOptions) -> temper_checkpoint::Result<()> {
    let tensors = tensors(params, data);
    export(out, params, &views(&tensors), side, options)
}

#[test]
fn one_file_in_f32_is_read_back_by_the_reference() {
    let (params, dir) = ([dense(), experts()].concat(), tempdir().unwrap());
    let data = values(&params, 3);
    let side = side_folder(&dir.path().join("base"));
    let out = dir.path().join("deep/er/out");
    run(&out, &params, &data, &side, &options(DType::F32)).unwrap();
    assert_eq!(
        names(&out),
        ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"].map(String::from).into()
    );
    let bytes = fs::read(out.join("model.safetensors")).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let want = on_disk(&params, &data);
    assert_eq!(file.len(), want.len());
    for (name, (dtype, shape, bytes)) in &want {
        let t = file.tensor(name).unwrap();
        assert_eq!((t.dtype(), t.shape(), t.data()), (*dtype, &shape[..], &bytes[..]), "{name}");
    }
    assert_eq!(fs::read_dir(out.parent().unwrap()).unwrap().count(), 1, "nothing else is left");
}

/// Longer than one block of the writer, against the `half` crate.
#[test]
fn bf16_is_rounded_to_nearest_even() {
    let n = 5_000_003;
    let params = vec![param("w", &[n], &[("w", &[n])]), param("v", &[3], &[("v", &[3])])];
    let data = vec![(0..n).map(|i| (i as f32 * 0.7).cos()).collect::<Vec<_>>(), vec![1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -0.0]];
    let dir = tempdir().unwrap();
    let side = side_folder(&dir.path().join("base"));
    let out = dir.path().join("out");
    run(&out, &params, &data, &side, &ExportOptions::default()).unwrap();
    let bytes = fs::read(out.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for (name, d) in [("w", &data[0]), ("v", &data[1])] {
        let t = file.tensor(name).unwrap();
        assert_eq!(t.dtype(), Dtype::BF16, "the type that config.json names");
        assert!(t.data().as_chunks::<2>().0.iter().zip(d).all(|(b, x)| u16::from_le_bytes(*b) == bf16::from_f32(*x).to_bits()));
    }
}

#[test]
fn shards_are_cut_at_the_limit_and_indexed() {
    let (params, dir) = (dense(), tempdir().unwrap());
    let data = values(&params, 3);
    let side = side_folder(&dir.path().join("base"));
    let out = dir.path().join("out");
    run(&out, &params, &data, &side, &ExportOptions { max_shard_bytes: 700, ..options(DType::F32) }).unwrap();
    let index = json(&out.join(INDEX));
    let total: usize = params.iter().map(|p| p.numel() * 4).sum();
    assert_eq!(index["metadata"]["total_size"], total);
    let map = index["weight_map"].as_object().unwrap();
    assert_eq!(map.len(), 8);
    let shards = names(&out).into_iter().filter(|n| n.ends_with(".safetensors")).collect::<Vec<_>>();
    assert!(shards.len() > 2 && shards[0] == format!("model-00001-of-{:05}.safetensors", shards.len()), "{shards:?}");
    for shard in &shards {
        let bytes = fs::read(out.join(shard)).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let size: usize = file.tensors().iter().map(|(_, t)| t.data().len()).sum();
        assert!(size <= 700 || file.len() == 1, "{shard} holds {size} bytes");
        assert!(file.names().iter().all(|n| map[*n] == shard.as_str()));
    }
    let (back, notices) = WeightsFolder::open(&out).unwrap().load(&params, DType::F32).unwrap();
    assert!(back.iter().zip(&data).all(|(t, d)| t.as_slice::<f32>().unwrap() == d));
    assert!(notices.is_empty(), "{notices:?}");
}

#[test]
fn config_is_carried_over_but_for_its_type() {
    let dir = tempdir().unwrap();
    let base = dir.path().join("base");
    let mut side = side_folder(&base);
    let params = dense();
    let data = values(&params, 3);
    let go = |side: &Sidecar, name: &str| {
        let out = dir.path().join(name);
        run(&out, &params, &data, side, &options(DType::F32)).map(|()| fs::read_to_string(out.join("config.json")).unwrap())
    };
    // 0.1 + 0.2 and 1e-06 as they were typed, a number past 64 bits, and a key of the user's.
    let text = r#"{"rms_norm_eps": 1e-06, "x": 0.30000000000000004, "big": 123456789012345678901234567890, "dtype": "bfloat16", "own": {"a":  [1,2]}}"#;
    fs::write(base.join("config.json"), text).unwrap();
    let got = go(&side, "a").unwrap();
    for kept in ["1e-06", "0.30000000000000004", "123456789012345678901234567890", "{\"a\":  [1,2]}", "\"dtype\": \"float32\""] {
        assert!(got.contains(kept), "{kept} is not in {got}");
    }
    assert!(!got.contains("torch_dtype"));
    fs::write(base.join("config.json"), r#"{"model_type": "qwen3"}"#).unwrap();
    assert!(go(&side, "b").unwrap().contains("\"torch_dtype\": \"float32\""));
    fs::write(base.join("config.json"), "[1]").unwrap();
    assert!(go(&side, "c").unwrap_err().is_bad_input());
    assert!(!dir.path().join("c").exists());
    // A tokenizer of another folder replaces all of the model's own.
    fs::write(base.join("config.json"), "{}").unwrap();
    side.tokenizer_dir = dir.path().join("tok");
    fs::create_dir(&side.tokenizer_dir).unwrap();
    fs::write(side.tokenizer_dir.join("tokenizer.json"), "other").unwrap();
    go(&side, "d").unwrap();
    assert_eq!(names(&dir.path().join("d")), ["config.json", "model.safetensors", "tokenizer.json"].map(String::from).into());
    assert_eq!(fs::read_to_string(dir.path().join("d/tokenizer.json")).unwrap(), "other");
}

#[test]
fn the_chat_end_token_joins_the_others() {
    let dir = tempdir().unwrap();
    let base = dir.path().join("base");
    let mut side = side_folder(&base);
    side.extra_eos = vec![302];
    let params = dense();
    let data = values(&params, 3);
    let mut n = 0;
    let mut eos = |generation: Option<&str>, side: &Sidecar| {
        n += 1;
        let _ = fs::remove_file(base.join("generation_config.json"));
        if let Some(text) = generation {
            fs::write(base.join("generation_config.json"), text).unwrap();
        }
        let out = dir.path().join(n.to_string());
        run(&out, &params, &data, side, &options(DType::F32)).unwrap();
        let path = out.join("generation_config.json");
        path.exists().then(|| (json(&path), fs::read_to_string(path).unwrap()))
    };
    assert_eq!(eos(None, &side).unwrap().0["eos_token_id"], serde_json::json!([300, 302]));
    let (value, _) = eos(Some(r#"{"eos_token_id": 300, "temperature": 0.6}"#), &side).unwrap();
    assert_eq!((&value["eos_token_id"], &value["temperature"]), (&serde_json::json!([300, 302]), &serde_json::json!(0.6)));
    let untouched = r#"{"eos_token_id":   [302, 7]}"#;
    assert_eq!(eos(Some(untouched), &side).unwrap().1, untouched);
    assert_eq!(eos(Some(r#"{"eos_token_id": null}"#), &side).unwrap().0["eos_token_id"], serde_json::json!([300, 302]));
    side.extra_eos.clear();
    assert!(eos(None, &side).is_none());
    assert_eq!(eos(Some(untouched), &side).unwrap().1, untouched);
}

/// An older model of three shards with files that are nobody's weights beside it.
fn old_model(dir: &Path) {
    fs::create_dir_all(dir.join("logs")).unwrap();
    let old = experts();
    let disk = on_disk(&old, &values(&old, 77));
    write_sharded(dir, &disk, &["model.layers.0.mlp.experts.1.up_proj.weight"]);
    fs::write(dir.join("model-00003-of-00003.safetensors"), "old").unwrap();
    for (name, text) in [
        ("pytorch_model.bin", "old"),
        ("config.json", "{\"model_type\": \"other\"}"),
        ("adapter_config.json", "{}"),
        ("tokenizer.model", "old"),
        ("notes.txt", "mine"),
        ("logs/a.txt", "mine"),
    ] {
        fs::write(dir.join(name), text).unwrap();
    }
}

#[test]
fn a_folder_in_use_is_refused_untouched_or_replaced_whole() {
    let dir = tempdir().unwrap();
    let side = side_folder(&dir.path().join("base"));
    let (params, out) = (dense(), dir.path().join("out"));
    let data = values(&params, 3);
    old_model(&out);
    let before = snapshot(&out);
    let error = run(&out, &params, &data, &side, &options(DType::F32)).unwrap_err();
    assert!(error.is_bad_input() && error.to_string().contains("--overwrite"), "{error}");
    assert_eq!(snapshot(&out), before);

    run(&out, &params, &data, &side, &ExportOptions { overwrite: true, ..options(DType::F32) }).unwrap();
    let want =
        ["chat_template.jinja", "config.json", "logs/a.txt", "model.safetensors", "notes.txt", "tokenizer.json", "tokenizer_config.json"];
    assert_eq!(names(&out), want.map(String::from).into());
    assert_eq!(fs::read_to_string(out.join("notes.txt")).unwrap(), "mine");
    let (back, _) = WeightsFolder::open(&out).unwrap().load(&params, DType::F32).unwrap();
    assert!(back.iter().zip(&data).all(|(t, d)| t.as_slice::<f32>().unwrap() == d));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "nothing else is left");

    fs::write(dir.path().join("file"), "").unwrap();
    assert!(run(&dir.path().join("file"), &params, &data, &side, &options(DType::F32)).unwrap_err().is_bad_input());
    fs::create_dir(dir.path().join("empty")).unwrap();
    run(&dir.path().join("empty"), &params, &data, &side, &options(DType::F32)).unwrap();
}

/// Refuses every operation from number `limit` on, as if the process had been killed there. Counts into the second value.
fn killed_at(limit: usize) -> (Hook, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let seen = count.clone();
    let hook = Hook::new(move |_| if seen.fetch_add(1, Ordering::Relaxed) < limit { Ok(()) } else { Err(io::Error::other("killed")) });
    (hook, count)
}

#[test]
fn a_kill_at_any_operation_leaves_the_old_model_or_the_new() {
    let root = tempdir().unwrap();
    let side = side_folder(&root.path().join("base"));
    let params = dense();
    let data = values(&params, 3);
    let finished = root.path().join("finished");
    old_model(&finished);
    let replace = |out: &Path, hook| {
        run(out, &params, &data, &side, &ExportOptions { overwrite: true, max_shard_bytes: 700, hook: Some(hook), ..options(DType::F32) })
    };
    let (hook, count) = killed_at(usize::MAX);
    replace(&finished, hook).unwrap();
    let (all, new) = (count.load(Ordering::Relaxed), snapshot(&finished));
    let (mut olds, mut news) = (0, 0);
    for limit in 0..all {
        let out = root.path().join(format!("out-{limit}"));
        old_model(&out);
        let old = snapshot(&out);
        let _ = replace(&out, killed_at(limit).0);
        let now = snapshot(&out);
        assert!(now == old || now == new, "killed before operation {limit} of {all}: {:?}", now.keys());
        if now == old {
            olds += 1
        } else {
            news += 1
        }
        // Whatever was left behind does not hinder the next attempt, which leaves nothing behind.
        replace(&out, killed_at(usize::MAX).0).unwrap();
        assert_eq!(snapshot(&out), new);
        let hidden =
            fs::read_dir(root.path()).unwrap().filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().starts_with('.')).count();
        assert_eq!(hidden, 0, "killed before operation {limit}");
    }
    assert!(olds > 20 && news > 5, "{olds} old, {news} new");
}

#[test]
fn a_full_disk_leaves_the_old_model_and_no_rubbish() {
    let root = tempdir().unwrap();
    let side = side_folder(&root.path().join("base"));
    let (params, out) = (dense(), root.path().join("out"));
    old_model(&out);
    let old = snapshot(&out);
    let full = Hook::new(|op| match op.action {
        "write" if op.path.ends_with("model.safetensors") => Err(io::Error::from(io::ErrorKind::StorageFull)),
        _ => Ok(()),
    });
    let error = run(&out, &params, &values(&params, 3), &side, &ExportOptions { overwrite: true, hook: Some(full), ..options(DType::F32) })
        .unwrap_err();
    assert!(
        !error.is_bad_input() && error.to_string().contains("model.safetensors") && error.to_string().contains("no storage space"),
        "{error}"
    );
    assert_eq!(snapshot(&out), old);
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 2);
}
