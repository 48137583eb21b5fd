//! A real pretrained model against transformers' values: SmolLM2-135M-Instruct, built by `../shared/scripts/smollm2.sh DIR`.
//! Runs where `TEMPER_SMOLLM2=DIR` names that folder; skipped elsewhere.

use serde_json::Value;
use std::path::{Path, PathBuf};
use temper_checkpoint::WeightsFolder;
use temper_config::Arch;
use temper_model::{Batch, Cx, Model, RopeTables, Weights, read_floats};
use temper_tensor::{DType, cpu::Cpu};

/// The fixture holds bf16 weights computed in f32; 1e-3 covers the order of f32 sums over 30 layers.
const TOLERANCE: f64 = 1e-3;

fn model_folder() -> Option<PathBuf> {
    let folder = std::env::var_os("TEMPER_SMOLLM2").map(PathBuf::from);
    if folder.is_none() {
        println!("skipped: set TEMPER_SMOLLM2 to a folder made by ../shared/scripts/smollm2.sh");
    }
    folder
}

/// Logits of a prompt, a row per token.
fn logits(folder: &Path, ids: &[i32]) -> Vec<Vec<f64>> {
    let ops = Cpu::new(0);
    let arch = Arch::from_folder(folder).unwrap();
    let model = Model::new(&arch).unwrap();
    let (tensors, _) = WeightsFolder::open(folder).unwrap().load(&model.params, DType::F32).unwrap();
    let weights = Weights::from_host(&model.params, tensors, DType::F32, &ops).unwrap();
    let rope = RopeTables::new(&ops, &arch, ids.len(), DType::F32).unwrap();
    let positions: Vec<i32> = (0..ids.len() as i32).collect();
    let batch = Batch::new(&ops, ids, &positions, &[0, ids.len() as i32]).unwrap();
    let cx = Cx { ops: &ops, weights: &weights, rope: &rope, batch: &batch, ranks: temper_model::Ranks::single() };
    let all = read_floats(&ops, &model.forward_logits(&cx).unwrap()).unwrap();
    all.chunks(arch.vocab).map(<[f64]>::to_vec).collect()
}

fn log_sum_exp(row: &[f64]) -> f64 {
    let largest = row.iter().fold(f64::NEG_INFINITY, |m, v| m.max(*v));
    largest + row.iter().map(|v| (v - largest).exp()).sum::<f64>().ln()
}

fn floats(v: &Value) -> Vec<f64> {
    v.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn close(what: &str, got: f64, want: f64) {
    assert!((got - want).abs() <= TOLERANCE * want.abs().max(1.0), "{what}: {got} for {want}");
}

#[test]
fn forward_equals_transformers() {
    let Some(folder) = model_folder() else { return };
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/smollm2_forward.json");
    let Ok(text) = std::fs::read_to_string(&fixture) else {
        println!("skipped: {} is absent", fixture.display());
        return;
    };
    let want: Value = serde_json::from_str(&text).unwrap();
    let ids: Vec<i32> = want["ids"].as_array().unwrap().iter().map(|v| v.as_i64().unwrap() as i32).collect();
    let rows = logits(&folder, &ids);

    let best = |row: &[f64]| (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap() as i64;
    let argmax: Vec<i64> = rows.iter().map(|r| best(r)).collect();
    assert_eq!(argmax, want["argmax"].as_array().unwrap().iter().map(|v| v.as_i64().unwrap()).collect::<Vec<_>>());
    let last = rows.last().unwrap();
    for pair in want["last_top5"].as_array().unwrap() {
        let (id, value) = (pair[0].as_u64().unwrap() as usize, pair[1].as_f64().unwrap());
        close(&format!("logit {id}"), last[id], value);
    }
    close("logsumexp", log_sum_exp(last), want["last_logsumexp"].as_f64().unwrap());
    for (t, log_prob) in floats(&want["token_logprobs"]).into_iter().enumerate() {
        close(&format!("log-probability of token {}", t + 1), rows[t][ids[t + 1] as usize] - log_sum_exp(&rows[t]), log_prob);
    }
}
