//! What the tests of several crates train and compare; they include this file (`#[path]`).
#![allow(dead_code, reason = "each test binary uses its own part")]

use temper_config::{Arch, ModelType, Moe};
use temper_tensor::Rng;

/// A dense network of a few hundred parameters.
pub fn tiny(model_type: ModelType) -> Arch {
    Arch {
        model_type,
        hidden: 8,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 4,
        intermediate: 6,
        vocab: 13,
        norm_eps: 1e-6,
        rope_theta: 10_000.0,
        max_positions: 64,
        tied: false,
        qkv_bias: model_type == ModelType::Qwen2,
        out_bias: false,
        mlp_bias: false,
        qk_norm: matches!(model_type, ModelType::Qwen3 | ModelType::Qwen3Moe),
        moe: None,
        init_std: 0.4,
        dtype: None,
        bos: None,
        eos: Vec::new(),
        notices: Vec::new(),
    }
}

/// The same with four experts of which two work on each token, but in `dense_layers`.
pub fn mixture(dense_layers: &[usize]) -> Arch {
    let moe = Moe {
        experts: 4,
        top_k: 2,
        intermediate: 4,
        normalise: true,
        sparse_step: 1,
        dense_layers: dense_layers.to_vec(),
        aux_coef: 0.01,
        aux_in_loss: true,
    };
    Arch { moe: Some(moe), intermediate: 8, ..tiny(ModelType::Qwen3Moe) }
}

/// Tokens of one micro-batch.
#[derive(Clone)]
pub struct Micro {
    pub ids: Vec<i32>,
    pub positions: Vec<i32>,
    pub cu: Vec<i32>,
    pub targets: Vec<i32>,
    pub weights: Vec<f32>,
}

/// Documents of these lengths; every third token is not trained.
pub fn micro(vocab: usize, lengths: &[usize], seed: u64) -> Micro {
    let mut rng = Rng::new(seed, 5);
    let mut m = Micro { ids: vec![], positions: vec![], cu: vec![0], targets: vec![], weights: vec![] };
    for &n in lengths {
        let ids: Vec<i32> = (0..n).map(|_| rng.below(vocab) as i32).collect();
        for t in 0..n {
            let trained = t + 1 < n && t % 3 != 1;
            m.targets.push(if trained { ids[t + 1] } else { temper_model::IGNORE });
            m.weights.push(if trained { 0.5 + t as f32 } else { 0.0 });
            m.positions.push(t as i32);
        }
        m.ids.extend(ids);
        m.cu.push(m.ids.len() as i32);
    }
    m
}

/// Largest difference relative to the largest expected value; infinite where a value is not a number.
pub fn relative(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0.0, |m: f64, v| m.max(v.abs()));
    let apart = |(a, b): (&f64, &f64)| if (a - b).is_nan() { f64::INFINITY } else { (a - b).abs() };
    found.iter().zip(expected).map(apart).fold(0.0, f64::max) / largest.max(1e-30)
}
