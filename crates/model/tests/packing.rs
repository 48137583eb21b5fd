//! A packed document trains exactly as it would alone, and the finder of non-finite values names the right place.

mod common;
use common::*;
use temper_config::{Arch, ModelType};
use temper_model::{AuxSettings, Batch, Error, Objective, Parts, Recompute, RopeTables, Weights};
use temper_tensor::{Balance, DType};

const OBJECTIVE: Objective = Objective { loss_scale: 0.5, aux: None, recompute: Recompute::None };

fn docs() -> Vec<Vec<i32>> {
    vec![vec![1, 7, 3, 9, 2], vec![4], vec![5, 5, 8], vec![12, 0, 6, 11]]
}

fn targets(doc: &[i32]) -> Vec<i32> {
    doc[1..].iter().copied().chain([temper_model::IGNORE]).collect()
}

#[test]
fn packed_equals_alone() {
    for arch in [tiny(ModelType::Qwen2), Arch { tied: true, ..tiny(ModelType::Qwen3) }, tiny_moe(4, 2, true)] {
        let s = Setup::random(&arch, DType::F64);
        let docs = docs();
        let all = pack(&s.ops, s.dtype, &docs, &docs.iter().map(|d| targets(d)).collect::<Vec<_>>());
        let logits = s.read(&s.model.forward_logits(&s.cx(&all)).unwrap());
        let mut together = s.grads();
        let losses = s.read(&s.model.forward_backward(&s.cx(&all), &mut together, &OBJECTIVE).unwrap().losses);
        let mut apart = s.grads();
        let (mut alone_logits, mut alone_losses) = (Vec::new(), Vec::new());
        for doc in &docs {
            let batch = pack(&s.ops, s.dtype, std::slice::from_ref(doc), &[targets(doc)]);
            alone_logits.extend(s.read(&s.model.forward_logits(&s.cx(&batch)).unwrap()));
            alone_losses.extend(s.read(&s.model.forward_backward(&s.cx(&batch), &mut apart, &OBJECTIVE).unwrap().losses));
        }
        assert!(relative(&logits, &alone_logits) < 1e-14);
        assert!(relative(&losses, &alone_losses) < 1e-14);
        for (p, (a, b)) in s.model.params.iter().zip(s.host_grads(&together).iter().zip(&s.host_grads(&apart))) {
            assert!(relative(a, b) < 1e-12, "{}", p.name);
        }
    }
}

/// Whatever is computed again, the gradients have the same bits: dense layers and layers of experts alternate here.
#[test]
fn recomputes_bitwise() {
    let moe = tiny_moe(4, 2, true);
    let mixed = temper_config::Moe { dense_layers: vec![0], ..moe.moe.clone().unwrap() };
    let s = Setup::random(&temper_config::Arch { moe: Some(mixed), ..moe }, DType::F32);
    let batch = documents(&s.ops, s.dtype, 13, &[6, 9], |t| t > 2);
    let run = |recompute| {
        let mut grads = s.grads();
        s.model.forward_backward(&s.cx(&batch), &mut grads, &Objective { recompute, ..OBJECTIVE }).unwrap();
        s.host_grads(&grads)
    };
    let kept = run(Recompute::None);
    assert_eq!(kept, run(Recompute::Full));
    for bits in 0..32u32 {
        let on = |bit: u32| bits >> bit & 1 == 1;
        let parts = Parts { norm: on(0), act: on(1), moe: on(2), mlp: on(3), qkv: on(4) };
        assert_eq!(kept, run(Recompute::Selective(parts)), "{parts:?}");
    }
}

/// The same batch twice gives the same bits, and gradients add up exactly.
#[test]
fn repeats_bitwise_and_accumulates() {
    let s = Setup::random(&tiny_moe(4, 2, false), DType::F32);
    let batch = documents(&s.ops, s.dtype, 13, &[6, 9], |t| t > 2);
    let objective = Objective { aux: Some(AuxSettings { kind: Balance::Megatron, coef: 0.1, z_coef: 0.1, scale: 1.0 }), ..OBJECTIVE };
    let run = |recompute| {
        let mut grads = s.grads();
        s.model.forward_backward(&s.cx(&batch), &mut grads, &Objective { recompute, ..objective }).unwrap();
        s.host_grads(&grads)
    };
    assert_eq!(run(Recompute::None), run(Recompute::None));
    let mut twice = s.grads();
    for _ in 0..2 {
        s.model.forward_backward(&s.cx(&batch), &mut twice, &objective).unwrap();
    }
    for (a, b) in s.host_grads(&twice).iter().zip(run(Recompute::None)) {
        assert!(relative(a, &b.iter().map(|v| 2.0 * v).collect::<Vec<_>>()) < 1e-5);
    }
}

#[test]
fn misuse_is_an_error() {
    let s = Setup::random(&tiny(ModelType::Llama), DType::F32);
    let bad = |ids: &[i32], positions: &[i32], cu: &[i32]| Batch::new(&s.ops, ids, positions, cu).is_err();
    assert!(bad(&[], &[], &[0]));
    assert!(bad(&[1, 2], &[0], &[0, 2]));
    assert!(bad(&[1, 2], &[0, 1], &[0, 1]));
    assert!(bad(&[1, 2], &[0, 1], &[0, 0, 2]));
    assert!(bad(&[1, 2], &[0, 1], &[]));
    let unlabelled = Batch::new(&s.ops, &[1, 2], &[0, 1], &[0, 2]).unwrap();
    assert!(matches!(s.model.forward_loss(&s.cx(&unlabelled), &None), Err(Error::Batch(_))));
    let outside = Batch::new(&s.ops, &[1, 13], &[0, 1], &[0, 2]).unwrap();
    assert!(s.model.forward_logits(&s.cx(&outside)).is_err());
    let far = Batch::new(&s.ops, &[1, 2], &[0, 64], &[0, 2]).unwrap();
    assert!(s.model.forward_logits(&s.cx(&far)).is_err());
    let empty = Weights::empty(&s.model.params, s.dtype);
    let cx = temper_model::Cx { weights: &empty, ..s.cx(&unlabelled) };
    let message = s.model.forward_logits(&cx).err().unwrap().to_string();
    assert!(message.contains("model.embed_tokens.weight"), "{message}");
}

/// Angles stay exact where f32 products of position and frequency would not.
#[test]
fn rope_tables_at_far_positions() {
    let s = Setup::random(&tiny(ModelType::Llama), DType::F32);
    let tables = RopeTables::new(&s.ops, &s.model.arch, 40_000, DType::F32).unwrap();
    let sin = s.read(&tables.sin);
    let expected = (39_999f64 * 10_000f64.powf(-0.5)).sin();
    assert!((sin[39_999 * 2 + 1] - expected).abs() < 1e-7);
}
