//! Every fixture, spread over ranks in many layouts, gives transformers' values; and what one rank gives on random tokens.

use std::path::PathBuf;
use std::sync::Arc;
use temper_comm::Axes;
use temper_model::Recompute;
use temper_tensor::{DType, cpu::Cpu};
use temper_train::layout::Layout;
use temper_train::verify::{Report, Subject};

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures").join(name)
}

fn layout(tp: usize, cp: usize, dp: usize, pp: usize, ep: usize, etp: usize) -> Layout {
    Layout { axes: Axes { tp, cp, dp, pp, ep, etp }, sequence: tp > 1, vpp: 1, split: Vec::new() }
}

fn passes(what: &str, layout: &Layout, report: &Report, tol: f64) {
    let wrong: Vec<_> = report.items.iter().filter(|i| i.error.is_nan() || i.error > tol).collect();
    assert!(wrong.is_empty() && report.passes(tol), "{what} in {layout:?}: {wrong:?}");
}

/// Against the golden file, with every kind of item compared, and against one rank.
fn agrees(name: &str, layouts: &[Layout]) {
    let folder = fixture(name);
    for (i, layout) in layouts.iter().enumerate() {
        let recompute = if i % 2 == 0 { Recompute::None } else { Recompute::Full };
        let subject = Subject { folder: &folder, dtype: DType::F32, layout: layout.clone(), recompute, ops: Arc::new(Cpu::new(1)) };
        let golden = subject.against_golden(&folder.join("golden.safetensors")).unwrap();
        passes(name, layout, &golden, 1e-4);
        for kind in ["logits", "loss", "grad/", "step_loss", "step_grad_norm", "trained/", "greedy"] {
            assert!(golden.items.iter().any(|i| i.name.starts_with(kind)), "{name}: {kind} is not compared in {layout:?}");
        }
        let one = subject.against_one_rank().unwrap();
        passes(name, layout, &one, 1e-5);
        assert!(
            one.items.len() + 1 >= golden.items.len(),
            "{name}: {} items against one rank, {} golden",
            one.items.len(),
            golden.items.len()
        );
    }
}

/// Two or three layers, four heads on two key/value heads.
#[test]
fn dense_fixtures() {
    let shared = [
        layout(1, 1, 1, 1, 1, 1),
        layout(2, 1, 1, 1, 1, 1),
        Layout { sequence: false, ..layout(4, 1, 1, 1, 1, 1) },
        layout(1, 2, 1, 1, 1, 1),
        layout(1, 1, 3, 1, 1, 1),
        layout(2, 2, 2, 1, 1, 1),
    ];
    for name in ["llama", "qwen2", "qwen3_dense_tied"] {
        agrees(name, &[&shared[..], &[layout(1, 1, 1, 2, 1, 1), layout(2, 1, 2, 2, 1, 1), layout(4, 2, 1, 2, 1, 1)]].concat());
    }
    let uneven = Layout { split: vec![1, 2], ..layout(2, 1, 1, 2, 1, 1) };
    agrees("qwen3_dense", &[&shared[..], &[uneven, layout(1, 1, 2, 3, 1, 1)]].concat());
}

/// Three layers of eight experts; four layers of which two have experts.
#[test]
fn fixtures_with_experts() {
    let shared = [
        layout(1, 1, 2, 1, 2, 1),
        layout(2, 1, 1, 1, 2, 1),
        layout(2, 1, 1, 1, 1, 2),
        layout(2, 2, 1, 1, 2, 2),
        Layout { sequence: false, ..layout(4, 1, 2, 1, 8, 1) },
        layout(1, 2, 2, 1, 4, 1),
    ];
    let uneven = Layout { split: vec![1, 2], ..layout(2, 1, 1, 2, 2, 1) };
    agrees("qwen3_moe", &[&shared[..], &[uneven, layout(1, 1, 2, 3, 2, 1)]].concat());
    let interleaved = Layout { vpp: 2, ..layout(2, 1, 2, 2, 4, 1) };
    agrees("qwen3_moe_sparse_step", &[&shared[..], &[layout(2, 2, 1, 2, 4, 1), interleaved, layout(1, 1, 1, 4, 1, 1)]].concat());
}
