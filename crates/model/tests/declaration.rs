//! The declaration: counts of real models, names, pieces without gaps, initialisation.

mod common;
use common::*;
use std::{collections::HashSet, path::Path};
use temper_config::{Arch, ModelType};
use temper_model::param::{Init, ParamId, count};
use temper_model::{Names, Weights, declare, init_piece};
use temper_tensor::{DType, cpu::Cpu};

/// Reference material beside the repository; tests that need it say so and pass where it is absent.
fn shared(file: &str) -> Option<std::path::PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared").join(file);
    if !path.exists() {
        eprintln!("skipped: ../shared/{file} is not here");
    }
    path.exists().then_some(path)
}

fn real(name: &str) -> Option<Arch> {
    let path = shared(&format!("facts/configs/{name}.config.json"))?;
    let text = std::fs::read_to_string(&path).unwrap();
    Some(Arch::from_json(&text, &path).unwrap())
}

#[test]
fn counts_of_real_models() {
    let Some(path) = shared("facts/ondisk_tensor_tables.json") else { return };
    let tables: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    for name in ["Qwen3-0.6B", "Qwen3-8B", "Qwen3-30B-A3B", "Qwen3-235B-A22B"] {
        let Some(arch) = real(name) else { return };
        let params = declare(&arch);
        let names = Names::new(&params);
        let table = &tables[name];
        assert_eq!(Some(count(&arch, &params).0), table["params_excl_tied"].as_u64(), "{name}");
        let pieces: usize = params.iter().map(|p| p.pieces.len()).sum();
        // Qwen3-0.6B's file repeats the tied head.
        assert_eq!(Some((pieces + usize::from(arch.tied)) as u64), table["n_tensors"].as_u64(), "{name}");
        for (tensor, shape) in table["example_tensors"].as_object().unwrap() {
            if arch.tied && tensor == "lm_head.weight" {
                assert!(names.find(tensor).is_none());
                continue;
            }
            let place = names.find(tensor).unwrap_or_else(|| panic!("{name}: no {tensor}"));
            assert_eq!(serde_json::json!(place.shape), *shape, "{name}: {tensor}");
        }
    }
}

#[test]
fn active_parameters() {
    let Some(arch) = real("Qwen3-235B-A22B") else { return };
    let (total, active) = count(&arch, &declare(&arch));
    assert_eq!(total, 235_093_634_560);
    // 94 layers x (128 - 8) idle experts x 3 matrices of 1536 x 4096.
    assert_eq!(total - active, 94 * 120 * 3 * 1536 * 4096);
}

#[test]
fn pieces_cover_parameters_and_names_are_unique() {
    let moe = Arch { qkv_bias: true, out_bias: true, ..tiny_moe(3, 2, true) };
    for arch in [tiny(ModelType::Llama), Arch { mlp_bias: true, tied: true, ..tiny(ModelType::Qwen2) }, moe] {
        let mut seen = HashSet::new();
        for p in declare(&arch) {
            let mut end = 0;
            for piece in &p.pieces {
                assert_eq!(piece.range.start, end, "{}", piece.name);
                assert_eq!(piece.range.len(), piece.shape.iter().product::<usize>());
                end = piece.range.end;
                assert!(seen.insert(piece.name.clone()), "{} twice", piece.name);
                assert_eq!(p.decay, piece.shape.len() >= 2, "{}", piece.name);
            }
            assert_eq!(end, p.numel(), "{}", p.name);
            let expected = if p.name.contains("bias") { Init::Zeros } else { Init::Ones };
            assert_eq!(p.shape.len() == 1, p.init == expected, "{}", p.name);
        }
    }
}

#[test]
fn names_find_pieces_fused_and_memory_names() {
    let params = declare(&tiny_moe(3, 2, true));
    let names = Names::new(&params);
    let up = names.find("model.layers.1.mlp.experts.2.up_proj.weight").unwrap();
    assert_eq!((up.range.clone(), up.shape.clone()), (200..240, vec![5, 8]));
    let fused = names.find("model.layers.1.mlp.experts.gate_up_proj").unwrap();
    assert_eq!((fused.id, fused.range.clone(), fused.shape.clone()), (up.id, 0..240, vec![3, 10, 8]));
    let k = names.find("model.layers.0.self_attn.k_proj.weight").unwrap();
    let qkv = names.find("model.layers.0.self_attn.qkv_proj.weight").unwrap();
    assert_eq!((k.id, k.range.clone()), (qkv.id, 128..192));
    assert!(names.find("model.layers.2.input_layernorm.weight").is_none());
}

#[test]
fn initial_values_do_not_depend_on_the_sharding() {
    let ops = Cpu::new(1);
    let params = declare(&tiny_moe(4, 2, true));
    let weights = Weights::random(&params, 11, DType::F32, &ops).unwrap();
    for (i, p) in params.iter().enumerate() {
        let whole = host(&ops, weights.get(ParamId(i)).unwrap());
        for piece in &p.pieces {
            let half = piece.range.len() / 2;
            let mut part = vec![0f32; piece.range.len() - half];
            init_piece(&mut part, piece, half as u64, p.init, 11);
            let expected: Vec<f32> = whole[piece.range.start + half..piece.range.end].iter().map(|v| *v as f32).collect();
            assert_eq!(part, expected, "{}", piece.name);
        }
    }
    let embedding = host(&ops, weights.get(ParamId(0)).unwrap());
    let std = (embedding.iter().map(|v| v * v).sum::<f64>() / embedding.len() as f64).sqrt();
    assert!((0.3..0.5).contains(&std), "standard deviation {std}, declared 0.4");
}
