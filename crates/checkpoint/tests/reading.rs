//! Model folders in: what must load, bit for bit, and what must be refused and how.

mod common;

use common::*;
use half::{bf16, f16};
use safetensors::Dtype;
use std::{fs, path::Path};
use temper_checkpoint::{Error, WeightsFolder};
use temper_model::param::Param;
use temper_tensor::{DType, Tensor};
use tempfile::tempdir;

fn load(dir: &Path, params: &[Param]) -> Result<(Vec<Tensor>, Vec<String>), Error> {
    WeightsFolder::open(dir)?.load(params, DType::F32)
}

/// Asserts that the tensors hold the values, to the bit.
fn assert_holds(tensors: &[Tensor], data: &[Vec<f32>]) {
    for (t, d) in tensors.iter().zip(data) {
        assert_eq!(t.as_slice::<f32>().unwrap(), d);
    }
}

/// No neighbour of a 16-bit float is nearer to the value, and of two equally near ones it is the even one.
#[track_caller]
fn assert_nearest(got: u16, want: f64, value: impl Fn(u16) -> f64) {
    let distance = |bits: u16| (value(bits) - want).abs();
    if value(got).is_infinite() {
        // The largest finite value must be at least half a step too small.
        let (max, before) = (value((got & 0x7fff) - 1), value((got & 0x7fff) - 2));
        return assert!(
            want.abs() >= max + (max - before) / 2.0 && want.is_sign_negative() == value(got).is_sign_negative(),
            "{want} became infinite"
        );
    }
    let magnitude = got & 0x7fff;
    for neighbour in [magnitude.checked_sub(1), Some(magnitude + 1)].into_iter().flatten().map(|m| m | (got & 0x8000)) {
        let (here, there) = (distance(got), distance(neighbour));
        assert!(here < there || here == there && got.is_multiple_of(2), "{want} became {} rather than {}", value(got), value(neighbour));
    }
}

#[track_caller]
fn assert_refused(result: Result<(Vec<Tensor>, Vec<String>), Error>, words: &[&str]) {
    let error = result.err().expect("must be refused");
    assert!(error.is_bad_input(), "{error}");
    for word in words {
        assert!(error.to_string().contains(word), "{word:?} is not in: {error}");
    }
}

#[test]
fn single_and_sharded_folders_load() {
    let (params, dir) = (dense(), tempdir().unwrap());
    let data = values(&params, 1);
    write(&dir.path().join("model.safetensors"), &on_disk(&params, &data));
    let (tensors, notices) = load(dir.path(), &params).unwrap();
    assert_holds(&tensors, &data);
    assert_eq!(tensors[2].shape(), [24, 8]);
    assert!(notices.is_empty(), "{notices:?}");

    let dir = tempdir().unwrap();
    write_sharded(dir.path(), &on_disk(&params, &data), &["lm_head.weight", Q_PROJ]);
    let (tensors, notices) = load(dir.path(), &params).unwrap();
    assert_holds(&tensors, &data);
    assert!(notices.is_empty(), "{notices:?}");
}

/// Every stored type into every host type, against the `half` crate and Rust's casts, specials included.
#[test]
fn conversions_match_an_element_by_element_reference() {
    let specials = [
        0.0,
        -0.0,
        1.0,
        1.0 + 1.0 / 256.0,
        1.0 + 3.0 / 256.0,
        65504.0,
        1e-8,
        -3e38,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MIN_POSITIVE / 4.0,
    ];
    // Longer than two conversion chunks, not a multiple of anything.
    let x: Vec<f32> = (0..600_011).map(|i| specials.get(i).copied().unwrap_or((i as f32 * 0.37).sin() * 3.0)).collect();
    let n = x.len();
    let params = vec![param("w", &[n], &[("w", &[n])])];
    let stored: [(Dtype, Vec<u8>, Vec<f64>); 4] = [
        (Dtype::F64, x.iter().flat_map(|v| (*v as f64 * 1.1).to_le_bytes()).collect(), x.iter().map(|v| *v as f64 * 1.1).collect()),
        (Dtype::F32, bytes_of(&x), x.iter().map(|v| *v as f64).collect()),
        (
            Dtype::BF16,
            x.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
            x.iter().map(|v| bf16::from_f32(*v).to_f64()).collect(),
        ),
        (
            Dtype::F16,
            x.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
            x.iter().map(|v| f16::from_f32(*v).to_f64()).collect(),
        ),
    ];
    for (dtype, bytes, want) in stored {
        let dir = tempdir().unwrap();
        // An odd-sized tensor before it puts the elements at an odd address.
        let odd = ("a".to_string(), (Dtype::U8, vec![3], vec![1, 2, 3]));
        write(&dir.path().join("model.safetensors"), &[odd, ("w".to_string(), (dtype, vec![n], bytes))].into_iter().collect());
        let folder = WeightsFolder::open(dir.path()).unwrap();
        let get = |to| folder.load(&params, to).unwrap().0.remove(0);
        let same = |a: f64, b: f64| a.to_bits() == b.to_bits();
        assert!(get(DType::F64).as_slice::<f64>().unwrap().iter().zip(&want).all(|(a, b)| same(*a, *b)), "{dtype:?} to f64");
        assert!(
            get(DType::F32).as_slice::<f32>().unwrap().iter().zip(&want).all(|(a, b)| a.to_bits() == (*b as f32).to_bits()),
            "{dtype:?} to f32"
        );
        for (got, want) in get(DType::BF16).as_slice::<bf16>().unwrap().iter().zip(&want) {
            assert_nearest(got.to_bits(), *want, |b| bf16::from_bits(b).to_f64());
        }
        for (got, want) in get(DType::F16).as_slice::<f16>().unwrap().iter().zip(&want) {
            assert_nearest(got.to_bits(), *want, |b| f16::from_bits(b).to_f64());
        }
    }
}

#[test]
fn equal_types_are_copied_bit_for_bit() {
    let bits = [0x7fc0_0001u32, 0xffff_ffff, 0x7f80_0001, 0x8000_0000];
    let dir = tempdir().unwrap();
    let bytes = bits.iter().flat_map(|b| b.to_le_bytes()).collect();
    write(&dir.path().join("model.safetensors"), &[("w".to_string(), (Dtype::F32, vec![4], bytes))].into_iter().collect());
    let (t, _) = load(dir.path(), &[param("w", &[4], &[("w", &[4])])]).unwrap();
    assert_eq!(t[0].as_slice::<f32>().unwrap().iter().map(|x| x.to_bits()).collect::<Vec<_>>(), bits);
}

#[test]
fn experts_load_from_either_spelling() {
    let params = experts();
    let data = values(&params, 2);
    let (single, fused) = (tempdir().unwrap(), tempdir().unwrap());
    write(&single.path().join("model.safetensors"), &on_disk(&params, &data));
    assert_holds(&load(single.path(), &params).unwrap().0, &data);
    let whole = (params[0].name.clone(), (Dtype::F32, vec![3, 4, 5], bytes_of(&data[0])));
    write(&fused.path().join("model.safetensors"), &[whole].into_iter().collect());
    assert_holds(&load(fused.path(), &params).unwrap().0, &data);
}

#[test]
fn a_missing_expert_is_named() {
    let (params, dir) = (experts(), tempdir().unwrap());
    let mut disk = on_disk(&params, &values(&params, 2));
    disk.remove("model.layers.0.mlp.experts.2.gate_proj.weight");
    write(&dir.path().join("model.safetensors"), &disk);
    assert_refused(load(dir.path(), &params), &["model.layers.0.mlp.experts.2.gate_proj.weight", "missing"]);
}

#[test]
fn a_wrong_shape_names_the_tensor_both_shapes_and_the_keys() {
    let (params, dir) = (dense(), tempdir().unwrap());
    let mut disk = on_disk(&params, &values(&params, 1));
    disk.insert(Q_PROJ.into(), (Dtype::F32, vec![8, 8], vec![0; 256]));
    write(&dir.path().join("model.safetensors"), &disk);
    fs::write(dir.path().join("config.json"), r#"{"head_dim": 16, "num_attention_heads": 1, "hidden_size": 8}"#).unwrap();
    assert_refused(load(dir.path(), &params), &[Q_PROJ, "[8, 8]", "[16, 8]", "head_dim 16", "num_attention_heads 1"]);
}

#[test]
fn quantised_weights_are_refused_by_name() {
    let (params, dir) = (dense(), tempdir().unwrap());
    let mut disk = on_disk(&params, &values(&params, 1));
    disk.insert("model.norm.weight".into(), (Dtype::F8_E4M3, vec![8], vec![0; 8]));
    write(&dir.path().join("model.safetensors"), &disk);
    assert_refused(load(dir.path(), &params), &["model.norm.weight", "F8_E4M3"]);
}

#[test]
fn a_tied_head_is_ignored_when_equal_and_noticed_when_not() {
    let all = dense();
    let mut data = values(&all, 1);
    data[5] = data[0].clone();
    let tied = &all[..5];
    let dir = tempdir().unwrap();
    write(&dir.path().join("model.safetensors"), &on_disk(&all, &data));
    assert_eq!(load(dir.path(), tied).unwrap().1, Vec::<String>::new());
    data[5][3] += 1.0;
    write(&dir.path().join("model.safetensors"), &on_disk(&all, &data));
    let notices = load(dir.path(), tied).unwrap().1;
    assert!(notices.len() == 1 && notices[0].contains("lm_head.weight differs"), "{notices:?}");
}

#[test]
fn unknown_tensors_are_noticed_and_rotary_buffers_are_not() {
    let (params, dir) = (dense(), tempdir().unwrap());
    let mut disk = on_disk(&params, &values(&params, 1));
    disk.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), (Dtype::F32, vec![4], vec![0; 16]));
    disk.insert("model.layers.7.mlp.up_proj.weight".into(), (Dtype::F32, vec![4], vec![0; 16]));
    write(&dir.path().join("model.safetensors"), &disk);
    let notices = load(dir.path(), &params).unwrap().1;
    assert!(
        notices.len() == 1 && notices[0].contains("1 tensors") && notices[0].contains("model.layers.7.mlp.up_proj.weight"),
        "{notices:?}"
    );
}

#[test]
fn an_index_that_disagrees_with_its_shards_is_refused() {
    let params = dense();
    let disk = on_disk(&params, &values(&params, 1));
    let fresh = || {
        let dir = tempdir().unwrap();
        write_sharded(dir.path(), &disk, &["lm_head.weight", "model.norm.weight"]);
        dir
    };
    let with_index = |edit: &dyn Fn(&mut serde_json::Value)| {
        let dir = fresh();
        let mut index = serde_json::from_slice(&fs::read(dir.path().join(INDEX)).unwrap()).unwrap();
        edit(&mut index);
        write_index(dir.path(), &index);
        dir
    };

    let dir = fresh();
    fs::remove_file(dir.path().join(SHARD_2)).unwrap();
    assert_refused(load(dir.path(), &params), &[SHARD_2, "missing"]);

    let dir = with_index(&|i| i["weight_map"]["lm_head.weight"] = SHARD_1.into());
    assert_refused(load(dir.path(), &params), &["lm_head.weight", SHARD_1, SHARD_2]);

    let dir = fresh();
    let rest: Disk = disk.iter().filter(|(n, _)| *n == "model.norm.weight").map(|(n, t)| (n.clone(), t.clone())).collect();
    write(&dir.path().join(SHARD_2), &rest);
    assert_refused(load(dir.path(), &params), &["lm_head.weight", SHARD_2, "no other shard"]);

    for name in ["../model-00002-of-00002.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""] {
        let dir = with_index(&|i| i["weight_map"]["lm_head.weight"] = name.into());
        assert_refused(load(dir.path(), &params), &[INDEX, "plain name"]);
    }

    let dir = with_index(&|i| drop(i["weight_map"].as_object_mut().unwrap().remove("lm_head.weight")));
    assert_refused(load(dir.path(), &params), &["lm_head.weight", SHARD_2, "does not list it"]);

    for text in
        ["not json at all", "{}", "[]", r#"{"weight_map": {}}"#, r#"{"weight_map": {"a": "b", "a": "c"}}"#, r#"{"weight_map": {"a": 1}}"#]
    {
        let dir = fresh();
        fs::write(dir.path().join(INDEX), text).unwrap();
        assert_refused(load(dir.path(), &params), &[INDEX]);
    }
}

#[test]
fn files_the_index_does_not_name_are_not_read() {
    let (params, dir) = (dense(), tempdir().unwrap());
    let data = values(&params, 1);
    write_sharded(dir.path(), &on_disk(&params, &data), &["lm_head.weight"]);
    write(&dir.path().join("model.safetensors"), &on_disk(&params, &values(&params, 9)));
    fs::write(dir.path().join("model-00003-of-00003.safetensors"), "garbage").unwrap();
    let (tensors, notices) = load(dir.path(), &params).unwrap();
    assert_holds(&tensors, &data);
    assert!(notices.len() == 1 && notices[0].contains("model.safetensors"), "{notices:?}");
}

#[test]
fn folders_without_safetensors_say_what_to_do() {
    let dir = tempdir().unwrap();
    assert_refused(load(dir.path(), &dense()), &["no model.safetensors", INDEX]);
    fs::write(dir.path().join("pytorch_model.bin"), "").unwrap();
    assert_refused(load(dir.path(), &dense()), &["pytorch_model.bin", "safetensors"]);
    assert_refused(load(&dir.path().join("absent"), &dense()), &["absent", "no such folder"]);
    fs::write(dir.path().join("model.safetensors"), "").unwrap();
    assert_refused(load(dir.path(), &dense()), &["model.safetensors", "empty"]);
}

#[test]
fn a_truncated_file_is_refused_at_any_length() {
    let (params, dir) = (experts(), tempdir().unwrap());
    let path = dir.path().join("model.safetensors");
    write(&path, &on_disk(&params, &values(&params, 1)));
    let whole = fs::read(&path).unwrap();
    for n in 0..whole.len() {
        fs::write(&path, &whole[..n]).unwrap();
        assert_refused(load(dir.path(), &params), &["model.safetensors"]);
    }
    fs::write(&path, [&whole[..], b"x"].concat()).unwrap();
    assert_refused(load(dir.path(), &params), &["1 bytes after the last tensor"]);
}

#[test]
fn rows_of_a_tensor_can_be_read_alone() {
    let (params, dir) = (dense(), tempdir().unwrap());
    let data = values(&params, 1);
    write(&dir.path().join("model.safetensors"), &on_disk(&params, &data));
    let folder = WeightsFolder::open(dir.path()).unwrap();
    let whole = folder.tensor("lm_head.weight").unwrap();
    let rows = whole.rows(3..5).unwrap();
    assert_eq!(rows.shape, [2, 8]);
    assert_eq!(rows.bytes, bytes_of(&data[5][24..40]));
    assert!(whole.rows(19..21).is_none() && whole.rows(20..20).is_some());
    assert!(folder.tensor("nothing").is_none());
}

/// The folders of public bug reports, with the parameters that their own config.json declares.
#[test]
fn reported_faults_come_out_right() {
    let Some(cases) = shared("cases") else { return };
    let open = |folder: String| {
        let dir = cases.join(folder);
        let arch = temper_config::Arch::from_folder(&dir).map_err(|e| e.to_string())?;
        load(&dir, &temper_model::declare(&arch))
            .map_err(|e| if e.is_bad_input() { e.to_string() } else { panic!("{e} must be bad input") })
    };
    let index = |name: &str| open(format!("25-safetensors-index/{name}"));
    let bits = |r: Result<(Vec<Tensor>, Vec<String>), String>| {
        let tensors = r.unwrap().0;
        tensors.iter().map(|t| t.as_slice::<f32>().unwrap().iter().map(|x| x.to_bits()).collect::<Vec<_>>()).collect::<Vec<_>>()
    };
    let good = bits(index("good"));
    for name in ["stale-single-file", "stale-third-shard", "wrong-total-size", "unknown-extra-tensor"] {
        assert_eq!(bits(index(name)), good, "{name}");
    }
    assert!(index("unknown-extra-tensor").unwrap().1.iter().any(|n| n.contains("model.layers.7")));
    let refused = [
        ("missing-shard", SHARD_2),
        ("tensor-in-no-shard", "lm_head.weight"),
        ("index-points-to-wrong-shard", "lm_head.weight"),
        ("path-escape", INDEX),
        ("index-not-json", INDEX),
        ("no-weights", "no model.safetensors"),
    ];
    for (name, word) in refused {
        let error = index(name).err().unwrap();
        assert!(error.contains(word), "{name}: {error}");
    }

    let names = |name: &str| open(format!("29-moe-and-head-dim-names/{name}"));
    let good = bits(names("old-per-expert"));
    for name in ["new-per-expert", "new-fused", "head-dim-absent", "head-dim-null", "norm-absent"] {
        assert_eq!(bits(names(name)), good, "{name}");
    }
    let error = names("one-expert-missing").err().unwrap();
    assert!(error.contains("model.layers.1.mlp.experts.3.gate_proj.weight"), "{error}");
    let error = names("dense-head-dim-wrong").err().unwrap();
    assert!(error.contains("head_dim 16") && error.contains("[16, 16]") && error.contains("q_proj"), "{error}");
}
