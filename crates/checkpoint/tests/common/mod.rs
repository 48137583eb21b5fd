//! Small models made by hand, and files written by the reference implementation of safetensors.
#![allow(dead_code)]

use safetensors::{Dtype, tensor::TensorView};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};
use temper_checkpoint::{Checkpoint, Error, Kind, Sidecar, Slot, Store};
use temper_comm::Solo;
use temper_model::param::{Init, Param, Piece, Shard};
use temper_tensor::{DType, Tensor, View};

pub const INDEX: &str = "model.safetensors.index.json";
pub const SHARD_1: &str = "model-00001-of-00002.safetensors";
pub const SHARD_2: &str = "model-00002-of-00002.safetensors";
pub const Q_PROJ: &str = "model.layers.0.self_attn.q_proj.weight";

/// Material that is not part of the repository; `None` (said aloud) where it is absent.
pub fn shared(sub: &str) -> Option<PathBuf> {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared")).join(sub);
    if path.exists() {
        return Some(path);
    }
    println!("SKIPPED: {} is not there", path.display());
    None
}

/// A parameter of consecutive pieces.
pub fn param(name: &str, shape: &[usize], pieces: &[(&str, &[usize])]) -> Param {
    let mut end = 0;
    let pieces = pieces.iter().map(|(name, shape)| {
        let piece = Piece::new(*name, shape, end);
        end = piece.range.end;
        piece
    });
    Param::new(name, shape, pieces.collect(), Shard::Replicated, Init::Normal(0.1))
}

/// Six parameters with the shapes of one small decoder layer, q, k and v in one matrix.
pub fn dense() -> Vec<Param> {
    let at = "model.layers.0.self_attn";
    let qkv: [(&str, &[usize]); 3] =
        [(Q_PROJ, &[16, 8]), (&format!("{at}.k_proj.weight"), &[4, 8]), (&format!("{at}.v_proj.weight"), &[4, 8])];
    vec![
        param("model.embed_tokens.weight", &[20, 8], &[("model.embed_tokens.weight", &[20, 8])]),
        param("model.layers.0.input_layernorm.weight", &[8], &[("model.layers.0.input_layernorm.weight", &[8])]),
        param(&format!("{at}.qkv_proj.weight"), &[24, 8], &qkv),
        param("model.layers.0.mlp.down_proj.weight", &[8, 12], &[("model.layers.0.mlp.down_proj.weight", &[8, 12])]),
        param("model.norm.weight", &[8], &[("model.norm.weight", &[8])]),
        param("lm_head.weight", &[20, 8], &[("lm_head.weight", &[20, 8])]),
    ]
}

/// The gate and up matrices of three experts, which may be fused on disk.
pub fn experts() -> Vec<Param> {
    let at = "model.layers.0.mlp.experts";
    let names: Vec<String> = (0..3).flat_map(|e| ["gate_proj", "up_proj"].map(|p| format!("{at}.{e}.{p}.weight"))).collect();
    let pieces: Vec<(&str, &[usize])> = names.iter().map(|n| (n.as_str(), &[2usize, 5][..])).collect();
    let mut p = param(&format!("{at}.gate_up_proj"), &[3, 4, 5], &pieces);
    p.fused = Some(Piece::new(p.name.clone(), &p.shape, 0));
    vec![p]
}

/// Distinct values for every element of every parameter, exact in every float type of at least 8 bits of precision.
pub fn values(params: &[Param], seed: usize) -> Vec<Vec<f32>> {
    let value = |i: usize| ((i * 37 + seed * 11) % 251) as f32 * 0.5 - 60.0;
    let mut at = 0;
    let mut next = || {
        at += 1;
        value(at)
    };
    params.iter().map(|p| (0..p.numel()).map(|_| next()).collect()).collect()
}

pub fn tensors(params: &[Param], data: &[Vec<f32>]) -> Vec<Tensor> {
    params.iter().zip(data).map(|(p, d)| Tensor::from_vec(d.clone(), &p.shape)).collect()
}

pub fn views(tensors: &[Tensor]) -> Vec<View<'_>> {
    tensors.iter().map(Tensor::view).collect()
}

/// Tensors by their names on disk: type, shape, bytes.
pub type Disk = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// The pieces of the parameters in f32.
pub fn on_disk(params: &[Param], data: &[Vec<f32>]) -> Disk {
    let pieces = params.iter().zip(data).flat_map(|(p, d)| p.pieces.iter().map(move |piece| (piece, &d[piece.range.clone()])));
    pieces.map(|(p, d)| (p.name.clone(), (Dtype::F32, p.shape.clone(), bytes_of(d)))).collect()
}

pub fn bytes_of(data: &[f32]) -> Vec<u8> {
    data.iter().flat_map(|x| x.to_le_bytes()).collect()
}

pub fn write(path: &Path, tensors: &Disk) {
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    fs::write(path, safetensors::serialize(views.collect::<Vec<_>>(), None).unwrap()).unwrap();
}

/// Two shards and an index; the tensors whose names are in `second` go to the second shard.
pub fn write_sharded(dir: &Path, tensors: &Disk, second: &[&str]) {
    let is_second = |n: &str| second.contains(&n);
    let (b, a): (Disk, Disk) = tensors.clone().into_iter().partition(|(n, _)| is_second(n));
    write(&dir.join(SHARD_1), &a);
    write(&dir.join(SHARD_2), &b);
    let map: BTreeMap<&String, &str> = tensors.keys().map(|n| (n, if is_second(n) { SHARD_2 } else { SHARD_1 })).collect();
    let total: usize = tensors.values().map(|t| t.2.len()).sum();
    write_index(dir, &serde_json::json!({ "metadata": { "total_size": total }, "weight_map": map }));
}

pub fn write_index(dir: &Path, index: &serde_json::Value) {
    fs::write(dir.join(INDEX), index.to_string()).unwrap();
}

/// Every file below a folder with its content.
pub fn snapshot(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    let mut todo = vec![dir.to_path_buf()];
    while let Some(d) = todo.pop() {
        for entry in fs::read_dir(d).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                todo.push(path);
            } else {
                files.insert(path.strip_prefix(dir).unwrap().to_path_buf(), fs::read(&path).unwrap());
            }
        }
    }
    files
}

pub fn names(dir: &Path) -> BTreeSet<String> {
    snapshot(dir).keys().map(|p| p.to_string_lossy().into_owned()).collect()
}

/// A folder with config and tokenizer but no weights.
pub fn side_folder(dir: &Path) -> Sidecar {
    fs::create_dir_all(dir).unwrap();
    fs::write(
        dir.join("config.json"),
        "{\n  \"model_type\": \"qwen3\",\n  \"rms_norm_eps\": 1e-06,\n  \"torch_dtype\": \"bfloat16\",\n  \"eos_token_id\": 300\n}\n",
    )
    .unwrap();
    fs::write(dir.join("tokenizer.json"), "{\"version\": \"1.0\"}").unwrap();
    fs::write(dir.join("tokenizer_config.json"), "{\"eos_token\": \"<|im_end|>\"}").unwrap();
    fs::write(dir.join("chat_template.jinja"), "{{ messages }}").unwrap();
    Sidecar { model_dir: dir.into(), tokenizer_dir: dir.into(), extra_eos: Vec::new() }
}

/// A checkpoint that one process has read whole.
pub struct Loaded {
    pub step: usize,
    pub weights: Vec<Tensor>,
    pub exp_avg: Vec<Tensor>,
    pub exp_avg_sq: Vec<Tensor>,
    pub state: serde_json::Value,
}

fn read_all(checkpoint: &Checkpoint, params: &[Param]) -> Result<[Vec<Tensor>; 3], Error> {
    let mut all = Kind::ALL.map(|kind| {
        assert_eq!(checkpoint.dtype(kind, params).unwrap_or(DType::F32), DType::F32);
        params.iter().map(|p| Tensor::from_vec(vec![0f32; p.numel()], &[p.numel()])).collect::<Vec<_>>()
    });
    let slots = Kind::ALL.into_iter().zip(&mut all).flat_map(|(kind, tensors)| {
        params.iter().zip(tensors).map(move |(param, t)| Slot { kind, param, range: 0..param.numel(), into: t.view_mut() })
    });
    checkpoint.read(slots.collect())?;
    Ok(all)
}

fn loaded([weights, exp_avg, exp_avg_sq]: [Vec<Tensor>; 3], checkpoint: &Checkpoint) -> Loaded {
    Loaded { step: checkpoint.step(), weights, exp_avg, exp_avg_sq, state: checkpoint.state().clone() }
}

/// The newest whole checkpoint, and notices.
pub fn load_latest(store: &Store, params: &[Param]) -> Result<Option<(Loaded, Vec<String>)>, Error> {
    let found = store.resume(&Solo, |checkpoint| read_all(checkpoint, params))?;
    Ok(found.map(|(tensors, checkpoint, notices)| (loaded(tensors, &checkpoint), notices)))
}

pub fn load_step(store: &Store, step: usize, params: &[Param]) -> Result<Loaded, Error> {
    let (tensors, checkpoint) = store.resume_step(&Solo, step, |checkpoint| read_all(checkpoint, params))?;
    Ok(loaded(tensors, &checkpoint))
}
